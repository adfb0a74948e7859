"""NPU-fork: several TEs load at once, each from the one before it; what breaks in the chain mends itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.engine.histories import SMALL
from xdeepserve.engine import npu_fork
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.loading import load_ns, most_nbytes
from xdeepserve.engine.npu_fork import BrokenForkError, Fork, chunks
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.engine.weight_digests import digests
from xdeepserve.errors import LostDieError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec
from xdeepserve.llm import build_engine
from xdeepserve.loop import run
from xdeepserve.model.presets import TinyCheckpoint

TWO_DIES = [*SMALL, "dies=2"]
CHUNKS = 16  # of a die, about


@pytest.fixture
def engine(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A TE of two dies whose weights are CHUNKS chunks."""
    engine = build_engine(tiny, "colocated", "int8", overrides=TWO_DIES)
    monkeypatch.setattr(npu_fork, "CHUNK_NBYTES", most_nbytes(engine.plan.tes[0]) // CHUNKS)
    return engine


async def _joins(engine: Engine, count: int) -> list[asyncio.Task[str]]:
    """So many TEs begin to load at one instant."""
    clock = engine.plan.pod.clock
    joining = [clock.spawn(engine.add_te(source="peer"), name=f"add {i}") for i in range(count)]
    while len(engine.plan.loadings) < count:
        await clock.sleep(1)
    return joining


def test_many_load_in_little_more_time_than_one(engine: Engine) -> None:
    """Four at once: each a chunk after the one before it, and the bytes of the first TE."""
    clock = engine.plan.pod.clock

    async def main() -> tuple[int, list[int]]:
        await engine.start()
        start = clock.now
        await engine.add_te(source="peer")
        alone = clock.now - start

        async def join_four() -> list[int]:
            start, ends = clock.now, []
            for task in await _joins(engine, 4):
                await clock.join(task)
                ends.append(clock.now - start)
            return ends

        ends = await clock.spawn(join_four(), name="four")
        found = [[digests(mem) for _, mem in te.all_memories] for te in engine.plan.tes]
        assert len(found) == 6
        assert all(each == found[0] for each in found)
        assert [te.num_readers for te in engine.plan.tes] == [0] * 6
        engine.check_integrity()
        await engine.stop()
        return alone, ends

    alone, ends = run(main())
    assert ends == sorted(ends)
    # Two TEs were ready, so there were two chains of two.
    assert ends[3] < alone * (1 + 2.5 / CHUNKS)


def test_a_chain_is_as_long_as_there_are_who_load(engine: Engine) -> None:
    async def main() -> list[str | None]:
        await engine.start()

        async def look() -> list[str | None]:
            joining = await _joins(engine, 3)
            await engine.plan.pod.clock.sleep(1)
            forks = [loading.fork for loading in engine.plan.loadings.values()]
            read = [fork.before and fork.before.name for fork in forks]
            for task in joining:
                await engine.plan.pod.clock.join(task)
            return read

        read = await engine.plan.pod.clock.spawn(look(), name="look")
        await engine.stop()
        return read

    assert run(main()) == [None, "te 1", "te 2"]


def test_who_read_nobody_to_the_end_leaves_its_place_to_who_comes(engine: Engine) -> None:
    """The third goes away, and the fourth reads the second: the first TE gives its weights once."""
    clock = engine.plan.pod.clock

    async def change() -> list[str | None]:
        joining = await _joins(engine, 4)
        await clock.sleep(load_ns(engine.plan.tes[0], "peer") // 2)
        joining[2].cancel()
        await clock.sleep(1)
        forks = [loading.fork for loading in engine.plan.loadings.values()]
        read = [fork.before and fork.before.name for fork in forks]
        assert engine.plan.tes[0].num_readers == 1
        for task in (*joining[:2], joining[3]):
            await clock.join(task)
        return read

    async def main() -> list[str | None]:
        await engine.start()
        read = await clock.spawn(change(), name="change")
        engine.check_integrity()
        await engine.stop()
        return read

    assert run(main()) == [None, "te 1", "te 2"]


@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_who_is_in_the_middle_goes_away_at_each_tenth(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Those behind it find another source; nothing is left behind, and all have the same bytes."""

    async def change(engine: Engine, tenth: int) -> list[str]:
        clock, pod = engine.plan.pod.clock, engine.plan.pod
        lasts = load_ns(engine.plan.tes[0], "peer")
        joining = await _joins(engine, 4)
        second = list(engine.plan.loadings.values())[1]
        await clock.sleep(lasts * tenth // 10)
        if how == "lost":
            pod.break_die(second.te.dies[1])
            with pytest.raises(LostDieError, match="of te 2 is lost"):
                await clock.join(joining[1])
        else:
            joining[1].cancel()
        return [await clock.join(each) for each in (joining[0], *joining[2:])]

    async def main(engine: Engine, tenth: int) -> None:
        await engine.start()
        names = await engine.plan.pod.clock.spawn(change(engine, tenth), name="change")
        assert names == ["te 1", "te 3", "te 4"]
        found = [[digests(mem) for _, mem in te.all_memories] for te in engine.plan.tes]
        assert found == [found[0]] * 4
        assert [te.num_readers for te in engine.plan.tes] == [0] * 4
        engine.check_integrity()
        await engine.stop()

    for tenth in range(10):
        engine = build_engine(tiny, "colocated", "int8", overrides=TWO_DIES)
        monkeypatch.setattr(npu_fork, "CHUNK_NBYTES", most_nbytes(engine.plan.tes[0]) // CHUNKS)
        run(main(engine, tenth))


def test_a_chain_takes_time_without_bytes(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three has all of it two chunks after the first."""

    def took(timing: TimingConfig | None) -> list[int]:
        engine = Engine(PodPlan(tiny, resolve("colocated", TWO_DIES), timing=timing))
        engine.load()
        monkeypatch.setattr(npu_fork, "CHUNK_NBYTES", 1 << 18)
        clock = engine.plan.pod.clock

        async def main() -> list[int]:
            await engine.start()

            async def three() -> list[int]:
                ends, start = [], clock.now
                for task in await _joins(engine, 3):
                    await clock.join(task)
                    ends.append(clock.now - start)
                return ends

            ends = await clock.spawn(three(), name="three")
            await engine.stop()
            return ends

        return run(main())

    real, priced = took(None), took(TimingConfig())
    spec = Spec()
    chunk = math.ceil(spec.startup_ns("dma") + spec.link_ns(0, 1 << 18, 0))
    assert [end - priced[0] for end in priced] == [0, chunk, 2 * chunk]
    assert real[2] - real[0] > 2 * chunk  # and what many small arrays of a chunk take


@pytest.mark.parametrize("when", ["waits", "copies"])
def test_who_is_about_to_run_when_its_source_breaks_hears_of_it(when: str) -> None:
    """It is not interrupted, since it does not wait: it looks at its source before and after a chunk."""
    pod = Pod()
    areas = [pod.plan(die).app.alloc("bytes", 4096) for die in range(2)]
    pod.materialise()
    source = Fork("te 1", pod, 1)
    source.came = [int(when == "copies")]
    reader = Fork("te 2", pod, 1, source)
    pieces = {1: [Copy(areas[0].address, areas[1].address, 4096)]}

    async def breaks() -> None:
        copying = pod.clock.spawn(reader.copy(pieces, lambda nbytes: None), name="reads")
        await pod.clock.sleep(1)
        source.after = None  # nobody is interrupted
        source.break_off()
        source.tell(0)
        await pod.clock.join(copying)

    with pytest.raises(BrokenForkError, match="te 1 does not get its weights"):
        run(_spawned(pod, breaks()))
    assert reader.came == [0]


async def _spawned(pod: Pod, work: Coroutine[Any, Any, None]) -> None:
    await pod.clock.spawn(work, name="test")


def test_chunks_keep_order_and_cut_what_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_fork, "CHUNK_NBYTES", 10)
    pieces = [Copy(Address(0, 0), Address(1, 100), 7), Copy(Address(0, 50), Address(1, 200), 16)]
    assert [[(src.offset, dst.offset, n) for src, dst, n in chunk] for chunk in chunks(pieces)] == [
        [(0, 100, 7), (50, 200, 3)],
        [(53, 203, 10)],
        [(63, 213, 3)],
    ]
