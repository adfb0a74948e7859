"""What is recorded: exchanges of three or four ranks, small enough to read byte by byte.

Inputs come from a seeded Philox generator, so they are the same everywhere. All outputs are exact:
quantisation and sums follow the canonical order (`model.canonical`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.comm.collectives import Collectives
from xdeepserve.comm.fused import FusedKernels, FusedXCCL
from xdeepserve.comm.layout import CollectiveLayout, FusedLayout, Group, Layout
from xdeepserve.comm.layout.ring import RingLayout
from xdeepserve.comm.send_receive import PointToPoint
from xdeepserve.comm.xccl import XCCL, Kernels
from xdeepserve.golden.cells import (
    Cells,
    Region,
    collective_cells,
    exchange_cells,
    fused_cells,
    ring_cells,
)
from xdeepserve.golden.recorder import AREAS, Arrays, Recorder, Recording, Step
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pod import Pod
from xdeepserve.model.canonical import quantize_rows

GROUP = Group(dies=(0, 1, 16), expert_rank=(0, 1, 2, 2))  # experts 2 and 3 share rank 2
TOP_K, HIDDEN, EVENT_ID = 2, 8, 7
NUM_TOKENS = (3, 0, 4)  # by rank


class Done(NamedTuple):
    """A case that has run."""

    recording: Recording
    regions: list[list[Region]]  # by rank
    parameters: dict[str, Any]


class Case(NamedTuple):
    """`run(seed)` records the case; the seed changes the order in which dies wake up, and no byte."""

    description: str
    run: Callable[[int | None], Done]


def _rng(stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(stream))


def _floats(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Multiples of 2**-20 in [-4, 4): exact in any library."""
    return (rng.integers(-(2**22), 2**22, shape) / 2**20).astype(np.float32)


def expert(expert_idx: int, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A stand-in for an expert's network: expert e multiplies by e + 1."""
    return x * np.float32(expert_idx + 1)


def _routing() -> Arrays:
    arrays: Arrays = {}
    for rank, num_tokens in enumerate(NUM_TOKENS):
        rng = _rng(rank)
        chosen = [rng.permutation(len(GROUP.expert_rank))[:TOP_K] for _ in range(num_tokens)]
        arrays[f"rank{rank}.x"] = _floats(rng, (num_tokens, HIDDEN))
        arrays[f"rank{rank}.topk_idx"] = np.array(chosen, np.int32).reshape(num_tokens, TOP_K)
        arrays[f"rank{rank}.topk_weights"] = np.abs(_floats(rng, (num_tokens, TOP_K))) / np.float32(8)
        arrays[f"rank{rank}.shared"] = _floats(rng, (num_tokens, HIDDEN))
    return arrays


def _regions(pod: Pod, dies: tuple[int, ...], cells: dict[str, Cells]) -> list[list[Region]]:
    result = []
    for die in dies:
        memory = pod.memory(die)
        areas = {area: getattr(memory, area) for area in AREAS}
        result.append(
            [
                Region(name, region.name, region.start, region.nbytes, cells[region.name])
                for name, area in areas.items()
                for region in area.regions.values()
            ]
        )
    return result


def _run(
    layout: Any,
    dies: tuple[int, ...],
    cells: dict[str, Cells],
    inputs: Arrays,
    make: Callable[[Pod, Recorder], list[Coroutine[Any, Any, Arrays]]],
    seed: int | None,
    prepare: Callable[[Pod], None] = lambda pod: None,
) -> Done:
    """Run one program a rank. Each returns the rank's outputs."""

    async def main() -> Done:
        pod = Pod(clock=Clock(seed))
        for die in dies:
            layout.plan(pod.plan(die))
        prepare(pod)
        pod.materialise()
        recorder = Recorder(pod, dies)
        programs = make(pod, recorder)
        tasks = [pod.dies[die].spawn(program) for die, program in zip(dies, programs, strict=True)]
        outputs: Arrays = {}
        for rank, found in enumerate(await asyncio.gather(*tasks)):
            outputs |= {f"rank{rank}.{name}": value for name, value in found.items()}
        parameters = {"dies": list(dies)} | msgspec.to_builtins(layout)
        return Done(Recording(inputs, recorder.steps, outputs), _regions(pod, dies, cells), parameters)

    return asyncio.run(main())


# ---- dispatch and combine -------------------------------------------------------------------------------


def pull(quantize: bool, seed: int | None) -> Done:
    layout = Layout.for_group(GROUP, max_tokens=4, top_k=TOP_K, hidden=HIDDEN, quantize=quantize)
    inputs = {name: x for name, x in _routing().items() if name.split(".")[1] in ("x", "topk_idx")}

    async def program(xccl: XCCL) -> Arrays:
        rank = xccl.rank
        x, topk_idx = inputs[f"rank{rank}.x"], inputs[f"rank{rank}.topk_idx"]
        got = await xccl.dispatch(x, topk_idx, EVENT_ID)
        received = {f"received.{name}": np.array(value) for name, value in got._asdict().items()}
        tokens = got.payload.astype(np.float32) * got.scale[:, None]
        out = [expert(e, row) for e, row in zip(got.expert_idx.tolist(), tokens, strict=True)]
        expert_out = np.array(out, np.float32).reshape(len(got), HIDDEN)
        combined = await xccl.combine(expert_out, EVENT_ID)
        return received | {"expert_out": expert_out, "combined": combined}

    def make(pod: Pod, recorder: Recorder) -> list[Coroutine[Any, Any, Arrays]]:
        kernels = Kernels(quantize_rows)
        return [
            program(XCCL(pod.dies[die], rank, GROUP, layout, kernels, on_step=recorder.lockstep))
            for rank, die in enumerate(GROUP.dies)
        ]

    parameters = {"expert_rank": list(GROUP.expert_rank), "event_id": EVENT_ID}
    done = _run(layout, GROUP.dies, exchange_cells(layout), inputs, make, seed)
    return done._replace(parameters=done.parameters | parameters)


def push(quantize: bool, seed: int | None) -> Done:
    layout = FusedLayout.for_group(GROUP, local_batch=4, top_k=TOP_K, hidden=HIDDEN, quantize=quantize)
    inputs = _routing()

    async def program(xccl: FusedXCCL) -> Arrays:
        x, topk_idx, weights, shared = (
            inputs[f"rank{xccl.rank}.{name}"] for name in ("x", "topk_idx", "topk_weights", "shared")
        )
        got = await xccl.dispatch(x, topk_idx, EVENT_ID)
        received = {f"received.{name}": np.array(value) for name, value in got._asdict().items()}
        tokens = got.payload.astype(np.float32) * got.scale[:, None]
        out = [expert(e, row) for e, row in zip(got.expert_idx.tolist(), tokens, strict=True)]
        expert_out = np.array(out, np.float32).reshape(len(got), HIDDEN)
        combined = await xccl.combine(expert_out, weights, EVENT_ID, shared)
        return received | {"expert_out": expert_out, "combined": combined.copy()}

    def make(pod: Pod, recorder: Recorder) -> list[Coroutine[Any, Any, Arrays]]:
        kernels = FusedKernels(quantize_rows)
        return [
            program(FusedXCCL(pod.dies[die], rank, GROUP, layout, kernels, on_step=recorder.lockstep))
            for rank, die in enumerate(GROUP.dies)
        ]

    parameters = {"expert_rank": list(GROUP.expert_rank), "event_id": EVENT_ID}
    done = _run(layout, GROUP.dies, fused_cells(layout), inputs, make, seed)
    return done._replace(parameters=done.parameters | parameters)


# ---- collectives ----------------------------------------------------------------------------------------


def collective(op: str, seed: int | None) -> Done:
    dies = (0, 1, 16, 17)
    layout = CollectiveLayout(num_ranks=len(dies), max_bytes=256)
    inputs: Arrays = {}
    for rank in range(len(dies)):
        rng = _rng(10 + rank)
        if op == "all_to_all":
            for peer in range(len(dies)):
                inputs[f"rank{rank}.to{peer}"] = _floats(rng, (int(rng.integers(0, 4)), 4))
        else:
            # Sums whose order shows: magnitudes differ, so roundings do.
            scale = np.float32(10.0) ** rng.integers(-3, 4, (5, 3)).astype(np.float32)
            inputs[f"rank{rank}.x"] = (_floats(rng, (5, 3)) * scale).astype(np.float32)

    async def program(rank: Collectives) -> Arrays:
        me = f"rank{rank.rank}"
        if op == "all_to_all":
            parts = [inputs[f"{me}.to{peer}"] for peer in range(len(dies))]
            got = await rank.all_to_all(parts, EVENT_ID)
            return {f"from{peer}": part.copy() for peer, part in enumerate(got)}
        result = await getattr(rank, op)(inputs[f"{me}.x"], EVENT_ID)
        return {"result": result.copy()}

    def make(pod: Pod, recorder: Recorder) -> list[Coroutine[Any, Any, Arrays]]:
        return [program(Collectives(pod.dies[die], dies, layout, on_step=recorder.lockstep)) for die in dies]

    done = _run(layout, dies, collective_cells(layout), inputs, make, seed)
    return done._replace(parameters=done.parameters | {"op": op, "event_id": EVENT_ID})


# ---- send and receive -----------------------------------------------------------------------------------


def send_receive(seed: int | None) -> Done:
    """Three messages of a chunk each over a ring of two slots. One step is complete at a time."""
    dies, sizes = (0, 16), (64, 40, 64)
    layout = RingLayout(num_ranks=2, num_cores=2, slot_nbytes=64, num_slots=2)
    inputs: Arrays = {
        f"rank0.message{i}": _rng(20 + i).integers(0, 256, nbytes, np.uint8) for i, nbytes in enumerate(sizes)
    }
    buffer = Cells(np.dtype(np.uint8), (("byte", 64),))

    async def sender(p2p: PointToPoint) -> Arrays:
        memory = p2p.die.memory
        buffer = memory.app.regions["buffer"]
        for i, nbytes in enumerate(sizes):
            memory.write(buffer.offset, inputs[f"rank0.message{i}"].tobytes())
            await p2p.send(buffer.offset, nbytes, 1, EVENT_ID + i, cores=2)
        return {}

    async def receiver(p2p: PointToPoint) -> Arrays:
        memory, found = p2p.die.memory, {}
        buffer = memory.app.regions["buffer"]
        for i, nbytes in enumerate(sizes):
            await p2p.receive(buffer.offset, nbytes, 0, EVENT_ID + i, cores=2)
            found[f"message{i}"] = memory.view(buffer, np.uint8, nbytes).copy()
        return found

    def make(pod: Pod, recorder: Recorder) -> list[Coroutine[Any, Any, Arrays]]:
        def on_step(op: str, step: int) -> None:
            recorder.snapshot(f"{op} {step}")

        ends = [
            PointToPoint(pod.dies[die], rank, dies, layout, on_step=on_step) for rank, die in enumerate(dies)
        ]
        return [sender(ends[0]), receiver(ends[1])]

    def prepare(pod: Pod) -> None:
        for die in dies:
            pod.plan(die).app.alloc("buffer", 64)

    cells = ring_cells(layout) | {"buffer": buffer}
    done = _run(layout, dies, cells, inputs, make, seed, prepare)
    return done._replace(parameters=done.parameters | {"event_id": EVENT_ID})


CASES = {
    "dispatch-combine-int8": Case(
        "pull-based dispatch and combine, quantised (XDS 3.2)", lambda seed: pull(True, seed)
    ),
    "dispatch-combine-fp32": Case(
        "pull-based dispatch and combine, not quantised", lambda seed: pull(False, seed)
    ),
    "fused-int8": Case("FusedDispatch and FusedCombine, quantised (CM 4.2.1)", lambda seed: push(True, seed)),
    "fused-fp32": Case("FusedDispatch and FusedCombine, not quantised", lambda seed: push(False, seed)),
    "send-receive": Case("three messages over a ring of two slots (XDS 3.1)", send_receive),
    "all-gather": Case("four ranks", lambda seed: collective("all_gather", seed)),
    "all-to-all": Case("four ranks, different lengths", lambda seed: collective("all_to_all", seed)),
    "reduce-scatter": Case(
        "four ranks, sums in canonical order", lambda seed: collective("reduce_scatter", seed)
    ),
    "all-reduce": Case("four ranks, sums in canonical order", lambda seed: collective("all_reduce", seed)),
}

__all__ = ["CASES", "Case", "Done", "Recording", "Step"]
