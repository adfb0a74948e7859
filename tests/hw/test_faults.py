"""Plans of faults: what is refused, and what happens to a die."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from xdeepserve.errors import InputError, LostDieError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.faults import Fault, check_faults, read_faults, schedule
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod


def pod_of(num_dies: int) -> Pod:
    pod = Pod()
    for die in range(num_dies):
        pod.plan(die).app.alloc("data", 64)
    pod.materialise()
    return pod


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[fault]]\nat_us = 1\ndie = 0\nkind = 'gone'", "Invalid enum value 'gone'"),
        ("[[fault]]\nat_us = 1\ndie = 'x'\nkind = 'lost'", "Expected `int`, got `str`"),
        ("[[fault]]\nat_us = 1\ndie = 0\nkind = 'lost'\nhow = 2", "unknown field `how`"),
        ("[[faults]]\nat_us = 1", "unknown field `faults`"),
        ("[[fault]", "Expected"),
        (b"\xff", "'utf-8' codec"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str | bytes, expected: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=f"^faults {path}: .*{expected}"):
        read_faults(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_faults(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ([Fault(5, 7, "lost")], "fault 'die 7 lost at 5 us': the deployment has no die 7; it has 3: 0, 1, 2"),
        ([Fault(-1, 0, "lost")], "its time is not ahead; it is 0 us"),
        ([Fault(float("nan"), 0, "lost")], "its time is not ahead"),
        ([Fault(float("inf"), 0, "lost")], "its time is not ahead"),
        ([Fault(5, 0, "slow")], "kind must be one of lost, stalled, glitch"),  # type: ignore[arg-type]
        ([Fault(5, 0, "stalled")], "a stall, and nothing else, lasts for_us"),
        ([Fault(5, 0, "lost", 3)], "a stall, and nothing else, lasts for_us"),
        ([Fault(5, 0, "glitch")], "fault 'die 0 glitch at 5 us': a glitch, and nothing else, has a code"),
        ([Fault(5, 0, "lost", code="mte-error")], "a glitch, and nothing else, has a code"),
        (
            [Fault(5, 0, "glitch", code="mte-eror")],
            "fault 'die 0 glitch mte-eror at 5 us': unknown code (did you mean mte-error?): known are aicore",
        ),
        ([Fault(5, 0, "stalled", 0)], "for_us must be more than 0"),
        (
            [Fault(9, 1, "stalled", 2), Fault(5, 1, "lost")],
            "faults 'die 1 lost at 5 us' and 'die 1 stalled at 9 us for 2 us' contradict each other",
        ),
        ([Fault(5, 1, "stalled", 9), Fault(8, 1, "lost")], "contradict each other"),
    ],
    ids=str,
)
def test_what_cannot_happen_is_refused_in_one_line(plan: Sequence[Fault], expected: str) -> None:
    with pytest.raises(InputError) as refusal:
        check_faults(plan, pod_of(3))
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_plan_from_a_file_that_can_happen(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        "[[fault]]\nat_us = 5\ndie = 0\nkind = 'lost'\n"
        "[[fault]]\nat_us = 2.5\ndie = 1\nkind = 'stalled'\nfor_us = 2\n"
    )
    plan = read_faults(path)
    assert plan == (Fault(5, 0, "lost"), Fault(2.5, 1, "stalled", 2))
    check_faults(plan, pod_of(2))


def test_a_lost_die_ends_in_the_middle_and_answers_nobody() -> None:
    pod, done = pod_of(2), []
    places = [pod.memories.plans[die].app.regions["data"].offset for die in range(2)]

    async def work() -> None:
        done.append("begun")
        await pod.dies[0].compute("kernel", lambda: None, flops=1e12)
        done.append("ended")

    async def reader() -> None:
        await pod.clock.sleep_until(20_000)
        with pytest.raises(LostDieError, match=r"^die 0 is lost: its memory does not answer$"):
            await pod.dies[1].mte.load([(Address(0, places[0]), 8)])
        await pod.dies[1].mte.store([(Address(0, places[0]), b"x")])  # nobody answers: no error

    async def main() -> None:
        pod.hold([0, 1], "test")
        pod.dies[0].spawn(work())
        await pod.dies[1].spawn(reader())
        assert not pod.dies[0].running

    schedule([Fault(10, 0, "lost")], pod)
    asyncio.run(main())
    assert done == ["begun"]
    assert pod.lost == {0}


def test_a_stalled_die_begins_nothing_meanwhile() -> None:
    def ends(plan: Sequence[Fault]) -> list[int]:
        pod, found = pod_of(1), []

        async def work() -> None:
            for _ in range(3):
                await pod.dies[0].run("kernel", lambda: None, 8_000)
                found.append(pod.clock.now)

        async def main() -> None:
            await pod.dies[0].spawn(work())

        schedule(plan, pod)
        asyncio.run(main())
        return found

    assert ends([]) == [8_000, 16_000, 24_000]
    assert ends([Fault(10, 0, "stalled", 9)]) == [8_000, 16_000, 27_000]
    assert ends([Fault(10, 0, "stalled", 5)]) == [8_000, 16_000, 24_000]


def test_time_does_not_go_on_for_the_sake_of_a_plan() -> None:
    clock, begun = Clock(), []

    async def act() -> None:
        begun.append(clock.now)

    async def main() -> None:
        clock.at(50, act)
        clock.at(10**12, act)
        assert clock.rests
        await clock.spawn(clock.sleep(40))
        assert (clock.now, begun, clock.rests) == (40, [], True)
        await clock.spawn(clock.sleep(40))
        assert (clock.now, begun, clock.rests) == (80, [50], True)

    asyncio.run(main())
