"""Requests whose prompts share prefixes, served by an engine with a memory pool."""

from __future__ import annotations

from pathlib import Path

from xdeepserve import LLM, SamplingParams
from xdeepserve.llm import digest

PROMPTS = [[(7 * i + j * j) % 300 for j in range(100 + 20 * i)] for i in range(3)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ALL = [16 * ((len(prompt) - 1) // 16) for prompt in PROMPTS]  # cached tokens, if every block is


def served(
    path: Path | None, model: object, *overrides: str, deployment: str = "monolithic", precision: str = "int8"
) -> tuple[str, list[int], dict[str, int]]:
    """Digest, cached tokens by prompt, and what the pool has counted."""
    where = [] if path is None else [f"ems.path={path}", "ems.block_size=16", "ems.servers=2"]
    with LLM(model, deployment, precision, overrides=[*where, *overrides]) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        llm.engine.check_integrity()
        if llm.engine.plan.pool_use is not None:
            llm.engine.plan.pool_use.pool.check_integrity()
        cached = [output.metrics.num_cached_tokens for output in outputs if output.metrics is not None]
        return digest(outputs), cached, llm.engine.stats().pool
