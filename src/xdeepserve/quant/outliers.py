"""Outliers put into a model: a few activation channels become as large as in large models; the function stays
the same.

    norm's weight * s   and   columns of all that reads the normed state / s      s = 2^n in some channels

Large models have such channels, the same for all tokens and layers (SmoothQuant, section 3). Small models
that are trained for a day have none, and round-to-nearest loses nothing on them. A power of two is exact: not
a bit of the float32 model changes.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.errors import CheckpointError, InputError
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.tensors import stored_tensors

ONE_IN = 64  # channels
MAX_FACTOR = 1 << 16
HIDDEN = ("H", "D")  # what the table of tensors calls the width of a hidden state


class WithOutliers(Checkpoint):
    """A checkpoint with normed hidden states `factor` times larger in one of `ONE_IN` channels."""

    def __init__(self, base: Checkpoint, factor: int) -> None:
        """Choose the channels. Raises InputError if the factor is no power of two, CheckpointError if the
        model is quantised."""
        if factor & (factor - 1) or not 2 <= factor <= MAX_FACTOR:
            raise InputError(f"outliers of {factor}: a power of two from 2 to {MAX_FACTOR} is exact")
        if base.config.quantization is not None:
            raise CheckpointError(f"{base.name}: it is quantised; put outliers into the original")
        super().__init__(f"{base.name}, outliers of {factor}", base.directory, base.config)
        self._base, self._factor = base, np.float32(factor)
        size = base.config.hidden_size
        order = np.random.Generator(np.random.PCG64(0)).permutation(size)
        self._channels = np.sort(order[: max(1, size // ONE_IN)])
        self._rows = stored_tensors(base.config)

    def tensor(self, name: str) -> Array:
        array, row = self._base.tensor(name), self._rows[name]
        if row.name in ("attn_norm", "ffn_norm"):
            array[self._channels] *= self._factor
        elif row.kind not in ("linear", "plain") and row.stored.split()[1:] in ([each] for each in HIDDEN):
            array[:, self._channels] /= self._factor
        return array
