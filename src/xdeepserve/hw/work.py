"""What a stage of the model does, by kinds that cost differently: the input of `Spec.stage_ns`."""

from __future__ import annotations

from operator import add
from typing import NamedTuple


class Work(NamedTuple):
    """Operations and bytes of one launch, as the hardware would have them.

    What norms, residuals and other small kernels take is fitted as a whole, a number for each layer and one
    for each pass, so their operations are not counted.
    """

    int8: float = 0.0  # operations of INT8 GEMMs
    bf16: float = 0.0  # of GEMMs in BF16
    attention: float = 0.0  # of attention's products, in BF16
    int8_attention: float = 0.0  # and in INT8
    weights: float = 0.0  # bytes of weights that are read
    cache: float = 0.0  # bytes of KV that are read
    layers: float = 0.0  # how many layers' small kernels are launched with it
    gates: float = 0.0  # routings of tokens
    passes: float = 0.0  # passes of the model, whose head and host part are billed with it

    @property
    def nbytes(self) -> float:
        """What it reads of HBM."""
        return self.weights + self.cache

    def __add__(self, other: object) -> Work:
        assert isinstance(other, Work)
        return Work._make(map(add, self, other))
