"""The cost of a fault by its stage of recovery (xDeepServe 6.2), in virtual time.

Two decode TEs of two dies each are at work when, in the middle of a step, something of the second TE fails.
In another run the only decode TE is lost with all its dies, so everything is started anew on the rest of
prefill's dies. Throughput is that of all tokens that leave the pod, in slices of time. No paper has such
figures; the claim is the order: a gentler stage costs less. Where a die is lost, most of the time passes
until its waiting peer gives up at the deadline of its exchange, or until heartbeats are missed. A reader of
the die's memory notices at once.

Then 1 to 16 of the 32 dies of a TE of DeepSeek-R1 are lost, and the TE comes back on the remaining dies. Rows
give the time from the moment the loss is known, including weights, which come from the hosts' page caches.
SGLang publishes 6.2 to 6.8 s for the same on its hardware, where a restart takes 120 to 180 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from xdeepserve.bench.report import Row, pyplot
from xdeepserve.engine.dp.events import Mended, Observed, StepEnded, TEChanged
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import LLM

POD = ("prefill.dies=1", "decode.count=2", "decode.dies=2", "max_model_len=128", "scheduler.max_num_seqs=16")
NUM_PROMPTS, NUM_TOKENS = 16, 48
DIE = 4  # of the second decode TE
# The only decode TE, with all its dies.
ONE = ("prefill.dies=2", "prefill.tp=1", "decode.count=1", "recovery.failover=true")
DIES_OF_ONE = (2, 3)
SLICES = 10  # of the run without faults
SHOWN = 15  # slices
NUM_RANKS, RANKS_LOST = 32, (1, 2, 4, 8, 16)


class Life(NamedTuple):
    """A run, in ns of virtual time: tokens, rollbacks and steps.

    `tokens` are the times of tokens, `rollbacks` durations, and `steps` the beginnings and ends of the last
    decode TE's steps.
    """

    tokens: list[int]
    rollbacks: list[int]
    steps: list[tuple[int, int]]

    @property
    def end_ns(self) -> int:
        """Time of the last token's leaving the pod [ns]."""
        return max(self.tokens)


def all_rows() -> Iterator[Row]:
    """Yield rows of every way, the run without faults first."""
    quiet = serve((), ())
    slice_ns = quiet.end_ns / SLICES
    at_us = sum(quiet.steps[len(quiet.steps) // 2]) / 2000
    glitch = Fault(at_us, DIE, "glitch", code="aicore-exception")
    ways: tuple[tuple[str, tuple[str, ...], tuple[Fault, ...]], ...] = (
        ("none", (), ()),
        ("glitch/stage=3", (), (glitch,)),
        ("glitch/stage=2", ("recovery.stage=2",), (glitch,)),
        ("lost/stage=2", (), (Fault(at_us, DIE, "lost"),)),
        ("lost/stage=2/failover", ("recovery.failover=true",), (Fault(at_us, DIE, "lost"),)),
    )
    for name, settings, faults in ways:
        yield from _rows_of(name, serve(settings, faults) if faults else quiet, quiet, slice_ns)
    alone = serve(ONE, (), "decode 0")
    at_us = sum(alone.steps[len(alone.steps) // 2]) / 2000
    gone = tuple(Fault(at_us + number, die, "lost") for number, die in enumerate(DIES_OF_ONE))
    yield from _rows_of("lost/stage=1", serve(ONE, gone), alone, alone.end_ns / SLICES)
    for num_lost in RANKS_LOST:
        recovery_ns, num_dies = scaled_down(num_lost)
        yield Row(f"recovery/ranks_lost={num_lost}/recovery", recovery_ns / 1e9, "s", "predicted")
        yield Row(f"recovery/ranks_lost={num_lost}/dies_left", num_dies, "dies", "predicted")


def _rows_of(name: str, life: Life, quiet: Life, slice_ns: float) -> Iterator[Row]:
    """Compute the delay of the last token, the durations of rollbacks, and tokens per second in each
    slice."""
    prefix = f"recovery/{name}"
    yield Row(f"{prefix}/last_token_later", (life.end_ns - quiet.end_ns) / 1e6, "ms", "measured")
    for rollback_ns in life.rollbacks:
        yield Row(f"{prefix}/rollback", rollback_ns / 1e3, "us", "measured")
    for number in range(SHOWN):
        begin = number * slice_ns
        count = sum(begin <= at < begin + slice_ns for at in life.tokens)
        value = count / slice_ns * 1e9
        yield Row(f"{prefix}/tokens_per_s/slice={number}", value, "1/s", "measured")


def serve(settings: Sequence[str], faults: Sequence[Fault], last: str = "decode 1") -> Life:
    """Answer the prompts; `last` is the last decode TE's name."""
    life = Life([], [], [])
    with LLM("tiny", "pd", overrides=[*POD, *settings], faults=faults) as llm:
        clock = llm.engine.plan.pod.clock

        def observe(event: Observed) -> None:
            if isinstance(event, StepEnded):
                life.tokens.extend(event.end_ns for share in event.shares for _ in share.token_ids)
                if event.group.te == last:
                    life.steps.append((event.start_ns, event.end_ns))
            elif isinstance(event, Mended):
                life.rollbacks.append(clock.now - event.begun_ns)

        llm.engine.observe(observe)
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        llm.generate([[10 + i, 20 + 3 * i, 30, 40 + i] for i in range(NUM_PROMPTS)], params)
    return life


def scaled_down(num_lost: int) -> tuple[int, int]:
    """Measure the time from the loss of a TE of 32 dies until another takes its place [ns], and count that
    TE's dies."""
    settings = (f"dies={NUM_RANKS}", "recovery.failover=true", "max_model_len=256")
    faults = [Fault(100.0 + die, NUM_RANKS - 1 - die, "lost") for die in range(num_lost)]
    at: dict[str, int] = {}
    with LLM("deepseek-r1", "colocated", overrides=settings, faults=faults, timing_only=True) as llm:
        engine = llm.engine

        def observe(event: Observed) -> None:
            if isinstance(event, TEChanged):
                at[event.life] = engine.plan.pod.clock.now

        engine.observe(observe)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        (te,) = engine.tes()
        return at["ready"] - at["lost"], len(te.dies)


def plot(rows: list[Row], path: Path) -> None:
    """Draw tokens per second over virtual time, a line for each way. Raises InputError without matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    lines: dict[str, list[float]] = {}
    for row in rows:
        name, _, number = row.name.partition("/tokens_per_s/slice=")
        if number:
            lines.setdefault(name.removeprefix("recovery/"), []).append(row.value)
    for name, values in lines.items():
        axes.step(range(len(values)), values, where="post", label=name)
    axes.set_xlabel(f"virtual time [{SLICES}ths of the run without faults]")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
