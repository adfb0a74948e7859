"""The state machines and the layout, without any bytes moving."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.bf16 import from_bf16, to_bf16
from xdeepserve.comm.arrivals import Arrivals
from xdeepserve.comm.exchange.layout import HEADER_DTYPE, Group, Layout
from xdeepserve.comm.turns import PHASE, Phase, Step, Turns
from xdeepserve.comm.wire import FIELD, FIELD_DTYPE
from xdeepserve.errors import AddressError, DeploymentError, OutOfMemoryError, ProtocolError
from xdeepserve.hw.memory import MemoryPlan


def test_dispatch_and_combine_alternate() -> None:
    turns = Turns(0)
    for step in [Step.DISPATCH, Step.DONE, Step.COMBINE, Step.DONE] * 2:
        turns.move(step)
    assert turns.state is Phase.READY


def test_everything_not_in_the_table_is_refused_by_name() -> None:
    for phase, step in itertools.product(Phase, Step):
        turns = Turns(5)
        turns.state = phase
        if (phase, step) not in PHASE:
            problem = f"rank 5 cannot {step.name.lower()} while {phase.name.lower()}"
            with pytest.raises(ProtocolError, match=problem):
                turns.move(step)


def test_arguments_that_are_refused_use_nothing_up() -> None:
    turns = Turns("attention 3", "A2E", "E2A")

    def refuse() -> None:
        raise AddressError("too many tokens")

    for _ in range(2):
        with pytest.raises(AddressError, match="too many tokens"):
            turns.begin(Step.DISPATCH, 1, refuse)
        assert turns.state is Phase.READY
    # What the order forbids is said first.
    with pytest.raises(ProtocolError, match="rank attention 3 cannot E2A while ready"):
        turns.begin(Step.COMBINE, 1, refuse)
    turns.begin(Step.DISPATCH, 1)
    assert turns.event_before == 0
    with pytest.raises(ProtocolError, match="A2E: rank attention 3 was given event 1 after 1"):
        turns.begin(Step.DISPATCH, 1, refuse)


@given(st.permutations(range(5)), st.integers(0, 5))
def test_arrivals_are_complete_when_the_last_has_posted(order: list[int], num_early: int) -> None:
    arrivals = Arrivals("dispatch", 0, num_ranks=5, expected=9, last=3)
    arrivals.look_at_all([9 if peer in order[:num_early] else 3 for peer in range(5)])
    for index in range(num_early, 5):
        assert not arrivals.is_complete
        assert arrivals.awaited == sorted(order[index:])
        arrivals.look(order[index], 9)
    assert arrivals.is_complete
    assert arrivals.awaited == []


@pytest.mark.parametrize(
    ("event", "is_first", "mistake"),
    [
        (10, True, "ahead"),
        (10, False, "ahead"),
        (8, True, "behind"),
        (8, False, "behind"),
        (3, False, "behind"),
    ],
)
def test_a_peer_ahead_or_behind_is_named(event: int, is_first: bool, mistake: str) -> None:
    arrivals = Arrivals("combine", 2, num_ranks=4, expected=9, last=3)
    with pytest.raises(
        ProtocolError,
        match=f"combine: rank 2 expects event 9, but peer 3 is {mistake}: its field says event {event}",
    ):
        arrivals.look(3, event, is_first)


def test_a_peer_that_posts_twice_is_named() -> None:
    arrivals = Arrivals("combine", 2, num_ranks=4, expected=9, last=3)
    arrivals.look(1, 9)
    with pytest.raises(ProtocolError, match="peer 1 has posted twice"):
        arrivals.look(1, 9)
    assert arrivals.num_awaited == 3


def test_a_field_is_32_bytes_and_a_row_of_deepseek_is_what_the_paper_sends() -> None:
    assert FIELD.size == FIELD_DTYPE.itemsize == 32
    values = (2**63 + 1, 2**40 + 3, 77)
    assert np.frombuffer(FIELD.pack(*values), FIELD_DTYPE)[0].tolist() == values
    assert HEADER_DTYPE.itemsize == 16
    layout = Layout(num_ranks=288, max_tokens=96, top_k=8, hidden=7168, max_experts_per_rank=1)
    assert layout.dispatch_row == 7168 + 32  # INT8 and a header, padded
    assert layout.combine_row == 2 * 7168
    assert layout.rows_per_block == 96


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 70),
    st.integers(0, 3),
    st.booleans(),
)
def test_planned_regions_hold_what_the_layout_needs(
    num_ranks: int, max_tokens: int, top_k: int, hidden: int, experts: int, quantize: bool
) -> None:
    layout = Layout(num_ranks, max_tokens, top_k, hidden, experts, quantize)
    plan = MemoryPlan(0)
    layout.plan(plan)
    assert layout.dispatch_row % 32 == layout.combine_row % 32 == 0
    assert layout.dispatch_row >= 16 + hidden * (1 if quantize else 4)
    assert layout.combine_row >= hidden * (2 if quantize else 4)
    sizes = {name: region.nbytes for area in plan.areas for name, region in area.regions.items()}
    for op, row in (("dispatch", layout.dispatch_row), ("combine", layout.combine_row)):
        assert sizes[f"xccl.{op}.fields"] == 32 * num_ranks
        assert sizes[f"xccl.{op}.blocks"] == num_ranks * max_tokens * min(top_k, experts) * row
    assert sizes["xccl.dispatch.rows"] == sizes["xccl.dispatch.blocks"]
    assert sizes["xccl.combine.rows"] == max_tokens * top_k * layout.combine_row


def test_two_groups_fit_on_one_die() -> None:
    plan = MemoryPlan(0)
    Layout(2, 1, 1, 8, 1, name="domain0").plan(plan)
    Layout(2, 1, 1, 8, 1, name="domain1").plan(plan)
    plan.metadata.check_integrity()


def test_what_cannot_be_laid_out_is_refused() -> None:
    with pytest.raises(DeploymentError, match="hidden must be at least 1, not 0"):
        Layout(1, 1, 1, 0, 1)
    with pytest.raises(DeploymentError, match="different dies"):
        Group((1, 1), (0,))
    with pytest.raises(DeploymentError, match=r"experts on ranks \[2\]: the group has ranks 0\.\.1"):
        Group((0, 1), (0, 2))
    with pytest.raises(OutOfMemoryError, match="metadata area"):
        Layout(70_000, 1, 1, 8, 1).plan(MemoryPlan(0))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bf16_agrees_with_ml_dtypes(bits: list[int]) -> None:
    import ml_dtypes

    x = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        theirs = x.astype(ml_dtypes.bfloat16)
    mine = to_bf16(x)
    is_nan = np.isnan(x)
    assert np.array_equal(mine[~is_nan], theirs.view(np.uint16)[~is_nan])
    assert np.isnan(from_bf16(mine[is_nan])).all()
    assert from_bf16(mine[~is_nan]).tobytes() == theirs[~is_nan].astype(np.float32).tobytes()
