"""Channels of XCCL's send and receive for KV: a ring for each pair of dies (xDeepServe 3.1; 5.1, step 7).

Each prefill-decode TE pair has a DistFlow instance of its own, and all instances share the channels:

    metadata   kv.tails [P, 2, C] | kv.acks [P, 2, C]    P pairs, C AIV cores, 32 bytes each
    managed    kv.rings [P, 2]                           rank 0 sends, rank 1 receives; none for zero copy

A die has a place for each of its peers (P), as far as half of the metadata area goes. A pair gets a free
place on both dies with its first message and keeps it. Where none is free, because TEs have joined, it gets
the place of the pair that has been idle for longest.

A pair has one message under way at a time; the next one waits in line. A message also waits while each place
of a die is in use, and no later message for one of its dies overtakes it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.comm.p2p.layout import RingField, RingLayout
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.clock import Waiter, Waiting
from xdeepserve.hw.memory import METADATA_LIMIT, MemoryPlan
from xdeepserve.hw.pod import Pod

SENDER, RECEIVER = 0, 1


def plan_channels(memory: MemoryPlan, layout: RingLayout, num_peers: int) -> None:
    """Reserve the regions on a die that sends KV to so many dies, or receives it from them."""
    nbytes = layout.region_nbytes
    most = METADATA_LIMIT // 2 // (nbytes["tails"] + nbytes["acks"])
    layout.plan(memory, max(1, min(num_peers, most)))


def channel_layout(weight: float = 1.0, has_rings: bool = True) -> RingLayout:
    """Make the layout of a pair's fields and rings."""
    return RingLayout(2, name="kv", weight=weight, has_rings=has_rings)


class Channel(NamedTuple):
    """Ordered pair of dies with fields and a ring for one message at a time."""

    src: int
    dst: int


class Asking(NamedTuple):
    """Request of a waiting message for a channel."""

    channel: Channel
    waiter: Waiter


class Channels:
    """Channels of all dies of a pod. `layout` is that with which their memory was planned."""

    def __init__(self, pod: Pod, layout: RingLayout) -> None:
        self.pod, self.layout = pod, layout
        self.num_messages = 0
        self.places: dict[int, dict[Channel, int]] = {}  # by die
        self._in_use: set[Channel] = set()
        self._asking: list[Asking] = []
        self._last: dict[Channel, int] = {}  # event ID of its last message; the longest idle first

    async def take(self, src: int, dst: int, timeout_ns: int) -> Channel:
        """Take the channel of two dies; `give_back` returns it. Raises DeadlineError if it is not free within
        `timeout_ns`."""
        clock = self.pod.clock
        waiter = clock.waiter(
            lambda: Waiting("send", f"die {src}", f"die {dst}", "XCCL channel", "a free one", "in use")
        )
        asking = Asking(Channel(src, dst), waiter)
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
        self._in_use.remove(channel)
        self._grant()

    def _grant(self) -> None:
        """Give channels to waiting messages, in order."""
        behind: set[int] = set()  # dies for which somebody waits that has found no place
        for asking in list(self._asking):
            channel = asking.channel
            if channel in self._in_use:
                continue
            if not behind.isdisjoint(channel) or not self._find_places(channel):
                behind |= set(channel)
                continue
            self._asking.remove(asking)
            self._in_use.add(channel)
            self._last[channel] = self._last.pop(channel, 0)
            asking.waiter.wake(channel)

    def _find_places(self, channel: Channel) -> bool:
        """Give a channel a place on both dies, if need be an idle one's. Returns False if there is none."""
        for die in channel:
            places = self.places.setdefault(die, {})
            if channel in places:
                continue
            if len(places) == self._num_places(die):
                idle = next(
                    (each for each in self._last if each in places and each not in self._in_use), None
                )
                if idle is None:
                    return False
                self._drop(idle)
            taken = set(places.values())
            places[channel] = next(n for n in range(self._num_places(die)) if n not in taken)
            self._last.setdefault(channel, 0)
            self._clear(die, places[channel])
        return True

    def _num_places(self, die: int) -> int:
        """Return the number of pairs for which a die has fields."""
        region = self.pod.memory(die).metadata.regions[self.layout.region("tails")]
        return region.nbytes // self.layout.region_nbytes["tails"]

    def _drop(self, channel: Channel) -> None:
        """Take a channel's places away."""
        del self._last[channel]
        for die in channel:
            self.places.get(die, {}).pop(channel, None)

    def open(self, channel: Channel, timeout_ns: int) -> tuple[PointToPoint, PointToPoint, int]:
        """Return handles of the sender and the receiver, and the event ID of a message ("number of
        sends")."""
        self.pod.memories.check_alive(channel)  # what lies in a lost one's fields is nobody's event
        places = [self.places[die][channel] for die in channel]
        sender, receiver = (
            PointToPoint(self.pod.dies[die], rank, channel, self.layout, timeout_ns, places=places)
            for rank, die in enumerate(channel)
        )
        # What earlier messages have left in the fields is older than this one.
        sender.reset(RECEIVER)
        receiver.reset(SENDER)
        self.num_messages += 1
        self._last[channel] = self.num_messages
        return sender, receiver, self.num_messages

    def clean(self, channel: Channel) -> None:
        """Clear a channel's fields after a failure, so that they cannot mislead the next message."""
        for die in channel:
            if (place := self.places.get(die, {}).get(channel)) is not None:
                self._clear(die, place)
        if channel in self._last:
            self._last[channel] = 0

    def _clear(self, die: int, place: int) -> None:
        """Fill the fields of a place with zeros."""
        for part in ("tails", "acks"):
            offset, nbytes = self._part(die, place, part)
            self.pod.memory(die).write(offset, bytes(nbytes))

    def _part(self, die: int, place: int, part: Literal["tails", "acks"]) -> tuple[int, int]:
        """Return offset and size of the tails or acks of a place."""
        nbytes = self.layout.region_nbytes[part]
        return self.pod.memory(die).metadata.regions[self.layout.region(part)].offset + place * nbytes, nbytes

    def forget(self, dies: Sequence[int]) -> None:
        """Forget the channels of a TE that is gone, because its dies' memory is used for other things."""
        for channel in [each for each in self._last if not set(dies).isdisjoint(each)]:
            self._drop(channel)

    def fields(self, die: int, part: Literal["tails", "acks"]) -> list[RingField]:
        """Return the tails or acks of all channels of a die, in the order in which these were last used."""
        return [field for channel in self._last for field in self._fields(channel, die, part)]

    def _fields(self, channel: Channel, die: int, part: Literal["tails", "acks"]) -> list[RingField]:
        place = self.places.get(die, {}).get(channel)
        if place is None:
            return []
        return RingField.unpack_all(self.pod.memory(die).read(*self._part(die, place, part)))

    def check_integrity(self) -> None:
        """Check the channels at rest: no message is under way, each place is one channel's, and fields hold
        only the last message's events. Raises ProtocolError if not."""
        if self._in_use or self._asking:
            waiting = [tuple(each.channel) for each in self._asking]
            in_use = sorted(map(tuple, self._in_use))
            raise ProtocolError(f"XCCL channels: {in_use} are in use, and {waiting} wait for one")
        for die, places in self.places.items():
            if len(set(places.values())) < len(places):
                raise ProtocolError(f"XCCL channels of die {die}: two have the same place, {places}")
            for channel in places if die not in self.pod.lost else ():
                found = [*self._fields(channel, die, "tails"), *self._fields(channel, die, "acks")]
                newest, last = max(field.event_id for field in found), self._last[channel]
                if newest != last:
                    raise ProtocolError(
                        f"XCCL channel {tuple(channel)}: fields of die {die} say event {newest}, the last "
                        f"was {last}"
                    )
