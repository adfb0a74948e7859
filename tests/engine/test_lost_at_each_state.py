"""A TE is lost at each state of a request: just when it is reached, and a little later. No bit changes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp import events
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


class Told(NamedTuple):
    """A run: the request's digest, TEs that were lost, and when it was first in each state, in us, by the
    name of the event."""

    digest: str
    lost: list[str]
    states: dict[str, float]
    tes: set[str]  # that had something to do with it


@functools.cache
def served(way: str, *faults: Fault) -> Told:
    states: dict[str, float] = {}
    tes: set[str] = set()
    with LLM("tiny-random", "pd", overrides=[*SETTINGS, *WAYS[way]], faults=faults) as llm:
        clock = llm.engine.plan.pod.clock

        def see(event: events.Observed) -> None:
            states.setdefault(type(event).__name__, clock.now / 1e3)
            if isinstance(event, events.AtGroup):
                tes.add(event.group.te)

        llm.engine.observe(see)
        outputs = llm.generate([PROMPT], PARAMS, keep_logits=True)
        llm.engine.check_integrity()
        return Told(digest(outputs), list(llm.engine.lost), states, tes)


@functools.cache
def alone() -> str:
    return digest(one_die([PROMPT], PARAMS))


@pytest.mark.thin(7)
@pytest.mark.parametrize("after_us", AFTER_US)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("way", WAYS)
def test_a_te_is_lost_at_each_state_of_a_request(way: str, state: str, role: str, after_us: float) -> None:
    quiet = served(way)
    assert quiet.digest == alone()
    assert quiet.states.keys() >= set(STATES)
    (te,) = (name for name in quiet.tes if name.startswith(role))
    told = served(way, Fault(quiet.states[state] + after_us, FIRST_DIE[te], "lost"))
    assert told.digest == quiet.digest
    # Who has nothing to do with it any more is not missed before somebody else asks.
    assert told.lost in ([te], [])
    needed = {"prefill": STATES[:4], "decode": STATES[3:]}[role]
    assert told.lost == [te] or state not in needed
