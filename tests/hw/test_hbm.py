"""HBM that kernels side by side share."""

import asyncio

import pytest

from xdeepserve.hw.clock import Clock
from xdeepserve.hw.hbm import SharedHBM, fair_speeds, side_by_side


def ends(kernels: list[tuple[int, int, float]]) -> list[int]:
    """When kernels end that begin at, take by themselves, and read for so many ns."""
    clock = Clock()
    hbm = SharedHBM(clock)

    async def kernel(start: int, alone: int, reads: float) -> int:
        await clock.sleep(start)
        await hbm.end(hbm.begin(alone, reads))
        return clock.now

    async def main() -> list[int]:
        return list(await asyncio.gather(*[clock.spawn(kernel(*each)) for each in kernels]))

    return asyncio.run(main())


def test_one_after_another_take_what_they_take_alone() -> None:
    assert ends([(0, 100, 100.0), (100, 50, 50.0), (150, 33, 0.0)]) == [100, 150, 183]


def test_those_that_draw_less_than_there_is_do_not_disturb_each_other() -> None:
    assert ends([(0, 100, 40.0), (10, 100, 60.0)]) == [100, 110]


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([(0, 100, 100.0), (0, 100, 100.0)], [200, 200]),  # half each
        # The second is slowed while the first is there, and the first until the second has ended.
        ([(0, 100, 100.0), (50, 25, 25.0)], [125, 100]),
        # One that asks for a quarter has it all; the other one has the rest.
        ([(0, 100, 25.0), (0, 150, 150.0)], [100, 175]),
        ([(0, 0, 0.0), (0, 10, 20.0)], [0, 10]),  # no kernel draws more than all
    ],
)
def test_max_min_fair(kernels: list[tuple[int, int, float]], expected: list[int]) -> None:
    assert ends(kernels) == expected


def test_what_all_draw_together_is_never_more_than_all() -> None:
    """And nobody who is slowed could have more."""
    shares = [0.1, 0.9, 0.35, 0.0, 1.0]
    speeds = fair_speeds(shares)
    drawn = [share * speed for share, speed in zip(shares, speeds, strict=True)]
    assert sum(drawn) == pytest.approx(1)
    assert speeds[0] == speeds[3] == 1
    slowed = {round(each, 9) for each, speed in zip(drawn, speeds, strict=True) if speed < 1}
    assert len(slowed) == 1
    assert max(drawn) == pytest.approx(slowed.pop())


def test_streams_of_kernels_take_what_processes_of_them_do() -> None:
    """The closed form against the clock, which rounds up."""
    streams = [[(100, 60.0), (0, 0.0), (40, 40.0)], [(50, 0.0), (70, 70.0), (30, 10.0)]]
    clock = Clock()
    hbm = SharedHBM(clock)

    async def stream(kernels: list[tuple[int, float]]) -> int:
        for kernel in kernels:
            await hbm.end(hbm.begin(*kernel))
        return clock.now

    async def main() -> list[int]:
        return list(await asyncio.gather(*[clock.spawn(stream(each)) for each in streams]))

    formula = side_by_side(streams)
    assert asyncio.run(main()) == pytest.approx(formula, abs=3)
    assert max(formula) > 150  # each alone takes 140 and 150
