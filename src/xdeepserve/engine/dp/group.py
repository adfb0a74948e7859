"""DP group: the books of a scheduler and an RTC, and the die that computes, or several dies (TP > 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from xdeepserve.comm.distflow import Completion, Endpoint
from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import EventLog, GroupId
from xdeepserve.engine.dp.group_books import GroupBooks
from xdeepserve.engine.dp.lost_blocks import LostBlocks
from xdeepserve.engine.dp.preemption import VictimPolicy
from xdeepserve.engine.dp.prefix_index import EvictionPolicy
from xdeepserve.engine.dp.prefixes import ShouldLoad
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import SampledToken
from xdeepserve.engine.dp.sequence import Sequence as Seq
from xdeepserve.engine.dp.step import PlannedStep, Scheduled, SeqResult, make_plan, observed, written_blocks
from xdeepserve.engine.messages import LOGPROB_SLOTS, CopyBlocks, Probe
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.plans import StepPlan
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address
from xdeepserve.model.canonical import Array


class Left(NamedTuple):
    """Entries that requests hold in the books of a DP group, a job executor or a whole engine, by kind.

    Once the requests have ended there must be none.
    """

    requests: int = 0  # that the engine has taken and that have not ended
    jobs: int = 0
    given: int = 0  # sequences that TE shells have given to a DP group
    transfers: int = 0  # of KV from prefill to decode, as the job executor sees them
    failures: int = 0  # links that a sequence has tried in vain
    places: int = 0  # sequences in the places of a scheduler
    tickets: int = 0
    handovers: int = 0  # blocks that are kept or reserved for a sequence between prefill and decode
    offers: int = 0  # of KV to sequences that arrive
    layers: int = 0  # of running steps, whose ends are told one by one
    completions: int = 0  # transfers of DistFlow that are open at this end, and requests that came early
    claims: int = 0  # on the memories of dies


class TransferEnded(events.AtGroup, frozen=True):
    """Step 8: a DP group has learnt that its side of a transfer ended, well or with an error."""

    completion: Completion


class GivesWay(NamedTuple):
    """Policies of a DP group for when blocks run out: which sequence gives way, and which cached block."""

    sequence: VictimPolicy
    block: EvictionPolicy


class DPGroup(GroupBooks):
    """Schedules sequences, launches steps on the group's dies, reads the results that the first die wrote.

    All dies of a group get the same commands, and hold the same blocks in the same slots.
    """

    def __init__(
        self,
        name: GroupId,
        dies: Sequence[Die],
        mems: Sequence[DieMemory],
        num_groups: int,
        steps: StepSizes,
        should_load: ShouldLoad | None,
        tell: EventLog,
        gives_way: GivesWay,
    ) -> None:
        kv = mems[0].kv.sizes
        rtc = RTC(kv.num_blocks, kv.block_size, kv.num_host_blocks, kv.max_cache_keys, gives_way.block)
        super().__init__(name, steps, rtc, tell, should_load, gives_way.sequence)
        self.dies, self.mems, self.mem, self.kv, self.num_groups = dies, mems, mems[0], kv, num_groups
        self.lost_blocks = LostBlocks(self.scheduler)
        self._num_done: Counter[int] = Counter()  # dies that have made the copies of a ticket
        self.endpoints: list[Endpoint] = []  # of DistFlow, one for each TE at the other side
        self._offers: dict[int, tuple[Endpoint, str]] = {}  # to arriving sequences, by seq_id
        self.by_layer: dict[int, list[int]] = {}  # by step: seq_ids whose layers leave as they end
        self._num_ended: Counter[tuple[int, int]] = Counter()  # by step and layer: dies that have ended it
        self._steps: dict[int, PlannedStep] = {}  # planned ones that have not ended, by number
        self._plans: dict[int, StepPlan] = {}  # of these
        self._num_told: Counter[int] = Counter()  # by step: layers of which it has been told that they ended
        self._faults: dict[int, dict[int, XDeepServeError]] = {}  # by step and logit row

    def left(self) -> Left:
        """Count the entries of sequences in the books of the group."""
        handover, endpoints = self.handover, self.endpoints
        return Left(
            places=self.places.num_placed,
            tickets=len(self.places.tickets),
            handovers=len(handover.sending) + len(handover.reserved),
            offers=len(self._offers),
            layers=len(self.by_layer) + len(self._num_ended),
            completions=sum(each.num_open + len(each.early_wants) for each in endpoints),
            claims=sum(len(die.memory.claims) for die in self.dies),
        )

    def plan(self, step_idx: StepNo) -> bool:
        """Schedule a step, and have the dies begin its copies and transfers; return whether the step has
        rows."""
        step = self.scheduler.schedule()
        self._steps[step_idx] = step
        self._plans[step_idx] = make_plan(step_idx, step.shares, self.kv.block_size)
        # Copies on write first: a block that only the cache still has may be one that a transfer overwrites.
        if step.copies:
            self.put(CopyBlocks(ticket=None, copies=step.copies))
        for ticket, copies in step.transfers:
            self.put(CopyBlocks(ticket=ticket, copies=copies))
        for seq in step.receives:
            endpoint, source = self._offers.pop(seq.seq_id)
            slots = seq.holding.slots
            by_rank = [self.block_pieces(slots, tp_rank) for tp_rank in range(len(self.dies))]
            pieces = [piece for part in by_rank for piece in part]
            self._receive(seq, endpoint, source, pieces)
        return bool(step.shares)

    def plan_empty(self, step_idx: StepNo) -> None:
        """Plan a step without rows, to run along where other groups run again what this one has ended."""
        self._steps[step_idx] = PlannedStep()
        self._plans[step_idx] = make_plan(step_idx, [], self.kv.block_size)

    def put(self, command: msgspec.Struct, delay_ns: int = 0) -> None:
        """Send a command to every die of the group, to be read after `delay_ns` (virtual ns)."""
        for die in self.dies:
            die.put(command, delay_ns)

    def probe(self) -> int:
        """Ask all dies of the group for a sign of life; return how many there are."""
        self.put(Probe())
        return len(self.dies)

    def finish_copies(self, ticket: int) -> None:
        """Note a die's copies of a ticket as made; the last die ends the ticket."""
        self._num_done[ticket] += 1
        pool = self.scheduler.pool
        num_dies = len(self.dies) if pool is None else pool.num_copiers(ticket)
        if self._num_done[ticket] == num_dies:
            del self._num_done[ticket]
            if pool is not None:
                pool.copied(ticket)
            self.scheduler.finish_transfer(ticket)

    def copy_pool(self, ticket: int) -> None:
        """Have dies make the copies of a ticket, for which the tier beyond host DRAM is ready now."""
        pool = self.scheduler.pool
        assert pool is not None
        if not pool.copy(ticket):
            self.scheduler.finish_transfer(ticket)

    def block_pieces(self, slots: Sequence[int], tp_rank: int) -> list[tuple[Address, int]]:
        """List raw addresses and sizes (bytes) of KV blocks on one of the dies, in the order of `slots`."""
        return [piece for slot in slots for piece in self.mems[tp_rank].kv.block_pieces("hbm", slot)]

    def arrive(self, seq: Seq, endpoint: Endpoint, source: str) -> None:
        """Take over a sequence prefilled elsewhere; `source` offers its KV blocks to `endpoint`."""
        self._offers[seq.seq_id] = (endpoint, source)
        self.handover.arrive(seq)

    def layer_pieces(self, slots: Sequence[int], tp_rank: int) -> list[list[tuple[Address, int]]]:
        """List addresses and sizes (bytes) of KV blocks by layer: the main model's layers, then MTP's
        part."""
        return self.mems[tp_rank].kv.layer_pieces(slots)

    def arrive_by_layer(self, seq: Seq, endpoint: Endpoint, source: str) -> None:
        """Step 6 for a sequence with a reservation: receive its layers as soon as `source` has them."""
        slots = self.handover.reserved[seq.seq_id].slots
        by_rank = [self.layer_pieces(slots, tp_rank) for tp_rank in range(len(self.dies))]
        pieces = [piece for part in zip(*by_rank, strict=True) for each in part for piece in each]
        self._receive(seq, endpoint, source, pieces)

    def _receive(self, seq: Seq, endpoint: Endpoint, source: str, pieces: list[tuple[Address, int]]) -> None:
        """Step 6: start the transfer that `source` has offered, into blocks that are there now."""
        endpoint.receive(seq.seq_id, source, pieces)
        nbytes = sum(size for _, size in pieces)
        self.tell(events.TransferBegan(seq.seq_id, self.id, source, is_source=False, nbytes=nbytes))

    def decline(self, seq: Seq) -> bool:
        """Drop an offer of KV blocks; return False if there is none, or the transfer has begun."""
        return self._offers.pop(seq.seq_id, None) is not None

    def poll_transfers(self) -> None:
        """Read DistFlow's completion queues and finish transfers. Failed ones are left to the job
        executor."""
        for endpoint in self.endpoints:
            for completion in endpoint.poll():
                self.tell(TransferEnded(completion.tag, self.id, completion))
                if completion.error is not None:
                    continue
                if completion.is_source:
                    self.handover.release(completion.tag)
                else:
                    self.scheduler.finish_transfer(self.places.ticket_of(completion.tag))
        self.leave_links()

    def take_arrived(self, seq: Seq) -> None:
        """Take a sequence's received blocks, where the link's completion queue will not be polled any
        more."""
        if self.places.of(seq) == "receiving":
            self.scheduler.finish_transfer(self.places.ticket_of(seq.seq_id))

    def leave_links(self) -> None:
        """Stop polling the completion queues of closed links."""
        self.endpoints = [endpoint for endpoint in self.endpoints if not endpoint.is_stopped]

    def missing(self, seq: Seq) -> tuple[int, int]:
        """Return how many tokens will not have been computed when the step under way ends, and how many
        will."""
        progress = self.scheduler.progress(seq)
        return progress.num_tokens - progress.num_computed, progress.num_computed

    @property
    def num_leaving(self) -> int:
        """Number of sequences whose places will be free when the step under way has ended."""
        return len(self.scheduler.leaving())

    @property
    def planned(self) -> list[int]:
        """Numbers of the steps that are planned and have not ended."""
        return sorted(self._plans)

    def num_rows(self, step_idx: StepNo) -> int:
        """Number of token rows of a step that is planned or under way."""
        return self._plans[step_idx].num_tokens

    def outlook(self, step_idx: StepNo) -> StepPlan:
        """Return the plan of a step or, before it is planned, the rows that it would have by counts alone."""
        if step_idx in self._plans:
            return self._plans[step_idx]
        plan = StepPlan(step=step_idx)
        for index, (start, num_rows) in enumerate(self.scheduler.outlook()):
            plan.positions.extend(range(start, start + num_rows))
            plan.seq_of.extend([index] * num_rows)
        return plan

    def launch(self, step_idx: StepNo, delay_ns: int = 0, bucket: int = 0, num_parts: int = 1) -> None:
        """Send the planned step to the dies; without work an empty one.

        `delay_ns` is the delay of the launch, `bucket` the number of rows of the graph that is launched. The
        dies cut the step into `num_parts` overlapping microbatches.
        """
        step = self._steps[step_idx]
        if self.tell.observers:
            step.start_ns = self.dies[0].clock.now + delay_ns
            step.num_used_blocks = self.rtc.num_blocks - self.rtc.num_available
        self._note_first_steps(step)
        if self.kv.sends_layers and not step.is_again:
            self._tell_last_chunks(step_idx, step)
        reports_layers = step_idx in self.by_layer
        before = self._plans.get(step_idx - 1) if step.is_again else None
        if before is not None:
            # It is run again, too: what it writes is copied then; all else has been, and may be gone since.
            written = written_blocks(before, self.kv.block_size)
            copies = [copy for copy in step.copies if copy.src in written]
            if copies:
                self.put(CopyBlocks(ticket=None, copies=copies))
        plan = self._plans[step_idx]
        told = {"bucket": bucket, "num_parts": num_parts, "reports_layers": reports_layers}
        self.put(msgspec.structs.replace(plan, **told), delay_ns)

    def forget_plan(self, step_idx: StepNo) -> None:
        """Drop a planned step because no DP group has rows in it, so it is not launched."""
        self._steps.pop(step_idx, None)
        self._plans.pop(step_idx, None)

    def renumber(self, step_idx: StepNo, later: StepNo) -> None:
        """Roll back a step under way; the same step will be launched again as step `later`.

        The repeated step has the same bits, because nothing reads its output before its end. Only layers
        whose end has not been told yet are told again.
        """
        step = self._steps[later] = self._steps.pop(step_idx)
        step.is_again = True
        self._plans[later] = msgspec.structs.replace(self._plans.pop(step_idx), step=later)
        self._faults.pop(step_idx, None)
        if step_idx in self.by_layer:
            self.by_layer[later] = self.by_layer.pop(step_idx)
            self._num_told[later] = self._num_told.pop(step_idx, 0)
        self._num_ended = Counter({key: n for key, n in self._num_ended.items() if key[0] != step_idx})

    def drop_lost(self) -> None:
        """After a rollback, leave sequences with lost blocks out of the steps, which will be launched again.
        The new plans also do not depend on anything that dies remember of earlier steps."""
        # As the step was planned: planning the next one, and the end of the one before, have changed them.
        tables: dict[int, dict[int, list[int]]] = {}
        used: dict[int, set[int]] = {}
        for number in sorted(self._steps):
            shares = self._steps[number].shares
            rows = zip(shares, self._plans[number].block_tables, strict=True)
            tables[number] = {share.seq.seq_id: table for share, table in rows}
            for seq_id, table in tables[number].items():
                used.setdefault(seq_id, set()).update(table)
        self.lost_blocks.drop([self._steps[number] for number in tables], used)
        before = None
        for number, slots in tables.items():
            step = self._steps[number]
            self.scheduler.keep(step, before)
            self._plans[number] = make_plan(number, step.shares, self.kv.block_size, slots)
            kept = {share.seq.seq_id for share in step.shares}
            if number in self.by_layer:
                self.by_layer[number] = [seq_id for seq_id in self.by_layer[number] if seq_id in kept]
            before = step

    def _tell_last_chunks(self, step_idx: StepNo, step: PlannedStep) -> None:
        """Tell the job executor about last chunks of prompts on their way to the dies. The answer may be a
        call of `send_by_layer`."""
        for share in step.shares:
            seq = share.seq
            if not share.ends or seq.is_finished or seq.num_generated + 1 >= seq.max_tokens:
                continue
            num_tokens = share.start + share.num_tokens
            self.tell(events.LastChunkLaunched(seq.seq_id, self.id, step_idx, num_tokens))

    def send_by_layer(self, seq: Seq, step_idx: StepNo, num_tokens: int) -> None:
        """Send the KV of a sequence's first `num_tokens` positions layer by layer, as the step's layers
        end."""
        self.handover.send_early(seq, num_tokens)
        self.by_layer.setdefault(step_idx, []).append(seq.seq_id)

    def end_layer(self, step_idx: StepNo, layer: int) -> None:
        """Note a layer's end on a die; after the last die, the layer's KV may be sent."""
        key = step_idx, layer
        self._num_ended[key] += 1
        if self._num_ended[key] == len(self.dies):
            del self._num_ended[key]
            if step_idx not in self.by_layer or layer < self._num_told[step_idx]:
                return
            self._num_told[step_idx] = layer + 1
            for seq_id in self.by_layer[step_idx]:
                self.tell(events.LayerEnded(seq_id, self.id, layer))

    def _note_first_steps(self, step: PlannedStep) -> None:
        """Note when sequences first take part in a step: that ends their time in the queue.

        Virtual time may pass between planning a step and launching it. A sequence that was aborted meanwhile
        has ended for its caller, and does not begin.
        """
        for share in step.shares:
            seq = share.seq
            if seq.scheduled_ns is None and not seq.is_finished:
                seq.scheduled_ns = self.dies[0].clock.now
                if seq.on_scheduled is not None:
                    seq.on_scheduled(seq)

    def note_faults(self, step_idx: StepNo, faults: dict[int, XDeepServeError]) -> None:
        """Note the logit rows of a step for which a die reported an error."""
        if faults:
            self._faults.setdefault(step_idx, {}).update(faults)

    def finish(self, step_idx: StepNo) -> None:
        """Read the results of the step that the dies have completed, and advance the sequences."""
        step = self._steps.pop(step_idx)
        del self._plans[step_idx]
        self.by_layer.pop(step_idx, None)
        self._num_told.pop(step_idx, None)
        faults = self._faults.pop(step_idx, {})
        if step.shares:
            results = self._read_results(step_idx, step.shares, faults)
            if step.start_ns is not None:
                end_ns, shares = self.dies[0].clock.now, observed(step, results)
                used = step.num_used_blocks
                self.tell(events.StepEnded(self.id, step_idx, step.start_ns, end_ns, used, shares))
            self.scheduler.finish_step(step, results)

    def _read_results(
        self, step_idx: StepNo, shares: list[Scheduled], faults: dict[int, XDeepServeError]
    ) -> list[SeqResult]:
        self.dies[0].check_alive()
        num_rows, result_of = sum(len(share.logit_rows) for share in shares), self.mem.result
        sampled = result_of("sampled", step_idx, num_rows).tolist()
        accepted, drafts, results, first = [], [], [], 0
        if self.steps.mtp:
            accepted = result_of("num_accepted", step_idx, len(shares)).tolist()
            drafts = result_of("drafts", step_idx, len(shares), self.steps.mtp).tolist()
        for index, share in enumerate(shares):
            ends = share.ends
            # Without logit rows in the whole step nothing was sampled, and the die wrote no acceptance.
            result = SeqResult(num_accepted=accepted[index] if share.num_drafts else 0)
            rows = range(first, first + len(share.logit_rows))
            if ends and self.steps.mtp:
                result.drafts = drafts[index]
            num_valid = len(share.logit_rows) - share.num_drafts + result.num_accepted
            # Of a row behind a rejected draft nothing counts, a fault neither.
            result.error = next((faults[row] for row in rows[:num_valid] if row in faults), None)
            for offset in range(num_valid):
                row = first + offset
                is_prompt = share.logit_rows[offset] < share.num_tokens - 1 or not ends
                result.rows.append(self._read_row(step_idx, share.seq, row, sampled[row], is_prompt))
            first += len(share.logit_rows)
            results.append(result)
        return results

    def _read_row(self, step_idx: StepNo, seq: Seq, row: int, token_id: int, is_prompt: bool) -> SampledToken:
        """Read row `row` of the die's output region."""
        params = seq.params

        def take(name: str, *shape: int) -> Array:
            return self.mem.result(name, step_idx, *shape)

        keep = seq.keep_logits == "all" or (seq.keep_logits == "sampled" and not is_prompt)
        logits = None
        if keep:
            logits = take("logits", row + 1, self.mem.config.vocab_size)[row].copy()
        wanted = params.prompt_logprobs if is_prompt else params.logprobs
        if wanted is None:
            return SampledToken(token_id, is_prompt, logits)
        ids = take("logprob_ids", row + 1, LOGPROB_SLOTS)[row, : wanted + 1].tolist()
        values = take("logprobs", row + 1, LOGPROB_SLOTS)[row, : wanted + 1].tolist()
        return SampledToken(
            ids[0],
            is_prompt,
            logits,
            logprob=values[0],
            rank=int(take("ranks", row + 1)[row]),
            top=tuple(zip(ids[1:], values[1:], strict=True)),
        )
