"""Tensor parallelism (TP): which part of a prepared array a rank of a TP group holds.

    array              tp                          sp-tp-sp
    -----------------  --------------------------  --------------------------
    wq_b, w_uk, w_uv   this rank's heads           this rank's heads
    wo                 the inputs of its heads     whole
    mlp.w13            its share of the features   whole
    mlp.w2             the inputs of its share     whole
    all others         whole                       whole

`tp` is Megatron's: outputs of one matrix are cut, inputs of the next, and a sum over ranks ends each pair.
`sp-tp-sp` is CloudMatrix 4.3.1: only attention is cut by heads; what comes before and after, by tokens.
Routed experts are spread over all dies (expert parallelism) and the shared expert runs on token slices, so
neither is cut. Arrays are cut before they are packed. Rank r of R has the elements n r / R to n (r + 1) / R.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from xdeepserve.model.canonical import Array

if TYPE_CHECKING:
    from xdeepserve.model.weights import Spec

TPMode: TypeAlias = Literal["tp", "sp-tp-sp"]
TP_SIZES = (1, 2, 4, 8)  # divisors of canonical.TP_BLOCKS

HEADS = (".w_uk", ".w_uv")  # [heads, ...]
OUTPUTS = (".wq_b", ".mlp.w13")
INPUTS = (".wo", ".mlp.w2")
BY_TOKENS = (".wo", ".mlp.w13", ".mlp.w2")  # in sp-tp-sp these run on slices of the tokens, whole


class Shard(NamedTuple):
    """The part of rank `rank` of `size`."""

    rank: int = 0
    size: int = 1
    mode: TPMode = "tp"

    def of(self, name: str) -> Shard:
        """This shard if array `name` is cut, else WHOLE."""
        # INPUTS have no `.scale` here: a scale belongs to an output, of which the rank has all.
        outputs = name.removesuffix(".scale").endswith(OUTPUTS)
        is_cut = self.size > 1 and (outputs or name.endswith(HEADS + INPUTS))
        if self.mode == "sp-tp-sp" and name.removesuffix(".scale").endswith(BY_TOKENS):
            is_cut = False
        return self if is_cut else WHOLE

    def specs(self, specs: Mapping[str, Spec]) -> dict[str, Spec]:
        """Specs of the arrays that the rank holds."""
        return {name: self._spec(name, spec) for name, spec in specs.items()}

    def _spec(self, name: str, spec: Spec) -> Spec:
        if self.of(name) is WHOLE:
            return spec
        shape, axis = list(spec.shape), self._axis(name, spec.dtype)
        shape[axis] //= self.size
        return spec._replace(shape=tuple(shape))

    def cut(self, name: str, array: Array) -> Array:
        """The rank's part of a prepared array (model/weights.py), contiguous."""
        if self.of(name) is WHOLE:
            return array
        axis = self._axis(name, array.dtype)
        # Gate and up projection lie side by side, and each is cut.
        sides = np.split(array, 2 if ".mlp.w13" in name else 1, axis)
        return np.concatenate([np.split(side, self.size, axis)[self.rank] for side in sides], axis)

    @staticmethod
    def _axis(name: str, dtype: np.dtype) -> int:
        """The axis that is cut. Matrices are float32 [in, out] or int8 [out, in]; scales [out]."""
        if name.endswith((*HEADS, ".scale")):
            return 0
        return int(name.endswith(INPUTS) == (dtype == np.int8))


WHOLE = Shard()
