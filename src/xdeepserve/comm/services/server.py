"""Server of experts: reads requests in local memory, forms batches, and writes answers there (EaaS 3.3).

The server never communicates: clients write requests to its slots and read answers from them. It knows no
step, group or order; it serves whatever has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.exchange.combine import load_answers
from xdeepserve.comm.exchange.rows import Float32, Received, check_answers, check_received, unpack_tokens
from xdeepserve.comm.handle import Handle, Quantize
from xdeepserve.comm.means import ALL_CORES, Means
from xdeepserve.comm.services.layout import (
    BELL,
    CARD,
    HEADER,
    SLOT_NBYTES,
    ServiceLayout,
    SlotHeader,
)
from xdeepserve.comm.services.rules import SlotEvent, SlotState, next_state
from xdeepserve.comm.steps import Observer
from xdeepserve.comm.turns import Turns
from xdeepserve.errors import DeadlineError, ProtocolError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die

SERVE = (
    "expert serve"  # steps: 1 a batch is formed, 2 answers are rounded, 3 they are written, 4 states are 2
)


class Batching(NamedTuple):
    """Condition for beginning a batch: with requests of `clients` clients, or of all recent ones, or
    `timeout_ns` after the first request.

    The paper waits for all (3.3), or for a sufficient number (its Figure 5), and does not mention a client
    that stays away. Here such a client is not waited for again until it posts.
    """

    clients: int = 1
    timeout_ns: int = 0


AT_ONCE = Batching()


class SlotRequest(NamedTuple):
    """Request found by a server in a slot: views of the server's memory."""

    client: int
    slot: int
    header: SlotHeader
    received: Received

    def __len__(self) -> int:
        return self.header.batch_size

    @property
    def layer(self) -> int:
        return self.header.layer

    @property
    def clients(self) -> tuple[int]:
        return (self.client,)

    @property
    def slots(self) -> tuple[int]:
        return (self.slot,)


class ServiceServer(Handle):
    """Expert server number `index`. `layout.plan_server` must have been called on the die's plan.
    `num_layers` have experts, and `generation` is the last one of the previous server with this number."""

    def __init__(
        self,
        die: Die,
        index: int,
        layout: ServiceLayout,
        num_layers: int,
        batching: Batching = AT_ONCE,
        quantize: Quantize | None = None,
        means: Means = ALL_CORES,
        on_step: Observer | None = None,
        generation: int = 0,
    ) -> None:
        self.label = f"expert server {index}"
        super().__init__(die, Turns(self.label), quantize, layout.quantize, means, on_step)
        self.index, self.layout, self.num_layers, self.batching = index, layout, num_layers, batching
        memory, count = die.memory, layout.num_all_slots
        self._card = memory.metadata.regions[layout.region("card")]
        self._slots = memory.metadata.regions[layout.region("slots")]
        self._requests = memory.managed.regions[layout.region("requests")]
        self._answers = memory.managed.regions[layout.region("answers")]
        raw = memory.view(self._slots, np.uint8, layout.state_at(count))
        self._states: npt.NDArray[np.uint8] = raw[BELL.size :].reshape(count, SLOT_NBYTES)[:, 0]
        self._mine = np.flatnonzero(np.asarray(layout.servers.expert_rank) == index)
        self._names = [f"client {client}" for client in range(layout.num_clients)]
        self.generation = generation
        self._lost: set[int] = set()  # clients, in every generation
        self.refusals: list[str] = []  # why clients were put offline
        self.register()

    # ---- its place among others ---------------------------------------------------------------------

    def register(self) -> None:
        """Begin a new generation: all slots are empty, and requests of older generations are void."""
        self.generation += 1
        self._order: list[int] = []  # slots that wait for a batch, as they came
        self._announced: set[int] = set()  # clients that have nothing for the next batch
        self._present = set(range(self.layout.num_clients))
        self._served: set[int] = set()  # slots whose requests are in a batch without answers yet
        self._offline: set[int] = set()  # clients that get no answers any more
        for number in range(self.layout.num_all_slots):
            self._set(number, SlotEvent.REGISTER)
        for client in self._lost:
            self._put_offline(client)
        self.die.memory.write(self._card.offset, CARD.pack(*self.layout.card(self.generation)))

    def release(self, client: int) -> None:
        """Put a lost client offline, on the monitor's word; batches no longer wait for it."""
        self._lost.add(client)
        self._put_offline(client)

    def admit(self, client: int) -> None:
        """Serve a client in the place of one that was released; its slots are empty."""
        self._lost.discard(client)
        self._offline.discard(client)
        for slot in range(self.layout.num_slots):
            self._set(self.layout.number(client, slot), SlotEvent.REGISTER)

    def _put_offline(self, client: int) -> None:
        self._present.discard(client)
        self._offline.add(client)
        for slot in range(self.layout.num_slots):
            number = self.layout.number(client, slot)
            if self.state(number) != SlotState.OFFLINE:
                self._set(number, SlotEvent.RELEASE)
            self._order = [each for each in self._order if each != number]
            self._served.discard(number)

    def state(self, number: int) -> int:
        """Return the state of a slot."""
        return int(self._states[number])

    def header(self, number: int) -> SlotHeader:
        """Return the header in a slot."""
        at = self._slots.offset + self.layout.header_at(number)
        return SlotHeader(*HEADER.unpack(self.die.memory.read(at, HEADER.size)))

    def _set(self, number: int, event: SlotEvent) -> None:
        """Change the state of a slot by an event; the client sees it when it polls."""
        client, slot = divmod(number, self.layout.num_slots)
        state = next_state(self.state(number), event, f"{self.label}, slot {slot} of client {client},")
        self.die.memory.write(self._slots.offset + self.layout.state_at(number), bytes([state]))

    # ---- batches ------------------------------------------------------------------------------------

    async def next_batch(self, room: int) -> list[SlotRequest]:
        """Wait, for as long as needed, for requests, and take those for the layer of the oldest, as many as
        fit in `room` rows. `room` must be enough for one."""
        batch: list[SlotRequest] = []
        while not batch:
            while not self._order:
                await self._look(None)
            deadline_ns = self.now_ns + self.batching.timeout_ns
            while not self._has_enough:
                try:
                    await self._look(deadline_ns)
                except DeadlineError:
                    self._present = self._heard
            batch = self.take(room)
        await self.steps.passed(SERVE, 1)
        return batch

    @property
    def _heard(self) -> set[int]:
        return self._announced | {number // self.layout.num_slots for number in self._order}

    @property
    def _has_enough(self) -> bool:
        if not self._order:
            return True  # all that had come are offline
        return len(self._heard) >= min(self.batching.clients, len(self._present | self._heard))

    async def _look(self, deadline_ns: int | None) -> None:
        """Wait until a request or a ring of the bell arrives, and note it. Raises DeadlineError if nothing
        does."""
        memory, bell = self.die.memory, self._slots.offset
        await self._wait(deadline_ns)
        asked, _ = BELL.unpack(memory.read(bell, BELL.size))
        memory.write(bell, BELL.pack(asked, asked))
        for number in self._new:
            self._note(number)

    @property
    def bell(self) -> int:
        """Address of the bell in the die's memory (offset)."""
        return self._slots.offset

    @property
    def now_ns(self) -> int:
        """Clock (ns) for measuring how long batches wait."""
        return self.die.clock.now

    async def _wait(self, deadline_ns: int | None) -> None:
        """Poll the own memory until there is news."""
        await self.die.wait_fields(
            self._slots.offset,
            self._slots.nbytes,
            lambda offset, nbytes: self._has_news,
            deadline_ns=deadline_ns,
            describe=self._describe,
            idle=deadline_ns is None,
        )

    def _describe(self) -> Waiting:
        return Waiting(SERVE, self.label, "any client", "slots", "a request", "none")

    @property
    def _has_news(self) -> bool:
        """Whether the monitor has rung the bell, or a client has written."""
        asked, answered = BELL.unpack(self.die.memory.read(self._slots.offset, BELL.size))
        return asked != answered or len(self._new) > 0

    @property
    def _new(self) -> list[int]:
        """Slots with a request not yet noted."""
        written = np.flatnonzero(self._states == SlotState.WRITTEN).tolist()
        return [number for number in written if number not in self._order]

    def _note(self, number: int) -> None:
        """Note a request in a slot: it waits for its batch, unless it is stale or its client is offline."""
        header, client = self.header(number), number // self.layout.num_slots
        if header.generation != self.generation:
            self._set(number, SlotEvent.STALE)
            return
        if client in self._offline:  # it may have written before it looked
            self._set(number, SlotEvent.REFUSE)
            return
        self._present.add(client)
        if header.batch_size:
            self._order.append(number)
        else:
            self._announced.add(client)
            self._set(number, SlotEvent.NOTE)

    def take(self, room: int) -> list[SlotRequest]:
        """Take the requests of the next batch from their slots.

        A request that cannot be served puts its client offline.
        """
        batch: list[SlotRequest] = []
        for number in list(self._order):
            header = self.header(number)
            if number not in self._order:  # its client has been put offline over another slot
                continue
            if batch and (header.layer != batch[0].header.layer or header.batch_size > room):
                continue
            self._order.remove(number)
            try:
                asked = self._read(number, header)
            except ProtocolError as error:
                self.refusals.append(str(error))
                self._set(number, SlotEvent.REFUSE)
                self._put_offline(number // self.layout.num_slots)
                continue
            room -= len(asked)
            batch.append(asked)
            self._served.add(number)
        self._announced.clear()
        return batch

    def _read(self, number: int, header: SlotHeader) -> SlotRequest:
        """Read the request in a slot. Raises ProtocolError for an impossible one."""
        layout, (client, slot) = self.layout, divmod(number, self.layout.num_slots)
        who = f"{SERVE}: {self.label}: slot {slot} of client {client}, event {header.event_id}"
        if header.batch_size > layout.rows_per_slot:
            raise ProtocolError(
                f"{who}: field batch size: expected {layout.rows_per_slot} at most, seen {header.batch_size}"
            )
        if header.layer >= self.num_layers:
            raise ProtocolError(f"{who}: field layer: expected below {self.num_layers}, seen {header.layer}")
        row = layout.rows.dispatch_row
        raw = self.die.memory.read(self._requests.offset + layout.request_at(number), header.batch_size * row)
        counts = np.zeros(layout.num_clients, np.int64)
        counts[client] = header.batch_size
        rows = np.frombuffer(raw, np.uint8).reshape(header.batch_size, row)
        received = unpack_tokens(layout.rows, rows, counts)
        check_received(SERVE, self.label, self._names, self._mine, received)
        return SlotRequest(client, slot, header, received)

    async def answer(self, batch: Sequence[SlotRequest], expert_out: Float32) -> None:
        """Write an answer row for each row of the batch, expert_out float32 [N, H], and then the slots'
        states.

        A client that was released meanwhile gets none, nor does another client in its place, and no client
        does if the server has registered anew.
        """
        layout, rows = self.layout, self.layout.rows
        total = np.zeros(sum(map(len, batch)))
        check_answers(SERVE, rows, total, expert_out)
        start_ns = self.die.clock.now
        packed = await load_answers(self, SERVE, rows, expert_out)
        launched_ns = start_ns + self.die.spec.kernel_ns(0, 0)
        await self.die.mte.store_view(packed.nbytes, None, self.means.cores, f"{SERVE} 3 write", launched_ns)
        numbers = [layout.number(asked.client, asked.slot) for asked in batch]
        for number, part in zip(
            numbers, np.split(packed, np.cumsum([len(a) for a in batch])[:-1]), strict=True
        ):
            at = self._answers.offset + layout.answer_at(number)
            self.die.memory.write(at, part.tobytes())
        await self.steps.passed(SERVE, 3)
        await self.die.clock.sleep(
            self.die.spec.pieces_ns(len(batch), self.means.cores or self.die.spec.num_cores("aiv"))
        )
        for number in numbers:
            if number in self._served and self.state(number) == SlotState.WRITTEN:
                self._served.discard(number)
                self._set(number, SlotEvent.ANSWER)
        await self.steps.passed(SERVE, 4)
