"""Tokens that flow: A2E and E2A without a barrier, so that experts start on what has arrived (XDS 5.3).

In the exchanges of XDS 3.2 and 3.3 every rank tells every other, also that it sends nothing, and all wait for
all: one late rank holds up everybody. Here an attention die tells only the expert dies that it has tokens
for, an expert die serves each attention die by itself, as it comes, and an attention die waits only for the
experts that its own tokens went to. So attention dies may be in different layers at the same time; the event
ID in a field says in which.

The rows, fields and blocks are those of the naive A2E, steps 3 to 7. One set of buffers is enough:
  - An attention die overwrites its block for an expert die after it has had that one's answer, which was
    posted after the rows were pulled.
  - An expert die overwrites an answer, or the place of an attention die's rows, when that die has sent new
    tokens, which it does after it has pulled the answer before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from xdeepserve.comm.channel import Inbox, Names
from xdeepserve.comm.exchange.combine import check_counts, load_answers
from xdeepserve.comm.exchange.rows import Float32, Int64, Received, unpack_tokens
from xdeepserve.comm.means import Means
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.comm.trampoline.naive import NaiveAttentionSide, NaiveExperts
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.waiting import Waiting


class FlowAttentionSide(NaiveAttentionSide):
    """A2E and E2A of one attention die. `layout.plan_naive_attention` must have been called on its plan."""

    async def _post(self, event_id: int, start_ns: int) -> None:
        """Step 4, at those only that tokens go to."""
        counts = self.sent.counts
        if counts.any():
            await self.outbox.post(event_id, counts, self.means, "A2E 4 post fields", start_ns, counts > 0)
            self._draw("A2E", event_id, self.die.trace.depart)

    async def _answered(self, event_id: int) -> Int64:
        """Step 5, for the answers of those only that tokens went to."""
        wanted = self.sent.counts > 0
        await wait_for(self.inbox, "E2A", event_id, np.flatnonzero(wanted), self.means)
        found = np.where(wanted, self.inbox.view["num_tokens"], 0).astype(np.int64)
        check_counts("E2A", self.label, event_id, self.sent.counts, found)
        self._draw("E2A", event_id, self.die.trace.arrive)
        return found

    def _draw(self, op: str, event_id: int, end: Callable[[Hashable, str, int, str, int], None]) -> None:
        """This die's end of an arrow for each expert die that tokens went to."""
        die = self.die
        if die.trace.is_on:
            for expert in np.flatnonzero(self.sent.counts).tolist():
                key = flow_arrow(op, self.layout, die.index, self.sides.experts.dies[expert], event_id)
                end(key, op, die.index, self.steps.lane, die.clock.now - 1)


class Arrival(NamedTuple):
    """Tokens of one attention die, at an expert die."""

    attention: int  # its rank
    event_id: int
    received: Received


class FlowExpertSide(NaiveExperts):
    """A2E and E2A of one expert die. `layout.plan_naive_expert` must have been called on its plan.

    Any number of arrivals may be under way; each is answered once, in any order.
    """

    def _connect(self) -> None:
        super()._connect()
        self.taken: Int64 = np.zeros(len(self.sides.attention), np.int64)  # the newest event pulled from each
        # Of a trace, where its owner draws what it takes and answers, and what it calls that.
        self.lanes, self.called = ("XCCL", "XCCL"), ""

    def reset(self) -> None:
        """Forget all arrivals, also those that have been posted and not taken."""
        super().reset()
        self.taken[:] = self.inbox.view["event_id"]

    async def arrivals(self) -> list[int]:
        """Wait, for as long as it takes, for attention dies that have posted new tokens; their ranks."""
        inbox, die = self.inbox, self.die
        start, nbytes = inbox.region.offset, inbox.view.nbytes

        def describe() -> Waiting:
            return Waiting("A2E", self.label, "any attention die", "event ID", "a new one", "none")

        await die.wait_fields(
            start,
            nbytes,
            lambda offset, size: bool((inbox.view["event_id"] > self.taken).any()),
            deadline_ns=None,
            describe=describe,
            idle=True,
        )
        return np.flatnonzero(inbox.view["event_id"] > self.taken).tolist()

    async def take(self, attention: int) -> Arrival:
        """Steps 6 and 7: pull an attention die's tokens to the place kept for them."""
        field = self.inbox.view[attention]
        event_id, count = int(field["event_id"]), int(field["num_tokens"])
        if not 0 < count <= self.inbox.blocks.rows_per_block:
            raise ProtocolError(
                f"A2E: {self.label} has no room for the {count} rows that attention {attention} posts"
            )
        self.taken[attention] = event_id
        counts = np.zeros(len(self.taken), np.int64)
        counts[attention] = count
        rows = await self.inbox.pull("A2E", counts, self.means, place=attention)
        die, peer = self.die, self.sides.attention[attention]
        key = flow_arrow("A2E", self.layout, peer, die.index, event_id)
        die.trace.arrive(key, "A2E", die.index, self.lanes[0], die.clock.now - 1, self.called)
        return Arrival(attention, event_id, unpack_tokens(self.layout.naive, rows, counts))

    async def answer(self, arrival: Arrival, expert_out: Float32) -> None:
        """E2A, steps 1 to 4, to one attention die: float32 [N, H], a row for each of the arrival's."""
        layout, means, steps, die = self.layout.naive, self.means, self.steps, self.die
        start_ns = die.clock.now
        steps.begin()
        launched_ns = start_ns + die.spec.kernel_ns(0, 0)
        rows = await load_answers(self, "E2A", layout, expert_out)
        counts = arrival.received.num_tokens_per_rank
        await self.outbox.write(rows, counts, means, "E2A 3 write rows", launched_ns)
        chosen = np.arange(len(counts)) == arrival.attention
        await self.outbox.post(arrival.event_id, counts, means, "E2A 4 post field", start_ns, chosen)
        key = flow_arrow(
            "E2A", self.layout, self.sides.attention[arrival.attention], die.index, arrival.event_id
        )
        die.trace.depart(key, "E2A", die.index, self.lanes[1], die.clock.now - 1, self.called)


def flow_arrow(
    op: str, layout: A2ELayout, attention: int, expert: int, event_id: int
) -> tuple[str, str, int, int, int]:
    """What the two ends of an exchange between two dies call it, in traces."""
    return op, layout.name, attention, expert, event_id


async def wait_for(inbox: Inbox, op: str, event_id: int, writers: Int64, means: Means) -> None:
    """Poll until each of `writers` has posted `event_id`. DeadlineError naming those that have not,
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
