"""TEs at the grain of a step: what a request costs by hand, runs of steps, caches, and nobody is lost."""

import numpy as np
import pytest

from tests.platform.tools import LIMITS, PRICE, small
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.errors import InputError
from xdeepserve.platform import step_group
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import Decision, FleetTE, KVTransfer, ServedRequest
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.prices.step_price import StepCounts, StepPrice

SCARCE = {"num_positions": 2048}


def fleet(count: int = 3, **options: object) -> Fleet:
    return Fleet([FleetTE(f"te {n}", PRICE, LIMITS) for n in range(count)], **options)  # type: ignore[arg-type]


def test_a_request_alone_costs_its_steps() -> None:
    (served,) = fleet(1).run([TracedRequest(1000, 150, 5, ())])
    chunks = [(0, 64), (64, 64), (128, 22)]
    ttft = sum(
        PRICE(StepCounts(rows, rows, rows * (before + (rows + 1) / 2), before + rows))
        for before, rows in chunks
    )
    # The first token stands in the cache from the first step that decodes on.
    rest = sum(PRICE(StepCounts(1, 1, 151 + step, 151 + step)) for step in range(4))
    assert served.ttft_ns == pytest.approx(ttft, rel=1e-12)
    assert served.tpot_ns == pytest.approx(rest / 4, rel=1e-12)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_positions": 2048},
        {"num_positions": 2048, "kv_block": 32},
        {"rows_each": 2},
        {"tokens_each": 1.9},
    ],
    ids=["plenty", "scarce", "larger blocks", "drafts in vain", "drafts"],
)
def test_steps_taken_at_once_are_those_taken_one_by_one(
    changes: dict[str, int], seed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler plans each step where runs have one. Prices in a run take accepted drafts for their
    mean."""
    has_drafts = changes.get("tokens_each", 1) > 1
    limits = LIMITS._replace(**{**changes, **({"rows_each": 2} if has_drafts else {})})
    trace = [each for each in small(seed) if each.input_length + each.output_length <= 2048]

    def served() -> tuple[dict[int, ServedRequest], int, int]:
        one = Fleet([FleetTE(f"te {n}", PRICE, limits) for n in range(count)])
        found = {each.number: each for each in one.run(trace)}
        one.check_integrity()
        groups = [group for stepper in one.steppers for group in stepper.groups]
        preempted = sum(group.scheduler.preemption.count for group in groups)
        return found, preempted, sum(group.scheduler.stats.rows_per_step.total() for group in groups)

    in_runs, preempted, num_steps = served()
    monkeypatch.setattr(step_group, "LONGEST_RUN", 1)
    one_by_one, also_preempted, also_steps = served()
    if has_drafts:
        times = [[each.last_ns - each.at_ns for each in found.values()] for found in (in_runs, one_by_one)]
        assert sum(times[0]) == pytest.approx(sum(times[1]), rel=0.01)
        return
    assert (preempted, num_steps) == (also_preempted, also_steps)
    for number, each in one_by_one.items():
        mine = in_runs[number]
        assert (mine.first_ns, mine.last_ns) == pytest.approx((each.first_ns, each.last_ns), rel=1e-9)
        assert (mine.te, mine.num_cached) == (each.te, each.num_cached)


@pytest.mark.parametrize("policy", sorted(ROUTE.rows))
def test_everybody_is_served_once_and_the_same_way_again(policy: str) -> None:
    results: list[list[ServedRequest]] = []
    for _ in range(2):
        one = fleet(policy=policy)
        results.append(list(one.run(small(seed=5))))
        one.check_integrity()
        assert all(stepper.num_tasks == 0 for stepper in one.steppers)
    assert results[0] == results[1]
    assert sorted(each.number for each in results[0]) == list(range(len(small(seed=5))))
    for each in results[0]:
        assert each.at_ns < each.first_ns <= each.last_ns
        assert 0 <= each.num_cached < each.num_prompt


def test_integrity_at_every_event() -> None:
    number = 0

    def look(decision: Decision) -> None:
        nonlocal number
        number += 1
        one.check_integrity()
        for te in range(3):  # nothing is stale: the global tree knows what TEs have
            for block in [*one.steppers[te].held][:50]:
                assert te in one.tree.match([block])

    one = fleet(explain=look)
    one.run(small(seed=2))
    assert number == len(small(seed=2))


def test_a_prefix_is_found_until_others_need_its_room() -> None:
    chat = TracedRequest(0, 160, 2, tuple(range(10)))
    again = chat._replace(at_ns=10**9)
    assert [each.num_cached for each in fleet(1).run([chat, again])] == [0, 144], "its last token is computed"
    others = [
        TracedRequest(10**9 + n, 2000, 500, tuple(range(1000 * n, 1000 * n + 125))) for n in range(1, 9)
    ]
    later = chat._replace(at_ns=60 * 10**9)
    assert fleet(1).run([chat, *others, later])[-1].num_cached == 0


def test_hints_that_are_stale_cost_time_and_nothing_else() -> None:
    trace = small(seed=3)
    fresh = fleet(policy="prefix").run(trace)
    stale = fleet(policy="prefix", stale_ns=10**12).run(trace)
    assert len(fresh) == len(stale) == len(trace)
    hits = [sum(each.num_cached for each in served) for served in (fresh, stale)]
    assert hits[0] > hits[1]


def test_prefill_and_decode_apart() -> None:
    decode = StepPrice(2, PRICE.own, PRICE.feed, PRICE.attention, PRICE.gap)
    apart = FleetTE("apart", PRICE, LIMITS, (decode, LIMITS), transfer=KVTransfer(block_ns=16e3))
    (alone,) = Fleet([apart]).run([TracedRequest(0, 150, 5, ())])
    (both,) = fleet(1).run([TracedRequest(0, 150, 5, ())])
    assert alone.first_ns == both.first_ns
    assert alone.last_ns == pytest.approx(both.last_ns + 10 * 16e3, rel=1e-12)
    mixed = Fleet([apart, FleetTE("both", PRICE, LIMITS)], policy="round-robin")
    served = mixed.run(small())
    mixed.check_integrity()
    assert len(served) == len(small())
    assert np.bincount([each.te for each in served]).tolist() == [150, 150]


def test_drafts_bring_tokens_faster() -> None:
    drafts = LIMITS._replace(rows_each=2, tokens_each=1.9)
    (with_drafts,) = Fleet([FleetTE("te", PRICE, drafts)]).run([TracedRequest(0, 64, 20, ())])
    (without,) = fleet(1).run([TracedRequest(0, 64, 20, ())])
    assert with_drafts.tpot_ns is not None
    assert without.tpot_ns is not None
    assert 0.5 * without.tpot_ns < with_drafts.tpot_ns < 0.6 * without.tpot_ns


def test_what_fits_nowhere_is_refused_before_anything_moves() -> None:
    with pytest.raises(InputError, match=r"request 1 of the trace has 4000 \+ 97 tokens, .* KV for 4096"):
        fleet().run([TracedRequest(0, 1, 1, ()), TracedRequest(0, 4000, 97, ())])


def test_requests_without_tokens_have_one() -> None:
    (served,) = fleet(1).run([TracedRequest(0, 0, 0, ())])
    assert served.tpot_ns is None
    assert served.num_prompt == served.num_output == 1


def test_a_forced_choice() -> None:
    served = fleet(forced=dict.fromkeys(range(300), 2)).run(small())
    assert {each.te for each in served} == {2}
