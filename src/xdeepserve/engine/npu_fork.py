"""NPU-fork: weights go die to die from a ready TE, as a chunked chain broadcast (DeepServe 6.2).

Of TEs that load at the same time, the first reads from a ready TE. Each other TE reads from the one before
it: each chunk as soon as it has arrived there. Ports are full duplex, so the k-th TE has everything k - 1
chunks after the first. A source gives its weights once, however many TEs load.

If a link of the chain breaks, because its source is lost or gives up, all links behind it break, too. Each TE
then looks for a new source and begins again, since the bytes so far may come from a broken memory.
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
    """Raised when the source of weights is lost or gives up."""


class Fork:
    """Progress of a TE loading from a peer, and the loads that wait for it.

    before  the fork that this one reads from; None: it reads from a ready TE
    after   the fork that reads from this one
    came    number of chunks by die, in the order of the TE's dies
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
        """Copy the weights of each die, by its own DMA; BrokenForkError if the source gives up."""
        dies = enumerate(pieces.items())
        await self._pod.clock.gather(*(self.copy_to(i, die, each, on_bytes) for i, (die, each) in dies))

    async def copy_to(
        self, index: int, die: int, pieces: Sequence[Copy], on_bytes: Callable[[int], None]
    ) -> None:
        """Copy the weights of a single die, chunk by chunk, as the source receives them."""
        with self._may_break():
            for number, chunk in enumerate(chunks(pieces)):
                await self._has_come(index, number)
                await self._pod.dies[die].dma.copy(chunk, name="weights")
                self._check_source()  # who was about to run when it broke was not interrupted
                self.tell(index)
                on_bytes(sum(piece.nbytes for piece in chunk))

    async def pass_time(self, nbytes: int) -> None:
        """Pass the virtual time of the fork where no bytes move.

        It is the time of the die with most bytes; its last chunk comes when the source has it.
        """
        whole_ns, last_ns = copy_ns(self._pod.spec, nbytes), hop_ns(self._pod.spec, nbytes)
        with self._may_break():
            end = self._pod.clock.now + whole_ns
            if self.before is not None:
                await self._has_come(0, 0)
                end = max(end, self._pod.clock.now + last_ns)
            await self._pod.clock.sleep_until(end)
            self.tell(0)

    @property
    def hops(self) -> int:
        """Number of links in the chain from a ready TE to this one."""
        return 1 if self.before is None else self.before.hops + 1

    @property
    def can_be_read(self) -> bool:
        """Whether another TE may read from this fork: it has begun, is not broken, and has no reader."""
        return bool(self.came) and not self.is_broken and self.after is None

    def break_off(self) -> None:
        """Break the fork and free the source: the reader of this fork has to look for another source."""
        self.is_broken = True
        if self.before is not None and self.before.after is self:
            self.before.after = None
        for process in self.after._processes if self.after is not None else ():
            process.interrupt(self._broken())

    @contextmanager
    def _may_break(self) -> Iterator[None]:
        """Context for interrupting the current process if the source breaks off.

        Hardware errors of a broken source are raised as BrokenForkError.
        """
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
        """Count a chunk for a die, and wake the fork that reads from this one."""
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
    """Return the time in ns for a die's DMA to copy bytes over UB, with one engine of the two sides."""
    return spec.startup_ns("dma") + math.ceil(spec.link_ns(0, nbytes, 0))


def hop_ns(spec: Spec, nbytes: int) -> int:
    """Return the time in ns by which each further TE of a chain has its weights later: that of a chunk."""
    return copy_ns(spec, min(nbytes, CHUNK_NBYTES))


def chunks(pieces: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Split pieces into runs of CHUNK_NBYTES, in order; the last run may be shorter."""
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
