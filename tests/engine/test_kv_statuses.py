"""Statuses of decode groups that come periodically: old ones change placements and no token."""

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Given, Observed
from xdeepserve.errors import DeploymentError
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

POD = ["prefill.dies=1", "decode.dies=4", "max_model_len=128", "scheduler.max_num_seqs=8"]
PROMPTS = [[3 + i] * (2 + 37 * i % 89) for i in range(24)]
PARAMS = [
    SamplingParams(max_tokens=4 + 11 * i % 29, temperature=0.5, seed=i, ignore_eos=True) for i in range(24)
]
ARRIVALS = [2_000_000 * i for i in range(24)]


def serve(tiny: TinyCheckpoint, period: str, *more: str) -> tuple[str, list[int]]:
    """Digest of the outputs, and the decode group of each request."""
    with LLM(tiny, "pd", overrides=[*POD, f"scheduler.status_period={period}", *more]) as llm:
        places: dict[int, int] = {}

        def see(event: Observed) -> None:
            if isinstance(event, Given) and event.group.te.startswith("decode"):
                places[event.seq_id] = event.group.rank

        llm.engine.observe(see)
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True, arrivals_ns=ARRIVALS)
        llm.engine.check_integrity()
        assert llm.engine.plan.pod.clock.rests
        return digest(outputs), [places[i] for i in range(len(PROMPTS))]


def test_old_statuses_change_placements_and_no_token(tiny: TinyCheckpoint) -> None:
    live, places = serve(tiny, "0")
    seldom, others = serve(tiny, "0.05")
    never, same = serve(tiny, "1000")
    assert live == seldom == never
    assert places != others
    assert places != same
    assert serve(tiny, "0.05") == (seldom, others)


@pytest.mark.parametrize("more", [(), ("transfer=layer",), ("scheduler.admission=decode",)], ids=str)
def test_what_was_full_long_ago_ends_nothing(tiny: TinyCheckpoint, more: tuple[str, ...]) -> None:
    """Few blocks, and statuses older than any request."""
    tight = ("decode.dies=1", "cache.num_blocks=8", *more)
    assert serve(tiny, "1000", *tight)[0] == serve(tiny, "0", *tight)[0]


def test_what_is_no_period_is_refused() -> None:
    with pytest.raises(DeploymentError, match="status_period must be 0 or more, found -1"):
        LLM("tiny-random", "pd", overrides=["scheduler.status_period=-1"])
