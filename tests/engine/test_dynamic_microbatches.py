"""Steps that are cut into two microbatches only where that is predicted to end sooner (xDeepServe 4)."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.description import describe
from xdeepserve.engine.dp.events import Mended, Observed, StepCut, StepEnded
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.forecast import Forecast
from xdeepserve.engine.walk.overlap import Halves, PricedItem, walk_ns
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.history import History
from xdeepserve.history import serve as run_history
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.llm import digest
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import PRESET_DIRECTORY, TinyCheckpoint
from xdeepserve.model.seeded import SeededCheckpoint

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [10, 11], [5] * 150]
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
TWO, DYNAMIC, ENGINES = "pipeline.microbatches=2", "pipeline.dynamic=true", "pipeline.overlap=engines"


# ---- bits -----------------------------------------------------------------------------------------------

SHAPES = [
    ["dies=4"],
    ["dies=4", ENGINES, "mtp=2"],
    ["dies=3", "exchange=push", "mtp=1", "execution.overlap=true"],
    ["dies=2", "execution.mode=op"],
    ["dies=2", ENGINES, "execution.mode=graph", "mtp=1"],
    ["dies=1"],
    ["dies=4", "tp=2", "tp_mode=sp-tp-sp", "scheduler.max_num_batched_tokens=33"],
    ["dies=4", "tp=2", ENGINES, "exchange=push"],
    ["dies=4", "lockstep=true", "exchange=push", "experts.redundant_slots=2"],
    ["dies=4", "lockstep=true", ENGINES, "mtp=1"],
]


def in_turn(self: Forecast, plans: Sequence[StepPlan]) -> int:
    """Cut every second step, whatever its rows."""
    return 1 + int(plans[0].step) % 2


@pytest.mark.thin(4)
@pytest.mark.parametrize("overrides", SHAPES, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_steps_that_are_cut_or_not_have_the_bits_of_one_die(
    tiny: TinyCheckpoint, precision: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "num_parts", in_turn)
    steps: set[int] = set()
    cut: set[int] = set()

    def see(event: Observed) -> None:
        if isinstance(event, StepEnded):
            steps.add(event.step)
        elif isinstance(event, StepCut):
            cut.add(event.step)

    with LLM(tiny, "colocated", precision, overrides=[TWO, DYNAMIC, *overrides]) as llm:
        llm.engine.observe(see)
        found = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
        llm.engine.check_integrity()
    assert cut
    assert cut < steps
    assert found == digest(one_die(PROMPTS, PARAMS, precision))


@pytest.mark.parametrize("overrides", [["dies=2", "mtp=1"], ["dies=4", "lockstep=true", "tp=2"]], ids=str)
def test_a_step_that_runs_again_has_the_same_bits(
    tiny: TinyCheckpoint, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolled-back step is decided on again: here cut where it had been whole, or the other way."""
    monkeypatch.setattr(Forecast, "num_parts", in_turn)
    history = History("colocated", (TWO, DYNAMIC, *overrides), PROMPTS, PARAMS)
    quiet = run_history(history)
    glitches = [
        Fault(share * quiet.end_ns / 1000, 1, "glitch", code="aicore-exception") for share in (0.3, 0.8)
    ]
    again = run_history(msgspec.structs.replace(history, faults=tuple(glitches)), hears=(Mended,))
    assert len(again.of(Mended)) == 2
    assert again.digest == quiet.digest


# ---- decisions ------------------------------------------------------------------------------------------


def busy() -> Spec:
    """A die whose kernels and links keep a small model as busy as a large one."""
    spec = Spec()

    def scaled(param: Param, factor: float) -> Param:
        return Param(param.value * factor, param.unit, "slowed down")

    return msgspec.structs.replace(
        spec,
        int8_peak=scaled(spec.int8_peak, 3e-4),
        bf16_peak=scaled(spec.bf16_peak, 3e-4),
        exchange_copy=scaled(spec.exchange_copy, 20),
    )


@pytest.fixture(scope="module")
def deep(tiny: TinyCheckpoint) -> SeededCheckpoint:
    config = msgspec.structs.replace(tiny.config, num_hidden_layers=8)
    return SeededCheckpoint("deep", PRESET_DIRECTORY / "tiny-random", config, seed=1)


class Served(msgspec.Struct):
    """Rows and parts of each step, and the virtual time of all of them in ns."""

    steps: list[tuple[int, int]]
    time_ns: int


def serve(model: SeededCheckpoint, *settings: str, timing: bool = False) -> Served:
    """Requests that come few at first, and then many, with prompts from one token to hundreds."""
    deployment = resolve("colocated", ["dies=4", "cache.num_blocks=600", *settings])
    plan = PodPlan(model, deployment, "int8", spec=busy(), timing=TimingConfig() if timing else None)
    rows: dict[int, int] = {}
    parts: dict[int, int] = {}  # of steps that are cut
    engine, time_ns = Engine(plan), 0

    def see(event: Observed) -> None:
        nonlocal time_ns
        if isinstance(event, StepEnded):
            rows[event.step] = rows.get(event.step, 0) + sum(share.num_tokens for share in event.shares)
            time_ns = event.end_ns
        elif isinstance(event, StepCut):
            parts[event.step] = event.num_parts

    async def run() -> None:
        await engine.start()
        for num, length in ((1, 1), (4, 8), (12, 190)):
            params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            requests = [
                engine.submit([(i + length) % 250 + 1] * length, params, f"{num}-{i}") for i in range(num)
            ]
            for request in requests:
                async for _ in request:
                    pass
        await engine.stop()

    engine.load()
    engine.observe(see)
    asyncio.run(run())
    return Served([(rows[step], parts.get(step, 1)) for step in sorted(rows)], time_ns)


MODES = {"tasks": ((), False), "lockstep": (("lockstep=true",), False), "time only": ((), True)}


@pytest.fixture(scope="module", params=["cores", "engines"])
def by_mode(request: pytest.FixtureRequest, deep: SeededCheckpoint) -> dict[str, dict[str, Served]]:
    """Runs by mode and by how steps are cut: never, always, or as predicted."""
    overlap = f"pipeline.overlap={request.param}", "pipeline.attention_cores=12"
    ways = {"never": (), "always": (TWO, *overlap), "dynamic": (TWO, DYNAMIC, *overlap)}
    return {
        mode: {way: serve(deep, *settings, *more, timing=timing) for way, settings in ways.items()}
        for mode, (more, timing) in MODES.items()
    }


def test_small_steps_run_whole_and_big_ones_are_cut(by_mode: dict[str, dict[str, Served]]) -> None:
    for runs in by_mode.values():
        steps = runs["dynamic"].steps
        assert {parts for _, parts in steps} == {1, 2}
        most = [max(rows for rows, parts in steps if parts == number) for number in (1, 2)]
        assert most[0] < most[1]
        assert all(parts == 1 for rows, parts in steps if rows <= 4)


def test_every_mode_decides_alike(by_mode: dict[str, dict[str, Served]]) -> None:
    tasks, *others = (runs["dynamic"].steps for runs in by_mode.values())
    assert all(steps == tasks for steps in others)


def test_no_slower_than_the_better_of_both(by_mode: dict[str, dict[str, Served]]) -> None:
    for runs in by_mode.values():
        assert runs["dynamic"].time_ns <= 1.01 * min(runs["never"].time_ns, runs["always"].time_ns)


# ---- the walk through layers that is predicted ----------------------------------------------------------


def layers(*times: tuple[float, float], num: int = 3) -> list[list[Halves]]:
    """For each part, layers whose halves are a kernel on AIC cores and an exchange."""
    return [
        [Halves([PricedItem("aic", attention, 0.0, 2)], [PricedItem(None, feed, 0.0, 1)])] * num
        for attention, feed in times
    ]


def test_a_whole_step_takes_the_sum_of_its_halves() -> None:
    assert walk_ns(layers((10.0, 5.0)), by_cores=False, op_ns=0) == [15, 30, 45]


@pytest.mark.parametrize("by_cores", [False, True])
def test_an_exchange_hides_behind_the_other_microbatch(by_cores: bool) -> None:
    ends = walk_ns(layers((10.0, 5.0), (10.0, 5.0)), by_cores=by_cores, op_ns=0)
    assert ends == [25, 45, 65]


def test_streams_share_memory_bandwidth() -> None:
    halves = [[Halves([PricedItem("aic", 10.0, 10.0, 1)], [PricedItem("aic", 10.0, 10.0, 1)])] * 4] * 2
    alone = [[Halves([PricedItem("aic", 10.0, 0.0, 1)], [PricedItem("aic", 10.0, 0.0, 1)])] * 4] * 2
    assert walk_ns(alone, by_cores=True, op_ns=0)[-1] == 90
    assert walk_ns(halves, by_cores=True, op_ns=0)[-1] == 160


def test_the_host_launches_one_operator_after_the_other() -> None:
    assert walk_ns(layers((1.0, 1.0)), by_cores=False, op_ns=10)[-1] == 91
    assert walk_ns(layers((1.0, 1.0), (1.0, 1.0)), by_cores=False, op_ns=10)[-1] == 181


# ---- settings -------------------------------------------------------------------------------------------


def test_buffers_have_room_for_whole_steps(tiny_config: ModelConfig) -> None:
    (whole,), (cut,) = (
        fit(resolve("colocated", ["dies=2", TWO, *more]), tiny_config) for more in ([DYNAMIC], [])
    )
    assert whole.steps.max_part == whole.steps.max_tokens == 2 * cut.steps.max_part
    assert whole.walk.num_parts == 2


def test_description_says_when_steps_are_cut(tiny: TinyCheckpoint) -> None:
    for more, said in (([DYNAMIC], True), ([], False)):
        plan = PodPlan(tiny, resolve("colocated", ["dies=2", TWO, *more]), "int8")
        assert ("in steps that are predicted to end sooner so" in describe(plan)) == said
