"""The scheduler of a DP group needs no die: driven by counts alone it decides as in the engine's own runs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.engine.histories import abort_on_the_way
from tests.engine.tools import loads
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Event, EventLog, GroupId, Preempted
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.scheduler import Scheduler
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.dp.step import PlannedStep, SeqResult
from xdeepserve.engine.plans import BlockCopy

SMALL = ("max_model_len=160", "scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=32")
FEW = ("cache.num_blocks=14", "cache.num_host_blocks=12", "cache.load=always")
PAIR = ("prefill.dies=2", "prefill.tp=2", "decode.dies=2")


class Asked(NamedTuple):
    """A sequence as it comes to a DP group. Generated tokens and drafts are counts."""

    seq_id: int
    choice: int
    prompt: tuple[int, ...]
    num_generated: int
    num_drafts: int
    num_computed: int
    max_tokens: int
    cache_id: str | None
    priority: int

    @classmethod
    def of(cls, seq: Sequence) -> Asked:
        return cls(
            *(seq.seq_id, seq.choice, tuple(seq.token_ids[: seq.num_prompt]), seq.num_generated),
            *(len(seq.drafts), seq.num_computed, seq.max_tokens, seq.params.prompt_cache_key, seq.priority),
        )


class Counts(NamedTuple):
    """What a step has brought one sequence: tokens sampled, drafts accepted, drafts for the next step."""

    num_tokens: int
    num_accepted: int
    num_drafts: int

    @classmethod
    def of(cls, result: SeqResult) -> Counts:
        sampled = [row for row in result.rows if not row.is_prompt]
        return cls(len(sampled), result.num_accepted, len(result.drafts))


class Decision(NamedTuple):
    """A step as the scheduler planned it: each sequence's rows and blocks, copies and transfers."""

    shares: tuple[tuple[Any, ...], ...]
    copies: tuple[BlockCopy, ...]
    transfers: tuple[tuple[int, tuple[BlockCopy, ...]], ...]
    receives: tuple[tuple[int, tuple[int, ...]], ...]
    ticket: int | None

    @classmethod
    def of(cls, step: PlannedStep) -> Decision:
        return cls(
            tuple(
                (
                    *(share.seq.seq_id, share.start, share.num_tokens, share.num_drafts, share.logit_rows),
                    *(share.ends, share.carried, tuple(share.seq.holding.slots)),
                )
                for share in step.shares
            ),
            tuple(step.copies),
            tuple((ticket, tuple(copies)) for ticket, copies in step.transfers),
            tuple((seq.seq_id, tuple(seq.holding.slots)) for seq in step.receives),
            step.ticket,
        )


class Call(NamedTuple):
    """A call of a DP group's scheduler, with counts as its arguments, and what it decided."""

    name: str
    args: tuple[Any, ...]
    decided: Any = None


class Log:
    """The calls of one group's scheduler in their order, without those that follow from another call."""

    def __init__(self, group: DPGroup) -> None:
        self.group, self.calls, self.preempted = group, list[Call](), list[Preempted]()
        self._steps: list[PlannedStep] = []
        self._depth = 0
        group.scheduler = Recorded(group.scheduler, self)  # type: ignore[assignment]
        group.handover = Recorded(group.handover, self)  # type: ignore[assignment]

    def call(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make a call, and note it."""
        counts = self._counts(name, args)
        self._depth += 1
        try:
            result = call(*args)
        finally:
            self._depth -= 1
        if not self._depth:
            if isinstance(result, PlannedStep):
                self._steps.append(result)
                result = Decision.of(result)
            self.calls.append(Call(name, counts, result))
            return self._steps[-1] if name == "schedule" else result
        return result

    def _counts(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "finish_step":
            step, results = args
            number = next(i for i, planned in enumerate(self._steps) if planned is step)
            return number, tuple(Counts.of(result) for result in results)
        plain = [arg.seq_id if isinstance(arg, Sequence) else arg for arg in args]
        if name in ("add", "arrive", "reserve", "take_over"):
            plain[0] = Asked.of(args[0])
        return tuple(plain)

    def see(self, event: Event) -> None:
        """Note the preemptions of the group."""
        if isinstance(event, Preempted) and event.group == self.group.id:
            self.preempted.append(event)


CALLS = {
    *("add", "schedule", "finish_step", "finish_transfer", "remove"),
    *("arrive", "reserve", "take_over", "drop", "send_early", "stop_early", "release"),
}


class Recorded:
    """A scheduler or its handover, whose calls are noted."""

    def __init__(self, inner: Any, log: Log) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return (lambda *args: self._log.call(name, found, args)) if name in CALLS else found


def placeholder(seq: Sequence, ahead: int = 0) -> int:
    """A token of which only the place is known."""
    return -1 - 1000 * seq.seq_id - len(seq.token_ids) - ahead


class Replay:
    """A scheduler alone, to which calls are made again."""

    def __init__(self, log: Log) -> None:
        steps, kv = log.group.steps, log.group.kv  # numbers alone
        tell = EventLog()
        self.preempted: list[Preempted] = []
        tell.act = lambda event: self.preempted.append(event) if isinstance(event, Preempted) else None
        rtc = RTC(kv.num_blocks, kv.block_size, kv.num_host_blocks, kv.max_cache_keys)
        self.scheduler = Scheduler(
            steps, rtc, loads if kv.num_host_blocks else None, GroupId(*log.group.id), tell
        )
        self.seqs: dict[int, Sequence] = {}
        self.steps: list[PlannedStep] = []

    def call(self, call: Call) -> Any:
        """Make a call again; return what is decided."""
        scheduler, handover, args = self.scheduler, self.scheduler.handover, call.args
        match call.name:
            case "add":
                leader = self.seqs[args[1]] if len(args) > 1 and args[1] is not None else None
                scheduler.add(self._take(args[0]), leader)
            case "schedule":
                self.steps.append(scheduler.schedule())
                return Decision.of(self.steps[-1])
            case "finish_step":
                step = self.steps[args[0]]
                scheduler.finish_step(step, self._results(step, args[1]))
            case "finish_transfer":
                scheduler.finish_transfer(*args)
            case "remove":
                scheduler.remove(self.seqs[args[0]])
            case "arrive" | "take_over":
                getattr(handover, call.name)(self._take(args[0]))
            case "reserve":
                return handover.reserve(self._take(args[0]), args[1])
            case "release" | "stop_early":
                getattr(handover, call.name)(*args)
            case _:
                getattr(handover, call.name)(self.seqs[args[0]], *args[1:])
        return None

    def _take(self, asked: Asked) -> Sequence:
        """The sequence with its present counts."""
        seq = self.seqs.get(asked.seq_id)
        if seq is None:
            seq = self.seqs[asked.seq_id] = Sequence(
                seq_id=asked.seq_id,
                choice=asked.choice,
                token_ids=list(asked.prompt),
                num_prompt=len(asked.prompt),
                max_tokens=asked.max_tokens,
                params=SamplingParams(max_tokens=asked.max_tokens, prompt_cache_key=asked.cache_id),
                seed=0,
                on_tokens=lambda seq, rows: seq.num_generated >= seq.max_tokens,
                priority=asked.priority,
            )
        while seq.num_generated < asked.num_generated:
            seq.token_ids.append(placeholder(seq))
        seq.drafts, seq.num_computed = [0] * asked.num_drafts, asked.num_computed
        return seq

    def _results(self, step: PlannedStep, counts: tuple[Counts, ...]) -> list[SeqResult]:
        return [
            SeqResult(
                [SampledToken(placeholder(share.seq, n), False, None) for n in range(each.num_tokens)],
                each.num_accepted,
                [0] * each.num_drafts,
            )
            for share, each in zip(step.shares, counts, strict=True)
        ]


def requests() -> tuple[list[list[int]], list[SamplingParams], list[int]]:
    """Prompts in families with a common beginning, some longer than a step; when each arrives, in ns."""
    lengths = (5, 33, 17, 70, 20, 1, 21, 40, 9, 50)
    prompts = [
        [7 + index % 3] * 32 + [(13 * index + i) % 100 for i in range(length)]
        for index, length in enumerate(lengths)
    ]
    params = [
        SamplingParams(
            max_tokens=4 + 9 * (index % 4),
            temperature=1.0,
            seed=index,
            n=2 if index == 4 else 1,
            priority=-(index % 5 == 3),
            ignore_eos=True,
            prompt_cache_key=f"family {index % 3}" if index % 2 else None,
        )
        for index in range(len(lengths))
    ]
    arrivals = [0, 0, 0, 200_000, 200_000, 1_500_000, 3_000_000, 9_000_000, 30_000_000, 30_000_000]
    return prompts, params, arrivals


def recorded(deployment: str, overrides: tuple[str, ...]) -> list[Log]:
    """Serve the requests by an engine, and note what its groups' schedulers are told and decide."""
    prompts, params, arrivals = requests()
    with LLM("tiny-random", deployment, "int8", overrides=(*SMALL, *overrides), progress=False) as llm:
        logs = [Log(group) for te in llm.engine.je.tes for group in te.groups]
        for log in logs:
            llm.engine.observe(log.see)
        abort_on_the_way(llm.engine, {3: 400_000, 6: 1_000_000})
        llm.generate(prompts, params, arrivals_ns=arrivals)
    return logs


@pytest.mark.parametrize(
    ("deployment", "overrides", "seen"),
    [
        ("monolithic", (*FEW, "cache.num_host_blocks=0"), {"chunk", "hit", "recompute"}),
        ("monolithic", (*FEW, "cache.preemption=swap"), {"chunk", "hit", "swap", "load", "save"}),
        (
            "monolithic",
            (*FEW, "execution.overlap=true", "mtp=2"),
            {"chunk", "hit", "recompute", "drafts", "accepted", "ahead"},
        ),
        ("colocated", ("dies=2", "mtp=1"), {"chunk", "hit", "copy", "drafts", "accepted"}),
        ("pd", (*PAIR, "cache.num_blocks=20"), {"chunk", "hit", "receive"}),
        ("pd", (*PAIR, "transfer=layer", "execution.decode.overlap=true", "mtp=1"), {"reserve", "drafts"}),
    ],
)
def test_counts_alone_bring_the_decisions_of_the_engine(
    deployment: str, overrides: tuple[str, ...], seen: set[str]
) -> None:
    found = Counter[str]()
    for log in recorded(deployment, overrides):
        replay = Replay(log)
        for number, call in enumerate(log.calls):
            decided = replay.call(call)
            if call.name in ("schedule", "reserve"):
                assert decided == call.decided, (number, call)
            replay.scheduler.check_integrity()
        assert replay.preempted == log.preempted
        assert replay.scheduler.places.is_empty
        own, alone = log.group.scheduler, replay.scheduler
        assert (alone.prefixes.num_queries, alone.prefixes.num_hits) == (
            own.prefixes.num_queries,
            own.prefixes.num_hits,
        )
        assert alone.stats.rows_per_step == own.stats.rows_per_step
        assert alone.rtc.num_available == own.rtc.num_available
        found += happened(log)
    assert found.keys() >= seen, found


def happened(log: Log) -> Counter[str]:
    """Count the kinds of decisions in a log."""
    found = Counter("swap" if event.is_swapped else "recompute" for event in log.preempted)
    found["hit"] = log.group.scheduler.prefixes.num_hits
    for call in log.calls:
        if call.name == "reserve":
            found["reserve"] += call.decided is not None
        if call.name == "finish_step":
            found["accepted"] += sum(each.num_accepted for each in call.args[1])
        if call.name != "schedule":
            continue
        step: Decision = call.decided
        found["chunk"] += sum(not ends for *_, ends, _, _ in step.shares)
        found["drafts"] += sum(share[3] for share in step.shares)
        found["ahead"] += sum(carried is not None for *_, carried, _ in step.shares)
        found["copy"] += len(step.copies)
        found["receive"] += len(step.receives)
        tiers = Counter(each.src_tier for _, copies in step.transfers for each in copies)
        found["load"], found["save"] = found["load"] + tiers["host"], found["save"] + tiers["hbm"]
    return +found


ALONE = """
import sys
import xdeepserve.engine.dp.scheduler, xdeepserve.engine.dp.lost_blocks
print(*(name for name in sys.modules if name.startswith(("xdeepserve.hw.", "xdeepserve.comm"))))
"""


def test_the_scheduler_imports_nothing_of_dies_memories_and_pods() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    names = ["xdeepserve.comm", "xdeepserve.comm.exchange_choices"]  # of settings
    assert done.stdout.split() == [*names, "xdeepserve.hw.topology"]  # bounds of settings
