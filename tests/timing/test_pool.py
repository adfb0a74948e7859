"""Time-only runs take a memory pool, whose values have few bytes that stand for all of theirs."""

from pathlib import Path

import msgspec
import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model

ROOM = ("cache.block_size=128", "cache.num_blocks=14", "max_model_len=1600", "max_num_batched_tokens=2048")
LIMITS = [*ROOM[:3], f"scheduler.{ROOM[3]}", f"prefill.{ROOM[3]}"]
PROMPTS = (7, 9, 11, 7, 9)  # tokens of which each prompt has 1,500; KV has room for one prompt


def serve(
    model: str | Checkpoint, path: Path | None, timing_only: bool, *more: str
) -> tuple[list[int], dict]:
    """Times to first tokens in us, and what the pool counts."""
    pool = [] if path is None else [f"ems.path={path}", "ems.servers=2", "ems.block_size=128"]
    overrides = [*LIMITS, *pool, *more]
    with LLM(model, "pd", overrides=overrides, timing_only=timing_only, progress=False) as llm:
        times = []
        for token in PROMPTS:
            (out,) = llm.generate(
                [[token] * 1500], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            )
            assert out.metrics.first_token_ns is not None
            times.append((out.metrics.first_token_ns - out.metrics.arrival_ns) // 1000)
        counts = {} if path is None else llm.engine.plan.pool_use.pool.counts()
    return times, counts


def test_the_pool_has_the_same_hits_and_bytes_as_with_tokens_and_its_times(tmp_path: Path) -> None:
    (with_tokens, real), (time_only, counted) = (
        serve("tiny-random", tmp_path / name, name == "time") for name in ("tokens", "time")
    )
    hits = "dram hits", "puts", "misses"
    assert [counted[name] for name in hits] == [real[name] for name in hits] == [22, 33, 3]
    assert time_only == pytest.approx(with_tokens, rel=0.03)
    # With tokens RoPE keys are FP32, and on the hardware BF16.
    assert 0.7 * real["dram bytes"] < counted["dram bytes"] < real["dram bytes"]


def test_at_full_width_a_prefix_from_the_pool_takes_less_than_computing_it_and_no_more_than_there_is_room_for(
    tmp_path: Path,
) -> None:
    model = resolve_model("deepseek-r1")
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=8)
    computed, _ = serve(model, None, True)
    pooled, counts = serve(model, tmp_path / "large", True)
    assert pooled[:3] == pytest.approx(computed[:3], rel=0.01)
    assert max(pooled[3:]) < 0.6 * min(computed[3:])
    nbytes = 22 * 128 * 8 * (512 + 4 + 2 * 64)
    assert counts["dram bytes"] == pytest.approx(nbytes, rel=0.01)
    _, few = serve(model, tmp_path / "small", True, "ems.dram_mb=8", "ems.volume_mb=8")
    assert few["dram evictions"]
    assert few["dram hits"] < counts["dram hits"]
