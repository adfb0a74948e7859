"""XCCL's buffers for send and receive, which the DistFlow instances of a pod share (xDeepServe 5.1, step 7).

Each prefill-decode TE pair has a DistFlow instance of its own, but rings and fields cost memory on every die.
So a die has NUM_CHANNELS of them, whoever its peers are, and a message takes one that is free at both ends:

    channel c of a die     metadata   kv/c.tails [2, C] | kv/c.acks [2, C]       C AIV cores, 32 bytes each
                           managed    kv/c.rings [2]                             rank 0 sends, rank 1 receives

Who finds none waits in the order of asking, and nobody who asks later for one of the same dies overtakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.comm.p2p.layout import RingField, RingLayout
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.clock import Waiter, Waiting
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.hw.pod import Pod

NUM_CHANNELS = 2  # of a die: while one message ends, the next may begin
SENDER, RECEIVER = 0, 1


def plan_channels(memory: MemoryPlan, weight: float = 1.0) -> None:
    """Reserve the regions for sending or receiving KV on a die."""
    for number in range(NUM_CHANNELS):
        _layout(number, weight).plan(memory)


def _layout(number: int, weight: float) -> RingLayout:
    return RingLayout(2, name=f"kv/{number}", weight=weight)


class Channel(NamedTuple):
    """Channel of a message between two dies, by number."""

    number: int
    src: int
    dst: int


class Asking(NamedTuple):
    """Request of a waiting message for a channel."""

    src: int
    dst: int
    waiter: Waiter


class Channels:
    """Channels of all dies of a pod. `weight` is that of `RingLayout`."""

    def __init__(self, pod: Pod, weight: float = 1.0) -> None:
        self.pod = pod
        self.layouts = [_layout(number, weight) for number in range(NUM_CHANNELS)]
        self._in_use: dict[int, set[int]] = {}  # numbers, by die
        self._asking: list[Asking] = []
        self.num_messages = 0
        self._last: dict[tuple[int, int], int] = {}  # event ID of the last message, by die and channel

    async def take(self, src: int, dst: int, timeout_ns: int) -> Channel:
        """Take a channel free at both dies; `give_back` returns it. Raises DeadlineError if none is free
        within `timeout_ns`."""
        clock = self.pod.clock
        waiter = clock.waiter(
            lambda: Waiting("send", f"die {src}", f"die {dst}", "XCCL channel", "a free one", "all in use")
        )
        asking = Asking(src, dst, waiter)
        self._asking.append(asking)
        self._grant()
        try:
            channel: Channel = await clock.wait(waiter, clock.now + timeout_ns)
            return channel
        except BaseException:
            if asking in self._asking:
                self._asking.remove(asking)
            elif waiter._value is not None:  # granted to somebody who is not there any more
                self.give_back(waiter._value)
            self._grant()
            raise

    def give_back(self, channel: Channel) -> None:
        """Return a channel after use, and grant it to the next in line."""
        for die in (channel.src, channel.dst):
            self._in_use[die].remove(channel.number)
        self._grant()

    def _grant(self) -> None:
        """Give channels to waiting messages, in order."""
        behind: set[int] = set()  # dies for which somebody waits already
        for asking in list(self._asking):
            ends = {asking.src, asking.dst}
            in_use = set().union(*(self._in_use.setdefault(die, set()) for die in ends))
            free = [number for number in range(NUM_CHANNELS) if number not in in_use]
            if not free or ends & behind:
                behind |= ends
                continue
            self._asking.remove(asking)
            for die in ends:
                self._in_use[die].add(free[0])
            asking.waiter.wake(Channel(free[0], asking.src, asking.dst))

    def open(self, channel: Channel, timeout_ns: int) -> tuple[PointToPoint, PointToPoint, int]:
        """Return handles of the sender and the receiver, and the event ID of a message ("number of
        sends")."""
        dies, layout = (channel.src, channel.dst), self.layouts[channel.number]
        self.pod.memories.check_alive(dies)  # what lies in a lost one's fields is nobody's event
        sender, receiver = (
            PointToPoint(self.pod.dies[die], rank, dies, layout, timeout_ns) for rank, die in enumerate(dies)
        )
        # What earlier messages have left in the fields is older than this one.
        sender.reset(RECEIVER)
        receiver.reset(SENDER)
        self.num_messages += 1
        for die in dies:
            self._last[die, channel.number] = self.num_messages
        return sender, receiver, self.num_messages

    def clean(self, channel: Channel) -> None:
        """Clear a channel's fields after a failure, so that they cannot mislead the next message."""
        layout = self.layouts[channel.number]
        for die in (channel.src, channel.dst):
            memory = self.pod.memory(die)
            for part in ("tails", "acks"):
                region = memory.metadata.regions[layout.region(part)]
                memory.write(region.offset, bytes(region.nbytes))
            self._last[die, channel.number] = 0

    def forget(self, dies: Sequence[int]) -> None:
        """Forget events on dies of a TE that is gone, because their memory is used for other things."""
        self._last = {key: event_id for key, event_id in self._last.items() if key[0] not in dies}

    def check_integrity(self) -> None:
        """Check the channels at rest: no message is under way, and fields hold only the last message's
        events. Raises ProtocolError if not."""
        busy = {die: numbers for die, numbers in self._in_use.items() if numbers}
        if busy or self._asking:
            waiting = [(each.src, each.dst) for each in self._asking]
            raise ProtocolError(f"XCCL channels: {busy} are in use, and {waiting} wait for one")
        for (die, number), event_id in self._last.items():
            if die in self.pod.lost:
                continue
            newest = max(field.event_id for region in self._fields(die, number) for field in region)
            if newest != event_id:
                raise ProtocolError(
                    f"XCCL channel {number} of die {die}: fields say event {newest}, the last was {event_id}"
                )

    def _fields(self, die: int, number: int) -> list[list[RingField]]:
        """Return all tails and acks of a channel."""
        memory, layout = self.pod.memory(die), self.layouts[number]
        regions = [memory.metadata.regions[layout.region(part)] for part in ("tails", "acks")]
        return [RingField.unpack_all(memory.read(region.offset, region.nbytes)) for region in regions]
