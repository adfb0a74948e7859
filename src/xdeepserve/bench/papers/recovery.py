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

from xdeepserve.bench.report import Row, pyplot
from xdeepserve.engine.dp.events import Mended, StepEnded, TEChanged
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault

POD = ("prefill.dies=1", "decode.count=2", "decode.dies=2", "max_model_len=128", "scheduler.max_num_seqs=16")
NUM_PROMPTS, NUM_TOKENS = 16, 48
DIE = 4  # of the second decode TE
# The only decode TE, with all its dies.
ONE = ("prefill.dies=2", "prefill.tp=1", "decode.count=1", "recovery.failover=true")
DIES_OF_ONE = (2, 3)
SLICES = 10  # of the run without faults
SHOWN = 15  # slices
NUM_RANKS, RANKS_LOST = 32, (1, 2, 4, 8, 16)


def all_rows() -> Iterator[Row]:
    """Yield rows of every way, the run without faults first."""
    quiet = decoded((), ())
    slice_ns = max(quiet.token_times) / SLICES
    at_us = _middle_us(quiet, "decode 1")
    glitch = Fault(at_us, DIE, "glitch", code="aicore-exception")
    ways: tuple[tuple[str, tuple[str, ...], tuple[Fault, ...]], ...] = (
        ("none", (), ()),
        ("glitch/stage=3", (), (glitch,)),
        ("glitch/stage=2", ("recovery.stage=2",), (glitch,)),
        ("lost/stage=2", (), (Fault(at_us, DIE, "lost"),)),
        ("lost/stage=2/failover", ("recovery.failover=true",), (Fault(at_us, DIE, "lost"),)),
    )
    for name, settings, faults in ways:
        yield from _rows_of(name, decoded(settings, faults) if faults else quiet, quiet, slice_ns)
    alone = decoded(ONE, ())
    at_us = _middle_us(alone, "decode 0")
    gone = tuple(Fault(at_us + number, die, "lost") for number, die in enumerate(DIES_OF_ONE))
    yield from _rows_of("lost/stage=1", decoded(ONE, gone), alone, max(alone.token_times) / SLICES)
    for num_lost in RANKS_LOST:
        recovery_ns, num_dies = scaled_down(num_lost)
        yield Row(f"recovery/ranks_lost={num_lost}/recovery", recovery_ns / 1e9, "s", "predicted")
        yield Row(f"recovery/ranks_lost={num_lost}/dies_left", num_dies, "dies", "predicted")


def _rows_of(name: str, told: Told, quiet: Told, slice_ns: float) -> Iterator[Row]:
    """Compute the delay of the last token, the durations of rollbacks, and tokens per second in each
    slice."""
    prefix, tokens = f"recovery/{name}", told.token_times
    yield Row(f"{prefix}/last_token_later", (max(tokens) - max(quiet.token_times)) / 1e6, "ms", "measured")
    for at_ns, event in told.events:
        if isinstance(event, Mended):
            yield Row(f"{prefix}/rollback", (at_ns - event.begun_ns) / 1e3, "us", "measured")
    for number in range(SHOWN):
        begin = number * slice_ns
        count = sum(begin <= at < begin + slice_ns for at in tokens)
        value = count / slice_ns * 1e9
        yield Row(f"{prefix}/tokens_per_s/slice={number}", value, "1/s", "measured")


def decoded(settings: tuple[str, ...], faults: Sequence[Fault]) -> Told:
    """Answer the prompts with faults."""
    prompts = [[10 + i, 20 + 3 * i, 30, 40 + i] for i in range(NUM_PROMPTS)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    history = History("pd", (*POD, *settings), prompts, params, faults=faults, model="tiny")
    return serve(history, hears=(StepEnded, Mended))


def _middle_us(told: Told, te: str) -> float:
    """Return the middle of a TE's middle step [us]."""
    steps = [step for step in told.of(StepEnded) if step.group.te == te]
    middle = steps[len(steps) // 2]
    return (middle.start_ns + middle.end_ns) / 2000


def scaled_down(num_lost: int) -> tuple[int, int]:
    """Measure the time from the loss of a TE of 32 dies until another takes its place [ns], and count that
    TE's dies."""
    history = History(
        "colocated",
        (f"dies={NUM_RANKS}", "recovery.failover=true", "max_model_len=256"),
        [[1, 2, 3]],
        SamplingParams(max_tokens=2, ignore_eos=True),
        faults=[Fault(100.0 + die, NUM_RANKS - 1 - die, "lost") for die in range(num_lost)],
        model="deepseek-r1",
        is_timing_only=True,
    )
    told = serve(history, hears=(TEChanged,))
    at = {event.life: at_ns for at_ns, event in told.events if isinstance(event, TEChanged)}
    (te,) = told.tes
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
