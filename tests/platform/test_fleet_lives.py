"""TEs of a fleet come, drain, are taken back, move out and are lost at random: everybody is served once."""

import random

import pytest

from tests.platform.tools import LIMITS, PRICE, small
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.hw.spec import Spec
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_pool import FleetPool
from xdeepserve.platform.fleet_words import FleetTE, KVTransfer
from xdeepserve.platform.pool_size import PoolBounds
from xdeepserve.platform.service_report import Bounds, report

BOTH = FleetTE("te", PRICE, LIMITS, transfer=KVTransfer(1e5, 1e5, 16e5, 1e5))
KINDS = [
    BOTH,
    BOTH._replace(role="prefill"),
    BOTH._replace(role="decode"),
    BOTH._replace(apart=(PRICE, LIMITS)),
]


def act(fleet: Fleet, rng: random.Random, said: set[str]) -> None:
    """Something happens to a TE, if it can."""
    te, what = rng.randrange(len(fleet.tes)), rng.choice(["join", "drain", "resume", "lose", "move out"])
    is_lost, serves = fleet.is_lost(te), te in fleet.serving
    if what == "join":
        fleet.join(rng.choice(KINDS))
    elif what == "drain" and serves:
        fleet.drain(te)
    elif what == "resume" and not serves and not is_lost and te not in fleet.moving:
        fleet.resume(te)
    elif what == "lose" and not is_lost:
        fleet.lose(te)
    elif what == "move out" and serves and fleet.tes[te].role == "decode":
        fleet.move_out(te)
    else:
        return
    said.add(what)
    fleet.check_integrity()


def live(seed: int) -> set[str]:
    """A life, after which all is as it has to be: what happened in it."""
    rng, trace, said = random.Random(seed), small(seed % 7)[:120], set[str]()
    fleet = Fleet(KINDS, rng.choice(sorted(ROUTE.rows)), stale_ns=rng.choice([0, 10**8]))
    if rng.random() < 0.5:
        bounds = PoolBounds(most=4, every_s=0.1, while_s=1, patience_s=0.2, calm_s=0.3)
        FleetPool(fleet, 1, rng.randint(5, 200), 1e6, bounds, Spec())
    last = trace[-1].at_ns
    for _ in range(rng.randint(1, 12)):
        fleet.at(rng.uniform(0, last), lambda: act(fleet, rng, said))
    for kind in KINDS[1:3]:
        fleet.at(1.1 * last, lambda kind=kind: (fleet.join(kind), None)[1])  # type: ignore[misc]
    served = sorted(fleet.run(trace))
    assert [each.number for each in served] == list(range(len(trace)))
    for each, asked in zip(served, trace, strict=True):
        assert (each.num_prompt, each.num_output) == (asked.input_length, asked.output_length)
        assert each.at_ns < each.first_ns <= each.last_ns
    assert all(fleet.is_empty(te) for te in range(len(fleet.tes)))
    there = [te for te in range(len(fleet.tes)) if not fleet.is_lost(te)]
    assert all(stepper.kv_load == 0 for te in there for stepper in fleet.steppers_of(te))
    found = report([each.outcome() for each in served], [te.name for te in fleet.tes], Bounds())
    assert sum(te.num_tokens for te in found.tes) == sum(each.output_length for each in trace)
    return said


def test_everybody_is_served_whatever_happens_to_tes() -> None:
    assert set.union(*map(live, range(12))) == {"join", "drain", "resume", "lose", "move out"}


@pytest.mark.campaign
def test_everybody_is_served_in_many_lives() -> None:
    for seed in range(12, 500):
        live(seed)
