"""Lockstep by exchanges alone, where other models, too few blocks, readers that leave and faults meet it."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import msgspec
import pytest

from tests.engine.lockstep import (
    GREEDY,
    PRECISIONS,
    PROMPTS,
    TWO,
    Model,
    check_colocated,
    variant,
    with_float,
)
from tests.engine.remains import check_nothing_is_left
from tests.model.hf_fixtures import BY_NAME
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Mended
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import XDeepServeError
from xdeepserve.history import History, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest
from xdeepserve.model.checkpoint import open_checkpoint

PARAMS = SamplingParams(max_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, seed=2, ignore_eos=True)
MET = [("tp=2",), (TWO, "mtp=1"), ("o_proj_tp=2", "exchange=push")]  # each on four dies
MODES = ("lockstep=false", "lockstep=true")

FAMILIES = [
    ("qwen-every-layer-of-experts", ("tp=4",)),  # more ranks than heads of the cache
    ("qwen-every-layer-of-experts", ("o_proj_tp=2", TWO, "exchange=push")),
    ("glm-biases-mtp", ("tp=2", "tp_mode=sp-tp-sp", "mtp=2")),
    ("minimax-rotary-dim", ("tp=2", TWO)),
    ("sparse-yarn-groups-mtp", ("tp=2", "mtp=2")),
    ("glm-sparse-shared-mtp", (TWO, "mtp=1", "experts.redundant_slots=1")),
]
OTHERS: list[tuple[str, Model]] = [
    ("no shared expert", variant(n_shared_experts=0)),
    ("two shared experts", variant(n_shared_experts=2)),
    ("no routed experts", variant(first_k_dense_replace=99)),
    ("float", with_float("outputs of MLA", "up", "down", "shared up", "shared down")),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "settings"), FAMILIES, ids=str)
def test_other_families(precision: str, name: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    """Whose stages are tasks' in any case."""
    checkpoint = open_checkpoint(BY_NAME[name].checkpoint_dir(tmp_path))
    check_colocated(precision, "dies=4", *settings, model=checkpoint)


@pytest.mark.parametrize("settings", [("tp=2", "mtp=1"), (TWO,)])
@pytest.mark.parametrize("model", [model for _, model in OTHERS], ids=[name for name, _ in OTHERS])
def test_other_models(model: Model, settings: tuple[str, ...]) -> None:
    check_colocated("int8", "dies=4", *settings, model=model)


@pytest.mark.parametrize("settings", MET, ids=str)
def test_sequences_that_give_way(settings: tuple[str, ...]) -> None:
    """Many more of them than there are blocks for, in chunks."""
    prompts = [[5 + i, *range(10, 10 + 3 * i)] for i in range(16)]
    tight = ("cache.num_blocks=4", "scheduler.max_num_seqs=3", "scheduler.max_num_batched_tokens=9")
    tight = (*tight, "scheduler.dispatch=two-level")  # which group is free first depends on times
    check_colocated("int8", "dies=4", *settings, *tight, prompts=prompts)


@functools.cache
def served(settings: tuple[str, ...], *faults: Fault) -> tuple[str, int]:
    """Return the digest, and virtual time at the end; or the error by which all requests end."""
    overrides = ["max_model_len=64", "dies=4", *settings]
    with LLM("tiny-random", "colocated", overrides=overrides, faults=faults) as llm:
        try:
            outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        except XDeepServeError as error:
            with pytest.raises(XDeepServeError):
                llm.generate([1, 2, 3], GREEDY)
            return str(error), 0
        check_nothing_is_left(llm.engine)
        return digest(outputs), llm.engine.stats().virtual_ns


@pytest.mark.parametrize("settings", MET, ids=str)
@pytest.mark.parametrize(("at_us", "die"), [(300.0, 0), (1000.0, 3)])
def test_a_lost_die_is_named_as_by_tasks(settings: tuple[str, ...], at_us: float, die: int) -> None:
    """By who waits for it in an exchange, in a collective, or for its report."""
    named = []
    for mode in MODES:
        message, _ = served((*settings, mode), Fault(at_us, die, "lost"))
        found = re.search(r"deadline passed .* waits for peer (DP group \d|[(\[]\d,?[)\]]),", message)
        assert found, message
        named.append(re.sub(r"\D", "", found[1]))
    assert named[0] == named[1]


@pytest.mark.parametrize("settings", MET, ids=str)
def test_a_link_that_is_down_is_named_as_by_tasks(settings: tuple[str, ...]) -> None:
    """Between dies that exchange rows, and share no layer."""
    fault = Fault(300.0, link=(0, 2), kind="down", plane="ub")
    for mode in MODES:
        message, _ = served((*settings, mode), fault)
        assert re.search(r"node [02] cannot reach node [02]: their link on the UB plane is down", message)


@pytest.mark.thin(2)
@pytest.mark.parametrize("settings", MET, ids=str)
@pytest.mark.parametrize(
    "fault",
    [
        Fault(5.0, 1, "late", 2000.0, by_us=5.0),
        Fault(5.0, 2, "stalled", 700.0),
        Fault(5.0, link=(0, 2), kind="blocked", plane="ub", for_us=3000.0),
    ],
    ids=str,
)
def test_who_is_late_costs_time_alone(settings: tuple[str, ...], fault: Fault) -> None:
    quiet, late = (served((*settings, "lockstep=true"), *faults) for faults in ((), (fault,)))
    assert quiet[0] == late[0] == served((*settings, "lockstep=false"))[0]
    assert late[1] > quiet[1]


@pytest.mark.parametrize("settings", MET, ids=str)
def test_steps_called_back_between_dispatch_and_combine_run_again(settings: tuple[str, ...]) -> None:
    overrides = ("dies=4", "lockstep=true", "max_model_len=64", *settings)
    history = History("colocated", overrides, PROMPTS, PARAMS)
    quiet = serve(history, is_traced=True)
    begun = [
        span.start_ns
        for span in quiet.trace.spans
        if span.node == 0 and span.name.endswith("combine") and span.lane.startswith("XCCL")
    ]
    for at_ns in begun[len(begun) // 3 :: len(begun) // 3][:2]:
        glitch = Fault(at_ns / 1000 - 0.05, 3, "glitch", code="mte-error")
        told = serve(msgspec.structs.replace(history, faults=[glitch]), hears=(Mended,))
        assert told.digest == quiet.digest
        assert len(told.of(Mended)) == 1


@pytest.mark.parametrize("settings", MET, ids=str)
def test_readers_that_leave_change_no_bit_of_others(settings: tuple[str, ...]) -> None:
    async def leave(engine: Engine) -> None:
        """Others come, and go at odd times in the midst of steps."""
        clock = engine.plan.pod.clock
        for number in range(5):
            noise = engine.submit([7, *range(number)], LONG, f"noise {number}")
            await clock.sleep(61_003 * (1 + number))
            before = engine.stats()
            noise.abort()
            after = engine.stats()
            assert after.num_running + after.num_waiting < before.num_running + before.num_waiting

    digests = []
    for meanwhile in (None, leave):
        overrides = ["max_model_len=64", "dies=4", "lockstep=true", *settings]
        with LLM("tiny-random", "colocated", overrides=overrides) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True, meanwhile=meanwhile)
            check_nothing_is_left(llm.engine)
            digests.append(digest(outputs))
    assert digests[0] == digests[1]
