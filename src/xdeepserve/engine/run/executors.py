"""Die programs of a TE from its sizes: which Programs its layers become, and who takes which turn."""

from __future__ import annotations

from functools import partial

import msgspec

from xdeepserve.engine.deploy.roles import Turns
from xdeepserve.engine.deploy.sizes import Sizes
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.program import Executor, Traversal
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.engine.run.net import Net
from xdeepserve.engine.walk.core_split import CoreSplit
from xdeepserve.engine.walk.runner import Pace, Runner
from xdeepserve.engine.walk.schedule import Schedule, away_and_back, in_slices, overlap, serial
from xdeepserve.hw.queue import Queue
from xdeepserve.model.attention_tables import ATTENTION
from xdeepserve.model.tensors import DENSE, MOE, Layer, Linear, ModelWeights, find
from xdeepserve.step.frame import Frame, Model
from xdeepserve.step.layer import Where, decoder_layer
from xdeepserve.step.linear import Threads
from xdeepserve.step.o_proj import shared_out_proj
from xdeepserve.step.shard import overlapped, sp_tp_sp, tensor_parallel
from xdeepserve.step.stage import LayerProgram


def executor(
    net: Net, rank: int, mem: DieMemory, threads: Threads, reports: Queue[msgspec.Struct]
) -> Executor:
    """The program of a die with a DP group."""
    die, weights = net.team.pod.dies[net.team.dies[rank]], mem.assemble()
    way = traversal(net, rank, mem, weights, threads)
    return Executor(rank, die, mem, weights, way, net.chooser(rank, mem), reports)


def traversal(net: Net, rank: int, mem: DieMemory, weights: ModelWeights, threads: Threads) -> Traversal:
    """How a step goes through the layers of a die."""
    sizes = net.team.sizes

    def runner(pace: Pace, buffers: Workspace) -> Runner:
        frame = Frame(
            Model(mem.config, mem.recipe, len(mem.heads), sizes.unabsorbed),
            buffers,
            threads,
            (weights.cos, weights.sin),
            sizes.max_model_len,
            mem.slots,
            mem.replicas,
            mem.redundant,
        )
        frame.group_rank, frame.group_size = rank % sizes.tp, sizes.tp
        if sizes.experts == "among":
            frame.shared_expert, frame.first_copy = net.shared_expert(rank), sizes.num_slots
        return Runner(net.team.pod.dies[net.team.dies[rank]], frame, pace)

    main_pace = net.pace(rank, None)
    main = runner(main_pace, mem.workspace)
    runners = [main]
    if sizes.turns == "overlap":
        parts = range(sizes.num_parts)
        runners = [runner(net.pace(rank, m), mem.layer_workspace(m)) for m in parts]
    elif sizes.num_microbatches > 1 and not sizes.is_lockstep:  # in lockstep who runs them all cuts the rows
        runners = [runner(main_pace, mem.workspace) for _ in range(sizes.num_microbatches)]
        for m, each in enumerate(runners):
            each.frame.lane = m % mem.num_choices
    for each in (main, *runners):
        if sizes.experts == "away":
            each.home = {"domain": rank // net.team.dies_per_domain}
            each.at()
    for m, each in enumerate(runners):
        connect(net, rank, each, m)
    return Traversal(main, runners, schedule(sizes), programs(net, mem, weights))


def connect(net: Net, rank: int, runner: Runner, microbatch: int) -> None:
    """Give a runner its ends of exchanges. Dies in lockstep have none: their gang makes those bytes."""
    sizes, pace = net.team.sizes, runner.pace
    if sizes.num_sharing > 1:
        runner.group = net.group(rank, pace, microbatch)
    if sizes.is_lockstep:
        return
    if sizes.experts == "away":
        runner.trampoline = net.trampoline(rank, pace, microbatch)
        runner.shared_expert = net.shared_expert(rank)
    elif sizes.experts == "among":
        runner.exchange = net.exchange(rank, pace, microbatch)


def schedule(sizes: Sizes) -> Schedule:
    """Whose turn it is."""
    split = CoreSplit(sizes.attention_cores, sizes.moves_cores) if sizes.overlap == "cores" else None
    schedules: dict[Turns, Schedule] = {
        "serial": serial,
        "overlap": partial(overlap, split=split),
        "away-and-back": away_and_back,
        "dataflow": away_and_back,  # its exchanges have no barriers
        "services": away_and_back,
    }
    chosen = schedules[sizes.turns]
    return partial(in_slices, chosen) if sizes.tp > 1 and sizes.tp_mode == "sp-tp-sp" else chosen


def programs(net: Net, mem: DieMemory, weights: ModelWeights) -> list[LayerProgram]:
    """What each layer becomes on this die, MTP's last. Layers that are alike share a Program, and its stages
    cost them the same."""
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
            kinds[kind] = layer_program(net, mem, layer)
        result.append(kinds[kind])
    return result


def layer_program(net: Net, mem: DieMemory, layer: Layer) -> LayerProgram:
    """A decoder layer, transformed as the deployment says."""
    sizes = net.team.sizes
    where = Where(
        experts=sizes.experts,
        has_shared=net.has_shared,
        has_routes=mem.has_routes,
        collects=mem.replicas is not None and mem.replicas.collects,
        pushes=sizes.exchange == "push",
        int8_answers=mem.config.int8_answers,
        holds=mem.holds,
    )
    program = decoder_layer(layer, where)
    if sizes.turns == "overlap":
        program = overlapped(program)
    if sizes.o_proj_tp > 1:
        return shared_out_proj(program, layer, sizes.o_proj_tp)
    if sizes.tp == 1:
        return program
    return tensor_parallel(program, layer, sizes.tp) if sizes.tp_mode == "tp" else sp_tp_sp(program)
