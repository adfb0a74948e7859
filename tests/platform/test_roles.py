"""How many TEs prefill and how many decode: the pure function, and fleets whose TEs change roles."""

import functools
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.platform.tools import LIMITS, PRICE, small
from xdeepserve.errors import XDeepServeError
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_roles import FleetRoles
from xdeepserve.platform.fleet_words import FleetTE, KVTransfer, TERole
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.role_ratio import RoleBounds, RoleRates, RoleState, Workload, next_roles, role_rates
from xdeepserve.platform.scale_up import HeldWeights, ScaleUp
from xdeepserve.platform.service_report import Bounds
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.prices.step_price import StepCounts

BOUNDS = RoleBounds(patience_s=4, calm_s=10, horizon_s=100)
WORK = Workload(10, 1000, 2000, 1000, 100)
UP = ScaleUp(HeldWeights(2**30, 10 * 2**30), 1e6, 32)


def tes(**changes: object) -> dict[TERole, FleetTE]:
    kind = FleetTE("te", PRICE, LIMITS, transfer=KVTransfer(block_ns=16e3))._replace(**changes)  # type: ignore[arg-type]
    return {"prefill": kind._replace(role="prefill"), "decode": kind._replace(role="decode")}


def fleet_of(*roles: TERole, kinds: dict[TERole, FleetTE] | None = None) -> Fleet:
    some = kinds or tes()
    return Fleet([some[role]._replace(name=f"te {n}") for n, role in enumerate(roles)], "load")


def run(counts: list[tuple[RoleRates, float]], change_s: float = 1.0, start: int = 4) -> list[int]:
    """The splits of eight TEs under these rates, a look each two seconds."""
    state, found = RoleState(start), []
    for number, (rates, rate) in enumerate(counts):
        work = WORK._replace(rate=rate)
        state = next_roles(state, 2.0 * number, work, rates, 8, change_s, BOUNDS)
        found.append(state.num_prefill)
    return found


def test_the_split_that_serves_most() -> None:
    assert RoleRates(2, 6).best_split(8) == 6
    assert RoleRates(2, 6).capacity(6, 2) == 12
    assert RoleRates(1000, 1).best_split(8) == 1, "somebody prefills"
    assert RoleRates(1, 1000).best_split(8) == 7, "somebody decodes"


def test_roles_follow_after_a_while_and_stay() -> None:
    found = run([(RoleRates(2, 6), 12.0)] * 20)
    assert found[:5] == [4] * 5
    assert found[5:] == [6] * 15, "patience, and calm since the beginning"
    assert set(run([(RoleRates(2, 2), 8), (RoleRates(1, 9), 8)] * 10)) == {4}, "each look another workload"


def test_what_does_not_pay_is_left() -> None:
    better = RoleRates(2, 6)
    assert set(run([(better, 5.0)] * 20)) == {4}, "8/s are served as it is, and half as much more is enough"
    assert set(run([(better, 12.0)] * 20, change_s=101)) == {4}, "by then it is over"
    assert set(run([(RoleRates(3, 3.2), 50.0)] * 20)) == {4}, "no other split wins a tenth"


@settings(max_examples=100, deadline=None)
@given(st.floats(0.1, 50), st.floats(0.1, 50), st.floats(0, 100), st.integers(1, 7))
def test_roles_change_once_under_a_workload_that_stays(
    prefill: float, decode: float, rate: float, start: int
) -> None:
    rates = RoleRates(prefill, decode)
    found = run([(rates, rate)] * 30, start=start)
    changes = [pair for pair in itertools.pairwise([start, *found]) if pair[0] != pair[1]]
    assert len(changes) <= 1
    for before, after in changes:
        assert rates.capacity(after, 8 - after) > rates.capacity(before, 8 - before)


def test_rates_by_hand() -> None:
    work = Workload(1, 100, 200, 50, 20)
    rates = role_rates(PRICE, (LIMITS, LIMITS), work, 1e12)
    full = PRICE(StepCounts(64, 128, 64 * 200, 200))
    assert rates.prefill == pytest.approx(128 / full * 1e9 / 50)
    batch = 8  # places; KV would do for 34
    step = PRICE(StepCounts(batch, 2 * batch, batch * 110, batch * 110))
    assert rates.decode == pytest.approx(2 * batch / step * 1e9 / 20)
    tight = role_rates(PRICE, (LIMITS, LIMITS), work, step - 1)
    assert tight.decode < rates.decode, "seven at a time keep the bound"
    few = msgspec.structs.replace(PRICE, gap=1e12)
    assert role_rates(few, (LIMITS, LIMITS), work, 1.0).decode > 0, "one at a time, if none keeps it"


def test_others_go_on_with_what_a_te_was_decoding() -> None:
    trace = small(seed=8)
    stays = fleet_of("prefill", "decode", "decode").run(trace)
    fleet = fleet_of("prefill", "decode", "decode")
    at = trace[len(trace) // 2].at_ns

    def leave() -> None:
        had = fleet.steppers_of(1)[0].num_tasks
        assert had > 0
        fleet.move_out(1)

    fleet.at(float(at), leave)
    moved = fleet.run(trace)
    fleet.check_integrity()
    assert fleet.is_empty(1)
    assert [each.number for each in sorted(moved)] == [each.number for each in sorted(stays)]
    assert {each.te for each in moved if each.last_ns > at + 1e9} == {2}
    for before, after in zip(sorted(stays), sorted(moved), strict=True):
        assert (before.num_prompt, before.num_output) == (after.num_prompt, after.num_output)
        assert before.first_ns == after.first_ns, "prefill went on"


def test_a_request_that_moves_has_the_steps_that_it_lacked() -> None:
    kinds = tes(transfer=KVTransfer())
    (stays,) = fleet_of("prefill", "decode", kinds=kinds).run(trace := small(seed=8)[:1])
    fleet = fleet_of("prefill", "decode", "decode", kinds=kinds)
    middle = (stays.first_ns + stays.last_ns) / 2
    fleet.at(middle, lambda: fleet.move_out(1))
    (moved,) = fleet.run(trace)
    assert moved.te == 2
    assert moved.last_ns == pytest.approx(stays.last_ns, rel=1e-9)
    assert [stepper.num_steps > 0 for stepper in fleet.steppers] == [True, True, True]


def test_kv_on_its_way_is_load_of_where_it_goes() -> None:
    """Prompts that end in one step of two DP groups: the second's KV goes to the other decode TE."""
    fleet = fleet_of("prefill", "decode", "decode", kinds=tes(transfer=KVTransfer(block_ns=16e6)))
    trace = [TracedRequest(0, 60, 30, ()), TracedRequest(0, 60, 30, ()), TracedRequest(10**9, 30, 5, ())]
    loads = []

    def look() -> None:
        blocks = 2 * LIMITS.num_blocks
        loads.append([stepper.kv_load * blocks for stepper in fleet.steppers])
        fleet.check_integrity()

    for at in (1e9 - 1, 1e9 + 20e6, 1e9 + 500e6):
        fleet.at(at, look)
    served = fleet.run(trace)
    assert sorted(each.te for each in served if each.number < 2) == [1, 2]
    assert loads == [[0, 0, 0], [2, 3, 0], [0, 0, 0]], "blocks of 30 positions, and of 35 where it decodes"


def test_kv_on_its_way_to_one_that_goes_is_sent_to_another() -> None:
    fleet = fleet_of("prefill", "decode", "decode", kinds=tes(transfer=KVTransfer(block_ns=16e6)))
    fleet.at(20e6, lambda: fleet.move_out(1))
    served = fleet.run(small(seed=8))
    assert len(served) == len(small(seed=8))
    assert {each.te for each in served if each.last_ns > 20e6} == {2}
    assert [stepper.kv_load for stepper in fleet.steppers] == [0, 0, 0]


def test_who_is_lost_counts_no_more() -> None:
    """Of six TEs in halves two that decode are lost: the four that stay are split anew, by what they are."""
    traffic = MadeTraffic(requests=1200, seconds=30, prompt=60, output=60, spread=0.3, turns=1, systems=0)
    bounds = RoleBounds(every_s=0.5, patience_s=2, calm_s=3, while_s=5, horizon_s=1e4)
    fleet = fleet_of("prefill", "prefill", "prefill", "decode", "decode", "decode")
    roles = FleetRoles(fleet, tes(), UP, bounds, Bounds(1, 100))
    for te in (3, 4):
        fleet.at(1e9, functools.partial(roles.lose, te))
    assert len(fleet.run(made(traffic))) == 1200
    said = [(event.what, event.num_serving) for event in roles.events]
    assert said[:2] == [("lost", 5), ("lost", 4)]
    wanted = [event for event in roles.events if event.what == "wanted"]
    assert "that prefill, not 3:" in wanted[0].reason
    assert roles.state.num_prefill == roles.count("prefill") < 3
    assert len(fleet.serving) == 4


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_a_role_that_nobody_has_is_taken_at_once(lost: TERole) -> None:
    names: list[TERole] = ["prefill", "prefill", "decode", "decode"]
    fleet = fleet_of(*names)
    bounds = RoleBounds(every_s=0.5, patience_s=1e3, calm_s=1e3)
    roles = FleetRoles(fleet, tes(), UP, bounds, Bounds(1, 100))
    trace = small(seed=8)
    half = trace[len(trace) // 2].at_ns
    for te in (number for number, role in enumerate(names) if role == lost):
        fleet.at(float(half), functools.partial(roles.lose, te))
    assert len(fleet.run(trace)) == len(trace)
    fleet.check_integrity()
    (joined,) = (event for event in roles.events if event.what == "joins")
    assert joined.te.startswith(lost)
    assert joined.at_ns < half + 2e9 + 1e9 * roles.change_s


def test_one_te_alone_has_nothing_to_change_with() -> None:
    fleet = fleet_of("prefill", "decode")
    roles = FleetRoles(fleet, tes(), UP, RoleBounds(every_s=0.05), Bounds(1, 100))
    trace = small(seed=8)
    fleet.at(float(trace[len(trace) // 2].at_ns), lambda: roles.lose(0))
    with pytest.raises(XDeepServeError, match="requests of the trace wait for a TE, and none comes"):
        fleet.run(trace)


def test_roles_of_a_fleet_follow_its_workload() -> None:
    first = MadeTraffic(
        requests=1800, seconds=30, prompt=300, output=4, spread=0.3, turns=1, systems=0, block=16
    )
    second = msgspec.structs.replace(first, prompt=20, output=150)
    later = [each._replace(at_ns=each.at_ns + 30 * 10**9, blocks=()) for each in made(second)]
    trace = [*(each._replace(blocks=()) for each in made(first)), *later]
    trace.sort(key=lambda each: each.at_ns)
    bounds = RoleBounds(every_s=0.5, patience_s=2, calm_s=3, while_s=5)
    results = []
    for _ in range(2):
        fleet = fleet_of("prefill", "prefill", "prefill", "decode", "decode", "decode")
        roles = FleetRoles(fleet, tes(), UP, bounds, Bounds(1, 100))
        served = fleet.run(trace)
        fleet.check_integrity()
        assert sorted(each.number for each in served) == list(range(len(trace)))
        results.append((served, roles.events))
    assert results[0] == results[1]
    wanted = [event for event in results[0][1] if event.what == "wanted"]
    splits = [int(event.reason.split()[0]) for event in wanted]
    assert splits[0] > 3
    assert splits[-1] < 3
    kinds = [event.te.split()[0] for event in results[0][1] if event.what == "joins"]
    assert {"prefill", "decode"} == set(kinds)


def test_a_te_that_is_lost_while_it_changes_does_not_come_back() -> None:
    trace = small(seed=8)
    fleet = fleet_of("prefill", "prefill", "decode")
    roles = FleetRoles(fleet, tes(), UP, RoleBounds(every_s=0.05, patience_s=1e6), Bounds(1, 100))

    def drain() -> None:
        roles.changing[0] = "decode"
        fleet.drain(0)

    def lose() -> None:
        assert not fleet.is_empty(0)
        fleet.lose(0)

    busy = next(each.at_ns for each in trace if each.input_length > 100)
    fleet.at(busy + 1.0, drain)
    fleet.at(busy + 2.0, lose)
    assert len(fleet.run(trace)) == len(trace)
    assert roles.changing == {}
    assert [event.what for event in roles.events] == []
    assert len(fleet.tes) == 3


def test_a_fleet_without_tes_does_not_wait_for_ever() -> None:
    fleet = fleet_of("prefill", "decode")
    FleetRoles(fleet, tes(), UP, RoleBounds(), Bounds(1, 100))
    for te in range(2):
        fleet.at(1e3, functools.partial(fleet.lose, te))
    with pytest.raises(XDeepServeError, match="1 requests of the trace wait for a TE, and none comes"):
        fleet.run(small(seed=8)[:1])
