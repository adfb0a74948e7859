"""MegaScale-Infer's equations by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.planner.performance import Times, moe_util, transfer_ns, util
from xdeepserve.prices.curve import Curve

TIMES = st.builds(Times, *[st.floats(1, 1e6)] * 2, st.floats(0, 1e6), busy=st.floats(0, 1e6))


@given(TIMES, st.integers(1, 8), st.integers(1, 80))
def test_the_total_is_equation_5_where_microbatches_are_enough(times: Times, m: int, layers: int) -> None:
    equation_5 = times.cycle + times.f * (m * layers - 1)
    if m * times.f >= times.cycle:
        assert times.total(m, layers) == pytest.approx(equation_5)
    else:
        assert times.total(m, layers) >= equation_5


@given(TIMES, st.integers(2, 60))
def test_the_least_number_of_microbatches_is_condition_3(times: Times, layers: int) -> None:
    m = times.min_microbatches()
    assert m * times.f >= 2 * (times.f + times.c) * (1 - 1e-6)
    assert (m - 1) * times.f < 2 * (times.f + times.c) * (1 + 1e-6)
    low, high = times.bounds(m, layers)
    assert low <= high * (1 + 1e-6)


def test_three_microbatches_hide_fast_communication_and_four_slow() -> None:
    assert Times(1, 1, 0.4).min_microbatches() == 3
    assert Times(1, 1, 0.6).min_microbatches() == 4
    assert Times(1, 1, 0.4).hides_communication(3)
    assert not Times(1, 1, 0.4).hides_communication(2)
    assert not Times(1, 1, 1.1).hides_communication(9)


def test_experts_that_serve_several_domains_set_the_pace() -> None:
    assert Times(300, 100, 50, busy=400).f == 400
    assert Times(300, 100, 50, busy=400).cycle == 500


def test_communication_takes_what_the_slower_side_takes() -> None:
    send, receive = Curve((0, 1000), (0, 10)), Curve((0, 1000), (5, 105))
    assert transfer_ns(send, receive, 1000, 500) == 55
    assert transfer_ns(send, receive, 9000, 0) == 90
    # 1000 bytes in 105 ns, of a device that moves 10 GB/s: 100 ns at best.
    assert util(receive, 10e9, 1000) == pytest.approx(100 / 105)


def test_mixtral_uses_a_quarter_at_the_ridge() -> None:
    assert moe_util(2, 8, 156, 156) == 0.25
    assert moe_util(2, 8, 156, 10_000) == 1
