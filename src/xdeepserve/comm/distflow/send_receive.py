"""Backend of DistFlow on XCCL's send and receive (xDeepServe 3.1; 5.1, steps 6 and 7).

Where the DMA backend has the destination pull, here two kernels work together: one on the source's die that
gathers KV blocks and fills a ring of the destination, one there that empties it into KV blocks. Fields say
how far each has come. With zero copy the first kernel only tells where the blocks lie, and ends; the other
takes them from there, and the source's host looks for the acknowledgement later.

All pieces between two dies go as one message; messages of a transfer between different dies (the ranks of a
TP group) go side by side, and the transfer is over with the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from xdeepserve.comm.distflow.backends import path_ns
from xdeepserve.comm.distflow.channels import RECEIVER, SENDER, Channel, Channels
from xdeepserve.comm.p2p.layout import MAX_MESSAGE
from xdeepserve.errors import GlitchError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.topology import Plane

Kernel: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
CORES = 8  # AIV cores of a kernel: with so many a message fills a die's UB port (XDS Figure 5)


class SendReceiveBackend:
    """Sends messages through `channels`; each wait in them lasts at most `timeout_ns` of virtual time."""

    name = "send-receive"

    def __init__(self, channels: Channels, timeout_ns: int) -> None:
        self.channels, self.timeout_ns, self._pod = channels, timeout_ns, channels.pod

    def check_path(self, src: int, dst: int) -> None:
        """Check for a path on the UB plane, because both kernels need each other's memory."""
        self._pod.topology.check_path(src, dst, Plane.UB)

    async def move(self, copies: Sequence[Copy], name: str) -> None:
        routes: dict[tuple[int, int], list[Copy]] = {}
        for copy in copies:
            routes.setdefault((copy.src.node, copy.dst.node), []).append(copy)
        await self._pod.clock.gather(*[self._send_all(batch) for batch in routes.values()])

    def idle_ns(self, src: int, dst: int, nbytes: int) -> int:
        """Return the time (ns) of a message of one piece: a kernel starts, and posts a field that the other
        finds."""
        spec = self._pod.spec_of(dst)
        start_ns = spec.startup_ns("mte") + spec.pieces_ns(1, 1) + spec.poll_ns()
        return start_ns + path_ns(self._pod, src, dst, self.channels.layout.weight * nbytes)

    async def _send_all(self, copies: Sequence[Copy]) -> None:
        """Send all copies between two dies, message by message."""
        weight = self.channels.layout.weight
        for message in _messages(copies, int(MAX_MESSAGE / weight)):
            src, dst = message[0].src.node, message[0].dst.node
            # Longer than a wait for a field: the message that hangs fails first, and the next one can go.
            channel = await self.channels.take(src, dst, self.timeout_ns * 3 // 2)
            try:
                while not await self._is_sent(channel, message):
                    pass  # a kernel of the two has failed, and what it had in the ring may be lost
            finally:
                self.channels.give_back(channel)

    async def _is_sent(self, channel: Channel, copies: Sequence[Copy]) -> bool:
        """Send a message. Returns False if one of the dies has ended its kernel with an error code."""
        try:
            await self._send(channel, copies)
        except GlitchError:
            return False
        return True

    async def _send(self, channel: Channel, copies: Sequence[Copy]) -> None:
        """Run the two kernels. If one fails, the other is stopped, and the channel is as if never used."""
        clock, dies = self._pod.clock, self._pod.dies
        failures: list[Exception] = []
        kernels: list[asyncio.Task[None]] = []

        async def run(kernel: Kernel) -> None:
            try:
                await kernel()
            except Exception as error:
                failures.append(error)
                stop(kernels)

        is_over = False
        try:
            sender, receiver, event_id = self.channels.open(channel, self.timeout_ns)
            gathered = [(copy.src.offset, copy.nbytes) for copy in copies]
            scattered = [(copy.dst.offset, copy.nbytes) for copy in copies]

            async def offer() -> None:
                sending = await sender.offer_pieces(gathered, RECEIVER, event_id, cores=CORES)
                await clock.until_ended(kernels[1])
                if not failures and not await sending.look():
                    await sending.run(sending.wait_for_ack)

            send: Kernel = partial(sender.send_pieces, gathered, RECEIVER, event_id, cores=CORES)
            receive: Kernel = partial(receiver.receive_pieces, scattered, SENDER, event_id, cores=CORES)
            if not self.channels.layout.has_rings:
                send = offer
                receive = partial(receiver.take_pieces, scattered, gathered, SENDER, event_id, cores=CORES)
            kernels.append(dies[channel.src].spawn(run(send), "send"))
            kernels.append(dies[channel.dst].spawn(run(receive), "receive"))
            for kernel in kernels:
                await clock.until_ended(kernel)
            is_over = not failures
            if failures:
                raise failures[0]
        finally:
            if not is_over:
                stop(kernels)
                self.channels.clean(channel)


def stop(kernels: Sequence[asyncio.Task[None]]) -> None:
    """Cancel all kernels still running, except the caller's."""
    for kernel in kernels:
        if kernel is not asyncio.current_task() and not kernel.done():
            kernel.cancel()


def _messages(copies: Sequence[Copy], most: int) -> Iterator[list[Copy]]:
    """Group copies, in order, into as few messages as possible."""
    message: list[Copy] = []
    nbytes = 0
    for copy in copies:
        if message and nbytes + copy.nbytes > most:
            yield message
            message, nbytes = [], 0
        message.append(copy)
        nbytes += copy.nbytes
    yield message
