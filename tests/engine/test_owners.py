"""Every process has an owner who hears its error: none is silent, and none hangs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.sources import SRC, tree_of
from xdeepserve.ems.pool_prefixes import PoolPrefixes
from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.job.admission import DecodeFirst
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.job.links import Links
from xdeepserve.engine.run.clock.flow_hub import FlowHub
from xdeepserve.engine.serving.control_plane import ControlPlane
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.te_group import TEGroup
from xdeepserve.engine.te import te
from xdeepserve.engine.te.steps_apart import StepsApart
from xdeepserve.engine.te.steps_together import StepsTogether
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw import faults, rdma
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import LLM

PAIR = ("prefill.dies=1", "decode.dies=1")
APART = ("attention.domains=1", "attention.dies=2", "experts.routed_dies=2")
CARDS = ("attention.hardware=h20", "experts.hardware=l40s", "attention.microbatches=3")


class Kind(NamedTuple):
    """A kind of process: the method that it runs, and a pod in which it runs."""

    name: str
    owner: Any  # class or module of the method
    method: str
    deployment: str
    overrides: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    is_timing_only: bool = True


GLITCH = (Fault(900.0, 0, "glitch", code="mte-error"),)
EPLB = ("dies=4", "experts.redundant_slots=1", "experts.balance_interval=0.001")
KINDS = (
    Kind("die program", Executor, "run", "colocated", ("dies=2",)),
    Kind("step of a die program", Executor, "step", "colocated", ("dies=2",)),
    Kind("expert die", ExpertProgram, "run", "moe-attention", APART),
    Kind("stream of an expert die", ExpertProgram, "_compute", "moe-attention", APART),
    Kind("loop of a TE", StepsTogether, "advance", "monolithic"),
    Kind("loop of a DP group", StepsApart, "run", "moe-attention", (*APART, "dataflow=true")),
    Kind("reports of layers", te, "hear_layers", "pd", (*PAIR, "transfer=layer")),
    Kind("search for a way", JobExecutor, "_find_way", "pd", PAIR),
    Kind("decode-first admission", DecodeFirst, "_look", "pd", (*PAIR, "scheduler.admission=decode")),
    Kind("beat of the control plane", ControlPlane, "_beat", "monolithic", ("health.beat_s=0.001",)),
    Kind("answers to the control plane", ControlPlane, "_hear", "monolithic", ("health.beat_s=0.001",)),
    Kind("loss of a die", TEGroup, "_lose_die", "monolithic"),
    Kind("tokens as they flow", FlowHub, "_carry", "moe-attention", (*APART, "dataflow=true")),
    Kind("planned fault", faults, "_happen", "monolithic", (), GLITCH),
    Kind("network card", rdma.RDMACard, "_transmit", "moe-attention", CARDS, (), False),
    Kind("segment on its way", rdma.RDMACard, "_receive", "moe-attention", CARDS, (), False),
    Kind("pool finds places", PoolPrefixes, "_find_places", "monolithic", (), (), False),
    Kind("pool keeps blocks", PoolPrefixes, "_keep", "monolithic", (), (), False),
    Kind("pool brings blocks", PoolPrefixes, "_bring", "monolithic", (), (), False),
    Kind("prefetch of experts", Reconfiguration, "_fetch", "colocated", EPLB, (), False),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_error_is_heard(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error in a process ends all requests that need it, by name, and leaves nothing unheard."""
    overrides = ("max_model_len=128", "cache.num_blocks=8", "scheduler.max_num_seqs=2", *kind.overrides)
    if kind.owner is PoolPrefixes:
        overrides += (f"ems.path={tmp_path}", "ems.block_size=16", "ems.servers=2")

    async def fails(*_: Any) -> None:
        raise ZeroDivisionError("tried on purpose")

    if kind.owner is JobExecutor:
        monkeypatch.setattr(Links, "choose", lambda *_: None)
    if kind.method != "_bring":
        monkeypatch.setattr(kind.owner, kind.method, fails)

    async def finds_a_die_lost(engine: Engine) -> None:
        for tell in engine.plan.pod.memories.on_silence.values():
            tell(0)

    meanwhile = finds_a_die_lost if kind.owner is TEGroup else None
    prompts, params = [[index] * 40 for index in range(4)], SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(
        *("tiny-random", kind.deployment, "int8"),
        overrides=overrides,
        timing_only=kind.is_timing_only,
        progress=False,
        faults=kind.faults,
    ) as llm:
        if kind.method == "_bring":
            llm.generate(prompts, params)  # more than HBM keeps: the pool has what is asked for again
            monkeypatch.setattr(kind.owner, kind.method, fails)
        with pytest.raises(XDeepServeError, match="tried on purpose"):
            llm.generate(prompts, params, meanwhile=meanwhile)


def spawns() -> Iterator[tuple[str, ast.Call, bool]]:
    """Calls of `spawn` and `detach` in the sources: where, the call, and whether its result is dropped."""
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            for value in ast.iter_child_nodes(node):
                is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
                if is_call and value.func.attr in ("spawn", "detach") and value.args:
                    yield str(path.relative_to(SRC)), value, isinstance(node, ast.Expr)


def test_no_process_is_without_an_owner() -> None:
    """Who spawns keeps the process and awaits it; what nobody awaits is detached, with an owner to hear."""
    dropped = [
        f"{path}:{call.lineno}"
        for path, call, is_dropped in spawns()
        if is_dropped and call.func.attr == "spawn"
    ]
    assert dropped == []
    hardware = ("hw/", "engine/run/clock/")  # owned by the clock's owner: all engines of the pod
    ownerless = [
        f"{path}:{call.lineno}"
        for path, call, _ in spawns()
        if call.func.attr == "detach" and len(call.args) < 3 and not path.startswith(hardware)
    ]
    assert ownerless == []
