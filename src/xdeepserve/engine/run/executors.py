"""Builds the die programs of a TE from its sizes: the Programs of its layers, and their schedule."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import msgspec

from xdeepserve.engine.deploy.roles import Turns
from xdeepserve.engine.deploy.sizes import GroupSizes, WalkSizes
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.program import Executor, Traversal
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.clock.wiring import ClockWiring
from xdeepserve.engine.run.wiring import ByteWiring
from xdeepserve.engine.walk.runner import Pace, Runner
from xdeepserve.engine.walk.schedule import CoreSplit, Schedule, away_and_back, in_slices, overlap, serial
from xdeepserve.hw.queue import Queue
from xdeepserve.model.attention_tables import ATTENTION
from xdeepserve.model.tensors import DENSE, MOE, Layer, Linear, ModelWeights, find
from xdeepserve.step.frame import Frame, Model
from xdeepserve.step.layer import Where, decoder_layer
from xdeepserve.step.linear import Threads
from xdeepserve.step.o_proj import shared_out_proj
from xdeepserve.step.shard import overlapped, sp_tp_sp, tensor_parallel
from xdeepserve.step.stage import LayerProgram

Wiring: TypeAlias = ByteWiring | ClockWiring
"""Maker of memories and ends by rank and, where microbatches overlap or go away, by microbatch."""


def executor(
    wiring: Wiring, rank: DieRank, mem: DieMemory, threads: Threads, reports: Queue[msgspec.Struct]
) -> Executor:
    """Build the program of a die with a DP group."""
    die, weights = wiring.team.pod.dies[wiring.team.dies[rank]], mem.assemble()
    way = traversal(wiring, rank, mem, weights, threads)
    return Executor(rank, die, mem, weights, way, wiring.chooser(rank, mem), reports)


def traversal(
    wiring: Wiring, rank: DieRank, mem: DieMemory, weights: ModelWeights, threads: Threads
) -> Traversal:
    """Build the way of a step through the layers of a die."""
    walk, groups = wiring.team.sizes.walk, wiring.team.sizes.groups
    die = wiring.team.pod.dies[wiring.team.dies[rank]]

    def runner(pace: Pace, buffers: Workspace) -> Runner:
        frame = frame_of(mem, weights, threads, buffers)
        frame.group_rank, frame.group_size = rank % groups.tp, groups.tp
        return Runner(die, frame, pace)

    main_pace = wiring.pace(rank, None)
    main = runner(main_pace, mem.workspace)
    runners = [main]
    if walk.turns == "overlap":
        runners = [runner(wiring.pace(rank, m), mem.layer_workspace(m)) for m in range(walk.num_parts)]
    elif walk.num_microbatches > 1 and not walk.is_lockstep:  # lockstep cuts the rows itself
        runners = [runner(main_pace, mem.workspace) for _ in range(walk.num_microbatches)]
        for m, each in enumerate(runners):
            each.frame.lane = m % mem.num_choices
    for each in (main, *runners):
        lead_to_experts(wiring, rank, each)
    for m, each in enumerate(runners):
        connect(wiring, rank, each, m)
    is_cut, is_sliced = walk.turns == "overlap", groups.is_sliced
    way = Traversal(main, runners, schedule(walk, is_sliced), programs(wiring, mem, weights, is_cut))
    if not walk.is_dynamic:
        return way
    # A whole step has the buffers of the first microbatch, and all cores.
    first = runners[0]
    runner_of_whole = Runner(die, first.frame, first.pace)
    runner_of_whole.group = first.group
    if first.exchange is not None:
        runner_of_whole.exchange = wiring.exchange(rank, first.pace, None)
    in_turn = partial(in_slices, serial) if is_sliced else serial
    whole = Traversal(main, [runner_of_whole], in_turn, programs(wiring, mem, weights, is_cut=False))
    return way._replace(whole=whole)


def frame_of(mem: DieMemory, weights: ModelWeights, threads: Threads, buffers: Workspace) -> Frame:
    """Make the frame of a die's steps, with the model and the memory that its stages use."""
    return Frame(
        Model(mem.config, mem.recipe, len(mem.heads), mem.walk.unabsorbed),
        buffers,
        threads,
        weights.tables,
        mem.steps.max_model_len,
        mem.slots,
        mem.replicas,
        mem.redundant,
    )


def lead_to_experts(wiring: Wiring, rank: DieRank, runner: Runner) -> None:
    """Tell a runner where its tokens find the shared expert, or the domain that they come from."""
    experts = wiring.team.sizes.experts
    if experts.where == "among":
        runner.frame.shared_expert, runner.frame.first_copy = wiring.shared_expert(rank), experts.num_slots
    elif experts.where == "away":
        runner.home = {"domain": rank // wiring.team.dies_per_domain}


def connect(wiring: Wiring, rank: DieRank, runner: Runner, microbatch: int) -> None:
    """Give a runner the ends of exchanges.

    Dies in lockstep have none: lockstep moves those bytes.
    """
    where, pace = wiring.team.sizes.experts.where, runner.pace
    if len(wiring.team.sharing(rank)) > 1:
        runner.group = wiring.group(rank, pace, microbatch)
    if wiring.team.sizes.walk.is_lockstep:
        return
    if where == "away":
        runner.trampoline = wiring.trampoline(rank, pace, microbatch)
        runner.shared_expert = wiring.shared_expert(rank)
    elif where == "among":
        runner.exchange = wiring.exchange(rank, pace, microbatch)


def schedule(walk: WalkSizes, is_sliced: bool) -> Schedule:
    """Choose the schedule of microbatches, which decides whose stage is next.

    `is_sliced`: the dies of a DP group cut a microbatch's tokens between them (SP-TP-SP).
    """
    split = CoreSplit(walk.attention_cores, walk.moves_cores) if walk.overlap == "cores" else None
    schedules: dict[Turns, Schedule] = {
        "serial": serial,
        "overlap": partial(overlap, split=split),
        "away-and-back": away_and_back,
        "dataflow": away_and_back,  # its exchanges have no barriers
        "services": away_and_back,
    }
    chosen = schedules[walk.turns]
    return partial(in_slices, chosen) if is_sliced else chosen


def programs(wiring: Wiring, mem: DieMemory, weights: ModelWeights, is_cut: bool) -> list[LayerProgram]:
    """Return the Program of each layer on this die, MTP's last; `is_cut`: two microbatches overlap in it.

    Equal layers share a Program, so the prices of its stages are computed once.
    """
    kinds: dict[tuple[object, ...], LayerProgram] = {}
    result = []
    for layer in [*weights.layers, *(mtp.layer for mtp in weights.mtp)]:
        found = [
            find(layer, row.name) for row in (*ATTENTION[layer.attention], *DENSE, *MOE) if row.kind == "int8"
        ]
        kind = (
            layer.attention,
            layer.moe is None,
            *(isinstance(w, Linear) and w.scale is not None for w in found),
        )
        if kind not in kinds:
            kinds[kind] = divided(layer_program(wiring, mem, layer, is_cut), layer, wiring.team.sizes.groups)
        result.append(kinds[kind])
    return result


def layer_program(wiring: Wiring, mem: DieMemory, layer: Layer, is_cut: bool) -> LayerProgram:
    """Build the Program of a decoder layer, for two microbatches that overlap if `is_cut`."""
    walk = wiring.team.sizes.walk
    where = Where(
        experts=wiring.team.sizes.experts.where,
        has_shared=wiring.has_shared,
        has_routes=mem.has_routes or wiring.has_replicas,
        collects=wiring.has_replicas or (mem.replicas is not None and mem.replicas.collects),
        pushes=walk.pushes,
        int8_answers=mem.config.int8_answers,
        holds=mem.holds,
    )
    program = decoder_layer(layer, where)
    return overlapped(program) if is_cut else program


def divided(program: LayerProgram, layer: Layer, groups: GroupSizes) -> LayerProgram:
    """Divide a layer's work between the dies that share its projections; alone, a die does all of it."""
    if groups.o_proj_tp > 1:
        return shared_out_proj(program, layer, groups.o_proj_tp)
    if groups.tp == 1:
        return program
    return tensor_parallel(program, layer, groups.tp) if groups.tp_mode == "tp" else sp_tp_sp(program)
