"""Asynchronous scheduling: plans made from counts while the step before runs. It changes no token.

The scheduler is tested against a die that is played by the test: it has memory, and looks whether what a row
would attend to is what its sequence has computed there.
"""

import asyncio
from collections.abc import Sequence as Seq
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tools import loads
from tests.tools import one_die
from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.scheduler import Scheduler
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.dp.step import PlannedStep, SeqResult, make_plan
from xdeepserve.engine.plans import BlockCopy, StepPlan
from xdeepserve.history import History, serve
from xdeepserve.llm import LLM, build_engine, digest
from xdeepserve.model.kernels import carried

BLOCK = 16


def resolve(
    plan: StepPlan, block_size: int, sampled: list[int], accepted: list[int], drafts: list[list[int]]
) -> StepPlan:
    """The plan with its token ids, positions and slots, from the results of the step before: row by row."""
    tokens, positions, slots = list(plan.token_ids), list(plan.positions), list(plan.slots)
    num_done = [0] * len(plan.carried_seq)  # rows of each sequence
    for row, seq in enumerate(plan.seq_of):
        before = plan.carried_seq[seq]
        if before < 0:
            continue
        shift, number = accepted[before], num_done[seq]
        tokens[row] = drafts[before][number - 1] if number else sampled[plan.carried_row[seq] + shift]
        positions[row] += shift
        block, offset = divmod(positions[row], block_size)
        slots[row] = plan.block_tables[seq][block] * block_size + offset
        num_done[seq] += 1
    found = msgspec.structs.replace(plan, token_ids=tokens, positions=positions, slots=slots)
    assert found == by_kernel(plan, block_size, sampled, accepted, drafts)
    return found


def by_kernel(
    plan: StepPlan, block_size: int, sampled: list[int], accepted: list[int], drafts: list[list[int]]
) -> StepPlan:
    """The same by the kernel of the dies."""
    tables = np.zeros((len(plan.block_tables), max(map(len, plan.block_tables), default=0)), np.int32)
    for row, table in zip(tables, plan.block_tables, strict=True):
        row[: len(table)] = table
    lists = (plan.token_ids, plan.positions, plan.slots, plan.seq_of)
    rows = [np.array(each, np.int32) for each in lists]
    before = [np.array(each, np.int32) for each in (plan.carried_seq, plan.carried_row, sampled, accepted)]
    width = max(map(len, drafts), default=1)
    made = np.array(drafts, np.int32).reshape(len(drafts), width)
    carried.resolve(*rows, tables, *before, made, block_size)
    tokens, positions, slots = (each.tolist() for each in rows[:3])
    return msgspec.structs.replace(plan, token_ids=tokens, positions=positions, slots=slots)


class Job:
    """A sequence, and the tokens that the model says after its prompt."""

    def __init__(self, seq_id: int, num_prompt: int, num_new: int, max_tokens: int) -> None:
        self.received: list[int] = []
        self.num_new = num_new
        self.tokens = [*range(num_prompt), *(1000 * (seq_id + 1) + i for i in range(400))]
        self.chain = [0]  # chain[n]: stands for the first n tokens
        for token in self.tokens:
            self.chain.append(hash((self.chain[-1], token)))
        params = SamplingParams(max_tokens=max_tokens)
        self.seq = Sequence(seq_id, 0, list(range(num_prompt)), num_prompt, max_tokens, params, 0, self._take)

    def _take(self, seq: Sequence, rows: list[SampledToken]) -> bool:
        self.received += [row.token_id for row in rows]
        return len(self.received) >= self.num_new


class Die:
    """KV memory, and what the last step has left there."""

    def __init__(self, jobs: dict[int, Job], num_drafts: int) -> None:
        self.jobs, self.num_drafts = jobs, num_drafts
        self.memory: dict[tuple[str, int], list[int]] = {}
        self.sampled: list[int] = []
        self.accepted: list[int] = []
        self.drafts: list[list[int]] = []

    def begin(self, copies: Seq[BlockCopy]) -> None:
        """A transfer has begun: nobody may look at its target."""
        for copy in copies:
            self.memory[copy.dst_tier, copy.dst] = [-1] * BLOCK

    def end(self, copies: Seq[BlockCopy]) -> None:
        """It reads its source up to its end."""
        for copy in copies:
            source = self.memory.get((copy.src_tier, copy.src), [-1] * BLOCK)
            self.memory[copy.dst_tier, copy.dst] = list(source)

    def run(self, plan: StepPlan, step: PlannedStep) -> list[SeqResult]:
        """Complete the plan, look at what it reads, write what it writes, sample."""
        plan = resolve(plan, BLOCK, self.sampled, self.accepted, self.drafts)
        assert len(set(plan.slots)) == plan.num_tokens, "two rows write the same slot"
        self.sampled, self.accepted, self.drafts, results, row = [], [], [], [], 0
        for seq_idx, share in enumerate(step.shares):
            job, table = self.jobs[share.seq.seq_id], plan.block_tables[seq_idx]
            first = plan.positions[row]
            cells = [self._cell(table, position) for position in range(first)]
            assert cells == job.chain[1 : first + 1], "attention to what the sequence has not computed"
            result = SeqResult()
            cell, is_right = job.chain[first], True
            for offset in range(share.num_rows):
                position, token = plan.positions[row + offset], plan.token_ids[row + offset]
                if token != job.tokens[position]:
                    assert offset >= share.num_tokens, "a wrong token that is no draft"
                    is_right = False
                elif offset >= share.num_tokens and is_right:
                    result.num_accepted += 1
                cell = hash((cell, token))
                slot = plan.slots[row + offset]
                self.memory.setdefault(("hbm", slot // BLOCK), [-1] * BLOCK)[slot % BLOCK] = cell
                if offset in share.logit_rows:
                    said = job.tokens[position + 1] if is_right else -7
                    self.sampled.append(said)
                    if is_right:
                        result.rows.append(SampledToken(said, False, None))
            next_position = first + share.num_tokens + result.num_accepted + 1
            places = range(next_position, next_position + self.num_drafts)
            drafts = [job.tokens[place] if place % 3 else 0 for place in places]
            result.drafts = drafts if share.ends else []
            self.accepted.append(result.num_accepted)
            self.drafts.append(drafts)
            results.append(result)
            row += share.num_rows
        return results

    def _cell(self, table: list[int], position: int) -> int:
        block, offset = divmod(position, BLOCK)
        return self.memory.get(("hbm", table[block]), [-1] * BLOCK)[offset]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(0, 40), st.integers(0, 20)),
        min_size=1,
        max_size=10,
    ),
    st.integers(12, 40),
    st.integers(1, 4),
    st.integers(7, 12),
    st.integers(0, 2),
    st.dictionaries(st.integers(0, 9), st.integers(0, 60), max_size=4),
    st.sampled_from([(0, False), (9, False), (9, True), (40, True)]),
    st.integers(1, 4),
    st.booleans(),
)
def test_what_is_planned_ahead_is_computed_right(
    sizes: list[tuple[int, int, int, int]],
    max_tokens: int,
    max_seqs: int,
    num_blocks: int,
    num_drafts: int,
    cancel_at: dict[int, int],
    host: tuple[int, bool],
    delay: int,
    has_forks: bool,
) -> None:
    """Lengths, arrivals, ends that only the output handler sees, aborts, preemption, prefixes, forks."""
    num_host, swaps = host
    scheduler = Scheduler(
        StepSizes(
            max_model_len=num_blocks * BLOCK,
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_part=max_tokens,
            max_logit_rows=max_tokens,
            mtp=num_drafts,
            preempts_by_swap=swaps,
            plans_ahead=True,
        ),
        RTC(num_blocks, BLOCK, num_host),
        loads if num_host else None,
    )
    jobs, arrivals = {}, []
    for seq_id, (num_prompt, num_new, unseen, arrival) in enumerate(sizes):
        if has_forks and seq_id % 2:
            num_prompt = sizes[seq_id - 1][0]
        room = num_blocks * BLOCK - num_prompt
        # What ends a sequence: its length, or something that no count tells of.
        jobs[seq_id] = Job(seq_id, num_prompt, min(num_new, room), min(num_new + unseen, room))
        arrivals.append(arrival)
    die, transfers = Die(jobs, num_drafts), {}
    running: tuple[PlannedStep, StepPlan] | None = None
    for turn in range(3000):
        for seq_id, arrival in enumerate(arrivals):
            if arrival == turn:
                leader = jobs[seq_id - 1].seq if has_forks and seq_id % 2 else None
                scheduler.add(jobs[seq_id].seq, leader)
        if turn > 45 and running is None and not scheduler.places.has_work:
            break
        step = scheduler.schedule()
        for ticket, copies in step.transfers:
            die.begin(copies)
            transfers[ticket] = (turn + delay, copies)
        planned = (step, make_plan(turn, step.shares, BLOCK)) if step.shares else None
        assert step.num_rows <= max_tokens
        assert len(step.shares) <= max_seqs
        scheduler.check_integrity()
        assert planned or running or transfers or not scheduler.places.has_work or turn <= 45
        for seq_id, when in cancel_at.items():
            if when == turn and seq_id in jobs and jobs[seq_id].seq in scheduler.places.sequences():
                scheduler.remove(jobs[seq_id].seq)  # while it runs, or is planned, or both
                scheduler.check_integrity()
        if running is not None:
            scheduler.finish_step(running[0], die.run(running[1], running[0]))
            scheduler.check_integrity()
        for ticket in [ticket for ticket, (end, _) in transfers.items() if end <= turn]:
            die.end(transfers.pop(ticket)[1])
            scheduler.finish_transfer(ticket)
            scheduler.check_integrity()
        die.end(step.copies)  # on write: after the step before, before this one
        running = planned
    else:
        raise AssertionError("the scheduler did not finish")
    for ticket in list(transfers):
        scheduler.finish_transfer(ticket)
    assert scheduler.rtc.num_available == num_blocks
    assert scheduler.rtc.num_host_available == num_host
    for seq_id, job in jobs.items():
        num_prompt = job.seq.num_prompt
        assert job.seq.is_finished
        assert job.received == job.tokens[num_prompt : num_prompt + len(job.received)]
        if seq_id not in cancel_at:
            assert job.num_new <= len(job.received) <= job.num_new + num_drafts


PROMPTS = [[5, 6, 7], list(range(20, 61)), [200], list(range(20, 45)), list(range(20, 70))]
PARAMS = [
    SamplingParams(max_tokens=3 * i + 9, temperature=0.8 * (i % 2), seed=i, n=1 + (i == 3), ignore_eos=i < 4)
    for i in range(len(PROMPTS))
]


def served(deployment: str, overrides: Seq[str]) -> str:
    return serve(History(deployment, ("max_model_len=128", *overrides), PROMPTS, PARAMS, model="tiny")).digest


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS, model="tiny", max_model_len=128))


TIGHT = ("cache.num_blocks=8", "scheduler.max_num_seqs=4")
WAYS = [
    ("monolithic", []),
    ("monolithic", ["scheduler.max_num_batched_tokens=13", "scheduler.max_num_seqs=4", "mtp=2"]),
    ("monolithic", [*TIGHT, "cache.preemption=swap", "cache.num_host_blocks=16", "cache.load=always"]),
    ("monolithic", [*TIGHT, "mtp=1"]),
    ("colocated", ["dies=2", "mtp=2"]),
    ("colocated", ["dies=2", "tp=2"]),
    ("colocated", ["dies=4", "tp=2", "tp_mode=sp-tp-sp", "mtp=1"]),
    ("pd", ["prefill.dies=1", "decode.dies=2", *TIGHT, "mtp=2"]),
    ("moe-attention", ["mtp=1"]),
    ("transformerless", ["execution.mode=op"]),
    ("transformerless", ["mtp=2"]),
    ("moe-attention", ["mtp=2", "lockstep=true"]),
    ("colocated", ["dies=3", "mtp=2", "lockstep=true"]),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("deployment", "overrides"), WAYS)
def test_overlap_changes_no_bit(expected: str, deployment: str, overrides: list[str]) -> None:
    assert served(deployment, [*overrides, "execution.overlap=true"]) == expected


@pytest.mark.parametrize("mtp", [0, 1, 2])
def test_stop_strings_and_end_tokens_are_seen_a_step_late_and_cut_the_same(mtp: int) -> None:
    """The trained model ends by itself, or at a word in the middle of what it says."""
    prompts = ["Once upon a time", "What is 47 + 25?"]
    every = [SamplingParams(max_tokens=60, temperature=0.0, stop=[" a"]), SamplingParams(max_tokens=60)]
    made = []
    for overrides in ([], ["execution.overlap=true"]):
        with LLM("tiny", overrides=[f"mtp={mtp}", *overrides]) as llm:
            outputs = llm.generate(prompts, every)
            choices = [output.outputs[0] for output in outputs]
            made.append([(each.text, each.token_ids, each.finish_reason) for each in choices])
    assert made[0] == made[1]
    assert made[0][0][2] == "stop"


def test_the_gap_disappears_because_the_plan_is_there() -> None:
    """Steps follow each other without the scheduler's time between them; the first one waits for it."""
    starts: dict[bool, list[int]] = {}
    for overlap in (False, True):
        with LLM("tiny", overrides=[f"execution.overlap={str(overlap).lower()}"]) as llm:
            [executor], clock = llm.engine.je.tes[0].executors, llm.engine.plan.pod.clock
            step, times = executor.step, []

            async def timed(plan: StepPlan, step=step, times=times, clock=clock) -> None:
                times.append(clock.now)
                await step(plan)
                times.append(clock.now)

            executor.step = timed  # type: ignore[method-assign]
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            gap = round(1e9 * llm.engine.plan.pod.spec.scheduler_gap.value)
            starts[overlap] = times
    idle = {
        overlap: [start - end for end, start in pairwise(times[1:])][::2] for overlap, times in starts.items()
    }
    durations = [end - start for start, end in pairwise(starts[True])][::2]
    assert all(wait >= gap for wait in idle[False])
    # The host plans while the die computes: the longer of the two counts, not both.
    assert all(wait <= max(0, gap - min(durations[2:])) + 700_000 for wait in idle[True][2:])
    assert starts[True][-1] < starts[False][-1]


async def test_aborts_while_a_step_runs_and_the_next_one_is_planned() -> None:
    long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    engine = build_engine(
        "tiny", "colocated", "int8", overrides=["dies=2", "mtp=1", "execution.overlap=true"]
    )
    await engine.start()

    async def tokens(request_id: str) -> list[int]:
        return [t async for delta in engine.submit([7, 8, 9], params, request_id) for t in delta.token_ids]

    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    alone = await tokens("alone")
    for turn in range(6):
        noise = [engine.submit([i, i + 1], long, f"{turn}.{i}") for i in range(6)]
        kept = asyncio.create_task(tokens(f"kept {turn}"))
        for _ in range(3 + turn):
            await asyncio.sleep(0.002)
        for request in noise:
            request.abort()
            engine.check_integrity()
        assert await kept == alone
    for _ in range(500):
        if engine.stats().kv_cache_usage == 0:
            break
        await asyncio.sleep(0.002)
    assert engine.stats().kv_cache_usage == 0
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    await engine.stop()
    engine.check_integrity()
