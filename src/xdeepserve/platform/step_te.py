"""A TE at the grain of a step: its scheduler's decisions by counts, at the price of each step.

Decode-only steps are taken in runs, up to the next end of a request. Contexts grow by a known number in each
step, so prices rise along a line, and a run costs the sum of its steps. A request that arrives meanwhile ends
the run after the step under way. So the simulation's work grows with requests and chunks of prompts, not with
tokens or TEs.

Each DP group has KV and a prefix cache of its own. A block shared by a running request is also counted as its
own, so there is a little less room here than in `engine/dp/rtc.py`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from xdeepserve.engine.balance.dp import LONG_PROMPT, prefill_cost
from xdeepserve.engine.balance.prompt_tree import PromptTree
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.prices.step_price import StepCounts, StepPrice

# What a TE at the grain of a step has to do for one request, and what its DP groups have room for.


class StepLimits(NamedTuple):
    """Capacity of a DP group, and progress of a request in a step.

    num_seqs         sequences
    num_rows         token rows of a step
    num_positions    of KV
    block            tokens of a block of the trace
    rows_each        of a sequence that decodes, in a step: one, and its drafts
    tokens_each      that it gets of them on average
    """

    num_seqs: int
    num_rows: int
    num_positions: int
    block: int
    rows_each: int = 1
    tokens_each: float = 1.0


class TETask:
    """A request's prefill, decode or both, at a TE.

    A memory pool has the first `pooled` blocks of its prompt; its DP group has `own` blocks in its cache.
    """

    __slots__ = (
        *("base", "before", "cached", "cost", "group", "left", "need", "number", "own", "pooled", "request"),
        "serial",
    )

    def __init__(self, number: int, request: TracedRequest, serial: int) -> None:
        self.number, self.request, self.serial = number, request, serial
        self.group, self.cached, self.before, self.left = -1, 0, 0, 0
        self.cost, self.base, self.need = 0.0, 0.0, 0
        self.own = self.pooled = 0

    @property
    def is_long(self) -> bool:
        return self.request.input_length >= LONG_PROMPT


LONGEST_RUN = 256  # steps whose prices are taken for a line


class StepTE:
    """A TE at the grain of a step: requests come by `give`, and time passes by `begin` and `end`.

    `prefills` and `decodes` say which halves of a request it does. `tell(blocks, has)` is called when it has
    new blocks of prompts, or has lost some. `fetch(task)` asks for blocks that a pool has and the DP group
    lacks. It returns whether they are on their way; then `fetched` will be called.
    """

    def __init__(
        self,
        price: StepPrice,
        limits: StepLimits,
        prefills: bool = True,
        decodes: bool = True,
        tell: Callable[[Sequence[int], bool], None] = lambda blocks, has: None,
        fetch: Callable[[TETask], bool] = lambda task: False,
    ) -> None:
        count = price.num_groups
        self.price, self.limits, self.prefills, self.decodes = price, limits, prefills, decodes
        self.tell, self.fetch = tell, fetch
        self.tree = PromptTree()  # of its DP groups
        self.waiting: deque[TETask] = deque()
        self.num_tasks = self.num_long = self.num_short = 0
        self.queued = self.positions = 0.0  # prefill cost, and KV positions, of all that it has
        self.coming = 0.0  # positions whose KV is on its way from TEs that prefill
        self.busy_ns = self.prefill_ns = 0.0  # in steps, and in those that have parts of prompts
        self.num_steps = 0
        self._queues: list[deque[TETask]] = [deque() for _ in range(count)]
        self._fetching: list[dict[int, TETask]] = [{} for _ in range(count)]  # by serial: KV is on its way
        self._queued = [0.0] * count
        self._active: dict[int, None] = {}  # groups that prefill
        self._running = [0] * count
        self._bases = [0.0] * count  # of the sequences that decode: their context when no step had been taken
        self._held = [0] * count
        self._caches: list[dict[int, None]] = [{} for _ in range(count)]
        self._ends: list[tuple[int, int, TETask]] = []
        self._step = 0
        self._chunks: list[tuple[TETask, int]] = []
        self._start = self._first = self._slope = 0.0
        self._count = 0  # steps under way

    @property
    def kv_load(self) -> float:
        """Share of KV in use or promised to waiting requests and to KV on its way."""
        return (self.positions + self.coming) / (len(self._held) * self.limits.num_positions)

    @property
    def queued_ns(self) -> float:
        """Estimate of the time [ns] to compute all waiting prompts, in full steps of all groups."""
        return self.queued * self.token_ns

    @property
    def token_ns(self) -> float:
        """Time [ns] of a prompt's token, in full steps of all groups, without attention."""
        rows, count = self.limits.num_rows, self.price.num_groups
        return self.price(StepCounts(rows, rows * count, 0.0, 0.0)) / (rows * count)

    # ---- requests -----------------------------------------------------------------------------------

    def tasks(self) -> list[TETask]:
        """List all tasks of the TE: waiting, in prefill, in decode."""
        tasks = [*self.waiting, *(task for group in self._fetching for task in group.values())]
        tasks += [task for queue in self._queues for task in queue]
        return tasks + [task for _, _, task in sorted(self._ends, key=lambda end: end[:2])]

    def need_of(self, request: TracedRequest) -> int:
        """Return the KV positions of a request in its whole life at this TE."""
        return request.input_length + (request.output_length if self.decodes else 0)

    def give(self, task: TETask) -> None:
        """Give the TE a task, which waits for a DP group."""
        task.need = self.need_of(task.request)
        self.num_tasks += 1
        self.positions += task.need
        if self.prefills:
            self.num_long += task.is_long
            self.num_short += not task.is_long
            task.cost = self._cost(task, task.pooled)
            self.queued += task.cost
        self.waiting.append(task)
        self._admit()

    def _admit(self) -> None:
        """Give DP groups to waiting tasks, in order, as long as a group has room for the first."""
        while self.waiting:
            task = self.waiting[0]
            found = self.tree.match(task.request.blocks) if self.prefills else {}
            group = self._group_for(task, found)
            if group is None:
                return
            self.waiting.popleft()
            self._place(task, group, found.get(group, 0))

    def _group_for(self, task: TETask, found: dict[int, int]) -> int | None:
        limits, need = self.limits, task.need
        room = [
            group
            for group, held in enumerate(self._held)
            if held + need <= limits.num_positions and self._num_seqs(group) < limits.num_seqs
        ]
        if not room:
            return None
        if not self.prefills:
            return min(room, key=lambda group: (self._held[group], group))

        costs = {group: self._cost(task, max(own, task.pooled)) for group, own in found.items()}
        others = self._cost(task, task.pooled)  # of groups that have nothing of it, which are most

        def key(group: int) -> tuple[float, int, int, int]:
            cost = self._queued[group] + costs.get(group, others)
            return cost, -found.get(group, 0), self._held[group], group

        return min(room, key=key)

    def _num_seqs(self, group: int) -> int:
        return self._running[group] + len(self._queues[group]) + len(self._fetching[group])

    def _cost(self, task: TETask, num_blocks: int) -> float:
        """Compute the prefill cost of a task's prompt with `num_blocks` blocks cached."""
        cached = self._num_cached(task, num_blocks)
        return prefill_cost(float(task.request.input_length - cached), float(cached))

    def _num_cached(self, task: TETask, num_blocks: int) -> int:
        return min(num_blocks * self.limits.block, task.request.input_length - 1)

    def _place(self, task: TETask, group: int, num_blocks: int) -> None:
        task.group = group
        self._held[group] += task.need
        if not self.prefills:
            self._decode(task)
            return
        task.own = num_blocks
        is_fetched = self.fetch(task)
        task.cached = task.before = self._num_cached(task, max(num_blocks, task.pooled))
        task.left = task.request.input_length - task.cached
        self.queued -= task.cost
        task.cost = prefill_cost(float(task.left), float(task.cached))
        self.queued += task.cost
        cache = self._caches[group]
        for block in task.request.blocks[:num_blocks]:  # used now
            if block in cache:
                del cache[block]
                cache[block] = None
        self._queued[group] += task.cost
        if is_fetched:
            self._fetching[group][task.serial] = task
        else:
            self._queue(task)
        self._trim(group)

    def _queue(self, task: TETask) -> None:
        self._queues[task.group].append(task)
        self._active[task.group] = None

    def fetched(self, task: TETask) -> None:
        """Queue a task for prefill after its blocks have come from the pool."""
        del self._fetching[task.group][task.serial]
        self._queue(task)

    def _decode(self, task: TETask) -> None:
        """Start to decode a task that has its first token, from the next step on."""
        limits = self.limits
        steps = math.ceil((task.request.output_length - 1) / limits.tokens_each)
        task.base = task.request.input_length + 1 - limits.tokens_each * self._step
        self._running[task.group] += 1
        self._bases[task.group] += task.base
        heapq.heappush(self._ends, (self._step + steps, task.serial, task))

    # ---- time ---------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Plan a step, or a run of steps, from now on. Returns when it ends, or None if there is nothing to
        do."""
        self._start, self._count, self._slope, self._chunks = now, 0, 0.0, []
        if self._active:
            self._first, self._count = self._plan_chunks(), 1
        elif self._ends:
            self._count = max(1, min(LONGEST_RUN, self._ends[0][0] - self._step))
            self._first = self._decode_price(self._step)
            if self._count > 1:
                last = self._decode_price(self._step + self._count - 1)
                self._slope = (last - self._first) / (self._count - 1)
        return self.ends_at if self._count else None

    @property
    def ends_at(self) -> float:
        """Time at the end of the run under way."""
        return self._start + self._elapsed(self._count)

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return not self._count

    def _elapsed(self, count: int) -> float:
        return count * self._first + self._slope * count * (count - 1) / 2

    def interrupt(self, now: float) -> None:
        """End the run with the step that is under way, because a task has come."""
        low, high = 1, self._count
        while low < high:
            middle = (low + high) // 2
            if self._start + self._elapsed(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self._count = min(self._count, low)

    def _contexts(self, step: int) -> list[float]:
        passed = self.limits.tokens_each * step
        return [base + num * passed for base, num in zip(self._bases, self._running, strict=True)]

    def _decode_price(self, step: int) -> float:
        each = self.limits.rows_each
        context = max(self._contexts(step))
        rows = each * sum(self._running)
        return self.price(StepCounts(each * max(self._running), rows, each * context, context))

    def _plan_chunks(self) -> float:
        """Fill the rows left free by decoding with parts of prompts, in order of arrival. Returns the price
        of the step."""
        each, room = self.limits.rows_each, self.limits.num_rows
        reads = self._contexts(self._step)
        rows = [each * num for num in self._running]
        contexts = [each * read for read in reads]
        for group in self._active:
            for task in self._queues[group]:
                chunk = min(task.left, room - rows[group])
                if chunk <= 0:
                    break
                rows[group] += chunk
                contexts[group] += chunk * (task.before + (chunk + 1) / 2)
                reads[group] += task.before + chunk
                self._chunks.append((task, chunk))
        attention = [*map(self.price.attention, rows, contexts, reads)]
        most = attention.index(max(attention))
        counts = StepCounts(max(rows), sum(rows), contexts[most], reads[most])
        return self.price(counts)

    def end(self) -> tuple[list[TETask], list[TETask]]:
        """End the run under way. Returns the tasks with a first token, and the tasks that are finished here.

        A task with one token is in both lists, and so is every task of a TE that only computes prompts.
        """
        self.busy_ns += self._elapsed(self._count)
        self.prefill_ns += self._elapsed(self._count) if self._chunks else 0.0
        self.num_steps += self._count
        self._step += self._count
        self._count = 0
        first = [task for task, chunk in self._chunks if self._computed(task, chunk)]
        done = []
        while self._ends and self._ends[0][0] <= self._step:
            done.append(heapq.heappop(self._ends)[2])
            self._running[done[-1].group] -= 1
            self._bases[done[-1].group] -= done[-1].base
        for task in first:
            if self.decodes and task.request.output_length > 1:
                self._decode(task)
            else:
                done.append(task)
        for task in done:
            self._held[task.group] -= task.need
            self.num_tasks -= 1
            self.positions -= task.need
        if done:
            self._admit()
        return first, done

    def _computed(self, task: TETask, chunk: int) -> bool:
        """Record computed rows of a prompt. Returns whether they were the last; other tasks may then use its
        blocks."""
        task.before += chunk
        task.left -= chunk
        cost = task.cost
        task.cost = prefill_cost(float(task.left), float(task.before)) if task.left else 0.0
        self.queued += task.cost - cost
        self._queued[task.group] += task.cost - cost
        if task.left:
            return False
        self.num_long -= task.is_long
        self.num_short -= not task.is_long
        queue = self._queues[task.group]
        queue.popleft()
        if not queue:
            del self._active[task.group]
            if not self._fetching[task.group]:
                self._queued[task.group] = 0.0
        if not any(self._queues) and not any(self._fetching) and not self.waiting:
            self.queued = 0.0  # what rounding has left
        whole = task.request.blocks[: task.request.input_length // self.limits.block]
        self._publish(task.group, whole)
        return True

    # ---- prefix caches ------------------------------------------------------------------------------

    def _publish(self, group: int, blocks: Sequence[int]) -> None:
        cache = self._caches[group]
        self.tell([block for block in blocks if not self.tree.is_held(block)], True)
        self.tree.publish(group, blocks)
        for block in reversed(blocks):  # the deepest is the first to go
            cache.pop(block, None)
            cache[block] = None
        self._trim(group)

    def _trim(self, group: int) -> None:
        """Evict the least recently used blocks to make room for running tasks."""
        cache = self._caches[group]
        room = max(0, self.limits.num_positions - self._held[group]) // self.limits.block
        gone: list[int] = []
        while len(cache) > room:
            block = next(iter(cache))
            del cache[block]
            gone.append(block)
        self._forget(group, gone)

    def _forget(self, group: int, gone: Iterable[int]) -> None:
        gone = list(gone)
        self.tree.evict(group, gone)
        self.tell([block for block in gone if not self.tree.is_held(block)], False)

    def move_out(self) -> list[tuple[TETask, int]]:
        """Take all tasks away between steps, from a TE that only decodes. Returns them with the number of
        tokens that each lacks."""
        found = [(task, task.request.output_length - 1) for task in self.waiting]
        for end, _, task in sorted(self._ends, key=lambda each: each[:2]):
            left = math.ceil((end - self._step) * self.limits.tokens_each)
            found.append((task, min(left, task.request.output_length - 1)))
            self._running[task.group] -= 1
            self._bases[task.group] -= task.base
            self._held[task.group] -= task.need
        self.num_tasks, self.positions = 0, 0.0
        self.waiting.clear()
        self._ends.clear()
        return found

    def check_integrity(self) -> None:
        """Check the counts against the TE's tasks."""
        tasks = self.tasks()
        assert self.num_tasks == len(tasks)
        assert self.positions == sum(task.need for task in tasks)
        held = [0] * len(self._held)
        for task in tasks[len(self.waiting) :]:
            held[task.group] += task.need
        assert held == self._held
        for group, cache in enumerate(self._caches):
            assert len(cache) * self.limits.block + held[group] <= self.limits.num_positions
            assert self._num_seqs(group) <= self.limits.num_seqs
            for block in cache:
                assert group in self.tree.match([block])
