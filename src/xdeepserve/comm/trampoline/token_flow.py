"""Token flow: A2E and E2A without a barrier, so that experts start on tokens that have arrived (XDS 5.3).

In the exchanges of XDS 3.2 and 3.3 every rank tells every other, even that it sends nothing, and all wait for
all: one late rank holds up all others. Here no rank waits for another with which it exchanges nothing:

    A2E    an attention die posts its tokens at its trampoline (`a2e.AttentionSide`)
    A2E'   the trampoline posts them at those expert dies that they are for, as soon as it has them
    E2A    an expert die answers each trampoline for each attention die by itself, in any order
    E2A'   a trampoline that has all answers to one attention die's tokens sums them, and posts there

So attention dies may be in different layers at the same time; the event ID in a field says in which. The rows
and fields of the first and last stage are those of A2E and E2A', those between of the naive A2E. One set of
buffers is enough:
  - An attention die sends again when it has had its answers. Its trampoline overwrites the copies of its
    tokens, and its answers, when it has sent again.
  - An expert die overwrites an answer, or the place of an attention die's rows, when that die's new tokens
    come, which their trampoline sends after it has pulled the answers before.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.channel import Inbox, Names, Outbox
from xdeepserve.comm.exchange.combine import check_counts, load_answers
from xdeepserve.comm.exchange.rows import (
    Float32,
    Int64,
    Received,
    SentRows,
    pack_tokens,
    unpack_answers,
    unpack_tokens,
    weighted_sum,
)
from xdeepserve.comm.means import Means
from xdeepserve.comm.trampoline.a2e import arrow
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.comm.trampoline.side import Side
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.clock import Waiting


class FlowTrampoline(Side):
    """Expert die as the trampoline of some attention dies, each served independently.

    `layout.plan_flow_expert` must have been called on its plan. Answers are summed here.
    """

    role = "expert"

    def _connect(self) -> None:
        die, sides, layout, label = self.die, self.sides, self.layout, self.label
        self.served = sides.served(self.rank)
        peers, times = [sides.attention[attention] for attention in self.served], len(self.served)
        self.inbox = Inbox(die, layout.tokens, peers, label, [f"attention {each}" for each in self.served])
        self.outbox = Outbox(die, layout.answers, 0, peers)
        # For each attention die that is served, all expert dies.
        self._num_experts = sides.experts.num_ranks
        self._expert_rank = np.asarray(sides.experts.expert_rank, np.int64)
        experts = list(sides.experts.dies) * times
        names = [f"expert {expert}" for expert in range(self._num_experts)] * times
        self._copies = Outbox(
            die, layout.flow_tokens, np.repeat(np.asarray(self.served, np.int64), self._num_experts), experts
        )
        self._answers = Inbox(die, layout.flow_answers, experts, label, names)
        self.taken: Int64 = np.zeros(times, np.int64)  # the newest event pulled from each
        # Of a trace, where its owner draws this, and what it calls that.
        self.lane, self.called = "XCCL", ""

    def reset(self) -> None:
        """Forget all arrived tokens, even those that were posted and not pulled."""
        super().reset()
        self.taken[:] = self.inbox.view["event_id"]

    async def next_event(self, number: int) -> int:
        """Wait for the next tokens of the attention die served as `number`; return their event ID."""
        await newer(self.inbox, "A2E", self.label, self.taken, np.array([number]))
        return int(self.inbox.view[number]["event_id"])

    async def serve(self, number: int) -> None:
        """Carry the tokens that `next_event` has found there and back, for the attention die `number`.

        Raises DeadlineError naming the expert dies that do not answer in time.
        """
        event_id, token = await self._take(number)
        counts, sent = await self._hand_on(number, event_id, token)
        await self._answer(number, event_id, await self._merge(number, event_id, token, counts, sent))

    async def _take(self, number: int) -> tuple[int, npt.NDArray[np.void]]:
        """A2E, steps 5 to 7: pull an attention die's tokens to the place kept for them."""
        layout, field = self.layout, self.inbox.view[number]
        event_id, count = int(field["event_id"]), int(field["num_tokens"])
        if count > layout.max_tokens:
            raise ProtocolError(
                f"A2E: {self.label} has no room for the {count} rows that {self.inbox.names[number]} posts"
            )
        self.taken[number] = event_id
        rows = await self.inbox.pull("A2E", self._at(number, count), self.means, is_bulk=True, place=number)
        self._draw("A2E", number, event_id)
        return event_id, rows[:, : layout.token_dtype.itemsize].view(layout.token_dtype)[:, 0]

    async def _hand_on(
        self, number: int, event_id: int, token: npt.NDArray[np.void]
    ) -> tuple[Int64, SentRows]:
        """A2E', steps 3 and 4: post tokens, and wait only for the answers of dies that got any. Returns how
        many rows each die has for each attention die."""
        layout, means, num_experts = self.layout, self.means, self._num_experts
        payload, topk_idx = (np.ascontiguousarray(token[name]) for name in ("payload", "topk_idx"))
        ranks, scale = self._expert_rank, token["scale"]
        rows, sent = pack_tokens("A2E'", layout.naive, ranks, num_experts, payload, scale, topk_idx)
        mine = slice(number * num_experts, (number + 1) * num_experts)
        counts = np.zeros(len(self.served) * num_experts, np.int64)
        counts[mine] = sent.counts
        if not counts.any():
            return counts, sent
        await self._copies.write(rows, counts, means, "A2E' 3 write rows")
        await self._copies.post(event_id, counts, means, "A2E' 4 post fields", counts > 0)
        self._draw_all("A2E'", number, event_id, sent.counts)
        # It knows whom it waits for, so it is not the attention die behind it that gives up first.
        patience = means._replace(timeout_ns=means.timeout_ns * 9 // 10)
        await wait_for(self._answers, "E2A", event_id, np.flatnonzero(counts), patience)
        found = np.where(counts > 0, self._answers.view["num_tokens"], 0).astype(np.int64)
        check_counts("E2A", self.label, event_id, sent.counts, found[mine])
        self._draw_all("E2A", number, event_id, sent.counts)
        return counts, sent

    async def _merge(
        self, number: int, event_id: int, token: npt.NDArray[np.void], counts: Int64, sent: SentRows
    ) -> Float32:
        """E2A, steps 6 and 7: pull the answers and return each token's weighted sum, float32 [T, H]."""
        # The answers for each attention die that is served have blocks of their own here.
        place = number * self.layout.flow_blocks
        rows = await self._answers.pull("E2A", counts, self.means, place=place)
        answers = unpack_answers(self.layout.naive, rows, sent)
        total = partial(weighted_sum, answers, token["topk_weights"])
        return await self.work("E2A' 2 weighted sum", total, 2 * answers.size)

    async def _answer(self, number: int, event_id: int, payload: Float32) -> None:
        """E2A', steps 3 and 4: post the sums for one attention die."""
        layout, means = self.layout, self.means
        rows = np.zeros((len(payload), layout.answers.row_nbytes), np.uint8)
        rows[:, : layout.answer_dtype.itemsize].view(layout.answer_dtype)[:, 0]["payload"] = payload
        counts, chosen = self._at(number, len(payload)), np.arange(len(self.served)) == number
        await self.outbox.write(rows, counts, means, "E2A' 3 write rows")
        await self.outbox.post(event_id, counts, means, "E2A' 4 post field", chosen)
        self._draw("E2A'", number, event_id)

    def _at(self, number: int, count: int) -> Int64:
        """Return counts with `count` for one served attention die and 0 for the others."""
        counts = np.zeros(len(self.served), np.int64)
        counts[number] = count
        return counts

    def title(self, number: int) -> str:
        """Return the trace's name for the way of an attention die's tokens."""
        return f"{self.called} of attention {self.served[number]}"

    def _draw(self, op: str, number: int, event_id: int) -> None:
        """Draw the trampoline's end of an arrow from or to an attention die."""
        if (trace := self.die.trace).is_on:
            key = arrow(op, self.layout, self.sides.attention[self.served[number]], event_id)
            end = trace.arrive if op == "A2E" else trace.depart
            end(key, op, self.die.index, self.lane, self.die.clock.now - 1, self.title(number))

    def _draw_all(self, op: str, number: int, event_id: int, counts: Int64) -> None:
        """Draw the die's ends of arrows to or from all other expert dies that get tokens."""
        die = self.die
        for expert in np.flatnonzero(counts).tolist() if die.trace.is_on else ():
            if (peer := self.sides.experts.dies[expert]) != die.index:
                key = flow_arrow(op, self.layout, self.served[number], peer, event_id)
                end = die.trace.depart if op == "A2E'" else die.trace.arrive
                end(key, op, die.index, self.lane, die.clock.now - 1, self.title(number))


class Arrival(NamedTuple):
    """Tokens of an attention die, arrived at an expert die."""

    attention: int  # its rank
    event_id: int
    received: Received


class FlowExpertSide(Side):
    """A2E' and E2A of an expert die. `layout.plan_flow_expert` must have been called on its plan.

    Any number of arrivals may be under way; each is answered once, in any order.
    """

    role = "expert"

    def _connect(self) -> None:
        sides, layout = self.sides, self.layout
        ranks = range(len(sides.attention))
        peers = [sides.experts.dies[sides.trampoline(attention)] for attention in ranks]
        names = [f"attention {attention}" for attention in ranks]
        self.inbox = Inbox(self.die, layout.flow_tokens, peers, self.label, names)
        num_experts = sides.experts.num_ranks
        places = np.array([attention // num_experts for attention in ranks], np.int64)
        self.outbox = Outbox(self.die, layout.flow_answers, places * num_experts + self.rank, peers)
        self.taken: Int64 = np.zeros(len(self.sides.attention), np.int64)  # the newest event pulled from each
        # Of a trace, where its owner draws what it takes and answers, and what it calls that.
        self.lanes, self.called = ("XCCL", "XCCL"), ""

    def reset(self) -> None:
        """Forget all arrivals, also posted ones not yet taken."""
        super().reset()
        self.taken[:] = self.inbox.view["event_id"]

    async def arrivals(self) -> list[int]:
        """Wait, for as long as needed, for attention dies with newly posted tokens; return their ranks."""
        inbox, everybody = self.inbox, np.arange(len(self.taken))
        await newer(inbox, "A2E'", self.label, self.taken, everybody)
        return np.flatnonzero(inbox.view["event_id"] > self.taken).tolist()

    async def take(self, attention: int) -> Arrival:
        """Steps 6 and 7: pull an attention die's tokens to the place kept for them."""
        field = self.inbox.view[attention]
        event_id, count = int(field["event_id"]), int(field["num_tokens"])
        if not 0 < count <= self.inbox.blocks.rows_per_block:
            raise ProtocolError(
                f"A2E': {self.label} has no room for the {count} rows that attention {attention} posts"
            )
        self.taken[attention] = event_id
        counts = np.zeros(len(self.taken), np.int64)
        counts[attention] = count
        rows = await self.inbox.pull("A2E'", counts, self.means, place=attention)
        self._draw("A2E'", attention, event_id)
        return Arrival(attention, event_id, unpack_tokens(self.layout.naive, rows, counts))

    async def answer(self, arrival: Arrival, expert_out: Float32) -> None:
        """E2A, steps 1 to 4, for one attention die: answers float32 [N, H], a row for each of the
        arrival's."""
        layout, means, steps = self.layout.naive, self.means, self.steps
        steps.begin()
        rows = await load_answers(self, "E2A", layout, expert_out)
        counts = arrival.received.num_tokens_per_rank
        await self.outbox.write(rows, counts, means, "E2A 3 write rows")
        chosen = np.arange(len(counts)) == arrival.attention
        await self.outbox.post(arrival.event_id, counts, means, "E2A 4 post field", chosen)
        self._draw("E2A", arrival.attention, arrival.event_id)

    def _draw(self, op: str, attention: int, event_id: int) -> None:
        """Draw the expert die's end of an arrow from or to a trampoline on another die."""
        die, is_taken = self.die, op == "A2E'"
        if self.sides.experts.dies[self.sides.trampoline(attention)] != die.index:
            key = flow_arrow(op, self.layout, attention, die.index, event_id)
            end, lane = (die.trace.arrive, self.lanes[0]) if is_taken else (die.trace.depart, self.lanes[1])
            end(key, op, die.index, lane, die.clock.now - 1, self.called)


def flow_arrow(
    op: str, layout: A2ELayout, attention: int, expert: int, event_id: int
) -> tuple[str, str, int, int, int]:
    """Return the key of an arrow in traces, by which trampoline and expert die match the exchange of an
    attention rank's tokens."""
    return op, layout.name, attention, expert, event_id


async def newer(inbox: Inbox, op: str, label: str, taken: Int64, writers: Int64) -> None:
    """Wait, for as long as needed, until one of `writers` has posted an event not yet `taken`."""
    names = Names(inbox.names[writer] for writer in writers)
    await inbox.die.wait_fields(
        inbox.region.offset,
        inbox.view.nbytes,
        lambda offset, size: bool((inbox.view["event_id"][writers] > taken[writers]).any()),
        deadline_ns=None,
        describe=lambda: Waiting(op, label, names, "event ID", "a new one", "none"),
        idle=True,
    )


async def wait_for(inbox: Inbox, op: str, event_id: int, writers: Int64, means: Means) -> None:
    """Poll until each of `writers` has posted `event_id`. Raises DeadlineError naming those that have not,
    ProtocolError for one that is ahead."""
    if not len(writers):
        return
    die, events = inbox.die, inbox.view["event_id"]

    def observe(offset: int, nbytes: int) -> bool:
        found = events[writers]
        if (found > event_id).any():
            ahead = int(writers[(found > event_id).argmax()])
            name, newer = inbox.names[ahead], events[ahead]
            raise ProtocolError(f"{op}: {inbox.rank} waits for event {event_id}, but {name} is at {newer}")
        return bool((found == event_id).all())

    def describe() -> Waiting:
        late = [int(writer) for writer in writers if events[writer] != event_id]
        seen = {inbox.names[writer]: int(events[writer]) for writer in late[:8]}
        return Waiting(op, inbox.rank, Names(inbox.names[each] for each in late), "event ID", event_id, seen)

    await die.wait_fields(
        inbox.region.offset,
        inbox.view.nbytes,
        observe,
        deadline_ns=die.clock.now + means.timeout_ns,
        describe=describe,
    )
