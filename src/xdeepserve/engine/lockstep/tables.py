"""Where everything lies: addresses by die, in the columns that `attention`, `exchange` and `experts` name.

Addresses hold as long as the pod's memories do; what they are taken from stays referenced by the programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.layout.blocks import FIELD
from xdeepserve.comm.layout.trampoline import A2ELayout
from xdeepserve.engine.lockstep.kernels import attention as a
from xdeepserve.engine.lockstep.kernels import exchange as x
from xdeepserve.engine.lockstep.kernels import experts as e
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.expert import ExpertProgram
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.hw.memory import Memory
from xdeepserve.model.canonical import Array
from xdeepserve.model.weights import Layer, Linear

Table = npt.NDArray[np.int64]


def address(array: Array | None) -> int:
    """Of an array's first byte; 0 if there is no array."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def base(memory: Memory) -> int:
    """Of a node's first byte."""
    return address(np.frombuffer(memory.buffer, np.uint8, 1))


def buffers(executors: Sequence[Executor]) -> Table:
    """[A, 18]: the workspaces of the attention dies, their rotary tables and how long these are."""
    rows = []
    for executor in executors:
        take, w = executor.ws.take, executor.weights
        row = [address(take(name, 1)) for name in a.BUFFERS]
        rows.append([*row, address(w.cos), address(w.sin), len(w.cos)])
    return np.array(rows, np.int64)


def layer_weights(layers: Sequence[Layer], caches: Sequence[KVCache]) -> Table:
    """[A, NUM_WEIGHTS]: one layer's arrays on each die, and its part of the KV cache."""

    def linear(layer: Linear | None) -> list[int]:
        return [0, 0] if layer is None else [address(layer.w), address(layer.scale)]

    table = np.zeros((len(layers), a.NUM_WEIGHTS), np.int64)
    for row, layer, cache in zip(table, layers, caches, strict=True):
        mlp, moe = layer.mlp, layer.moe
        linears = [layer.wq_a, layer.wq_b, layer.wkv_a, layer.wo]
        linears += [None, None] if mlp is None else [mlp.w13, mlp.w2]
        vectors = (layer.attn_norm, layer.q_norm, layer.kv_norm, layer.w_uk, layer.w_uv, layer.ffn_norm)
        row[:] = [
            *(at for each in linears for at in linear(each)),
            *map(address, vectors),
            address(None if moe is None else moe.gate),
            address(None if moe is None else moe.bias),
            *map(address, cache),
        ]
    return table


class Item(NamedTuple):
    """A2E and E2A of one microbatch of one domain: what its kernels take, besides the shape."""

    first: int  # attention rank in the TE of the domain's first
    ways: Table  # [R, 15], expert dies
    attention: Table  # [A of the domain, 8]
    bases: Table  # [A of the domain]
    answer_fields: Table  # [A of the domain]
    served: Table  # attention ranks in the domain, by trampoline
    bounds: Table  # [R + 1]
    expert_rank: Table
    counts: Table  # [A of the domain]
    orders: Table  # [R, max_tokens * copies]
    sents: Table  # [R, R]
    received: Table  # [R, R]
    sent: Table  # [R], addresses of the answers' buffers


def item(
    layout: A2ELayout,
    first: int,
    place: int,
    executors: Sequence[Executor],
    programs: Sequence[ExpertProgram],
    shared_experts: Sequence[int | None],
) -> Item:
    """Tables of `layout`. `place` is its number in the round; executors are those of its domain."""
    sides, num_ranks = layout.sides, len(programs)
    experts = layout.experts

    def region(program: ExpertProgram | Executor, area: str, name: str) -> tuple[int, int]:
        """Its address, and its offset in the die's memory."""
        memory = program.die.memory
        offset = getattr(memory, area).regions[name].offset
        return base(memory) + offset, offset

    ways = np.zeros((num_ranks, 15), np.int64)
    for way, program in zip(ways, programs, strict=True):
        dispatch, combine = experts.dispatch, experts.combine
        way[x.BASE] = base(program.die.memory)
        for blocks, fields, rows in (
            (layout.tokens, x.TOKEN_FIELDS, x.TOKEN_ROWS),
            (dispatch, x.DISPATCH_FIELDS, x.DISPATCH_ROWS),
            (combine, x.COMBINE_FIELDS, x.COMBINE_ROWS),
        ):
            way[fields], _ = region(program, "metadata", blocks.region("fields"))
            way[rows], _ = region(program, "app", blocks.region("rows"))
        for blocks, at, pointer in (
            (dispatch, x.DISPATCH_BLOCKS, x.DISPATCH_POINTER),
            (combine, x.COMBINE_BLOCKS, x.COMBINE_POINTER),
            (layout.answers, x.ANSWER_BLOCKS, x.ANSWERS_POINTER),
        ):
            way[at], way[pointer] = region(program, "managed", blocks.region("blocks"))
    attention = np.zeros((len(executors), 8), np.int64)
    for rank, (row, executor) in enumerate(zip(attention, executors, strict=True)):
        trampoline = sides.trampoline(rank)
        index = sides.served(trampoline).index(rank)
        row[a.TOKENS], row[a.TOKENS_POINTER] = region(executor, "managed", layout.tokens.region("blocks"))
        row[a.TRAMPOLINE_FIELD] = ways[trampoline, x.TOKEN_FIELDS] + index * FIELD.size
        row[a.TRAMPOLINE_BASE] = ways[trampoline, x.BASE]
        row[a.ANSWER_FIELD], _ = region(executor, "metadata", layout.answers.region("fields"))
        row[a.ANSWERS], _ = region(executor, "app", layout.answers.region("rows"))
        shared = shared_experts[rank]
        row[a.SHARED_EXPERT] = -1 if shared is None else shared
    served = [sides.served(rank) for rank in range(num_ranks)]
    return Item(
        first=first,
        ways=ways,
        attention=attention,
        bases=np.array([base(executor.die.memory) for executor in executors], np.int64),
        answer_fields=attention[:, a.ANSWER_FIELD].copy(),
        served=np.array([rank for each in served for rank in each], np.int64),
        bounds=np.cumsum([0, *map(len, served)], dtype=np.int64),
        expert_rank=np.array(sides.experts.expert_rank, np.int64),
        counts=np.zeros(len(executors), np.int64),
        orders=np.zeros((num_ranks, experts.max_tokens * layout.top_k), np.int64),
        sents=np.zeros((num_ranks, num_ranks), np.int64),
        received=np.zeros((num_ranks, num_ranks), np.int64),
        sent=np.array([address(each.mem.workspace.take(f"sent/{place}", 1)) for each in programs], np.int64),
    )


def expert_table(programs: Sequence[ExpertProgram], layer: int) -> Table:
    """[R, NUM_EXPERT_COLUMNS]: the experts of MoE layer `layer` on each expert die, and its buffers."""
    table = np.zeros((len(programs), e.NUM_EXPERT_COLUMNS), np.int64)
    for row, program in zip(table, programs, strict=True):
        mem, mlp = program.mem, program.layers[layer]
        take = mem.workspace.take
        row[:6] = [
            mem.experts.start if mem.experts else 0,
            len(mem.experts),
            address(mlp.w13.w),
            address(mlp.w13.scale),
            address(mlp.w2.w),
            address(mlp.w2.scale),
        ]
        for column, name in enumerate(e.BUFFERS, 6):
            if not mem.is_shared:
                row[column] = address(take(f"expert_{name}", 1))
            elif name in ("gate_up", "act", "q8", "q8_scale"):
                row[column] = address(take(name, 1))
    return table
