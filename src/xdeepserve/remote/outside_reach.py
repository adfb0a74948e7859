"""How a client die of a pod reaches servers outside of it: by real bytes, in this computer's time.

While a client waits, the pod's time stands still: the pod cannot know how long a server takes. An answer
arrives at the virtual instant at which it was asked for, whatever the computer did meanwhile. Events in the
pod therefore have the same order every time, and no deadline of the pod passes because a process was slow.
Only the deadline of the wait itself passes, and it is measured by this computer's clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from xdeepserve.errors import DeadlineError, LostDieError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address
from xdeepserve.hw.traffic import Integers
from xdeepserve.remote.server_link import ServerLink

READ_S = 5.0  # without an answer to a read, after which a connection is given up
LOOK_S = 0.05  # for one look at what nobody waits for
NAPS_S = (0.0, 0.00002, 0.00005, 0.0001, 0.0002)  # between looks; the last one again and again
LOOKS = 40  # of each length
IDLE_S = 0.001  # after these


async def nap(num_looks: int) -> None:
    """Sleep after `num_looks` polls without news, ever longer, to leave the cores to processes that
    compute."""
    which = num_looks // LOOKS
    if which < len(NAPS_S):
        _doze(NAPS_S[which])
    await asyncio.sleep(0 if which < len(NAPS_S) else IDLE_S)


def _doze(seconds: float) -> None:
    """Block the event loop for a nap; asyncio cannot sleep for such short times."""
    if seconds:
        time.sleep(seconds)


class OutsideReach:
    """Access of a client die to servers outside of its pod.

    `links`, by node, is shared by all clients of the process, and links come and go.
    """

    follows_others = True

    def __init__(self, die: Die, links: dict[int, ServerLink]) -> None:
        self.die, self._links = die, links

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns()

    def place(self, node: int, area: str, region: str, offset: int) -> Address:
        if node not in self._links:
            raise LostDieError(f"die {node} is outside of the pod, and there is no link to it")
        return Address(node, self._links[node].windows[region].offset + offset)

    def state(self, address: Address) -> int | None:
        return self._links[address.node].seen(address.offset)

    def is_silent(self, node: int) -> bool:
        return node not in self._links or self._links[node].broken is not None

    def generation(self, epoch: int) -> int:
        return epoch

    async def write(self, pieces: Sequence[Copy], name: str) -> None:
        for (_, source), (node, offset), nbytes in pieces:
            self._links[node].write(offset, bytes(self.die.memory.read(source, nbytes)))

    async def gather(self, nodes: Integers, offsets: Integers, sizes: Integers, at: int, name: str) -> None:
        pieces = zip(nodes.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        asked = [(node, self._link(node).read(offset, nbytes)) for node, offset, nbytes in pieces]
        _, late = await asyncio.wait([future for _, future in asked], timeout=READ_S)
        for node, future in asked:
            if future in late:
                self._links[node].close(f"no answer to a read ({name}) within {READ_S:g} s")
        self.die.memory.write(at, b"".join([future.result() for _, future in asked]))

    def _link(self, node: int) -> ServerLink:
        if self.is_silent(node):
            why = self._links[node].broken if node in self._links else "there is no link to it"
            raise LostDieError(f"die {node}, outside of the pod, does not answer: {why}")
        return self._links[node]

    async def comes_back(self, address: Address) -> bool:
        if self.is_silent(address.node):
            return False
        link = self._links[address.node]
        look = link.look(address.offset)
        if look is not None and not link.is_late:
            # A slow server is late, and not gone. One wait is enough: every exchange of every client looks.
            link.is_late = bool((await asyncio.wait([look], timeout=LOOK_S))[1])
        return link.broken is None

    async def poll(
        self,
        places: Sequence[tuple[Address, int]],
        observe: Callable[[], bool],
        deadline_ns: int,
        describe: Callable[[], Waiting],
    ) -> None:
        spec, num_looks, begin = self.die.spec, 0, time.monotonic()
        # Whoever is as far as this one writes first, so that servers have the requests of all of them.
        await self.die.clock.sleep(spec.startup_ns("urma") + spec.far_latency_ns())
        far = [(address.node, address.offset) for address, _ in places if address.node != self.die.index]
        while True:
            looks = [look for node, at in far if (look := self._links[node].look(at)) is not None]
            if looks:
                await asyncio.wait(looks, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            if observe():
                return
            if time.monotonic_ns() >= deadline_ns:
                waited_s, wait = time.monotonic() - begin, describe()._asdict()
                raise DeadlineError(real_s=waited_s, at_ns=self.die.clock.now, **wait)
            await nap(num_looks)
            num_looks += 1
