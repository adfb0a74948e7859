"""Weights from a seed, the same bits on every machine and with every version of NumPy.

Nothing but integer arithmetic and single IEEE operations: a hash of (seed, tensor name, element number)
gives four bytes, their sum is nearly normal, and one multiplication, one addition and one rounding to
BF16 make the value. So any storage that holds BF16 holds these weights exactly.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xdeepserve.bf16 import round_bf16
from xdeepserve.errors import CheckpointError
from xdeepserve.model.checkpoint import WHOLE_NUMBERS, Checkpoint, fallback
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tensors import stored_tensors

# The sum of four bytes has mean 510 and this standard deviation.
_BYTE_SUM_DEVIATION = math.sqrt(4 * (256**2 - 1) / 12)


def hash_words(seed: int, name: str, count: int) -> NDArray[np.uint32]:
    """Return `count` random-looking words: word i is a bijective mix of i with a key from (seed, name)."""
    key = np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], dtype="<u4")
    words = np.arange(count, dtype=np.uint32)
    words += key[0]
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words ^= words >> np.uint32(shift)
        words *= np.uint32(multiplier)
        words ^= key[1]
    words ^= words >> np.uint32(16)
    return words


def normal_tensor(
    seed: int, name: str, shape: tuple[int, ...], deviation: float, mean: float = 0.0
) -> NDArray[np.float32]:
    """Return nearly normal values (within 3.45 deviations), float32 and exactly representable in BF16."""
    words = hash_words(seed, name, math.prod(shape))
    total = np.zeros(words.shape, dtype=np.int32)
    for shift in (0, 8, 16, 24):
        total += ((words >> np.uint32(shift)) & np.uint32(255)).astype(np.int32)
    scale = np.float32(deviation / _BYTE_SUM_DEVIATION)
    values = (total - 510).astype(np.float32) * scale + np.float32(mean)
    return round_bf16(values).reshape(shape)


class SeededCheckpoint(Checkpoint):
    """Checkpoint of computed tensors: only its config and seed need storing.

    Deviations are such that each layer adds a fair share to the residual stream, attention and routing are
    neither flat nor saturated, and logits spread over a few units.
    """

    def __init__(self, name: str, directory: Path, config: ModelConfig, seed: int) -> None:
        super().__init__(name, directory, config)
        self.seed = seed
        self._rows = stored_tensors(config)

    def digest(self) -> str:
        """Digest the seed and the config from which all tensors are computed."""
        source = f"{type(self).__qualname__} {self.seed} ".encode() + self.config.to_bytes()
        return hashlib.blake2b(source, digest_size=16).hexdigest()

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name not in self._rows:
            raise CheckpointError(f"{self.name}: the model has no tensor {name}")
        if (other := fallback(name, self.config)) is not None:
            return self.tensor(other)
        shape = self._rows[name].stored_shape(self.config)
        if name.endswith(WHOLE_NUMBERS):
            words = hash_words(self.seed, name, math.prod(shape)) % np.uint32(self.config.n_routed_experts)
            return words.astype(np.float32).reshape(shape)
        if name.endswith((".base", ".scale", ".ape", ".attn_sink", "gate.bias")):
            return normal_tensor(self.seed, name, shape, deviation=0.5, mean=0.5 * name.endswith(".scale"))
        if name.endswith("norm.weight"):
            return normal_tensor(self.seed, name, shape, deviation=0.1, mean=1.0)
        if name.endswith("e_score_correction_bias"):
            # Biased scores are mostly negative, so that masking with 0 instead of -inf picks other experts.
            return normal_tensor(self.seed, name, shape, deviation=0.05, mean=-0.75)
        return normal_tensor(self.seed, name, shape, self._gain(name) / math.sqrt(shape[-1]))

    def _gain(self, name: str) -> float:
        """Return a matrix's output deviation for inputs of deviation 1."""
        if name == "model.embed_tokens.weight":
            # A tied embedding is the head, too: large rows would make every token repeat itself.
            return 1.5 if self.config.tie_word_embeddings else math.sqrt(self.config.hidden_size)
        if name == "lm_head.weight":
            return 3.0
        return self._rows[name].gain
