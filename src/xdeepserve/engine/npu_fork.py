"""NPU-fork: weights die to die from a TE that has them, as a chunked chain broadcast (DeepServe 6.2).

Of TEs that load at the same time, the first reads one that is ready, and each other reads the one before it:
a chunk, as soon as it has come there. Ports are full duplex: the k-th TE has all of it k - 1 chunks after the
first, and who serves gives its weights once, however many load.

What breaks a link of the chain (its source is lost, or gives up) breaks those behind it, too; each looks for
a source anew and begins again, since what has come may be what a broken memory had.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from xdeepserve.errors import HardwareError
from xdeepserve.hw.clock import Process, Waiter, Waiting
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec

CHUNK_NBYTES = 64 << 20  # long against a startup, short against a die


class BrokenForkError(HardwareError):
    """Who gave the weights gives no more."""


class Fork:
    """How far a TE that loads has come, and who waits for that.

    before  the fork that it reads; None: a TE that is ready
    after   the one that reads it
    came    chunks by die, in the order of the TE's dies
    """

    def __init__(self, name: str, pod: Pod, num_dies: int, before: Fork | None = None) -> None:
        self.name, self.before, self._pod = name, before, pod
        self.after: Fork | None = None
        self.came, self.is_broken = [0] * num_dies, False
        self._waiting: list[Waiter] = []
        self._processes: list[Process] = []
        if before is not None:
            before.after = self

    async def copy(self, pieces: Mapping[int, Sequence[Copy]], on_bytes: Callable[[int], None]) -> None:
        """Bring each die its pieces, by its own DMA. BrokenForkError if the source gives up."""
        dies = enumerate(pieces.items())
        await self._pod.clock.gather(*(self.copy_to(i, die, each, on_bytes) for i, (die, each) in dies))

    async def copy_to(
        self, index: int, die: int, pieces: Sequence[Copy], on_bytes: Callable[[int], None]
    ) -> None:
        """Bring one die its pieces, chunk by chunk, as the source has them."""
        with self._may_break():
            for number, chunk in enumerate(chunks(pieces)):
                await self._has_come(index, number)
                await self._pod.dies[die].dma.copy(chunk, name="weights")
                self._check_source()  # who was about to run when it broke was not interrupted
                self.tell(index)
                on_bytes(sum(piece.nbytes for piece in chunk))

    async def pass_time(self, nbytes: int) -> None:
        """The same where no byte moves: what it takes the die with most, whose last chunk comes when the
        source has it."""
        whole_ns, last_ns = (copy_ns(self._pod.spec, n) for n in (nbytes, min(nbytes, CHUNK_NBYTES)))
        with self._may_break():
            end = self._pod.clock.now + whole_ns
            if self.before is not None:
                await self._has_come(0, 0)
                end = max(end, self._pod.clock.now + last_ns)
            await self._pod.clock.sleep_until(end)
            self.tell(0)

    @property
    def hops(self) -> int:
        """From a TE that is ready."""
        return 1 if self.before is None else self.before.hops + 1

    @property
    def can_be_read(self) -> bool:
        """Whether it is at it, or was to the end, and nobody reads it."""
        return bool(self.came) and not self.is_broken and self.after is None

    def break_off(self) -> None:
        """Whoever reads this one has to look elsewhere, and who was read may be read by another."""
        self.is_broken = True
        if self.before is not None and self.before.after is self:
            self.before.after = None
        for process in self.after._processes if self.after is not None else ():
            process.interrupt(self._broken())

    @contextmanager
    def _may_break(self) -> Iterator[None]:
        """The process that runs is interrupted if the source breaks off while it waits in here, and whatever
        a broken source does to it is that it is broken."""
        process = asyncio.current_task()
        assert isinstance(process, Process)
        self._processes.append(process)
        try:
            yield
        except HardwareError:
            self._check_source()
            raise
        finally:
            self._processes.remove(process)

    def tell(self, index: int) -> None:
        """Wake the fork that reads from this one: a die has one chunk more."""
        self.came[index] += 1
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.wake()

    async def _has_come(self, index: int, number: int) -> None:
        """Wait until the source has a chunk of a die."""
        before = self.before
        if before is None:
            return
        self._check_source()
        while before.came[index] <= number:
            waiter = self._pod.clock.waiter(
                lambda: Waiting("fork", self.name, before.name, "chunks", number + 1, before.came[index])
            )
            before._waiting.append(waiter)
            await self._pod.clock.wait(waiter)
            self._check_source()

    def _check_source(self) -> None:
        if self.before is not None and self.before.is_broken:
            raise self.before._broken()

    def _broken(self) -> BrokenForkError:
        return BrokenForkError(f"{self.name} does not get its weights, and so cannot give them")


def copy_ns(spec: Spec, nbytes: int) -> int:
    """What it takes a die's DMA to bring bytes over UB: one side of it carries them."""
    return spec.startup_ns("dma") + math.ceil(spec.link_ns(0, nbytes, 0))


def chunks(pieces: Sequence[Copy]) -> Iterator[list[Copy]]:
    """The pieces, in order, in runs of CHUNK_NBYTES, of which the last may be shorter."""
    chunk, room = [], CHUNK_NBYTES
    for src, dst, nbytes in pieces:
        done = 0
        while done < nbytes:
            part = min(room, nbytes - done)
            chunk.append(Copy(src.plus(done), dst.plus(done), part))
            done, room = done + part, room - part
            if not room:
                yield chunk
                chunk, room = [], CHUNK_NBYTES
    if chunk:
        yield chunk
