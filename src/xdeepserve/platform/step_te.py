"""A TE at the grain of a step: the engine's TE-shell and schedulers decide, and a step takes its price.

Each DP group is the engine's own without dies (`step_group.py`), so prompts are dealt out and cut, KV blocks
are allocated, shared, evicted and taken back as in the engine. Only the inside of a step is left out: its
duration is the price for its rows and contexts (`prices/step_price.py`).

Steps are taken in runs, up to the next change in any DP group. Contexts grow by a known number in each step,
so prices rise along a line, and a run costs the sum of its steps. A request that arrives meanwhile ends the
run after the step under way. So the simulation's work grows with requests and not with tokens or TEs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

from xdeepserve.engine.balance.dp import GroupStatus
from xdeepserve.engine.balance.te_load import PromptSteps, TEWork
from xdeepserve.engine.deploy.deployment import HealthConfig, RecoveryConfig
from xdeepserve.engine.deploy.sizes import StepSizes, TESettings
from xdeepserve.engine.dp.events import EventLog, Given, GroupId, Observed
from xdeepserve.engine.dp.prefix_index import Node
from xdeepserve.engine.dp.sequence import SampledToken
from xdeepserve.engine.dp.sequence import Sequence as Seq
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.engine.te.shell import TEShell
from xdeepserve.platform import step_group
from xdeepserve.platform.step_group import StepGroup, StepLoad, TracedSequence, opening, traced_sequence
from xdeepserve.platform.step_pool import StepPool, TEPool
from xdeepserve.platform.step_rtc import StepRTC
from xdeepserve.platform.traced_tokens import Name, blocks_ending_in
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.prices.step_price import StepCounts, StepPrice


class StepLimits(NamedTuple):
    """Capacity of a DP group, and progress of a request in a step.

    num_seqs         sequences
    num_rows         token rows of a step
    num_positions    of KV
    block            tokens of a block of the trace
    rows_each        of a sequence that decodes, in a step: one, and its drafts
    tokens_each      that it gets of them on average
    kv_block         positions of a KV block; 0: as many as a block of the trace has
    """

    num_seqs: int
    num_rows: int
    num_positions: int
    block: int
    rows_each: int = 1
    tokens_each: float = 1.0
    kv_block: int = 0

    @property
    def block_size(self) -> int:
        """Positions of a KV block."""
        return self.kv_block or self.block

    @property
    def num_blocks(self) -> int:
        """KV blocks of a DP group."""
        return self.num_positions // self.block_size

    def sizes(self, prefills: bool, decodes: bool) -> StepSizes:
        """Return the limits as the engine's scheduler reads them."""
        mtp = self.rows_each - 1
        return StepSizes(
            role="both" if prefills and decodes else "prefill" if prefills else "decode",
            max_model_len=self.num_blocks * self.block_size,
            max_tokens=self.num_rows,
            max_part=self.num_rows,
            max_seqs=self.num_seqs,
            max_logit_rows=min(self.num_rows, max(64, self.num_seqs * self.rows_each)),
            mtp=mtp,
            num_mtp_layers=mtp,
            caches_prefixes=True,  # to decode, too: prompts that are alike share blocks
        )


Line = tuple[float, float]  # of times in a run of steps: in the first one, and growth from step to step
SETTINGS = TESettings(
    dispatch="collaborative",
    decode="kv",
    victim="last",
    eviction="lru",
    placement="eplb",
    status_period_ns=0,
    execution=None,
    seed=0,
    health=HealthConfig(),
    recovery=RecoveryConfig(),
    invariants=False,
)


class Unlike:
    """DP groups without dies that may get new work: all, but of those that are alike only the first.

    `num` requests are to be dealt out now; `openings` are names of their first blocks. Groups that have no
    sequence, and cache no beginning of these requests, are alike to every policy, which takes the first.
    """

    def __init__(self, groups: Sequence[StepGroup]) -> None:
        self._groups = groups
        self.num, self.openings = 0, set[Name]()
        self.occupied = set[GroupRank]()  # groups that have sequences

    @property
    def open_ranks(self) -> tuple[GroupRank, ...]:
        """Ranks of the DP groups that are not alike, and of as many others as there are requests."""
        unlike = set[GroupRank]()
        for name in self.openings:
            unlike.update(group.rank for group in self._groups if name in group.openings)
        unlike |= self.occupied
        alike = (group.rank for group in self._groups if group.rank not in unlike)
        return tuple(sorted([*unlike, *islice(alike, self.num)]))


class StepTE:
    """A TE at the grain of a step: requests come by `give`, and time passes by `begin` and `end`.

    `prefills` and `decodes` say which halves of a request it does. `tell(blocks, has)` is called when it has
    new blocks of prompts, or has lost some.
    """

    def __init__(
        self,
        price: StepPrice,
        limits: StepLimits,
        prefills: bool = True,
        decodes: bool = True,
        tell: Callable[[Sequence[int], bool], None] = lambda blocks, has: None,
    ) -> None:
        self.price, self.limits, self.prefills, self.decodes = price, limits, prefills, decodes
        self.tell = tell
        self.waiting: deque[TracedSequence] = deque()  # that the TE-shell does not know yet
        self._kv_load: float | None = None  # since the last change in a DP group
        self.busy_ns, self.prompts = 0.0, PromptSteps()  # in steps, and in those that have parts of prompts
        self.num_steps = 0
        self.held: dict[int, int] = {}  # DP groups that have a block of the trace, by its number
        self._tasks: dict[int, TracedSequence] = {}  # by number
        self._first: list[TracedSequence] = []  # of the step that ends
        self._done: list[TracedSequence] = []
        log = EventLog()
        log.act = self._hear
        sizes = limits.sizes(prefills, decodes)
        self.groups = [self._group(GroupRank(rank), sizes, log) for rank in range(price.num_groups)]
        self._open = Unlike(self.groups)
        self.shell: TEShell[StepGroup] = TEShell(
            *(self.groups, self._open, Lifetime("", log), log, SETTINGS),
            *(lambda: 0, lambda: None, None, None),
        )
        self.shell.wake = self._wake
        self._woken: dict[GroupRank, StepGroup] = {}  # to be planned anew
        self._stuck: dict[GroupRank, StepGroup] = {}  # that have sequences, and had no rows when planned
        self._under_way: dict[GroupRank, StepGroup] = {}
        self._showing: list[StepGroup] = []  # whose cached blocks change in the run under way
        self._count = 0  # steps under way, from `_start` on
        self._start = self._price = self._slope = self._first_tail = 0.0
        self._early_ns: float | None = None  # when a group in no step takes its turn before the others
        self._ending: list[StepGroup] = []  # that have left the last exchange of their step, and not ended it
        self._exchanged = 0.0  # when they left it
        self._since = self._ended = 0.0  # the latest begin of a step, and end of a group's step
        self._before = lru_cache(maxsize=None)(price.ends.before)
        self._tail = lru_cache(maxsize=None)(price.ends.tail)
        self._together = lru_cache(maxsize=None)(price.together)

    def _group(self, rank: GroupRank, sizes: StepSizes, log: EventLog) -> StepGroup:
        limits = self.limits
        rtc = StepRTC(limits.num_blocks, limits.block_size, self._tell)
        return StepGroup(GroupId("", rank), sizes, rtc, log, limits.tokens_each)

    def use_pool(self, pool: TEPool) -> None:
        """Load blocks of prompts from a memory pool that DP groups lack, from now on."""
        for group in self.groups if self.prefills else ():
            group.scheduler.pool = StepPool(group, pool, self._wake)

    @property
    def num_tasks(self) -> int:
        """Number of requests at the TE."""
        return len(self._tasks)

    @property
    def kv_load(self) -> float:
        """Share of KV blocks in use or reserved, averaged over the DP groups. A run of steps does not change
        it: what is reserved at first is used then."""
        if self._kv_load is None:
            self._kv_load = sum(group.kv_load for group in self.groups) / len(self.groups)
        return self._kv_load

    def used_positions(self, now: float) -> int:
        """Count the positions of KV blocks in use, those of the step under way included."""
        self._catch_up(now)
        return sum(group.num_taken_blocks for group in self.groups) * self.limits.block_size

    @property
    def token_ns(self) -> float:
        """Time [ns] of a prompt's token, in full steps of all groups, without attention."""
        rows, count = self.limits.num_rows, self.price.num_groups
        return self.price(StepCounts(rows, rows * count, 0.0, 0.0)) / (rows * count)

    # ---- requests -----------------------------------------------------------------------------------

    def tasks(self) -> list[TracedSequence]:
        """List all requests of the TE, in order of arrival here."""
        return [*self._tasks.values()]

    def give(self, number: int, request: TracedRequest) -> None:
        """Give the TE a request, prefilled if it only decodes. A DP group is chosen before the next step."""
        seq = traced_sequence(number, request, self.limits.block, self._advance, not self.prefills)
        self._tasks[number] = seq
        if self.prefills:
            self.waiting.append(seq)
        else:
            self.shell.receive(seq)

    def on_receive(self, call: Callable[[StepGroup, list[Seq]], None]) -> None:
        """Have a function called when a DP group has room for the KV of some sequences."""
        for group in self.groups:
            group.receive = partial(call, group)

    def take_received(self, group: StepGroup, seq: Seq) -> None:
        """Let a DP group decode a sequence whose KV has come, from its next step on."""
        group.scheduler.finish_transfer(group.places.ticket_of(seq.seq_id))
        self._wake(group)

    def sender_of(self, number: int) -> StepGroup | None:
        """Return the DP group that keeps the blocks of a prompt until decode has taken them."""
        return next((group for group in self.groups if number in group.handover.sending), None)

    def release(self, number: int) -> None:
        """Free the blocks of a prompt computed here, which are kept until decode has taken them."""
        group = self.sender_of(number)
        if group is not None:
            group.handover.release(number)
            self._wake(group)

    def _hear(self, event: Observed) -> None:
        """Take a prefilled sequence into the DP group that it was given to."""
        if isinstance(event, Given) and not self.prefills:
            self.groups[event.group.rank].handover.arrive(self._tasks[event.seq_id])

    def wake(self) -> None:
        """Have the DP groups planned anew that have sequences and are in no step: something has come or gone
        at the TE, which wakes them all in the engine, too."""
        stuck, self._stuck = self._stuck, {}
        for group in stuck.values():
            self._wake(group)

    def _wake(self, group: StepGroup) -> None:
        group.changed()
        self._kv_load = None
        self._woken[group.rank] = group
        self._open.occupied.add(group.rank)

    def _deal(self) -> None:
        """Have the TE-shell deal out waiting requests, as many as its policy could place now."""
        shell, limit = self.shell, self.limits.num_rows
        if len(self.waiting) == 1 and not shell.pending:
            shell.dispatch([self.waiting.popleft()])
        elif self.waiting or shell.pending:
            room, rows = _room([group.status() for group in self.groups], limit)
            if not room or rows <= 0:
                return
            rows -= sum(min(len(seqs[0].token_ids), limit) for seqs in shell.pending)
            while self.waiting and rows > 0 and len(shell.pending) < room:
                seq = self.waiting.popleft()
                rows -= min(seq.num_prompt, limit)
                shell.dispatch([seq])
        if shell.pending:
            for group in self._under_way.values():
                group.show()
        if shell.pending or shell.arrivals:
            self._open.num = shell.num_pending
            size = self.limits.block_size
            self._open.openings = {opening(seqs[0], size) for seqs in shell.pending}
            shell.deal()

    def _advance(self, seq: Seq, tokens: list[SampledToken]) -> bool:
        """Take new tokens of a sequence; return whether it has ended."""
        assert isinstance(seq, TracedSequence)
        seq.told_ns, num_generated = self._ended, seq.num_generated
        if self.prefills and num_generated == len(tokens):
            self._first.append(seq)
        is_over = num_generated >= seq.max_tokens
        if is_over or not self.decodes:
            self._done.append(seq)
        return is_over

    # ---- time ---------------------------------------------------------------------------------------

    def turn(self, now: float) -> float | None:
        """Take the turns of DP groups that are due, and begin a step or a run of steps if one has rows.

        Returns when the next turn is due, or None if there is nothing to do. `take` has the results, those
        of groups that end later as well.
        """
        if self._count:
            self._end_run(now)
        self.wake()
        has_begun = self._rest_turns(now)
        while self._ending and not has_begun and self._due <= now:
            has_begun = self._turn(now, self._ending.pop(0))
        if has_begun:
            has_news = bool(self._stuck)  # that count when the next step is planned
            for group in self._ending:  # which runs the step that another one has begun, and dealt out for
                self._end(group)
                has_news |= self._has_undealt and group.rank in self._woken
                self._plan(now, group)
            self._ending.clear()
            self._count, self._since = self._run(), now
            if has_news:
                self._count = 1
        self._early_ns = self._exchange_ns if self._rests and (self._stuck or self._has_undealt) else None
        return None if self.is_idle else self.ends_at

    @property
    def _has_undealt(self) -> bool:
        """Whether requests have no DP group yet."""
        return bool(self.waiting or self.shell.pending or self.shell.arrivals)

    @property
    def _rests(self) -> bool:
        """Whether steps are under way and a DP group is in none: it leaves each step at the last exchange."""
        return bool(self._count) and len(self._under_way) < len(self.groups)

    def _rest_turns(self, now: float) -> bool:
        """Take the turn of groups that are in no step, if it is due; return whether one begins a step."""
        if self._ending and self._early_ns is None:
            return False
        self._deal()
        return self._plan_resting(now)

    def _turn(self, now: float, group: StepGroup) -> bool:
        """End a group's step, deal out what waits, and plan; return whether a step has begun."""
        self._end(group)
        if self._has_undealt:
            self._deal()
        self._plan(now, group)
        return self._plan_resting(now) or group.step is not None

    def _plan_resting(self, now: float) -> bool:
        """Plan for the groups that have got something and are in no step; return whether one has rows."""
        has_rows = False
        for rank in sorted(self._woken) if self._woken else ():
            group = self._woken[rank]
            if not group.ahead:
                has_rows = self._plan(now, group) or has_rows
        return has_rows

    def _plan(self, now: float, group: StepGroup) -> bool:
        """Plan a group's next step at the end of its last one, if anything has changed; return whether it
        has rows."""
        group.begins = max(now, group.ends)
        if self._woken.pop(group.rank, None) is not None:
            if group.step is not None:
                self._finish(group)
            self._kv_load = None
            if group.places.has_work and group.plan():
                self._under_way[group.rank] = group
                group.tail = self._tail(group.load.rows, group.load.logits)
            elif group.places.waiting or group.places.swapped or group.places.arriving:
                self._stuck[group.rank] = group
        return group.step is not None

    def _run(self) -> int:
        """Price the steps under way; return how many follow each other on a line of prices.

        The groups meet when the last one has come to the first exchange, and then wait for the slowest.
        """
        price, fullest, rows, logits, count = self.price, 0, 0, 0, step_group.LONGEST_RUN
        share, meets = price.ends.share, 0.0
        lines, heads = [], []  # by groups: time of attention, and up to the first exchange, and their growth
        for group in self._under_way.values():
            load, done = group.load, group.done
            fullest, rows, logits = max(fullest, load.rows), rows + load.rows, max(logits, load.logits)
            count = min(count, group.horizon - done)
            less, kv, alike = self._attention(load, done)
            count = min(count, alike)
            before = self._before(load.rows)
            meets = max(meets, group.begins + before + share * max(less[0], kv[0]))
            alone = group.tail + before
            for line in (less,) if less[0] >= kv[0] and less[1] >= kv[1] else (less, kv):
                lines.append(line)
                heads.append((alone + share * line[0], share * line[1]))
        most, slope = max(lines)
        head, head_slope = max(heads)
        for found, (highest, steepest) in ((lines, (most, slope)), (heads, (head, head_slope))):
            for each, growth in found:
                if growth > steepest:
                    count = min(count, 1 + int((highest - each) / (growth - steepest)))
        together = self._together(fullest, rows, logits) + (1 - share) * most
        self._price, self._slope = head + together, head_slope + (1 - share) * slope
        self._start = meets + together - self._price
        self._first_tail = min(group.tail for group in self._under_way.values())
        self._showing = [group for group in self._under_way.values() if group.shows] if count > 1 else []
        return count

    def _attention(self, load: StepLoad, done: int) -> tuple[Line, Line, int]:
        """Return lines of a group's time of attention: to compute, in the faster way, and to read KV; and for
        how many steps that way is the faster one."""
        of, count = self.price.attention, step_group.LONGEST_RUN
        context = load.context + done * load.more_context
        kv_tokens = load.kv_tokens + done * load.more_kv_tokens
        absorbed = of.absorbed * context, of.absorbed * load.more_context
        plain = (
            of.plain * context + of.per_earlier * max(0.0, kv_tokens - load.rows),
            of.plain * load.more_context + of.per_earlier * load.more_kv_tokens,
        )
        less, more = (absorbed, plain) if absorbed <= plain else (plain, absorbed)
        if more[1] < less[1]:
            count = 1 + int((more[0] - less[0]) / (less[1] - more[1]))
        return less, (of.per_kv_token * kv_tokens, of.per_kv_token * load.more_kv_tokens), count

    @property
    def _due(self) -> float:
        """Time of the next turn after the last exchange of a step."""
        return self._exchanged + self._ending[0].tail

    @property
    def ends_at(self) -> float:
        """Time of the first turn at the end of the run under way, or of the next one."""
        if self._early_ns is not None:
            return self._early_ns
        return self._exchange_ns + self._first_tail if self._count else self._due

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return not self._count and not self._ending

    @property
    def _exchange_ns(self) -> float:
        """Time of the last exchange of the run under way."""
        return self._start + self._elapsed(self._count)

    def _elapsed(self, count: int) -> float:
        return count * self._price + self._slope * count * (count - 1) / 2

    def _num_ended(self, now: float) -> int:
        """Count the steps of the run under way that have ended by now."""
        now -= self._first_tail
        if not self._count or self._start + self._price > now:
            return 0
        ended = self._num_until(now)
        return ended - (ended > 0 and self._start + self._elapsed(ended) > now)

    def work_at(self, now: float) -> TEWork:
        """Return the work of the TE now, with the step under way as computed."""
        self._catch_up(now)
        running = [*self._under_way.values()] if self._count else []
        for group in running:
            group.ahead = 1
        statuses = [group.status() for group in self.groups]
        for group in running:
            group.ahead = 0
        role = self.groups[0].steps.role
        pending = [seq.num_prompt for seq in self.waiting] + self.shell.pending_tokens
        return TEWork(role, statuses, pending, self.limits.num_seqs * len(self.groups))

    def _catch_up(self, now: float) -> None:
        """Let the run under way begin with the step that is under way now."""
        ended = min(self._num_ended(now), self._count - 1)
        if ended > 0:
            at = self._start + self._elapsed(ended)
            self._note_steps(ended, at)
            for group in self._under_way.values():
                group.done += ended
            self._price, self._start = self._price + self._slope * ended, at
            self._count, self._since = self._count - ended, at

    @property
    def shows(self) -> bool:
        """Whether blocks are computed or evicted within the run under way."""
        return bool(self._showing)

    def show(self, now: float, name: Name) -> bool:
        """Tell of the blocks that steps of the run under way have computed and evicted by now, where prompts
        begin with the KV block of this name. Returns False if there are none."""
        shown = [group for group in self._showing if group.may_show(name)]
        if not shown or not self._num_ended(now):
            return False
        self._catch_up(now)
        for group in shown:
            group.show_under_way()
        return True

    def _note_steps(self, count: int, now: float) -> None:
        """Count the next steps of the run under way, which took until now."""
        self.busy_ns += now - self._since
        self.num_steps += count
        loads = [(group.load, group.done) for group in self._under_way.values()]
        if not any(load.prefills for load, _ in loads):
            return
        gap = self.price.gap  # of the host: no time on dies, which is what the engine's events tell
        self.prompts.total_ns += now - self._since - count * gap
        for ended in {0, count - 1}:
            cost = sum(load.prompt_cost(done + ended) for load, done in loads)
            self.prompts.hear(self._price + self._slope * ended - gap, cost)

    def interrupt(self, now: float) -> None:
        """End the run with the step that is under way, because a request has come.

        A group that is in no step ends its part at the last exchange, and deals the request out there. Later
        it does so at once, if it is awake, as it is while it keeps blocks.
        """
        self._early_ns = None
        if self._count:
            self._count = self._num_until(now - self._first_tail)
            if self._rests and self._exchange_ns >= now:
                self._early_ns = self._exchange_ns
                return
        if any(not group.is_empty for group in self.groups if group.rank not in self._under_way):
            self._early_ns = now

    def _num_until(self, now: float) -> int:
        """Count the steps of the run up to the one that is under way now."""
        count, passed = 1, now - self._start
        if passed > self._price:
            # The root of elapsed(count) = passed, in the form that a slope of 0 has too; then no rounding.
            first = self._price - self._slope / 2
            count = math.ceil(2 * passed / (first + math.sqrt(first**2 + 2 * self._slope * passed)))
            count = min(self._count, count)
        while count > 1 and self._start + self._elapsed(count - 1) >= now:
            count -= 1
        while count < self._count and self._start + self._elapsed(count) < now:
            count += 1
        return count

    def _end_run(self, now: float) -> None:
        """Bring all groups to the last exchange of the run under way; from there on each ends its step
        alone."""
        self._exchanged = self._start + self._elapsed(self._count)
        self._note_steps(self._count, now)
        for group in self._under_way.values():
            group.done += self._count - 1
            group.ahead = 1
        self._ending = sorted(self._under_way.values(), key=lambda group: (group.tail, group.rank))
        self._count = 0

    def _end(self, group: StepGroup) -> None:
        """End a group's step, the last of a run."""
        group.done, group.ahead = group.done + 1, 0
        group.ends = self._exchanged + group.tail
        if group.done == group.horizon:
            self._finish(group)
            self._woken[group.rank] = group

    def stop(self, now: float) -> None:
        """End all steps under way, with what groups have done by then, and begin no others."""
        if self._count:
            self._end_run(now)
        for group in self._ending:
            self._end(group)
        self._ending.clear()

    @property
    def told_at(self) -> float:
        """Time of the next token that `take` has not told of: a first one, or a last one here."""
        first, done = self._first, self._done
        return min(first[0].told_ns if first else math.inf, done[0].told_ns if done else math.inf)

    def take(self, now: float) -> tuple[list[TracedSequence], list[TracedSequence]]:
        """Return the requests that have got a first token by now, and those that are finished here.

        A request with one token is in both lists, and so is every request of a TE that only computes prompts.
        """
        first = [seq for seq in self._first if seq.told_ns <= now]
        done = [seq for seq in self._done if seq.told_ns <= now]
        del self._first[: len(first)], self._done[: len(done)]
        for seq in done:
            self.shell.forget(seq)
            del self._tasks[seq.seq_id]
        return first, done

    def _finish(self, group: StepGroup) -> None:
        """Have a DP group finish the steps that have ended."""
        del self._under_way[group.rank]
        self._ended, self._kv_load = group.ends, None
        group.finish()
        if group.is_empty:
            self._open.occupied.discard(group.rank)

    # ---- prefix caches ------------------------------------------------------------------------------

    def _tell(self, nodes: Sequence[Node], has: bool) -> None:
        """Tell the job executor of a prompt's blocks that one DP group is the first to have, or the last."""
        held, changed = self.held, []
        for node in nodes:
            for block in blocks_ending_in(node.tokens):
                num = held.get(block, 0) + (1 if has else -1)
                if num:
                    held[block] = num
                else:
                    del held[block]
                if num == has:
                    changed.append(block)
        if changed and self.prefills:
            self.tell(changed, has)

    def move_out(self) -> list[tuple[TracedSequence, TracedRequest]]:
        """Take all requests away between steps, from a TE that only decodes. Returns each with what is left
        of it: the prompt is what has KV, the answer begins with the newest token."""
        found = []
        for group in [*self._under_way.values()]:
            self._finish(group)
        for seq in self.tasks():
            num_generated = seq.num_generated
            left = seq.request._replace(
                input_length=seq.num_prompt + num_generated - 1,
                output_length=seq.max_tokens - num_generated + 1,
            )
            found.append((seq, left))
            given = self.shell.group_of(seq)
            self.shell.remove(seq)
            if given is not None and given.places.of(seq) == "receiving":  # its KV has nowhere to come
                given.scheduler.finish_transfer(given.places.ticket_of(seq.seq_id))
        self._tasks.clear()
        self._woken.clear()
        self._stuck.clear()
        self._open.occupied.clear()
        self._kv_load = None
        return found

    def check_integrity(self) -> None:
        """Check the books of all DP groups, and the counts against the TE's requests."""
        placed = len(self.waiting) + self.shell.num_pending
        for group in self.groups:
            group.scheduler.check_integrity()
            holdings = [seq.holding for seq in group.places.sequences()]
            group.rtc.check_integrity([*holdings, *group.handover.holdings()])
            placed += group.places.num_placed - len(group.places.sending)
            assert len(group.places.running) <= self.limits.num_seqs
        assert placed == self.num_tasks
        held = Counter(
            block
            for group in self.groups
            for node in group.rtc.index.nodes()
            if node.is_ready
            for block in blocks_ending_in(node.tokens)
        )
        assert held == self.held


def _room(statuses: Iterable[GroupStatus], num_rows: int) -> tuple[int, int]:
    """Count the places of DP groups, and the rows of a step that those with a place have left."""
    open_ones = [status for status in statuses if status.num_free_places > 0]
    return (
        sum(status.num_free_places for status in open_ones),
        sum(max(0, num_rows - status.queued_tokens) for status in open_ones),
    )
