"""EPLB's algorithm: the papers' rules, properties, and DeepSeek's published example beside ours."""

import json
from collections import Counter
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.engine.balance.eplb import (
    Counts,
    Holdings,
    die_loads,
    hottest_die,
    layer_load,
    place,
    select,
)

DEEPSEEK = json.loads((Path(__file__).parents[1] / "fixtures" / "eplb" / "deepseek_readme.json").read_text())


def counts(*rows: list[int]) -> Counts:
    """[E, T] from the rows of the experts."""
    return np.array(rows, np.int64)


def replicas(num_experts: int, chosen: list[int]) -> Counts:
    return 1 + np.bincount(np.array(chosen, np.int64), minlength=num_experts)


def spread(num_experts: int, num_dies: int) -> list[int]:
    """The die of each expert's primary, experts dealt in ranges."""
    return [
        die
        for die in range(num_dies)
        for _ in range(num_experts * die // num_dies, num_experts * (die + 1) // num_dies)
    ]


@st.composite
def layers(draw: st.DrawFn) -> tuple[Counts, list[int], list[int]]:
    """token_count [E, T], the primaries' dies, and the redundant slots of each die."""
    num_dies = draw(st.integers(2, 6))
    num_experts = draw(st.integers(num_dies, 12))
    num_slices = draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 1000), min_size=num_slices, max_size=num_slices)
    token_count = np.array(draw(st.lists(rows, min_size=num_experts, max_size=num_experts)), np.int64)
    free = draw(st.lists(st.integers(0, 3), min_size=num_dies, max_size=num_dies))
    return token_count, spread(num_experts, num_dies), free


def balanced(token_count: Counts, primary: list[int], free: list[int]) -> tuple[list[int], Holdings]:
    chosen = select(token_count, sum(free), len(free))
    return chosen, place(token_count, chosen, primary, free)


# ---- select -----------------------------------------------------------------------------------------------


def test_the_hottest_expert_of_one_slice_gets_the_replica() -> None:
    assert select(counts([10], [30], [20]), 1, 3) == [1]


def test_an_expert_may_be_chosen_again() -> None:
    # 90 -> 45 -> 30, and only then is 40 the hottest.
    assert select(counts([90], [40], [1]), 3, 4) == [0, 0, 1]


def test_it_is_the_sum_over_slices_that_counts() -> None:
    # The hottest expert of slice 0 has a rival of 95 beside it; a replica of the other's brings 100 - 50.
    token_count = counts([100, 0], [95, 0], [0, 100], [0, 50])
    assert select(token_count, 1, 4) == [2]


def test_candidates_are_only_experts_that_are_the_hottest_of_some_slice() -> None:
    # Expert 1 has most tokens in all, but is nowhere the hottest until expert 0 has been split.
    token_count = counts([100, 0, 0], [90, 90, 90], [0, 100, 0], [0, 0, 100])
    assert select(token_count, 2, 4) == [0, 1]


def test_ties_do_not_stop_it() -> None:
    # Neither replica alone lowers the load; both do.
    assert select(counts([60], [60], [1]), 2, 4) == [0, 1]


def test_no_tokens_no_replicas() -> None:
    assert select(counts([0, 0], [0, 0]), 4, 2) == []


def test_an_expert_has_at_most_a_replica_on_each_die() -> None:
    assert select(counts([100], [1]), 5, 2) == [0]


@given(layers())
def test_each_choice_is_the_best_of_its_candidates(layer: tuple[Counts, list[int], list[int]]) -> None:
    token_count, _, free = layer
    chosen = select(token_count, sum(free), len(free))
    assert len(chosen) <= sum(free)
    before = np.ones(len(token_count), np.int64)
    for expert in chosen:
        split = token_count / before[:, None]
        assert any(split[expert, t] == split[:, t].max() for t in range(split.shape[1]))
        after = before.copy()
        after[expert] += 1
        for other in {int(e) for e in split.argmax(axis=0)}:
            if before[other] < len(free):
                alternative = before.copy()
                alternative[other] += 1
                assert layer_load(token_count, after) <= layer_load(token_count, alternative)
        before = after
    assert before.max() <= len(free)


def test_for_one_slice_the_greedy_choice_is_the_best_of_all() -> None:
    token_count = counts([70], [55], [31], [30], [8])
    chosen = select(token_count, 4, 5)
    best = min(
        layer_load(token_count, replicas(5, list(other)))
        for other in combinations_with_replacement(range(5), 4)
    )
    assert layer_load(token_count, replicas(5, chosen)) == best


# ---- place ------------------------------------------------------------------------------------------------


def test_replicas_go_to_the_least_loaded_die_the_heaviest_first() -> None:
    # Dies 0..3 have one expert each, of loads 80, 60, 10, 20; experts 0 and 1 are split in halves.
    token_count = counts([80], [60], [10], [20])
    assert place(token_count, [0, 1], range(4), [1, 1, 1, 1]) == [[], [], [0], [1]]


def test_a_die_without_a_free_slot_gets_none() -> None:
    token_count = counts([80], [60], [10], [20])
    assert place(token_count, [0, 1], range(4), [1, 1, 0, 1]) == [[1], [], [], [0]]


def test_a_replica_never_lies_beside_its_primary() -> None:
    # Die 0 is free and by far the least loaded even with half of its own expert.
    token_count = counts([4], [100], [100])
    assert place(token_count, [0], range(3), [1, 1, 1]) == [[], [0], []]


def test_two_replicas_of_one_expert_lie_on_different_dies() -> None:
    token_count = counts([90], [40], [40], [1])
    holdings = place(token_count, [0, 0], range(4), [2, 2, 2, 2])
    assert holdings == [[], [0], [], [0]]


def test_a_replica_without_a_place_changes_places() -> None:
    # Expert 0 takes the only slot elsewhere first; then the one free slot left is beside expert 1's primary.
    token_count = counts([100], [60], [50])
    assert place(token_count, [0, 1], range(3), [0, 1, 1]) == [[], [0], [1]]


def test_a_replica_that_fits_nowhere_is_left_out() -> None:
    assert place(counts([100], [1]), [0], [0, 1], [1, 0]) == [[], []]


@given(layers())
def test_no_die_holds_two_of_an_expert_and_none_more_than_its_slots(
    layer: tuple[Counts, list[int], list[int]],
) -> None:
    token_count, primary, free = layer
    chosen, holdings = balanced(token_count, primary, free)
    assert len(holdings) == len(free)
    for die, held in enumerate(holdings):
        assert len(held) <= free[die]
        assert len(set(held)) == len(held)
        assert all(primary[expert] != die for expert in held)
    placed = Counter(expert for held in holdings for expert in held)
    assert all(number <= Counter(chosen)[expert] for expert, number in placed.items())


@given(layers())
def test_replicas_split_load_and_lose_none(layer: tuple[Counts, list[int], list[int]]) -> None:
    token_count, primary, free = layer
    _, holdings = balanced(token_count, primary, free)
    loads = die_loads(token_count, primary, holdings)
    assert np.allclose(loads.sum(axis=0), token_count.sum(axis=0))
    hottest = token_count / replicas(len(token_count), [e for held in holdings for e in held])[:, None]
    assert (loads.max(axis=0) >= hottest.max(axis=0) - 1e-9).all()


@given(layers())
def test_left_out_only_if_the_free_slots_cannot_take_it(layer: tuple[Counts, list[int], list[int]]) -> None:
    token_count, primary, free = layer
    chosen, holdings = balanced(token_count, primary, free)
    missing = Counter(chosen) - Counter(expert for held in holdings for expert in held)
    for die, held in enumerate(holdings):
        if len(held) < free[die]:
            assert all(primary[expert] == die or expert in held for expert in missing)


# ---- beside others ----------------------------------------------------------------------------------------


def test_with_one_expert_a_die_the_skew_of_the_paper_goes_down() -> None:
    # XDS Figure 11: 256 experts, the hottest 30 times the mean; one redundant slot on each die.
    popularity = np.arange(1, 257, dtype=np.float64) ** -0.93
    token_count = np.rint(1e6 * popularity / popularity.sum()).astype(np.int64)[:, None]
    assert 28 < token_count.max() / token_count.mean() < 42
    before = hottest_die(token_count, range(256), [[]] * 256)
    _, holdings = balanced(token_count, list(range(256)), [1] * 256)
    assert hottest_die(token_count, range(256), holdings) < before / 10


@pytest.mark.parametrize("layer", [0, 1])
def test_beside_deepseek_s_published_example(layer: int) -> None:
    """DeepSeek's EPLB moves primaries too, and keeps groups on nodes; ours leaves primaries where they are.

    With the same twelve experts, eight dies and four redundant slots ours chooses replicas that split the
    hottest expert at least as well. Which die is the hottest depends on the primaries that one may move.
    """
    token_count = np.array(DEEPSEEK["weight"][layer], np.int64)[:, None]
    phy2log, num_gpus = DEEPSEEK["phy2log"][layer], DEEPSEEK["num_gpus"]
    primary = spread(12, num_gpus)
    free = [2 - primary.count(die) for die in range(num_gpus)]  # two slots a die, as theirs
    chosen, holdings = balanced(token_count, primary, free)
    theirs = np.bincount(phy2log)
    assert len(chosen) == 4 == sum(map(len, holdings))
    ours = layer_load(token_count, replicas(12, chosen))
    assert ours <= layer_load(token_count, theirs)
    if layer == 0:
        assert replicas(12, chosen).tolist() == theirs.tolist()
    # Both lower the hottest die of primaries alone, and neither can beat the mean.
    per_gpu = (token_count[:, 0] / theirs)[phy2log].reshape(num_gpus, -1).sum(axis=1)
    unbalanced = hottest_die(token_count, primary, [[]] * num_gpus)
    mean = token_count.sum() / num_gpus
    assert mean <= per_gpu.max() < unbalanced
    assert mean <= hottest_die(token_count, primary, holdings) < unbalanced
