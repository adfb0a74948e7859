"""A TE is lost at each state of a request: just when it is reached, and a little later. No bit changes."""

from __future__ import annotations

import functools

import pytest

from tests.tools import one_die
from xdeepserve import SamplingParams
from xdeepserve.engine.dp import events
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest

PROMPT = [7, 5, 9, 11] * 12
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, ignore_eos=True, seed=3)
SETTINGS = ("prefill.count=2", "decode.count=2", "prefill.dies=2", "decode.dies=2")
WAYS: dict[str, tuple[str, ...]] = {
    "by request": (),
    "by layer": ("transfer=layer",),
    "by send and receive": ("transfer_over=send-receive",),
    "decode chosen first": ("scheduler.admission=decode",),
}
FIRST_DIE = {"prefill 0": 0, "prefill 1": 2, "decode 0": 4, "decode 1": 6}
AFTER_US = (0.001, 3.0)
# Of whoever prefills and of whoever decodes.
STATES = (
    "Assigned",
    "Given",
    "Registered",
    "Sent",
    "TransferBegan",
    "TransferEnded",
    "Released",
    "StepEnded",
)


def served(way: str, *faults: Fault) -> Told:
    history = History("pd", (*SETTINGS, *WAYS[way]), [PROMPT], PARAMS, faults=faults)
    return serve(history, hears=(events.Observed,))


quietly = functools.cache(served)


@functools.cache
def alone() -> str:
    return digest(one_die([PROMPT], PARAMS))


@pytest.mark.thin(7)
@pytest.mark.parametrize("after_us", AFTER_US)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", WAYS)
def test_a_te_is_lost_at_each_state_of_a_request(way: str, state: str, role: str, after_us: float) -> None:
    quiet = quietly(way)
    assert quiet.digest == alone()
    states: dict[str, float] = {}  # when the request was first in each, in us
    for at_ns, event in quiet.events:
        states.setdefault(type(event).__name__, at_ns / 1e3)
    assert states.keys() >= set(STATES)
    tes = {event.group.te for event in quiet.of(events.AtGroup)}  # had something to do with it
    (te,) = (name for name in tes if name.startswith(role))
    told = served(way, Fault(states[state] + after_us, FIRST_DIE[te], "lost"))
    assert told.digest == quiet.digest
    # Who has nothing to do with it any more is not missed before somebody else asks.
    assert list(told.lost) in ([te], [])
    needed = {"prefill": STATES[:4], "decode": STATES[3:]}[role]
    assert list(told.lost) == [te] or state not in needed
