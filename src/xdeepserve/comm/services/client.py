"""Client of expert servers: writes requests to its slots on the servers, and reads the answers there.

    expert write   1, 2   token rows in the unified buffers, quantised
                   3      its slots are empty, or of a generation that is over
                   4      payload and header are written, by URMA
                   5      state 1 is written behind them
    expert read    1      all states are 2, or those who are late are given up
                   2      headers and answers are read
                   3      state 0 is written
                   4      the rows are weighed and summed in the order of the token's experts

Requests to a server that is given up go to replicas in another attempt, when the answers of the other servers
have been read and their slots are free. Answers that come too late are never read. Requests are pure, so all
attempts have answers with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from xdeepserve.comm.checks import check_array
from xdeepserve.comm.exchange.dispatch import load_tokens
from xdeepserve.comm.exchange.rows import (
    Float32,
    Int32,
    Int64,
    Rows,
    check_tokens,
    pack_tokens,
    weighted_sum,
)
from xdeepserve.comm.handle import Handle, Quantize
from xdeepserve.comm.means import ALL_CORES, Means
from xdeepserve.comm.services.client_slots import ClientSlots
from xdeepserve.comm.services.known_servers import KnownServers
from xdeepserve.comm.services.layout import HEADER, HEADER_AT, SlotHeader
from xdeepserve.comm.services.rules import SlotState
from xdeepserve.comm.steps import Observer
from xdeepserve.comm.turns import Step, Turns
from xdeepserve.errors import AddressError, DeadlineError, FieldError, LostDieError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address

WRITE, READ = "expert write", "expert read"
Replicas = Callable[[int, int], Sequence[int]]
"""Layer (among those with experts) and physical expert -> all physical experts that are the same one."""


class Patience(NamedTuple):
    """Waiting times of a client for a server, in ns of its reach's time: until it asks a replica, if there is
    one, and until it fails otherwise."""

    replica_ns: int = 20_000_000
    last_ns: int = 1_000_000_000


Outcome = Literal["done", "stale", "given up"]


PATIENCE = Patience()


class OpenRequest(NamedTuple):
    """Unanswered request to a server: its header, the flat (token, slot) of its rows, its time, and the epoch
    of the server's seat."""

    header: SlotHeader
    order: Int64
    since_ns: int
    epoch: int


class ServiceClient(Handle):
    """Microbatch `slot` of client number `rank`; `known` is shared by all microbatches of the client.

    Servers are reached through `known.reach`, whatever the carrier of `means`. `num_layers` have experts, and
    the event IDs count them from 1, step by step.
    """

    def __init__(
        self,
        rank: int,
        slot: int,
        known: KnownServers,
        num_layers: int,
        replicas: Replicas = lambda layer, physical: (physical,),
        patience: Patience = PATIENCE,
        quantize: Quantize | None = None,
        means: Means = ALL_CORES,
        on_step: Observer | None = None,
    ) -> None:
        die, layout = known.die, known.layout
        self.rank, self.slot, self.label = rank, slot, f"client {rank}"
        super().__init__(die, Turns(self.label, WRITE, READ), quantize, layout.quantize, means, on_step)
        self.known, self.layout, self.num_layers = known, layout, num_layers
        self.reach = known.reach
        self.replicas, self.patience = replicas, patience
        self.slots = ClientSlots(rank, slot, known)
        self._outbox = die.memory.managed.regions[layout.region(f"outbox.{slot}")]
        self._returned = die.memory.app.regions[layout.region(f"returned.{slot}")]
        self.expert_rank = np.asarray(layout.servers.expert_rank, np.int64)
        self._open: dict[int, OpenRequest] = {}  # by server
        # Servers, and their epochs, at which this slot may not be empty, and nobody waits for it.
        self._left: dict[int, int] = {}
        self._met: dict[int, int] = {}  # servers, and their epochs, whose slot here has been this client's
        self.num_resent = 0  # requests that replicas were asked

    def reset(self) -> None:
        """Forget all open requests. Servers register anew, before or after; slots on servers that do not are
        checked before use."""
        self.turns.reset({})
        self.known.reset()
        self._left |= {server: request.epoch for server, request in self._open.items()}
        self._open.clear()

    # ---- write --------------------------------------------------------------------------------------

    async def a2e(self, x: Float32, topk_idx: Int32, topk_weights: Float32, event_id: int) -> None:
        """Ask the experts topk_idx [T, K] (physical) about token rows x [T, H]; topk_weights [T, K] stay
        here."""

        def check() -> None:
            check_tokens(WRITE, self.layout.rows, len(self.expert_rank), x, None, topk_idx)
            check_array(WRITE, "topk_weights", topk_weights)
            if topk_weights.dtype != np.float32 or topk_weights.shape != topk_idx.shape:
                found = f"{topk_weights.dtype} {topk_weights.shape}"
                raise AddressError(f"{WRITE}: topk_weights must be float32 {topk_idx.shape}, not {found}")

        await self._run(
            Step.DISPATCH, event_id, lambda: self._a2e(x, topk_idx, topk_weights, event_id), check
        )

    async def _a2e(self, x: Float32, topk_idx: Int32, topk_weights: Float32, event_id: int) -> None:
        payload, scale = await load_tokens(self, WRITE, x, None)
        self._payload, self._scale = payload.copy(), scale.copy()  # the buffers are the next layer's soon
        self._topk_idx, self._weights = topk_idx.copy(), topk_weights.copy()
        self._event_id, self._layer, self._attempt = event_id, (event_id - 1) % self.num_layers, 0
        self._slot_out = np.zeros((topk_idx.size, self.layout.hidden), np.float32)
        await self._ask(np.arange(topk_idx.size))

    async def _ask(self, chosen: Int64) -> None:
        """Make an attempt for flat (token, slot): find servers, and write to their slots."""
        self._attempt += 1
        layout, num_servers = self.layout, self.layout.servers.num_ranks
        await self._look_at_given_up()
        is_ready = False
        while not is_ready:
            self._choose(chosen)
            rows, sent = pack_tokens(
                *(WRITE, layout.rows, self.expert_rank, num_servers),
                *(self._payload, self._scale, self._topk_idx, chosen),
            )
            asked = np.flatnonzero(sent.counts).tolist()
            if layout.announces and self._attempt == 1:
                asked = [s for s in range(num_servers) if sent.counts[s] or self.known.is_usable(s)]
            is_ready = await self._empty_left(asked) and await self.known.connect(asked)
            is_ready = is_ready and await self._take_over(asked)
        await self.steps.passed(WRITE, 3)
        await self._write(asked, rows, sent.counts, sent.order)

    def _choose(self, chosen: Int64) -> None:
        """Lead (token, slot) pairs to replicas where their servers are out of use; without a replica they
        stay.

        Raises FieldError if a server's memory is gone, and no other server has its experts.
        """
        experts, servers = self._topk_idx.reshape(-1), range(self.layout.servers.num_ranks)
        is_out = np.array([not self.known.is_usable(server) for server in servers])
        if not is_out.any():
            return
        for flat in chosen[is_out[self.expert_rank[experts[chosen]]]].tolist():
            server, found = int(self.expert_rank[experts[flat]]), self._replica(int(experts[flat]))
            if found is None and self.known.is_gone(server):
                raise self._gone(server, [int(experts[flat])])
            experts[flat] = experts[flat] if found is None else found

    def _replica(self, physical: int) -> int | None:
        """Return another physical expert with the same weights, on a usable server. If the own server is
        gone, a server that is only late will do. The choice depends on expert and client, so that clients
        share the load of a lost server."""
        known, rank = self.known, self.expert_rank
        there = [each for each in self.replicas(self._layer, physical) if each != physical]
        others = [each for each in there if known.is_usable(int(rank[each]))]
        if not others and known.is_gone(int(rank[physical])):
            others = [each for each in there if not known.is_gone(int(rank[each]))]
        return others[(self.rank + physical) % len(others)] if others else None

    async def _write(self, asked: Sequence[int], rows: Rows, counts: Int64, order: Int64) -> None:
        """Steps 4 and 5: write rows [N, row_nbytes], grouped by server, then headers and states."""
        if not asked:
            return
        layout, memory, known, here = self.layout, self.die.memory, self.known, self.die.index
        row, first = layout.rows.dispatch_row, np.cumsum(counts) - counts
        await self.die.mte.store_view(rows.nbytes, None, self.means.cores, f"{WRITE} outbox")
        memory.write(self._outbox.offset, rows.tobytes())
        payloads: list[Copy] = []
        for server in asked:
            start, count, at = int(first[server]), int(counts[server]), self.slots.word_at(server)
            generation, epoch = known.generation(server), known.epoch(server)
            header = SlotHeader(generation, self._attempt, self._event_id, self._layer, count)
            memory.write(at, bytes([SlotState.WRITTEN]).ljust(HEADER_AT, b"\0") + header.pack())
            if count:
                source = Address(here, self._outbox.offset + start * row)
                target = known.place(server, "managed", "requests", layout.request_at(self.slots.number))
                payloads.append(Copy(source, target, count * row))
                mine = order[start : start + count]
                self._open[server] = OpenRequest(header, mine, self.reach.now_ns, epoch)
            else:
                self._left[server] = epoch
            payloads.append(Copy(Address(here, at + HEADER_AT), self.slots.header_of(server), HEADER.size))
        await self.reach.write(payloads, f"{WRITE} 4 payload, header")
        await self.steps.passed(WRITE, 4)
        await self.slots.write_states(asked, f"{WRITE} 5 state")
        await self.steps.passed(WRITE, 5)

    # ---- slots whose answers nobody waits for -------------------------------------------------------

    async def _look_at_given_up(self) -> None:
        """Look once at the slots of servers that this client has given up, and use those again whose late
        answers have come. Servers that have registered anew are among them."""
        for server in sorted(self._left):
            if not self.known.is_given_up(server) or self.known.is_gone(server):
                continue
            if await self.slots.reads(server) and self.slots.state(server) != SlotState.WRITTEN:
                self.known.trust(server)

    def late(self) -> list[int]:
        """List servers that are given up, although the monitor says they are there, and have not answered yet
        as the latest read of their slots found them."""
        return [
            server
            for server, epoch in list(self._left.items())
            if epoch == self.known.epoch(server)
            and self.known.is_given_up(server)
            and not self.known.is_masked(server)
            and self.slots.is_written(server)
        ]

    async def look_at_late(self) -> None:
        """Read the slots of late servers again, where reads cost no virtual time."""
        for server in self.late() if self.reach.follows_others else ():
            await self.reach.comes_back(self.slots.state_of(server))

    async def _take_over(self, asked: Sequence[int]) -> bool:
        """Wait for slots on servers new to this client until requests of an earlier client process are done
        with. Returns False if a server was given up over that."""
        new = [server for server in asked if self._met.get(server) != self.known.epoch(server)]
        if not new or not self.reach.follows_others:
            return True
        self._left |= {server: self.known.epoch(server) for server in new}
        is_done = await self._empty_left(new)
        self._met |= {server: self.known.epoch(server) for server in new if server not in self._left}
        return is_done

    async def _empty_left(self, asked: Sequence[int]) -> bool:
        """Step 3: wait until old requests in the slots on these servers are done with, and empty them.
        Returns False if a server has been given up over that, and another must be found.

        Raises DeadlineError if there is no other.
        """
        left = [server for server in asked if self._left.get(server) == self.known.epoch(server)]
        if not left:
            return True
        is_last = any(map(self.known.is_given_up, left))
        patience = self.patience.last_ns if is_last else self.patience.replica_ns
        try:
            await self.slots.poll(WRITE, left, self.slots.is_written, self.reach.now_ns + patience)
        except DeadlineError:
            if is_last:
                raise
            late = [server for server in left if self.slots.is_written(server)]
            for server in late:
                self.known.give_up(server)
            return False
        await self.slots.empty(
            [server for server in left if self.slots.state(server) == SlotState.DONE], WRITE
        )
        self.slots.check_online(left, WRITE)
        for server in left:
            self._left.pop(server, None)
        return True

    # ---- read ---------------------------------------------------------------------------------------

    async def e2a(self, event_id: int) -> Float32:
        """Return the experts' answers, weighed and summed on this die: [T, H]."""
        return await self._run(Step.COMBINE, event_id, self._e2a)

    async def _e2a(self) -> Float32:
        while self._open:
            outcomes = await self._wait()
            await self.steps.passed(READ, 1)
            again = [server for server, outcome in outcomes.items() if outcome != "done"]
            for server in again:
                if outcomes[server] == "stale":
                    self.known.forget(server)
                else:
                    self._give_up(server)
            again += await self._read([server for server in outcomes if server not in again])
            if again:
                orders = [self._open.pop(server).order for server in again]
                self.num_resent += len(again)
                await self._ask(np.sort(np.concatenate(orders)))
        answers = self._slot_out.reshape(*self._topk_idx.shape, self.layout.hidden)
        total = partial(weighted_sum, answers, self._weights)
        result = await self.work(f"{READ} 4 weighted sum", total, 2 * answers.size)
        await self.steps.passed(READ, 4)
        return result

    def _give_up(self, server: int) -> None:
        """Ask a server nothing more until its late answer has come; the slot is the server's until then."""
        self.known.give_up(server)
        self._left[server] = self._open[server].epoch

    async def _wait(self) -> dict[int, Outcome]:
        """Step 1: wait until each server has answered or is given up; return the outcome of each request.

        Raises DeadlineError, naming it, for a server that does not answer and has no replicas.
        """
        asked, doubted = list(self._open), set[int]()
        since_ns = min(request.since_ns for request in self._open.values())
        while True:
            is_late = self.reach.now_ns >= since_ns + self.patience.replica_ns
            patience = self.patience.last_ns if is_late else self.patience.replica_ns

            def is_open(server: int) -> bool:
                is_doubtful = self.known.is_masked(server) and server not in doubted
                return self._outcome(server) is None and not is_doubtful

            try:
                await self.slots.poll(READ, asked, is_open, since_ns + patience)
            except DeadlineError:
                if is_late:
                    raise
            outcomes = {server: outcome for server in asked if (outcome := self._outcome(server))}
            self.slots.check_online(asked, READ)
            if len(outcomes) == len(asked):
                return outcomes
            for server in (server for server in asked if server not in outcomes and server not in doubted):
                doubted.add(server)  # it is waited for, if it is there, unless others have its experts
                if not await self.slots.reads(server) and self._outcome(server) is None:
                    raise self._gone(server, self._experts_of(server))

    def _outcome(self, server: int) -> Outcome | None:
        """Return the outcome of a request; None while it must be waited for."""
        request = self._open[server]
        if request.epoch != self.known.epoch(server):
            return "stale"
        state = self.slots.state(server)
        if state != SlotState.WRITTEN:
            return "stale" if state == SlotState.EMPTY else "done"
        is_late = self.reach.now_ns >= request.since_ns + self.patience.replica_ns
        if not is_late and not self.known.is_masked(server) and not self.known.is_gone(server):
            return None
        has_replicas = all(self._replica(expert) is not None for expert in self._experts_of(server))
        return "given up" if has_replicas else None

    def _experts_of(self, server: int) -> list[int]:
        """Return the physical experts of an open request."""
        return np.unique(self._topk_idx.reshape(-1)[self._open[server].order]).tolist()

    async def _read(self, servers: Sequence[int]) -> list[int]:
        """Steps 2 and 3: read headers and answers of servers that have answered. Returns the servers that
        were lost meanwhile."""
        known, layout, die, row = self.known, self.layout, self.die, self.layout.rows.combine_row
        moved = [server for server in servers if self._open[server].epoch != known.epoch(server)]
        if len(moved) == len(servers):
            return moved
        servers = [server for server in servers if server not in moved]
        counts = np.array([len(self._open[server].order) for server in servers], np.int64)
        answers_at = layout.answer_at(self.slots.number)
        answers = [self.known.place(server, "managed", "answers", answers_at) for server in servers]
        sizes = np.concatenate([np.full(len(servers), HEADER.size, np.int64), counts * row])
        headers = [self.slots.header_of(server) for server in servers]
        nodes, offsets = np.array([tuple(place) for place in headers + answers], np.int64).T
        try:
            await self.reach.gather(nodes, offsets, sizes, self._returned.offset, f"{READ} 2 answers")
        except LostDieError:
            silent = [server for server in servers if not await self.slots.reads(server)]
            for server in silent:
                self._give_up(server)
            return moved + silent + await self._read([each for each in servers if each not in silent])
        await self.steps.passed(READ, 2)
        raw, words = die.memory.read(self._returned.offset, int(sizes.sum())), len(servers) * HEADER.size
        rows = np.frombuffer(raw[words:], np.uint8).reshape(-1, row)
        parts = np.split(rows, np.cumsum(counts)[:-1])
        for server, part, found in zip(servers, parts, HEADER.iter_unpack(raw[:words]), strict=True):
            request = self._open[server]
            if SlotHeader(*found) != request.header:
                raise self.slots.error(READ, server, "header", request.header, SlotHeader(*found))
            self._slot_out[request.order] = layout.rows.answers.unpack(part)
        await self.slots.empty(servers, READ)
        await self.steps.passed(READ, 3)
        for server in servers:
            del self._open[server]
        return moved

    def _gone(self, server: int, experts: Sequence[int]) -> FieldError:
        """Make the error for a server that is lost for certain, with experts that no usable server has."""
        lost = f"a lost die, and no replica of physical experts {list(experts)} of expert layer {self._layer}"
        return self.slots.error(READ, server, f"state of slot {self.slot}", SlotState.DONE.value, lost)
