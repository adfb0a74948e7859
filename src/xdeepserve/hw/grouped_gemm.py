"""A grouped INT8 GEMM on the cube cores of a die, tile by tile (CM Table 9)."""

from __future__ import annotations

import math

import msgspec

from .spec import Spec

TILE = (128, 152)  # rows and columns of the output that a core computes at once


class GroupedGemm(msgspec.Struct, frozen=True):
    """`groups` products of [m, k] by [k, n], INT8 in, BF16 out, in one kernel."""

    groups: int
    m: int
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes of both inputs and of the output, each moved once."""
        return self.groups * (self.m * self.k + self.k * self.n + 2 * self.m * self.n)

    def seconds(self, spec: Spec) -> float:
        """All cores take a tile each, wave after wave; the last wave takes as long as a full one."""
        rows, columns = TILE
        cores = spec.num_cores("aic")
        tiles = self.groups * math.ceil(self.m / rows) * math.ceil(self.n / columns)
        core_peak = spec.int8_peak.value / cores * spec.tile_efficiency.value
        tile = 2 * rows * columns * self.k / core_peak + spec.tile_overhead.value
        return math.ceil(tiles / cores) * tile + spec.kernel_overhead.value

    def utilisation(self, spec: Spec) -> float:
        """Share of the die's INT8 peak, 0 to 1."""
        operations = 2 * self.groups * self.m * self.n * self.k
        return operations / self.seconds(spec) / spec.int8_peak.value
