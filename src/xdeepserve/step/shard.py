"""Parallelism as a transformation of a Program: what the dies of a DP group share, and where they meet.

Operations say how they may be cut (`Op.cut`). From that follow both ways in which a group splits a layer:

    tensor_parallel   every die has all rows, its own heads and features, and its part of every sum
    sp_tp_sp          rows are cut, then heads, then rows again (CloudMatrix 4.3.1); no sum is cut

and `overlapped`, which gives the AIV cores what they can do beside the AIC cores (CloudMatrix 4.3.2).
"""

from __future__ import annotations

import numpy as np

from xdeepserve.hw.spec import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import TP_BLOCKS, Array
from xdeepserve.model.tensors import Layer
from xdeepserve.step.attention import OUT_PROJ, RowParallel, down_parts, out_work, outputs
from xdeepserve.step.feed import MLP_DOWN
from xdeepserve.step.frame import Frame, Model
from xdeepserve.step.stage import Counts, LayerProgram, Meet, Op, Program, Stage, free

# The products whose inputs dies may share, by the stage that ends with them.
ROW_PARALLEL: dict[str, RowParallel] = {"OProj": OUT_PROJ, "MLP": MLP_DOWN}


# ---- tensor parallelism -----------------------------------------------------------------------------


def tensor_parallel(program: LayerProgram, layer: Layer, size: int) -> LayerProgram:
    """Cut heads, and features of dense layers, among `size` dies, which add up rows of h [T, H]:

        FP32   each die's blocks of K as a tree, then the dies' sums as the rest of that tree   all-reduce
        INT8   the row's maximum over all dies, for the scale                                   all-reduce
               then int32 sums, exact in any order                                              all-reduce

    which are the bits of one die. Tokens of layers with experts are cut: a die gates and dispatches its
    slice, and the slices are gathered again.
    """
    attention = _summed(program.attention, layer, size)
    if layer.moe is None:
        return LayerProgram(attention, _summed(program.feed, layer, size))
    return LayerProgram(attention, (*program.feed, *GATHER))


def _summed(program: Program, layer: Layer, size: int) -> Program:
    result: list[Stage | Meet] = []
    for item in program:
        assert isinstance(item, Stage)
        if item.ops[-1].cut == "sum":
            result += _partial_sums(item, layer, size)
        else:
            result.append(item._replace(rows="all"))
    return tuple(result)


def _partial_sums(stage: Stage, layer: Layer, size: int) -> list[Stage | Meet]:
    """Split a stage with a row-parallel layer at its end, so that dies share it."""
    product = ROW_PARALLEL[stage.name]
    *before, last = stage.ops
    if product.linear(layer).scale is None:

        def multiply(f: Frame) -> None:
            y = f.take("y", *f.h.shape)
            f.linears.partial_sums(y, product.floats(f), product.linear(f.layer), TP_BLOCKS // size)

        def add(f: Frame) -> None:
            k.add(f.h, f.h, f.reduced)

        return [
            Stage(stage.name, (*before, Op(multiply, last.work, operators=last.operators - 1)), rows="all"),
            Meet("all_reduce", lambda f: f.take("y", *f.whole.shape)),
            Stage("Residual", (Op(add, free),), "aiv", "all"),
        ]

    def find_maxima(f: Frame) -> None:
        k.row_maxima(f.take("maxima", len(f.h)), product.floats(f))

    def multiply_int8(f: Frame) -> None:
        linear, rows = product.linear(f.layer), len(f.h)
        x = f.take(product.buffer, rows, linear.k)
        q, scale = f.take("q8", *x.shape), f.take("q8_scale", rows)
        k.quantize_by_maxima(q, scale, x, f.reduced)
        f.linears.int8_sums(f.take("sums", rows, linear.n), q, linear)

    def add_scaled(f: Frame) -> None:
        y, scale = f.take("y", *f.h.shape), product.linear(f.layer).scale
        k.scale_sums(y, f.reduced, f.take("q8_scale", len(f.h)), scale)
        k.add(f.h, f.h, y)

    return [
        Stage(f"{stage.name} inputs", (*before, Op(find_maxima, free)), rows="all"),
        Meet("all_reduce", lambda f: f.take("maxima", len(f.whole)), "max"),
        Stage(stage.name, (Op(multiply_int8, last.work, operators=2),), rows="all"),
        Meet("all_reduce", lambda f: f.take("sums", *f.whole.shape)),
        Stage("Residual", (Op(add_scaled, free, operators=2),), "aiv", "all"),
    ]


# ---- slices of rows ---------------------------------------------------------------------------------


def _slice(f: Frame) -> Array:
    return f.take("slice", f.slice_size(len(f.whole)), f.whole.shape[1])


def _pack_slice(f: Frame) -> None:
    _slice(f)[: len(f.mine)] = f.mine


def _unpack_slices(f: Frame) -> None:
    np.copyto(f.whole, f.reduced)


def _copy_work(model: Model, layer: Layer, n: Counts) -> Work:
    """Work of copying rows, in BF16 on the hardware."""
    return Work(kernels=1, moved=4.0 * n.rows * model.config.hidden_size)


# Complete the rows of a group, of which each die has its own slice.
GATHER: Program = (
    Stage("Slice", (Op(_pack_slice, _copy_work),), "aiv"),
    Meet("all_gather", _slice),
    Stage("Gather", (Op(_unpack_slices, _copy_work),), "aiv", "all"),
)


# ---- SP-TP-SP ---------------------------------------------------------------------------------------


def _latents(f: Frame) -> Array:
    """Buffer of the die's slice of all tokens' inputs of heads: the query's latent, then the cache's, ..."""
    return f.take("latents", f.slice_size(f.batch.num_tokens), f.config.down_columns)


def _pack_latents(f: Frame) -> None:
    rows = len(f.h)
    np.concatenate(down_parts(f, rows), axis=1, out=_latents(f)[:rows])


def _unpack_latents(f: Frame) -> None:
    parts, start = down_parts(f, f.batch.num_tokens), 0
    for part in parts:
        part[:] = f.reduced[:, start : start + part.shape[1]]
        start += part.shape[1]
    f.source = f.linears.prepare(parts[0])


def _join_heads(f: Frame) -> Array:
    o = f.take("o_slice", len(f.h), f.layer.wo.k)
    np.concatenate(f.parts, axis=1, out=o)
    return o


OUT_OF_SLICES = OUT_PROJ._replace(floats=_join_heads, rows=lambda f: f.linears.prepare(_join_heads(f)))


def sp_tp_sp(program: LayerProgram) -> LayerProgram:
    """Pack the tokens of a step, whatever their sequences, into one run of rows and cut it evenly:

        stage 1, SP   norm and down projections of this die's slice      all-gather of the latents
        stage 2, TP   up projections and attention of all tokens, for    all-to-all: heads of all tokens
                      this die's heads                                   become all heads of a slice
        stage 3, SP   output projection, and the MLP or the experts, of the slice

    Dies are balanced for prompts of any length, and the latents exchanged between dies are narrower than the
    rows that tensor parallelism adds up.
    """
    prolog, attention, output = (item for item in program.attention if isinstance(item, Stage))
    (down, up), (heads, _) = prolog.ops, output.ops
    return LayerProgram(
        (
            Stage("DownProj", (down, Op(_pack_latents, free))),
            Meet("all_gather", _latents),
            Stage("UpProj", (Op(_unpack_latents, free), up), rows="all"),
            attention._replace(rows="all"),
            Stage("HeadOutputs", (heads,), rows="all"),
            Meet("all_to_all", lambda f: outputs(f, f.batch.num_tokens)),
            Stage("OProj", (Op(OUT_OF_SLICES.run, out_work, operators=3),)),
        ),
        program.feed,
    )


# ---- cores ------------------------------------------------------------------------------------------


def overlapped(program: LayerProgram) -> LayerProgram:
    """Move the sum of all experts' outputs to AIV cores, beside the shared expert on AIC cores
    (CombineCompute in CloudMatrix 4.3.2). DispatchCompute is the work of dispatch before it posts."""
    feed: list[Stage | Meet] = []
    for item in program.feed:
        if isinstance(item, Stage) and item.name == "SharedExpert":
            *shared, add = item.ops
            feed += [item._replace(ops=tuple(shared)), Stage("CombineCompute", (add,), "aiv")]
        else:
            feed.append(item)
    return LayerProgram(program.attention, tuple(feed))
