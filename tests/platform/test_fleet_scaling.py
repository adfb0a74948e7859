"""Fleets that grow, shrink and lose TEs: nobody is lost, TEs drain, what came is what was asked for."""

import msgspec
import pytest

from tests.platform.tools import LIMITS, PRICE, small
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds
from xdeepserve.errors import XDeepServeError
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_scaling import FleetScaler
from xdeepserve.platform.fleet_words import FleetTE
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.scale_up import HeldWeights, ScaleUp, ScaleWays
from xdeepserve.platform.service_report import Bounds, is_within
from xdeepserve.platform.traces import TracedRequest

UP = ScaleUp(HeldWeights(10 * 2**30, 100 * 2**30), 1e6, 32)
BOUNDS = ScaleBounds(most=8, every_s=0.05, up_s=0.1, down_s=0.3, calm_s=0.2)
SERVICE = Bounds(ttft_s=0.5, tpot_ms=100)
BURST = MadeTraffic(
    requests=600, seconds=10, prompt=200, output=30, spread=0.3, block=16, turns=1, systems=0, swing=1.0
)
KIND = FleetTE("te", PRICE, LIMITS)


def te(name: str, role: str = "both") -> FleetTE:
    return KIND._replace(name=name, role=role)  # type: ignore[arg-type]


def test_a_burst_brings_tes_and_its_end_sends_them_away() -> None:
    results = []
    for _ in range(2):
        fleet = Fleet([te("te 0")], "load")
        scaler = FleetScaler(fleet, KIND, UP, BOUNDS, SERVICE)
        trace = [*made(BURST), TracedRequest(20 * 10**9, 20, 5, ())]
        served = fleet.run(trace)
        assert sorted(each.number for each in served) == list(range(len(trace)))
        fleet.check_integrity()
        joined = [event for event in scaler.events if event.what == "joins"]
        left = [event for event in scaler.events if event.what == "leaves"]
        assert len(joined) >= 2
        assert "NPU-fork" in joined[0].reason
        assert len(left) == len(joined), "after it, one is enough"
        assert len(fleet.serving) == 1
        results.append((served, scaler.events))
        alone = Fleet([te("te 0")], "load").run(trace)
        mean = [sum(each.ttft_ns for each in some) / len(trace) for some in (served, alone)]
        assert mean[0] < mean[1] / 2
    assert results[0] == results[1]


def test_time_in_a_queue_asks_for_more() -> None:
    """Dynamo #10528: in bursts a prompt alone was always served in time, so nobody came, and all waited. Here
    neither KV nor places are ever taken."""
    kind = KIND._replace(limits=LIMITS._replace(num_seqs=1000, num_positions=10**6))
    trace = made(msgspec.structs.replace(BURST, requests=1000, seconds=20, prompt=300, output=2))

    for each in trace:
        (served,) = Fleet([kind], "load").run([each._replace(at_ns=0)])
        assert served.ttft_ns < 0.5e9 * SERVICE.ttft_s
    late = [each for each in Fleet([kind], "load").run(trace) if not is_within(each.outcome(), SERVICE)]
    assert len(late) > 0.9 * len(trace)
    fleet = Fleet([kind], "load")
    scaler = FleetScaler(fleet, kind, UP, BOUNDS, SERVICE)
    all_served = fleet.run(trace)
    first = next(event for event in scaler.events if event.what == "wanted")
    assert first.at_ns < min(each.first_ns for each in late), "before anybody is late"
    assert sum(is_within(each.outcome(), SERVICE) for each in all_served) > 0.9 * len(trace)


def test_a_te_that_leaves_has_ended_what_it_had() -> None:
    fleet, trace = Fleet([te("te 0"), te("te 1")], "load"), small(seed=3)
    half = trace[len(trace) // 2].at_ns
    fleet.at(float(half), lambda: fleet.drain(0))
    served = fleet.run(trace)
    assert len(served) == len(trace)
    assert any(each.te == 0 and each.last_ns > half for each in served)
    assert all(each.te == 1 for each in served if each.at_ns > half)
    assert fleet.is_empty(0)


@pytest.mark.parametrize("roles", [("both", "both"), ("prefill", "prefill", "decode", "decode")])
@pytest.mark.parametrize("lost", [0, 1, -1])
def test_requests_of_a_lost_te_begin_again(roles: tuple[str, ...], lost: int) -> None:
    fleet, trace = Fleet([te(f"te {n}", role) for n, role in enumerate(roles)], "load"), small(seed=4)
    number = lost % len(roles)
    at = trace[len(trace) // 3].at_ns
    fleet.at(float(at), lambda: fleet.lose(number))
    served = fleet.run(trace)
    assert sorted(each.number for each in served) == list(range(len(trace)))
    assert all(each.te != number for each in served if each.last_ns > at)
    for other in {*range(len(roles))} - {number}:
        assert fleet.is_empty(other)


def test_who_has_no_te_waits_for_one() -> None:
    fleet = Fleet([te("prefill", "prefill")], "load")
    fleet.at(1e9, lambda: fleet.drain(0))
    fleet.at(2e9, lambda: (fleet.join(te("decode", "decode")), None)[1])
    fleet.at(3e9, lambda: (fleet.join(te("late", "prefill")), None)[1])
    first, second = fleet.run([TracedRequest(0, 100, 5, ()), TracedRequest(15 * 10**8, 100, 5, ())])
    assert first.first_ns < 1e9
    assert first.last_ns > 2e9
    assert second.first_ns > 3e9
    with pytest.raises(XDeepServeError, match="1 requests of the trace wait for a TE"):
        Fleet([te("prefill", "prefill")]).run([TracedRequest(0, 100, 5, ())])


def test_one_that_is_taken_back_serves_who_has_waited() -> None:
    fleet = Fleet([te("te 0"), te("te 1")], "load")
    fleet.at(1e9, lambda: fleet.drain(0))
    fleet.at(2e9, lambda: fleet.lose(1))
    fleet.at(4e9, lambda: fleet.resume(0))
    (served,) = fleet.run([TracedRequest(3 * 10**9, 100, 5, ())])
    assert (served.te, served.first_ns > 4e9) == (0, True)
    apart = Fleet([te("prefill", "prefill"), te("decode", "decode")], "load")
    apart.drain(1)
    apart.at(4e9, lambda: apart.resume(1))
    (served,) = apart.run([TracedRequest(0, 100, 5, ())])
    assert served.first_ns < 4e9 < served.last_ns


def test_a_scaler_makes_good_for_who_is_lost() -> None:
    fleet = Fleet([te("te 0"), te("te 1")], "load")
    bounds = ScaleBounds(least=2, most=2, every_s=0.05)
    scaler = FleetScaler(fleet, KIND, UP, bounds, SERVICE)
    fleet.at(2e9, lambda: scaler.lose(1))
    assert len(fleet.run(small(seed=6))) == len(small(seed=6))
    assert [event.what for event in scaler.events] == ["lost", "joins"]


def test_a_request_that_no_te_serves_in_time_asks_for_none() -> None:
    fleet = Fleet([te("te 0")], "load")
    scaler = FleetScaler(fleet, KIND, UP, BOUNDS, Bounds(ttft_s=0.01, tpot_ms=1000))
    fleet.run([TracedRequest(n * 10**9, 500, 2, ()) for n in range(10)])
    assert scaler.events == []


def test_pre_warmed_tes_are_taken_and_started_anew() -> None:
    """One is there: of two that come the second starts cold; later there is one again."""
    fleet = Fleet([te("te 0")], "load")
    scaler = FleetScaler(fleet, KIND, UP, ScaleBounds(most=8, down_s=1e6), SERVICE, warm=1)
    assert scaler.warm is not None
    fleet.at(1e9, lambda: scaler.bring(2))
    fleet.at(1e9 + 1, lambda: ready.append(scaler.warm.ready))  # type: ignore[union-attr]
    fleet.at(100e9, lambda: scaler.bring(1))
    ready: list[int] = []
    fleet.run([TracedRequest(n * 10**9, 50, 2, ()) for n in range(200)])
    joins = [(each.at_ns / 1e9, each.reason) for each in scaler.events if each.what == "joins"]
    warm_s, cold_s = (sum(step.seconds for step in UP.steps(1, 1, is_warm)) for is_warm in (True, False))
    assert cold_s == pytest.approx(warm_s + UP.warming_s - 0.2)
    assert [at for at, _ in joins] == pytest.approx([1 + warm_s, 1 + cold_s, 100 + warm_s], abs=0.1)
    assert ["pre-warmed, 0 left" in reason for _, reason in joins] == [True, False, True]
    assert "none was pre-warmed" in joins[1][1]
    assert ready == [0]
    made_ready = [each.at_ns / 1e9 for each in scaler.events if each.what == "warm"]
    assert made_ready == pytest.approx([1 + UP.warming_s, 100 + UP.warming_s])
    assert scaler.warm.ready == 1


def test_who_is_called_off_gives_its_pre_warmed_te_back() -> None:
    fleet = Fleet([te("te 0")], "load")
    scaler = FleetScaler(fleet, KIND, UP, ScaleBounds(most=8, down_s=1e6), SERVICE, warm=2)
    assert scaler.warm is not None
    fleet.at(1e9, lambda: scaler.bring(2))
    fleet.at(1e9 + 1, lambda: scaler.part_with(1))
    fleet.run([TracedRequest(n * 10**9, 50, 2, ()) for n in range(100)])
    assert [each.what for each in scaler.events if each.te == "new 1"] == ["called off"]
    assert scaler.warm.ready == 2
    assert [each.reason for each in scaler.events if each.what == "warm"] == [
        "one more is pre-warmed, 2 in all"
    ]


def test_the_five_steps() -> None:
    port, startup = UP.spec.link_ns(0, 2**26, 0), UP.spec.startup_ns("dma")
    chunks = 160
    assert UP.fork_s(1) == pytest.approx((startup + chunks * port) / 1e9)
    assert UP.fork_s(5) == pytest.approx((5 * startup + (chunks + 4) * port) / 1e9)
    assert UP.fork_s(5, is_chunked=False) > 4 * UP.fork_s(5)
    across = UP.fork_s(24, crossed=1)
    assert across > 4 * UP.fork_s(23)
    assert UP.fork_s(47, crossed=1) == pytest.approx(across, rel=0.1), "a chunk crosses once for a SuperPod"
    loads = [UP.steps(place, 1)[2] for place in (23, 24)]  # 24 TEs of 32 dies are a SuperPod
    assert ["UB" in loads[0].source, "RoCE" in loads[1].source] == [True, True]

    def seconds(prewarmed: bool, preloaded: bool, fork: bool, serving: int = 1) -> float:
        up = ScaleUp(UP.weights, UP.dummy_ns, UP.dies, ScaleWays(prewarmed, preloaded, fork))
        assert [step.name for step in up.steps(1, serving)] == [
            "Scaler-Pre", "TE-Pre-Load", "TE-Load", "TE-Post-Load", "Scaler-Post"
        ]  # fmt: skip
        return up.seconds(1, serving)

    for other in ((False, False), (False, True), (True, False), (True, True)):
        assert seconds(True, *other) < seconds(False, *other)
    assert seconds(True, True, True) < seconds(True, True, False) < seconds(True, False, False)
    assert seconds(True, True, True, serving=0) == seconds(True, True, False), "nobody to fork from"
