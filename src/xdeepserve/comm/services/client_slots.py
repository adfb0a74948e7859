"""Slots of a client on all servers: their words, read, written and polled from afar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdeepserve.comm.services.known_servers import KnownServers
from xdeepserve.comm.services.layout import HEADER_AT, SLOT_NBYTES
from xdeepserve.comm.services.rules import SLOT, SlotEvent, SlotState
from xdeepserve.errors import FieldError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address


class ClientSlots:
    """Slots of a microbatch: number `slot` among those that client `rank` has on each server."""

    def __init__(self, rank: int, slot: int, known: KnownServers) -> None:
        self.die, self.known, self.layout, self.slot = known.die, known, known.layout, slot
        self.reach = known.reach
        self.label, self.number = known.label, known.layout.number(rank, slot)
        self._states: dict[tuple[int, int], Address] = {}  # by server and epoch
        self.words = self.die.memory.managed.regions[self.layout.region(f"words.{slot}")]

    def word_at(self, server: int) -> int:
        return self.words.offset + server * SLOT_NBYTES

    def state_of(self, server: int) -> Address:
        """Return the address of the state of this client's slot on a server."""
        this = server, self.known.epoch(server)
        if this not in self._states:
            at = self.layout.state_at(self.number)
            self._states[this] = self.known.place(server, "metadata", "slots", at)
        return self._states[this]

    def header_of(self, server: int) -> Address:
        return self.state_of(server).plus(HEADER_AT)

    async def write_states(self, servers: Sequence[int], name: str) -> None:
        """Write the states in the client's words to its slots on servers."""
        here = self.die.index
        words = [Copy(Address(here, self.word_at(s)), self.state_of(s), 1) for s in servers]
        await self.reach.write(words, name)

    async def empty(self, servers: Sequence[int], op: str) -> None:
        """Write state 0 to slots in state 2, after their answers were read or are not wanted any more."""
        state = SLOT[SlotState.DONE, SlotEvent.READ]
        for server in servers:
            self.die.memory.write(self.word_at(server), bytes([state]))
        if servers:
            await self.write_states(servers, f"{op} state 0")

    def state(self, server: int) -> int:
        """Return the slot's state as the latest read found it. A lost server answers no read, so its slot
        seems unchanged."""
        state = self.reach.state(self.state_of(server))
        return SlotState.WRITTEN if state is None else state

    def is_written(self, server: int) -> bool:
        return self.state(server) == SlotState.WRITTEN

    async def reads(self, server: int) -> bool:
        """Whether a read of a slot's state comes back. A server for which it does not is marked as gone."""
        if await self.reach.comes_back(self.state_of(server)):
            return True
        self.known.lose(server)
        return False

    async def poll(
        self, op: str, servers: Sequence[int], is_open: Callable[[int], bool], deadline_ns: int
    ) -> None:
        """Poll the states of the slots on these servers, and the own mask, until none of them is open."""
        places = [(self.state_of(server), 1) for server in servers]
        mask = self.known.mask_region
        places.append((mask.address, mask.nbytes))

        def describe() -> Waiting:
            late = [server for server in servers if is_open(server)]
            peers = ", ".join(f"expert server {server}" for server in late[:4])
            states = [int(self.state(server)) for server in late[:4]]
            expected = [SlotState.DONE.value] * len(states)
            return Waiting(op, self.label, peers, f"state of slot {self.slot}", expected, states)

        await self.reach.poll(places, lambda: not any(map(is_open, servers)), deadline_ns, describe)

    def check_online(self, servers: Sequence[int], op: str) -> None:
        """Check the states of slots: each must be 0, 1 or 2. Raises FieldError for any other."""
        for server in servers:
            state = self.state(server)
            if state not in (SlotState.EMPTY, SlotState.WRITTEN, SlotState.DONE):
                raise self.error(op, server, f"state of slot {self.slot}", "0, 1 or 2", state)

    def error(self, op: str, server: int, field: str, expected: object, seen: object) -> FieldError:
        peer = f"expert server {server}"
        said = f"expected {expected}, seen {seen}"
        message = f"{op}: {self.label}: {peer}, field {field}: {said}"
        return FieldError(
            message, op=op, rank=self.label, peer=peer, field=field, expected=expected, seen=seen
        )
