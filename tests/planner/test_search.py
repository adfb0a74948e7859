"""Algorithm 1, its climb, and the best of all points."""

import math

import msgspec
import numpy as np
import pytest

from xdeepserve.bench.papers.plan import random_space, shares
from xdeepserve.errors import InputError
from xdeepserve.hw.accelerators import ACCELERATORS, accelerator
from xdeepserve.planner.devices import pairings, space_of
from xdeepserve.planner.moe_shape import PUBLISHED
from xdeepserve.planner.performance import LatencyBound
from xdeepserve.planner.search import (
    NodeKind,
    Space,
    algorithm_1,
    balanced,
    evaluate,
    obstacle,
    search,
    simulate,
)

GPUS = ("l20", "h800", "a800", "h20", "l40s")


def spaces(count: int) -> list[Space]:
    rng = np.random.default_rng(7)
    return [random_space(rng) for _ in range(count)]


def test_the_planner_finds_the_best_of_all_points() -> None:
    found = list(shares(40, seed=384))
    assert len(found) > 30
    assert all(planner == pytest.approx(1, abs=1e-12) for planner, _ in found)
    # As printed, n_a ignores k2, k4, the SLO and memory.
    assert min(printed for _, printed in found) < 0.9


def test_the_climb_begins_where_algorithm_1_ends() -> None:
    for space in spaces(40):
        printed, climbed = algorithm_1(space), search(space)
        assert not printed or climbed[0].tpuc >= printed[0].tpuc


def test_the_batch_is_the_largest_and_its_bound_is_the_next_ones() -> None:
    bounds = set()
    for space in spaces(40):
        for plan in search(space):
            assert obstacle(space, plan) is None
            point = (space, plan.attention, plan.experts, plan.n_a, plan.m)
            assert obstacle(space, evaluate(*point, plan.b_a + 1)) == plan.bound
            bounds.add(plan.bound)
    assert bounds == {"SLO", "memory", "range"}


def test_rows_of_attention_and_of_experts_are_one_batch() -> None:
    for space in spaces(10):
        for plan in search(space):
            assert plan.b_e * plan.m * space.num_experts / space.top_k == pytest.approx(plan.batch)


def test_nodes_without_room_are_left_out() -> None:
    space = spaces(1)[0]
    full = tuple(msgspec.structs.replace(side, fits=False) for side in space.attention)
    assert search(msgspec.structs.replace(space, attention=full)) == []


def test_what_was_not_measured_is_used_only_when_asked() -> None:
    space = msgspec.structs.replace(spaces(1)[0], slo_ns=1e12, max_batch=10_000)
    free = tuple(msgspec.structs.replace(side, max_positions=math.inf) for side in space.attention)
    space = msgspec.structs.replace(space, attention=free)
    kinds: tuple[NodeKind, NodeKind] = (space.attention[0], space.experts[0])
    known = simulate(space, *kinds, 1, 3)
    beyond = simulate(msgspec.structs.replace(space, extrapolates=True), *kinds, 1, 3)
    assert known is not None
    assert known.bound == "range"
    assert kinds[0].time.covers(known.b_a)
    assert beyond is not None
    assert beyond.b_a == 10_000


# ---- devices -------------------------------------------------------------------------------------------


def test_dbrx_balances_at_eight_attention_nodes() -> None:
    shape = msgspec.structs.replace(PUBLISHED["dbrx"], matrices=2)
    a800 = ACCELERATORS["a800"]
    space = space_of(shape, a800, a800, 650, 150e6)
    assert round(balanced(space, space.attention[0], space.experts[0])) == 8


@pytest.mark.parametrize("name", PUBLISHED)
def test_attention_wants_bandwidth_and_experts_operations(name: str) -> None:
    best = pairings(PUBLISHED[name], [ACCELERATORS[gpu] for gpu in GPUS], 650, LatencyBound(150e6))[0]
    assert (best.attention.name, best.experts.name) == ("h20", "l40s")


def test_what_cannot_be_planned_is_refused_with_what_would_work() -> None:
    h20 = [accelerator("H20")]
    with pytest.raises(InputError, match=r"no plan keeps T_iter <= 1 ms .* --slo-ms [\d.]+ would") as refused:
        pairings(PUBLISHED["dbrx"], h20, 650, LatencyBound(1e6))
    slo_ms = float(str(refused.value).split("--slo-ms ")[1].split()[0])
    assert pairings(PUBLISHED["dbrx"], h20, 650, LatencyBound(1e6 * slo_ms))
    huge = msgspec.structs.replace(PUBLISHED["dbrx"], layers=4000)
    with pytest.raises(InputError, match="does not fit on nodes of up to 8 h20"):
        pairings(huge, h20, 650, LatencyBound(150e6))
