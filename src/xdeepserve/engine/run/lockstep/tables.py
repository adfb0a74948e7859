"""Tables of addresses by die, in the columns that the kernels' modules name.

Addresses hold as long as the pod's memories do, because the programs keep references to the arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.exchange import twin as x
from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.comm.fused import twin as fused
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.trampoline import twin as a2e
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.comm.wire import FIELD, Blocks
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.die.replicas import ReplicaMap
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.run.lockstep.kernels import experts as e
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Memory
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import MLP, Layer, Linear, find
from xdeepserve.step.frame import KVCache

Table = npt.NDArray[np.int64]


def address(array: Array | None) -> int:
    """Return the address of an array's first byte; 0 if there is no array."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def base(memory: Memory) -> int:
    """Return the address of a node's first byte."""
    return address(np.frombuffer(memory.buffer, np.uint8, 1))


def buffers(executors: Sequence[Executor], spaces: Sequence[Workspace]) -> Table:
    """Return the table of attention dies' buffers, [A, NUM_COLUMNS].

    A row has the addresses of workspace buffers and rotary tables, and the rotary tables' length. The die's
    rank, the buffer with the tokens' routes and the shared expert's number follow.
    """
    rows = []
    for executor, ws in zip(executors, spaces, strict=True):
        w = executor.weights
        row = [address(ws.take(name, 0)) if name in ws else 0 for name in a.BUFFERS]
        routes = row[a.TOPK_PHYSICAL] or row[a.TOPK_IDX]
        shared = executor.runner.frame.shared_expert
        numbers = len(w.cos), executor.rank, routes, -1 if shared is None else shared
        rows.append([*row, address(w.cos), address(w.sin), *numbers])
    return np.array(rows, np.int64)


def beside(executor: Executor, space: Workspace, row: Array, num_rows: int) -> tuple[Table, Array]:
    """Allocate buffers for `num_rows` rows of several dies and their h, outside the dies' memories.

    Returns their addresses [NUM_COLUMNS + 1], and the memory. `row` is the row of a die in the table of
    `buffers`.
    """
    table, groups = np.zeros(a.NUM_COLUMNS + 1, np.int64), executor.mem.groups
    table[[a.COS, a.SIN, a.ROTARY_SIZE]] = row[[a.COS, a.SIN, a.ROTARY_SIZE]]
    used = [at for at in range(len(a.BUFFERS)) if row[at] and at not in (a.SLOT_OUT, a.TOPK_PHYSICAL)]
    columns = {column: space.nbytes(a.BUFFERS[column]) for column in used}
    columns[a.BESIDE_H] = space.nbytes("x")
    line, at = 64, 0  # each begins on a cache line of its own
    for column, nbytes in columns.items():
        table[column] = at
        at += (-(-nbytes // groups.max_slice) * num_rows + line - 1) // line * line
    memory = np.zeros(at + line, np.uint8)  # prompts on a matrix unit hand out what they have not written
    table[[*columns]] += (address(memory) + line - 1) // line * line
    return table, memory


def weights_nbytes(layer: Layer) -> int:
    """Return the size in bytes of a layer's weights, without its routed experts."""
    linears = (each.w for name in a.LINEARS if (each := find(layer, name)) is not None)
    vectors = (find(layer, name) for name in a.VECTORS)
    return sum(each.nbytes for each in (*linears, *vectors) if each is not None)


def layer_weights(
    layers: Sequence[Layer], caches: Sequence[KVCache], replicas: Sequence[ReplicaMap | None]
) -> Table:
    """Return the table of a layer on each die, [A, NUM_WEIGHTS]: weights, KV cache and replica map."""

    def linear(weight: Linear | None) -> tuple[int, int]:
        return (0, 0) if weight is None else (address(weight.w), address(weight.scale))

    table = np.zeros((len(layers), a.NUM_WEIGHTS), np.int64)
    for row, layer, cache, found in zip(table, layers, caches, replicas, strict=True):
        routing = (None, None, None) if found is None or layer.moe is None else found.tables(layer.moe)
        row[:] = [
            *(at for name in a.LINEARS for at in linear(find(layer, name))),
            *(address(find(layer, name)) for name in a.VECTORS),
            *map(address, cache.pages),
            layer.int8_attention,
            *map(address, routing),
        ]
    return table


def _region(die: Die, area: str, name: str) -> tuple[int, int]:
    """Return a region's address and its offset in the die's memory."""
    offset = getattr(die.memory, area).regions[name].offset
    return base(die.memory) + offset, offset


def ways(dies: Sequence[Die], layout: Layout) -> Table:
    """Return the table of dispatch and combine on each die of a group, [R, NUM_WAY_COLUMNS]; columns of A2E
    stay 0."""
    table = np.zeros((len(dies), x.NUM_WAY_COLUMNS), np.int64)
    for way, die in zip(table, dies, strict=True):
        way[x.BASE] = base(die.memory)
        for blocks, fields, at, pointer, rows in (
            (
                layout.dispatch,
                x.DISPATCH_FIELDS,
                x.DISPATCH_BLOCKS,
                x.DISPATCH_POINTER,
                x.DISPATCH_ROWS,
            ),
            (layout.combine, x.COMBINE_FIELDS, x.COMBINE_BLOCKS, x.COMBINE_POINTER, x.COMBINE_ROWS),
        ):
            _reader(way, die, blocks, fields, rows)
            way[at], way[pointer] = _region(die, "managed", blocks.region("blocks"))
    return table


def no_ways(dies: Sequence[Die]) -> Table:
    """Return the table of dies that pull nothing, [R, NUM_WAY_COLUMNS]: base addresses only."""
    table = np.zeros((len(dies), x.NUM_WAY_COLUMNS), np.int64)
    table[:, x.BASE] = [base(die.memory) for die in dies]
    return table


def ends(dies: Sequence[Die], layout: FusedLayout) -> Table:
    """Return the table of FusedDispatch and FusedCombine on each die of a group, [R, 7]."""
    table = np.zeros((len(dies), fused.NUM_END_COLUMNS), np.int64)
    for row, die in zip(table, dies, strict=True):
        for column, area, part in (
            (fused.FLAGS, "metadata", "flags"),
            (fused.TOKEN_FLAGS, "metadata", "token_flags"),
            (fused.DISPATCH, "managed", "dispatch"),
            (fused.COMBINE, "managed", "combine"),
            (fused.OUTPUT, "app", "output"),
            (fused.OUTPUT_SLOTS, "app", "output_slots"),
            (fused.COMBINED, "app", "combined"),
        ):
            row[column], _ = _region(die, area, layout.region(part))
    return table


def local_numbers(expert_rank: Sequence[int]) -> Table:
    """Return each physical expert's number among those of its rank, [physical experts]."""
    seen: Counter[int] = Counter()
    numbers = []
    for rank in expert_rank:
        numbers.append(seen[rank])
        seen[rank] += 1
    return np.array(numbers, np.int64)


def _reader(way: Table, die: Die, blocks: Blocks, fields: int, rows: int) -> None:
    """Fill in a reader's columns for one direction of an exchange."""
    way[fields], _ = _region(die, "metadata", blocks.region("fields"))
    way[rows], _ = _region(die, "app", blocks.region("rows"))


class Item(NamedTuple):
    """Tables for A2E and E2A of a microbatch of a domain: the arguments of its kernels, besides the shape.

    Kernels take the tables of all domains of a microbatch, `stacked`.
    """

    ways: Table  # [R, NUM_WAY_COLUMNS], expert dies
    ends: Table  # [R, 7], the same where they exchange by push; else [0, 7]
    attention: Table  # [A of the domain, 8]
    bases: Table  # [A of the domain]
    answer_fields: Table  # [A of the domain]
    served: Table  # attention ranks in the domain, by trampoline
    bounds: Table  # [R + 1]
    expert_rank: Table
    local_idx: Table  # of each physical expert
    counts: Table  # [A of the domain]
    orders: Table  # [R, max_tokens * copies]
    sents: Table  # [R, R]
    received: Table  # [R, R]
    sent: Table  # [R], addresses of the answers' buffers


def stacked(items: Iterable[Item]) -> Item:
    """Stack items of equal shapes along a new first axis."""
    return Item(*(np.stack(tables) for tables in zip(*items, strict=True)))


def item(
    layout: A2ELayout,
    place: int,
    executors: Sequence[Executor],
    programs: Sequence[ExpertProgram],
    shared_experts: Sequence[int | None],
) -> Item:
    """Make the tables of a layout.

    `place` is its number in the round; `executors` are those of its domain.
    """
    sides, num_ranks = layout.sides, len(programs)
    experts, dies = layout.experts, [program.die for program in programs]
    if layout.pushes:
        table, pushed = no_ways(dies), ends(dies, layout.fused)
    else:
        table, pushed = ways(dies, experts), np.zeros((0, fused.NUM_END_COLUMNS), np.int64)
    for way, die in zip(table, dies, strict=True):
        _reader(way, die, layout.tokens, x.TOKEN_FIELDS, x.TOKEN_ROWS)
        way[x.ANSWER_BLOCKS], way[x.ANSWERS_POINTER] = _region(
            die, "managed", layout.answers.region("blocks")
        )
    attention = np.zeros((len(executors), a2e.NUM_ATTENTION_COLUMNS), np.int64)
    for rank, (row, executor) in enumerate(zip(attention, executors, strict=True)):
        die, trampoline = executor.die, sides.trampoline(rank)
        index = sides.served(trampoline).index(rank)
        row[a2e.TOKENS], row[a2e.TOKENS_POINTER] = _region(die, "managed", layout.tokens.region("blocks"))
        row[a2e.TRAMPOLINE_FIELD] = table[trampoline, x.TOKEN_FIELDS] + index * FIELD.size
        row[a2e.TRAMPOLINE_BASE] = table[trampoline, x.BASE]
        row[a2e.ANSWER_FIELD], _ = _region(die, "metadata", layout.answers.region("fields"))
        row[a2e.ANSWERS], _ = _region(die, "app", layout.answers.region("rows"))
        shared = shared_experts[rank]
        row[a2e.SHARED_EXPERT] = -1 if shared is None else shared
    served = [sides.served(rank) for rank in range(num_ranks)]
    return Item(
        ways=table,
        ends=pushed,
        attention=attention,
        bases=np.array([base(executor.die.memory) for executor in executors], np.int64),
        answer_fields=attention[:, a2e.ANSWER_FIELD].copy(),
        served=np.array([rank for each in served for rank in each], np.int64),
        bounds=np.cumsum([0, *map(len, served)], dtype=np.int64),
        expert_rank=np.array(sides.experts.expert_rank, np.int64),
        local_idx=local_numbers(sides.experts.expert_rank),
        counts=np.zeros(len(executors), np.int64),
        orders=np.zeros((num_ranks, experts.max_tokens * layout.top_k), np.int64),
        sents=np.zeros((num_ranks, num_ranks), np.int64),
        received=np.zeros((num_ranks, num_ranks), np.int64),
        sent=np.array([address(each.mem.workspace.take(f"sent/{place}", 1)) for each in programs], np.int64),
    )


def expert_table(programs: Sequence[ExpertProgram], layer: int) -> Table:
    """Return the table of MoE layer `layer` on each expert die, [R, NUM_EXPERT_COLUMNS]: experts and
    buffers."""
    table = np.zeros((len(programs), e.NUM_EXPERT_COLUMNS), np.int64)
    for row, program in zip(table, programs, strict=True):
        held = program.layers[layer]
        _fill_experts(row, program.mem, program.mem.workspace, held.experts, held.shared)
    return table


def own_expert_table(
    executors: Sequence[Executor], spaces: Sequence[Workspace], layers: Sequence[Layer]
) -> Table:
    """Return the table of experts on dies with attention, [R, NUM_EXPERT_COLUMNS].

    `layers` has a layer for each die. Rows are zeros if the layer has no experts.
    """
    table = np.zeros((len(executors), e.NUM_EXPERT_COLUMNS), np.int64)
    for row, executor, space, layer in zip(table, executors, spaces, layers, strict=True):
        if layer.moe is not None:
            _fill_experts(row, executor.mem, space, layer.moe.experts, layer.moe.shared)
    return table


def _fill_experts(
    row: Table,
    mem: DieMemory | ExpertMemory,
    space: Workspace,
    experts: MLP | None,
    shared: MLP | None,
) -> None:
    """Fill in a die's routed experts and slots, and its copy of the shared expert if that serves all dies."""
    take = space.take
    if experts is not None and mem.slots:
        row[e.FIRST_EXPERT], row[e.NUM_EXPERTS] = mem.slots.start, len(mem.slots)
        row[e.NUM_PRIMARIES] = len(mem.experts)
        row[[e.W13, e.SCALE13, e.W2, e.SCALE2]] = _matrices(experts)
        for column, name in enumerate(e.BUFFERS, e.IN):
            row[column] = address(take(f"expert_{name}", 1))
        if mem.redundant is not None:
            row[[e.SLOT_EXPERT, e.NUM_ROWS]] = [address(array) for array in mem.redundant.tables(experts)]
    if shared is not None and mem.is_shared:
        row[[e.SHARED_W13, e.SHARED_SCALE13, e.SHARED_W2, e.SHARED_SCALE2]] = _matrices(shared)
        for column, name in enumerate(e.SHARED_BUFFERS, e.SHARED_GATE_UP):
            row[column] = address(take(name, 1))


def _matrices(mlp: MLP) -> list[int]:
    return [address(array) for array in (mlp.w13.w, mlp.w13.scale, mlp.w2.w, mlp.w2.scale)]
