"""Tools of the tests of kernels: shares of work, unpacked weights, a paged cache."""

import numpy as np

from tests.model.bits import F32, normal
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import cache_shape


def unpack_f32(packed: np.ndarray, n: int) -> np.ndarray:
    """The inverse of pack_f32: [..., groups, K, 16] -> [..., K, n]."""
    *lead, _, k, _ = packed.shape
    return np.ascontiguousarray(np.moveaxis(packed, -3, -2).reshape(*lead, k, -1)[..., :n])


def shares(n: int, workers: int) -> list[tuple[int, int]]:
    """Column groups of n columns, cut for some workers; some get none."""
    groups = k.num_groups(n)
    return [(groups * i // workers, groups * (i + 1) // workers) for i in range(workers)]


class Pages:
    """A sequence of `context` positions in a shuffled paged cache whose other slots hold rubbish."""

    def __init__(
        self,
        seed: int,
        context: int,
        size: int,
        rank: int,
        rope: int,
        is_int8: bool,
        magnitude: float = 1.0,
        of_keys: float = 1.0,
    ) -> None:
        kv, norm = normal(seed, context, rank + rope), normal(seed + 1, rank, scale=magnitude)
        cos, sin = (normal(seed + i, context, rope // 2, scale=of_keys) for i in (2, 3))
        latent, self.k_pe = c.rms_norm(kv[:, :rank], norm, 1e-6), c.rope(kv[:, rank:], cos, sin)
        self.latent, self.scale = c.quantize_rows(latent) if is_int8 else (latent, None)
        num_blocks = -(-context // size) + 2
        shuffled = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        self.table = shuffled[: -(-context // size)]
        positions = np.arange(context, dtype=np.int32)
        slots = self.table[positions // size] * np.int32(size) + positions % np.int32(size)
        rubbish = np.uint8(77) if is_int8 else F32(np.nan)
        self.cache = (
            np.full(cache_shape(num_blocks, size, rank), rubbish),
            np.full((num_blocks, size) if is_int8 else (0, 0), np.nan, F32),
            np.full(cache_shape(num_blocks, size, rope), np.nan, F32),
        )
        k.append_kv(*self.cache, slots, kv, norm, 1e-6, positions, cos, sin)

    def attend(self, q_lat: np.ndarray, q_pe: np.ndarray, position: int, int8_weights: bool) -> np.ndarray:
        """The NumPy twin for the query at `position`."""
        seen = slice(0, position + 1)
        scale = None if self.scale is None else self.scale[seen]
        return c.attention(q_lat, q_pe, self.latent[seen], scale, self.k_pe[seen], 0.11, int8_weights)
