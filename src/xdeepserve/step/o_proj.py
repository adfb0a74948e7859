"""Output projection shared by DP groups of one die each (xDeepServe Figure 10): a transformation of a
Program.

MLA stays whole on the die of its tokens, so no latent is cached twice. The output projection is cut: each of
`size` dies has the inputs of its share of heads, and only the weights for these.

    HeadOutputs   o [T, heads * V] of the die's own T rows, cut by columns       all-to-all
    OProj         its columns of the rows of all, times its weights              reduce-scatter
    Residual      the sums of its own rows, added to h [T, H]

The bits are those of one die:

    FP32   each die's blocks of K as a tree, then the dies' sums as the rest of that tree
    INT8   rows are quantised before they are cut; int32 sums are exact in any order

Dies have different numbers of rows, or none, and meet all the same.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import TP_BLOCKS, Array
from xdeepserve.model.tensors import Layer
from xdeepserve.step.attention import outputs
from xdeepserve.step.frame import Frame
from xdeepserve.step.stage import LayerProgram, Meet, Op, Program, Stage, free


def shared_out_proj(program: LayerProgram, layer: Layer, size: int) -> LayerProgram:
    """Transform a layer for each of `size` neighbouring DP groups; `layer` has the die's share of the
    projection."""
    *before, output = program.attention
    assert isinstance(output, Stage)
    make = _in_floats if layer.wo.scale is None else _in_int8
    return LayerProgram((*before, *make(output, size)), program.feed)


def _in_floats(output: Stage, size: int) -> Program:
    heads, project = output.ops

    def cut(f: Frame) -> None:
        _cut(_columns(f, "o_columns", size), outputs(f, len(f.h)))

    def multiply(f: Frame) -> None:
        x = _shared(f, "o_shared")
        f.linears.partial_sums(_sums(f, "o_sums"), x, f.layer.wo, TP_BLOCKS // size)

    def add(f: Frame) -> None:
        k.add(f.h, f.h, f.reduced)

    return (
        Stage("HeadOutputs", (heads, Op(cut, free))),
        Meet("spread", lambda f: _columns(f, "o_columns", size)),
        Stage(output.name, (Op(multiply, project.work),), rows="shared"),
        Meet("reduce_scatter", lambda f: _sums(f, "o_sums")),
        Stage("Residual", (Op(add, free),), "aiv"),
    )


def _in_int8(output: Stage, size: int) -> Program:
    heads, project = output.ops

    def cut(f: Frame) -> None:
        rows = f.linears.prepare(outputs(f, len(f.h)))
        _cut(_columns(f, "q8_columns", size), rows.x)

    def multiply(f: Frame) -> None:
        f.linears.int8_sums(_sums(f, "q8_sums"), _shared(f, "q8_shared"), f.layer.wo)

    def add(f: Frame) -> None:
        y = f.take("y", *f.h.shape)
        k.scale_sums(y, f.reduced, f.take("q8_scale", len(f.h)), f.layer.wo.scale)
        k.add(f.h, f.h, y)

    return (
        Stage("HeadOutputs", (heads, Op(cut, free))),
        Meet("spread", lambda f: _columns(f, "q8_columns", size)),
        Stage(output.name, (Op(multiply, project.work),), rows="shared"),
        Meet("reduce_scatter", lambda f: _sums(f, "q8_sums")),
        Stage("Residual", (Op(add, free, operators=2),), "aiv"),
    )


def _columns(f: Frame, name: str, size: int) -> Array:
    """Buffer [size, T, K / size] with each die's columns of the own rows."""
    return f.take(name, size, len(f.mine), f.layer.wo.k)


def _cut(columns: Array, rows: Array) -> None:
    """Cut rows [T, K] by columns, one part per die."""
    size, count, width = columns.shape
    columns[:] = rows.reshape(count, size, width).transpose(1, 0, 2)


def _shared(f: Frame, name: str) -> Array:
    """Join the received parts into [rows of all, K / size]: this die's columns."""
    x = f.take(name, sum(f.shared_counts), f.layer.wo.k)
    return np.concatenate(f.parts, out=x)


def _sums(f: Frame, name: str) -> Array:
    """Buffer [rows of all, H] of this die's part of every sum."""
    return f.take(name, sum(f.shared_counts), f.config.hidden_size)
