"""The effect of drafts on the trained model, which computes: tokens per step, and the prediction from
acceptance.

The `tiny` preset answers held-out prompts of every kind that it was trained on. Both numbers come from the
requests' records, the first from tokens and steps, the second from drafts and their fate by position
(xDeepServe 4.6):

    tokens per step    tokens / steps, both without the first, which is the prompt's
    expected           1 + p1 with one draft, 1 + p1 + p1 p2 with two; p2 of those whose first was accepted

They differ by the tokens that a request's last step makes beyond its end.
"""

from __future__ import annotations

import msgspec

from xdeepserve.bench.report import Row
from xdeepserve.corpus import EXAMINED
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.stats import summed
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.evals.samples import examined
from xdeepserve.llm import LLM

WAYS = {
    "k=1": ("mtp=1",),
    "k=2": ("mtp=2",),
    "k=2,reuse": ("mtp=2", "mtp_reuse=true"),
}
NUM_PROMPTS, MAX_TOKENS = 6, 96  # of each kind


class Drafts(msgspec.Struct, frozen=True):
    """Results of drafting for many requests: tokens per step, and acceptance by position."""

    tokens_per_step: float
    acceptance: tuple[float, ...]  # of the d-th draft, where all before it were accepted

    @property
    def expected(self) -> float:
        """Tokens per step expected from acceptance: 1 + p1 + p1 p2 + ..."""
        total, product = 1.0, 1.0
        for p in self.acceptance:
            product *= p
            total += product
        return total

    @classmethod
    def of(cls, records: list[RequestMetrics]) -> Drafts:
        offered = summed([record.drafts_by_position for record in records])
        accepted = summed([record.accepted_by_position for record in records])
        # A draft comes to be looked at where those before it were accepted; nearly all steps offer all.
        reached = [1.0, *(a / o for a, o in zip(accepted, offered, strict=True))]
        acceptance = [a / o / r if r else 0.0 for a, o, r in zip(accepted, offered, reached, strict=False)]
        num_tokens = sum(record.num_tokens - 1 for record in records)
        return cls(num_tokens / sum(record.num_steps - 1 for record in records), tuple(acceptance))


def measure(overrides: tuple[str, ...], num_prompts: int = NUM_PROMPTS, model: str = "tiny") -> Drafts:
    """Serve the prompts with some settings, and return the results of drafting."""
    prompts = [examined(kind, i).prompt for kind in EXAMINED for i in range(num_prompts)]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    with LLM(model, "monolithic", overrides=[*overrides, "max_model_len=768"]) as llm:
        outputs = llm.generate(prompts, params)
    return Drafts.of([output.metrics for output in outputs if output.metrics is not None])


def rows(num_prompts: int = NUM_PROMPTS) -> list[Row]:
    """Compute rows for each way of drafting: acceptance by position, tokens per step, and the expectation."""
    result = []
    for way, overrides in WAYS.items():
        found, name = measure(overrides, num_prompts), f"engine/mtp/tiny/{way}"
        result += [Row(f"{name}/p{d}", p, "", "measured") for d, p in enumerate(found.acceptance, start=1)]
        result.append(Row(f"{name}/tokens_per_step", found.tokens_per_step, "", "measured"))
        result.append(Row(f"{name}/expected", found.expected, "", "measured"))
    return result
