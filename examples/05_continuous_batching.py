"""Walkthrough 5: continuous batching.

A DP group does not wait until a batch is complete. Each step its scheduler takes what there is: one row of
every sequence that decodes, and with the rows left over the next chunk of somebody's prompt. Sequences join
and leave at any step. When KV blocks run out, the last in line gives its own up and is computed again later.

Asynchronous scheduling takes the scheduler off the die's time: a step is planned while the one before runs,
from counts only. Which token that one samples the die knows when it needs it.

This script watches the scheduler of one die at work, step by step, and then checks that none of this changed
a single bit. All times are virtual.

    python examples/05_continuous_batching.py
"""

from __future__ import annotations

from xdeepserve import LLM, RequestOutput, SamplingParams
from xdeepserve.engine.dp.events import Event, Preempted, StepEnded
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.llm import digest

POD = [
    "scheduler.max_num_batched_tokens=16",  # rows in a step
    "scheduler.max_num_seqs=3",  # sequences in a step
    "max_model_len=64",
    "cache.num_blocks=5",  # of 16 positions each
]
NAMES = "ABCD"
PROMPTS = [[7] * 6, list(range(10, 44)), list(range(60, 72)), [3, 1, 4]]
PRIORITIES = [0, 0, 0, -1]  # D came last, but lower goes first


def params(priority: int) -> SamplingParams:
    return SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, priority=priority)


def title(text: str) -> None:
    print(f"\n--- {text}")


def counted(number: int, what: str, width: int = 3) -> str:
    """A number in a column, with its noun."""
    return f"{number:{width}d} {what}{'s' if number != 1 else ' '}"


def watch(llm: LLM) -> None:
    """Print every step, and whose blocks are taken for it."""
    preempted = set()

    def see(event: Event | StepEnded) -> None:
        if isinstance(event, Preempted):
            preempted.add(event.seq_id)
            name = NAMES[event.seq_id]
            print(f"        no block is left: {name} gives up its {event.num_computed} positions")
        if not isinstance(event, StepEnded):
            return
        cells = []
        for share in event.shares:
            again = "again" if share.seq_id in preempted else "prefill"
            kind = again if share.is_prefill else "decode"
            cells.append(f"{NAMES[share.seq_id]} {kind} [{share.start},{share.start + share.num_tokens})")
        rows = sum(share.num_tokens for share in event.shares)
        now, used = event.start_ns / 1000, event.num_used_blocks
        size = f"{counted(rows, 'row')} {counted(used, 'block', 1)}"
        print(f"{event.step:3d} {now:9.1f} us {size}  {', '.join(cells)}")

    llm.engine.observe(see)


def show_tables(group: DPGroup) -> None:
    title("What is left when all are done")
    rtc = group.rtc
    used = round(rtc.usage * rtc.num_blocks)
    print(f"blocks in use: {used} of {rtc.num_blocks}; {rtc.num_cached} hold prefixes for prompts to come")
    stats = group.scheduler.stats
    print(f"{sum(stats.rows_per_step.values())} steps, {group.scheduler.preemption.count} preemption(s)")
    for rows, steps in sorted(stats.rows_per_step.items()):
        print(f"  {counted(steps, 'step', 2)} of {counted(rows, 'row', 2).rstrip()}")


def show_times(outputs: list[RequestOutput]) -> None:
    title("What each request saw, in virtual time")
    print("     queue    TTFT     TPOT   steps  preempted")
    for name, output in zip(NAMES, outputs, strict=True):
        m = output.metrics
        assert m is not None
        assert m.queue_ns is not None
        assert m.ttft_ns is not None
        assert m.tpot_ns is not None
        times = f"{m.queue_ns / 1000:7.1f} {m.ttft_ns / 1000:7.1f} {m.tpot_ns / 1000:8.1f} us"
        print(f"  {name} {times} {m.num_steps:4d}  {m.num_preemptions}")


def show_ahead(every: list[SamplingParams], expected: list[RequestOutput]) -> None:
    title("A host that takes time to plan and to launch: after each step, or while it runs")
    for overlap in ("false", "true"):
        overrides = [*POD, f"execution.overlap={overlap}"]
        with LLM("tiny-random", "monolithic", overrides=overrides) as llm:
            outputs = llm.generate(PROMPTS, every, keep_logits=True)
            steps, time_ms = llm.engine.je.tes[0].step_idx, llm.virtual_ns / 1e6
        when = "while the one before runs" if overlap == "true" else "when the one before has ended"
        same = digest(outputs) == digest(expected)
        print(f"  planned {when:<30} {steps} steps, {time_ms:5.1f} ms of virtual time, same bits: {same}")


def main() -> None:
    every = [params(priority) for priority in PRIORITIES]
    with LLM("tiny-random", "monolithic", overrides=POD) as llm:
        [group] = llm.engine.groups
        title("Four requests at once, one die")
        for name, prompt, one in zip(NAMES, PROMPTS, every, strict=True):
            print(
                f"{name}: {len(prompt):2d} prompt tokens, {one.max_tokens} new ones, priority {one.priority}"
            )
        print(f"at most 16 rows and 3 sequences in a step; {group.rtc.num_blocks} KV blocks of 16 positions")
        title("Every step: its rows, and who computes which positions (B's prompt goes in three chunks)")
        watch(llm)
        outputs = llm.generate(PROMPTS, every, keep_logits=True)
        show_tables(group)
        show_times(outputs)
        llm.engine.check_integrity()
    title("The same requests, each alone on a die with room")
    with LLM("tiny-random", "monolithic") as llm:
        alone = [llm.generate([p], one, keep_logits=True)[0] for p, one in zip(PROMPTS, every, strict=True)]
    for name, crowd, single in zip(NAMES, outputs, alone, strict=True):
        is_same = digest([crowd]) == digest([single])
        print(f"  {name}: {crowd.outputs[0].token_ids[:6]}...  same tokens and logits: {is_same}")
    show_ahead(every, outputs)


if __name__ == "__main__":
    main()
