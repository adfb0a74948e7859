"""Plans of faults: what is refused, and what happens to a die."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from xdeepserve.comm.steps import Steps
from xdeepserve.errors import DriverReport, InputError, IntegrityError, LinkError, LostDieError, PageLostError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy, Targets
from xdeepserve.hw.fault_kinds import OnPlane
from xdeepserve.hw.faults import Fault, check_faults, read_faults, schedule
from xdeepserve.hw.memory import PAGE_NBYTES, SCRIBBLE, Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.stream import Stream
from xdeepserve.hw.topology import Plane


def pod_of(num_dies: int) -> Pod:
    pod = Pod()
    for die in range(num_dies):
        pod.plan(die).app.alloc("data", 64)
    pod.materialise()
    return pod


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[fault]]\nat_us = 1\ndie = 0\nkind = 'gone'", "line 4: .*1: kind must be one of .*, found 'gone'"),
        ("[[fault]]\nat_us = 1\ndie = 'x'\nkind = 'lost'", "die must be a whole number, found 'x'"),
        ("[[fault]]\nat_us = 1\ndie = 0\nkind = 'lost'\nhow = 2", "line 5: .*unknown field how"),
        ("[[faults]]\nat_us = 1", "line 1: unknown field faults .did you mean fault.*; fault is missing"),
        ("[[fault]", "not valid TOML: expected"),
        (b"\xff", "not a text in UTF-8 .byte 0"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str | bytes, expected: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=f"^faults {path}[:,] .*{expected}"):
        read_faults(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(InputError, match=f"^faults {path}: No such file or directory$"):
        read_faults(path)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ([Fault(5, 7, "lost")], "fault 'die 7 lost at 5 us': the deployment has no die 7; it has 3: 0, 1, 2"),
        ([Fault(-1, 0, "lost")], "its time is not ahead; it is 0 us"),
        ([Fault(float("nan"), 0, "lost")], "its time is not ahead"),
        ([Fault(float("inf"), 0, "lost")], "its time is not ahead"),
        ([Fault(5, 0, "gone")], "kind of a die must be one of lost, stalled, slow, late, glitch"),  # type: ignore[arg-type]
        ([Fault(5, 0, "full")], "kind of a die must be one of lost, stalled, slow, late, glitch"),
        (
            [Fault(5, 0)],
            "fault 'die 0 None at 5 us': kind of a die must be one of lost, stalled, slow, late, glitch",
        ),
        ([Fault(5, kind="lost")], "'nowhere lost at 5 us': it happens at one of die, host, link,"),
        ([Fault(5, 0, "lost", host=0)], "'die 0 and host 0 lost at 5 us': it happens at one of die, host,"),
        ([Fault(5, host=1, kind="lost")], "the deployment has no host 1; it has 1: 0"),
        ([Fault(5, volume=0, kind="full")], "the deployment has no volume 0; it has none"),
        ([Fault(5, 0, "stalled")], "it needs for_us"),
        ([Fault(5, 0, "lost", 3)], "it has no for_us"),
        ([Fault(5, 0, "glitch")], "fault 'die 0 glitch at 5 us': it needs code"),
        ([Fault(5, 0, "lost", code="mte-error")], "it has no code"),
        (
            [Fault(5, 0, "glitch", code="mte-eror")],
            "fault 'die 0 glitch mte-eror at 5 us': unknown code (did you mean mte-error?): known are aicore",
        ),
        ([Fault(5, 0, "glitch", code="hbm-page")], "'die 0 glitch hbm-page at 5 us': unknown code"),
        ([Fault(5, 0, "bad-page")], "fault 'die 0 bad-page at 5 us': it needs page"),
        ([Fault(5, 0, "lost", page=3)], "it has no page"),
        ([Fault(5, link=(0, 1), kind="down", plane="ub", page=3)], "it has no page"),
        ([Fault(5, 0, "bad-page", page=1)], "'die 0 bad-page 1 at 5 us': die 0 uses 1 pages of its memory"),
        ([Fault(5, 0, "bad-page", page=-1)], "die 0 uses 1 pages of its memory, from 0 on"),
        (
            [Fault(5, 0, "bad-page", page="date")],
            "'die 0 bad-page date at 5 us': die 0 has no 'date' in its memory (did you mean data?)",
        ),
        ([Fault(5, 0, "bad-page", 3, page=0)], "it has no for_us"),
        ([Fault(5, 0, "stalled", 9), Fault(8, 0, "bad-page", page=0)], "contradict each other"),
        ([Fault(5, 0, "stalled", 0)], "for_us must be more than 0"),
        ([Fault(5, 0, "slow", 3)], "it needs factor"),
        ([Fault(5, 0, "slow", 3, factor=1)], "factor must be more than 1"),
        ([Fault(5, 0, "late", 3, by_us=float("nan"))], "by_us must be more than 0"),
        ([Fault(5, link=(0, 1), kind="down")], "'link (0, 1) down at 5 us': it needs plane"),
        ([Fault(5, link=(0, 1), kind="down", plane="hccs")], "plane must be one of ub, roce, vpc"),  # type: ignore[arg-type]
        ([Fault(5, link=(0, 1), kind="blocked", plane="ub")], "it needs for_us"),
        ([Fault(5, link=(0, 3), kind="down", plane="ub")], "the deployment has no die 3; it has 3: 0, 1"),
        ([Fault(5, link=(0, 1), kind="down", plane="vpc")], "the deployment has no host 1; it has 1: 0"),
        ([Fault(5, link=(2, 2), kind="down", plane="ub")], "a link has two ends; die 2 is one"),
        ([Fault(5, link=(0, 1), kind="lost", plane="ub")], "kind of a link must be one of down, blocked,"),
        ([Fault(5, 0, "lost", plane="ub")], "it has no plane"),
        ([Fault(None, 0, "lost")], "it happens at a time, at_us, or at a step of an operation"),
        ([Fault(5, 0, "lost", operation="A2E", step=5)], "it happens at a time, at_us, or at a step"),
        ([Fault(None, 0, "lost", operation="A2E")], "operation and step, and which event of them, say one"),
        ([Fault(5, 0, "lost", event=2)], "operation and step, and which event of them, say one"),
        ([Fault(None, 0, "lost", operation="A2E", step=5, event=0)], "lost at A2E 5, time 0': event must be"),
        (
            [
                Fault(5, link=(0, 1), kind="down", plane="ub"),
                Fault(6, link=(1, 0), kind="blocked", plane="ub", for_us=3),
            ],
            "contradict each other",
        ),
        (
            [Fault(9, 1, "stalled", 2), Fault(5, 1, "lost")],
            "faults 'die 1 lost at 5 us' and 'die 1 stalled at 9 us for 2 us' contradict each other",
        ),
        ([Fault(5, 1, "stalled", 9), Fault(8, 1, "lost")], "contradict each other"),
        ([Fault(5, host=0, kind="lost"), Fault(8, host=0, kind="lost")], "contradict each other"),
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


def test_a_lost_host_takes_its_dies_along() -> None:
    pod = pod_of(2)
    pod.plan(16).app.alloc("data", 64)
    pod.materialise()

    async def main() -> None:
        await pod.clock.spawn(pod.clock.sleep(20_000))

    plan = [Fault(5, 1, "lost"), Fault(10, host=0, kind="lost")]
    check_faults(plan, pod)
    schedule(plan, pod)
    asyncio.run(main())
    assert pod.lost == {*range(16)}  # nobody gets one of them any more
    assert pod.memories.silent == {0, 1}


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


NBYTES = 1 << 20


THERE = ("mte read", "dma read", "mte copy", "dma write", "mte store", "mte load", "scatter", "push")
HERE = ("load view", "store view", "kernel", "urma", "atomic add", "stream")


def times_ns(*plan: Fault, ways: Sequence[str] = THERE) -> dict[str, int]:
    """How long die 0 takes to read from dies 1 and 2, and to write there, with each engine and way."""
    found: dict[str, int] = {}
    for other in (1, 2):
        for how in ways:
            pod = Pod()
            for die in range(3):
                pod.plan(die).app.alloc("data", NBYTES)
            pod.materialise()
            schedule(plan, pod)
            found[f"{how} {other}"] = asyncio.run(_time_of(pod, how, other))
    return found


async def _time_of(pod: Pod, how: str, other: int) -> int:
    mte, dma, data = pod.dies[0].mte, pod.dies[0].dma, bytes(NBYTES)
    mine, theirs = Address(0, 0), Address(other, 0)
    ones = np.array([other]), np.array([0]), np.array([NBYTES])

    async def work() -> int:
        await pod.clock.sleep(10)
        match how:
            case "mte read":
                await mte.gather(*ones, 0)
            case "dma read":
                await dma.copy([Copy(theirs, mine, NBYTES)])
            case "mte copy":
                await mte.copy([Copy(mine, theirs, NBYTES)])
            case "dma write":
                await dma.copy([Copy(mine, theirs, NBYTES)])
            case "mte store":
                await mte.store([(theirs, data)])
            case "mte load":
                await mte.load([(theirs, NBYTES)])
            case "scatter":
                targets = Targets(pod.fabric, mte.place, *ones[:2], NBYTES)
                await mte.scatter(targets, np.zeros((1, NBYTES), np.uint8))
            case "push":
                await mte.push([(theirs, data)], load_nbytes=NBYTES, work_ns=0, num_steps=1)
            case "load view":
                await mte.load_view(NBYTES)
            case "store view":
                await mte.store_view(NBYTES, 1)
            case "kernel":
                await pod.dies[0].run(how, lambda: None, NBYTES)
            case "urma":
                await pod.dies[0].urma.pass_time(other, 0, NBYTES)
            case "atomic add":
                await mte.atomic_add([(theirs, 1)])
            case "stream":
                stream = Stream(mte, how)
                await stream.copy([Copy(mine, theirs, 64)], 1)
                await stream.drain()
        return pod.clock.now - 10

    return await pod.clock.spawn(work())


def test_a_stalled_die_begins_nothing_by_any_way() -> None:
    quiet, stalled = times_ns(ways=THERE + HERE), Fault(0.001, 0, "stalled", 500)
    assert times_ns(stalled, ways=THERE + HERE) == {way: took + 499_991 for way, took in quiet.items()}
    assert times_ns(Fault(0.001, 1, "stalled", 500), ways=THERE + HERE) == quiet


def test_a_link_is_blocked_or_slow_for_those_who_use_it_and_a_die_late_for_all() -> None:
    quiet = times_ns()
    blocked = times_ns(Fault(0.001, link=(1, 0), kind="blocked", for_us=500, plane="ub"))
    slow = times_ns(Fault(0.001, link=(0, 1), kind="slow", for_us=500, factor=3, plane="ub"))
    late = times_ns(Fault(0.001, 0, "late", 500, by_us=70))
    for way, took in quiet.items():
        if way.endswith("2"):
            assert blocked[way] == slow[way] == took
        else:
            assert 499_000 < blocked[way] - took < 500_000, way
            assert 1.2 * took < slow[way] <= 3 * took, way
        assert late[way] == took + 70_000, way
    others = (
        Fault(0.001, 1, "late", 500, by_us=70),
        Fault(0.001, link=(1, 2), kind="blocked", for_us=500, plane="ub"),
        Fault(0.002, link=(0, 1), kind="blocked", plane="roce", for_us=500),
        Fault(0.001, link=(0, 1), kind="down", for_us=0.005, plane="ub"),  # it is over by then
    )
    assert times_ns(*others) == quiet


def test_what_waits_behind_a_slow_link_keeps_no_port_from_others() -> None:
    """Die 2 pulls twice from die 0, by a slow link; meanwhile die 4 pulls from die 0, as from an idle one."""

    async def pull(pod: Pod, node: int) -> int:
        await pod.dies[node].dma.copy([Copy(Address(0, 0), Address(node, 0), 64)])
        return pod.clock.now

    async def ends(is_slow: bool) -> list[int]:
        pod = pod_of(5)
        if is_slow:
            schedule([Fault(0.0, link=(0, 2), kind="slow", for_us=1e9, factor=1e9, plane="ub")], pod)
            await pod.clock.spawn(pod.clock.sleep(1))
        begun_ns = pod.clock.now
        ends_ns = await pod.clock.spawn(pod.clock.gather(*[pull(pod, node) for node in (2, 2, 4)]))
        return [end_ns - begun_ns for end_ns in ends_ns]

    (idle, *_), (first, second, beside) = asyncio.run(ends(is_slow=False)), asyncio.run(ends(is_slow=True))
    assert second > first > 1000 * idle
    assert beside == idle


def test_a_link_that_is_down_is_told_of_at_once() -> None:
    with pytest.raises(LinkError, match=r"^node 0 cannot reach node 1: their link on the UB plane is down$"):
        times_ns(Fault(0.001, link=(1, 0), kind="down", plane="ub"))


def test_cards_know_the_links_of_their_plane() -> None:
    async def roce(pod: Pod) -> int:
        for name in ("first", "second"):
            await pod.cards(Plane.ROCE).move([Copy(Address(0, 0), Address(1, 0), 64)], name)
        return pod.clock.now

    def time_ns(*plan: Fault) -> int:
        pod = pod_of(2)
        schedule(plan, pod)

        async def main() -> int:
            return await pod.clock.spawn(roce(pod))

        return asyncio.run(main())

    quiet = time_ns()
    blocked = Fault(0.001, link=(0, 1), kind="blocked", plane="roce", for_us=500)
    assert 490_000 < time_ns(blocked) - quiet < 501_000
    with pytest.raises(LinkError, match="node 1 cannot reach node 0: their link on the ROCE plane is down"):
        time_ns(Fault(0.001, link=(0, 1), kind="down", plane="roce"))


@pytest.mark.parametrize("plane", ["ub", "roce"])
@pytest.mark.parametrize("is_checked", [False, True])
def test_a_bit_that_flips_on_its_way(plane: OnPlane, is_checked: bool) -> None:
    pod = pod_of(3)
    pod.fabric.checksums.is_on = is_checked
    places = [pod.memories.plans[die].app.regions["data"].address for die in range(3)]
    pod.memories.write(places[0], data := bytes(range(64)))

    async def bring(other: int) -> bytes:
        copies = [Copy(places[0], places[other], 64)]
        if plane == "ub":
            await pod.dies[other].dma.copy(copies)
        else:
            await pod.cards(Plane.ROCE).move(copies, "bytes")
        return bytes(pod.memories.read(places[other], 64))

    async def all_of_it() -> None:
        assert await bring(2) == data  # another link
        if is_checked:
            with pytest.raises(
                IntegrityError,
                match=r"^64 bytes from node 0 to node 1 are not those that were sent: checksum 0x100ece8c ",
            ):
                await bring(1)
            assert bytes(pod.memories.read(places[1], 64)) == bytes(64)  # nothing of it has been written
        else:
            assert await bring(1) == data[:32] + bytes([data[32] ^ 1]) + data[33:]
        assert await bring(1) == data  # once

    async def main() -> None:
        await pod.clock.spawn(all_of_it())

    schedule([Fault(0, link=(1, 0), kind="flipped", plane=plane)], pod)
    asyncio.run(main())


def test_checksums_take_the_time_of_their_bytes() -> None:
    def time_ns(is_on: bool, src: int) -> int:
        pod = Pod()
        for die in range(2):
            pod.plan(die).app.alloc("data", 2 * NBYTES)
        pod.materialise()
        pod.fabric.checksums.is_on = is_on

        async def main() -> None:
            copy = Copy(Address(src, 0), Address(0, NBYTES), NBYTES)
            await pod.clock.spawn(pod.dies[0].dma.copy([copy]))

        asyncio.run(main())
        return pod.clock.now

    assert time_ns(True, 1) - time_ns(False, 1) == math.ceil(Pod().spec.hbm_ns(NBYTES))
    assert time_ns(True, 0) == time_ns(False, 0)  # within a die


def test_a_fault_at_a_moment_of_an_operation() -> None:
    pod = pod_of(2)
    passed = []

    async def work() -> None:
        steps = [Steps(die) for die in pod.dies.values()]
        for number in range(1, 5):
            for each in steps:
                await each.passed("dispatch", 3)
                await each.passed("combine", 3)
            await pod.clock.sleep(1_000)
            passed.append((number, sorted(pod.lost), bool(pod.fabric.links)))

    async def main() -> None:
        await pod.clock.spawn(work())

    plan = [
        Fault(die=1, kind="lost", operation="dispatch", step=3, event=3),  # of its own
        Fault(link=(0, 1), kind="down", plane="ub", operation="dispatch", step=3, event=3),  # of anybody's
        Fault(die=0, kind="lost", operation="dispatch", step=4),  # never
    ]
    check_faults(plan, pod)
    schedule(plan, pod)
    asyncio.run(main())
    assert passed == [(1, [], False), (2, [], True), (3, [1], True), (4, [1], True)]


def test_a_slow_die() -> None:
    def end_ns(*plan: Fault) -> int:
        pod = pod_of(1)

        async def work() -> None:
            for _ in range(3):
                await pod.dies[0].run("kernel", lambda: None, 8_000)

        async def main() -> None:
            await pod.dies[0].spawn(work())

        schedule(plan, pod)
        asyncio.run(main())
        return pod.clock.now

    assert end_ns(Fault(5, 0, "slow", 10, factor=2)) == 32_000  # the second of three


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


def test_a_page_that_is_lost() -> None:
    """Scribbled over, and it can be used again; who listens is told which bytes, what the die is at ends, and
    who gathers from there gets the error until it has been put right."""
    pod = Pod()
    for die in range(2):
        pod.plan(die).app.alloc("data", 3 * PAGE_NBYTES - 64)
    pod.materialise()
    told: list[DriverReport] = []
    pod.fabric.on_report["me"] = told.append
    ends: list[str] = []

    async def work(die: Die) -> None:
        try:
            await die.clock.sleep(9000)
        except PageLostError as error:
            ends.append(str(error))

    async def scenario() -> None:
        memory = pod.memory(1)
        memory.write(0, bytes(range(256)))
        memory.write(PAGE_NBYTES, b"x" * PAGE_NBYTES)
        working = [pod.dies[die].spawn(work(pod.dies[die])) for die in range(2)]
        schedule([Fault(5, 1, "bad-page", page=1), Fault(6, 1, "bad-page", page=2)], pod)
        await asyncio.gather(*working)
        assert [(each.die, each.offset, each.nbytes) for each in told] == [
            (1, PAGE_NBYTES, PAGE_NBYTES),
            (1, 2 * PAGE_NBYTES, PAGE_NBYTES - 64),
        ]
        assert ends == [str(told[0])]
        assert bytes(memory.read(0, 256)) == bytes(range(256))
        assert set(memory.read(PAGE_NBYTES, 2 * PAGE_NBYTES - 64)) == {SCRIBBLE}
        nodes, sizes = np.array([1]), np.array([64])
        for offset, is_sound in (
            (PAGE_NBYTES - 64, True),
            (PAGE_NBYTES - 63, False),
            (2 * PAGE_NBYTES, False),
        ):
            gather = pod.dies[0].mte.gather(nodes, np.array([offset]), sizes, 0)
            result = (await asyncio.gather(pod.clock.spawn(gather), return_exceptions=True))[0]
            assert (result is None) == is_sound
            assert is_sound or isinstance(result, PageLostError)
        memory.write(PAGE_NBYTES, b"y")
        pod.memories.bad_pages.clear()
        await pod.clock.spawn(pod.dies[0].mte.gather(nodes, np.array([PAGE_NBYTES]), sizes, 0))
        assert bytes(pod.memory(0).read(0, 1)) == b"y"

    asyncio.run(scenario())
    assert pod.memories.plans[1].find_page("data") == 0
    found = [pod.memories.plans[1].find_page(page) for page in (0, 2, 3, -1, "none")]
    assert found == [0, 2 * PAGE_NBYTES, None, None, None]
