"""Tensor parallelism (TP): the part of a prepared array on a rank of a TP group. The table of tensors says
how arrays are cut (tensors.py); most are whole.

    cut        tp                          sp-tp-sp             o-proj
    ---------  --------------------------  -------------------  --------------------------------
    heads      this rank's heads           this rank's heads    whole
    outputs    its share of the features   whole                whole
    inputs     the inputs of its share     whole                whole, but for attention's output

`tp` is Megatron's: outputs of one matrix are cut, inputs of the next, and a sum over ranks ends each pair.
`sp-tp-sp` is CloudMatrix 4.3.1: only attention is cut by heads; what comes before and after, by tokens.
`o-proj` is xDeepServe's Figure 10: ranks are DP groups of one die each, which share an output projection.
Routed experts are spread over all dies (expert parallelism) and the shared expert runs on token slices, so
neither is cut. Arrays are cut before they are packed. Rank r of R has the elements n r / R to n (r + 1) / R.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from xdeepserve.model.attention_tables import ATTENTION
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ShardMode
from xdeepserve.model.packing import ArraySpec
from xdeepserve.model.tensor_row import Tensor
from xdeepserve.model.tensors import DENSE, MOE

HEADS = [row for rows in ATTENTION.values() for row in rows]
CUT = [row for row in (*HEADS, *DENSE, *MOE) if row.cut != "whole"]
CUT_BY: dict[ShardMode, list[Tensor]] = {
    "tp": CUT,
    "sp-tp-sp": [row for row in CUT if row.cut == "heads"],
    "o-proj": [row for row in HEADS if row.cut == "inputs"],
}


@functools.cache
def _row(name: str) -> Tensor | None:
    """Return the table's row of an array that can be cut. A scale belongs to an output, so inputs' scales are
    whole."""
    bare = name.removesuffix(".scale")
    row = next((row for row in CUT if bare.endswith(f".{row.name}")), None)
    return None if row is not None and row.cut == "inputs" and bare != name else row


class Shard(NamedTuple):
    """Part of rank `rank` among `size` ranks, cut by `mode`."""

    rank: int = 0
    size: int = 1
    mode: ShardMode = "tp"

    def of(self, name: str) -> Shard:
        """Return the shard itself if array `name` is cut, else WHOLE."""
        return self if self.size > 1 and _row(name) in CUT_BY[self.mode] else WHOLE

    def specs(self, specs: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
        """Return specs of the arrays on the rank."""
        return {name: self._spec(name, spec) for name, spec in specs.items()}

    def _spec(self, name: str, spec: ArraySpec) -> ArraySpec:
        if self.of(name) is WHOLE:
            return spec
        shape = list(spec.shape)
        shape[_axis(name, spec.shape, spec.dtype)] //= self.size
        return spec._replace(shape=tuple(shape))

    def cut(self, name: str, array: Array) -> Array:
        """Cut the rank's part out of a prepared array (model/weights.py), contiguous."""
        row = _row(name)
        if row is None or self.of(name) is WHOLE:
            return array
        axis = _axis(name, array.shape, array.dtype)
        # Gate and up projection lie side by side, and each is cut.
        sides = np.split(array, len(row.modules), axis)
        return np.concatenate([np.split(side, self.size, axis)[self.rank] for side in sides], axis)


def _axis(name: str, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the axis to cut. Matrices are float32 [in, out] or int8 [out, in], or one for each head; scales
    [out]."""
    row = _row(name)
    if row is None or len(shape) != 2:
        return 0
    return int((row.cut == "inputs") == (dtype == np.int8))


WHOLE = Shard()
