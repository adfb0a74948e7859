"""Statuses of decode groups that come periodically: old ones change placements and no token."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Given
from xdeepserve.errors import DeploymentError
from xdeepserve.history import History, serve

POD = ["prefill.dies=1", "decode.dies=4", "max_model_len=128", "scheduler.max_num_seqs=8"]
PROMPTS = [[3 + i] * (2 + 37 * i % 89) for i in range(24)]
PARAMS = [
    SamplingParams(max_tokens=4 + 11 * i % 29, temperature=0.5, seed=i, ignore_eos=True) for i in range(24)
]
ARRIVALS = [2_000_000 * i for i in range(24)]


def served(period: str, *more: str) -> tuple[str, list[int]]:
    """Digest of the outputs, and the decode group of each request."""

    @contextmanager
    def around(llm: LLM) -> Iterator[None]:
        yield
        assert llm.engine.plan.pod.clock.rests

    settings = (*POD, f"scheduler.status_period={period}", *more)
    told = serve(History("pd", settings, PROMPTS, PARAMS, ARRIVALS), hears=(Given,), around=around)
    given = [event for event in told.of(Given) if event.group.te.startswith("decode")]
    places = {event.seq_id: event.group.rank for event in given}
    return told.digest, [places[i] for i in range(len(PROMPTS))]


def test_old_statuses_change_placements_and_no_token() -> None:
    live, places = served("0")
    seldom, others = served("0.05")
    never, same = served("1000")
    assert live == seldom == never
    assert places != others
    assert places != same
    assert served("0.05") == (seldom, others)


@pytest.mark.parametrize("more", [(), ("transfer=layer",), ("scheduler.admission=decode",)], ids=str)
def test_what_was_full_long_ago_ends_nothing(more: tuple[str, ...]) -> None:
    """Few blocks, and statuses older than any request."""
    tight = ("decode.dies=1", "cache.num_blocks=8", *more)
    assert served("1000", *tight)[0] == served("0", *tight)[0]


def test_what_is_no_period_is_refused() -> None:
    with pytest.raises(DeploymentError, match="status_period must be 0 or more, found -1"):
        LLM("tiny-random", "pd", overrides=["scheduler.status_period=-1"])
