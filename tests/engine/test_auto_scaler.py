"""AutoScaler: how many TEs for which load; what others' autoscalers have been caught at; no oscillation."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xdeepserve.engine.balance.auto_scaler import ScaleLook, ScaleState, next_wanted
from xdeepserve.engine.balance.service_level import IdlePrefill, ServiceLevel
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds
from xdeepserve.errors import InputError

BOUNDS = ScaleBounds(most=32, up_s=2, down_s=10, calm_s=5)


class Plant:
    """TEs that come `delay` seconds after they are wanted, under a load that a test says."""

    def __init__(self, count: int, bounds: ScaleBounds = BOUNDS, delay: int = 3) -> None:
        self.bounds, self.delay = bounds, delay
        self.state = ScaleState(count)
        self.serving, self.coming = count, list[float]()
        self.now = 0.0
        self.changes: list[int] = []

    def look(self, load: float, missed: float | None = None) -> None:
        self.serving += sum(at <= self.now for at in self.coming)
        self.coming = [at for at in self.coming if at > self.now]
        there = self.serving + len(self.coming)
        self.state = next_wanted(
            self.state, ScaleLook(self.now, load, self.serving, len(self.coming), missed), self.bounds
        )
        more = self.state.wanted - there
        if self.state.changed_s == self.now and more:
            self.changes.append(self.state.wanted)
            self.coming += [self.now + self.delay] * max(0, more)
            for _ in range(max(0, -more)):
                if self.coming:
                    self.coming.pop()
                else:
                    self.serving -= 1
        self.now += 1

    @property
    def there(self) -> int:
        return self.serving + len(self.coming)


@pytest.mark.parametrize(("waiting", "wanted"), [(0, 0), (1, 1), (9, 1)])
def test_the_last_te_stays_for_requests_that_will_need_it(waiting: int, wanted: int) -> None:
    bounds, state = ScaleBounds(least=0, down_s=1, calm_s=0), ScaleState(3)
    for second in range(3):
        state = next_wanted(state, ScaleLook(second, 0.0, state.wanted, 0, waiting=waiting), bounds)
    assert state.wanted == wanted


def test_more_come_for_a_load_and_go_after_it() -> None:
    plant = Plant(1)
    for _ in range(20):
        plant.look(4.0)
    assert plant.changes == [8]  # to `aim`, at once
    for _ in range(40):
        plant.look(0.3)
    assert plant.changes == [8, 1]


def test_a_spike_of_one_look_is_none() -> None:
    plant = Plant(2)
    for number in range(40):
        plant.look(5.0 if number % 4 == 0 else 1.0)
    assert plant.changes == []


def test_what_the_others_would_have_decides_who_goes() -> None:
    """Dynamo #9294: two workers at 70 % each were one at 140 % next, two again, and so on."""
    plant = Plant(2)
    for _ in range(200):
        plant.look(2 * 0.35)  # below `low` each, but 0.7 for one alone
    assert plant.changes == []


def test_a_bound_that_no_te_can_keep_asks_for_none() -> None:
    """Dynamo #11624: a prompt that was too long alone asked for more workers for ever. Such requests are
    not among the missed (`fleet_scaling.py` leaves them out); with none left, and no load, one TE stays."""
    plant = Plant(2)
    for _ in range(100):
        plant.look(0.0, missed=0.0)
    assert plant.changes == [1]


def test_nobody_asks_again_for_what_is_coming() -> None:
    """Dynamo #9774: while workers were starting, the same load asked for more of them."""
    plant = Plant(1, delay=30)
    for _ in range(30):
        plant.look(4.0)
    assert plant.changes == [8]


def test_who_comes_no_more_is_called_off() -> None:
    """Dynamo #14251: a worker that never came kept all others from leaving."""
    plant = Plant(1, delay=10**9)
    for _ in range(10):
        plant.look(4.0)
    assert plant.there == 8
    for _ in range(40):
        plant.look(0.1)
    assert plant.there == plant.serving == 1


def test_load_does_not_undo_what_the_service_level_asked_for() -> None:
    """With two TEs requests are late although load is low; with three they are not."""
    plant = Plant(2)
    for _ in range(300):
        plant.look(0.5, missed=0.5 if plant.serving < 3 else 0.0)
    assert plant.changes == [3]
    forgets = Plant(2, ScaleBounds(most=32, up_s=2, down_s=10, calm_s=5, forget_s=100))
    for number in range(300):
        forgets.look(0.5, missed=0.5 if number < 5 else 0.0)
    assert forgets.changes == [3, 2]


def test_late_requests_ask_for_no_more_than_a_few_at_once() -> None:
    plant = Plant(4)
    for _ in range(7):
        plant.look(0.01, missed=1.0)
    assert plant.changes == [5]


def test_bounds_hold_and_lost_ones_are_made_good() -> None:
    plant = Plant(1, ScaleBounds(least=2, most=4, up_s=2, calm_s=5))
    plant.look(0.0)
    assert plant.there == 2  # at once
    for _ in range(40):
        plant.look(100.0)
    assert plant.there == 4
    plant.serving = 1
    plant.look(0.0)
    assert plant.there == 2


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(1, 32),
    load=st.floats(0, 12),
    delay=st.integers(0, 20),
    noise=st.lists(st.floats(0.85, 1.15), min_size=1, max_size=7),
    slow=st.integers(0, 6),
)
def test_no_change_is_undone_under_a_load_that_stays(
    start: int, load: float, delay: int, noise: list[float], slow: int
) -> None:
    """And with noise that stays within high / low; requests are late with less than `slow` TEs."""
    plant = Plant(start, delay=delay)
    for factor in itertools.islice(itertools.cycle(noise), 200):
        plant.look(load * factor, missed=1.0 if plant.serving < slow else 0.0)
    ways = [math.copysign(1, b - a) for a, b in itertools.pairwise([start, *plant.changes])]
    assert sum(a != b for a, b in itertools.pairwise(ways)) <= 1, plant.changes
    assert load <= BOUNDS.high * plant.there * 1.2


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (ScaleBounds(least=3, most=2), "1 <= least <= most"),
        (ScaleBounds(low=0.6, aim=0.5), "low <= aim < high"),
        (ScaleBounds(within=2, calm_s=-1), "within .*; scale: calm_s"),
    ],
)
def test_bounds_that_cannot_be(bounds: ScaleBounds, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bounds.check()


def test_the_service_level_counts_late_requests_that_an_idle_te_would_have_served_in_time() -> None:
    level = ServiceLevel(ttft_ns=100, tpot_ns=10)
    assert level.take_share() is None
    level.hear(100, 10, lambda: 50)  # in time
    level.hear(101, None, lambda: 100)  # late
    level.hear(99, 11, lambda: 99)  # its first token was in time, others were not
    level.hear(300, 5, lambda: 101)  # late on an idle TE, too
    assert level.take_share() == 0.5
    assert level.take_share() is None


def test_without_bounds_no_request_is_late() -> None:
    level = ServiceLevel(math.inf, math.inf)
    level.hear(1e18, 1e18, lambda: 1e18)
    assert level.take_share() == 0


@given(st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 10**9)), min_size=1))
def test_a_prompt_is_never_estimated_slower_than_it_was(prompts: list[tuple[int, int]]) -> None:
    idle = IdlePrefill()
    for num_tokens, prefill_ns in prompts:
        idle.hear(num_tokens, 0, prefill_ns)
        assert idle.ns(num_tokens) <= prefill_ns * (1 + 1e-9)


def test_the_estimate_for_a_long_prompt_comes_from_the_fastest_one() -> None:
    idle = IdlePrefill()
    idle.hear(1000, 0, 50_000)
    idle.hear(1000, 0, 80_000)  # beside others
    idle.hear(1000, 900, 20_000)  # behind a prefix that is cached
    assert idle.ns(1000) == pytest.approx(50_000)
    assert idle.ns(10) == 20_000  # no step is shorter
    assert idle.ns(2000) > 100_000
