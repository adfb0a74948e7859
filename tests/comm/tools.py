"""Tools of the tests of comm: experts without weights, quantisation, comparison of bits."""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.outside.seat_list import Register


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.maximum(np.abs(x).max(axis=1, initial=0), 1e-6).astype(np.float32) / np.float32(127)
    return np.rint(x / scale[:, None]).astype(np.int8), scale


def expert(expert_idx: int, x: np.ndarray) -> np.ndarray:
    """Something that tells experts and tokens apart."""
    return (x * np.float32(expert_idx + 1) + np.float32(0.25 * expert_idx)).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


IDENTITY, TOKEN = "tiny", "a token"


def asks(name: str, seat: int | None = None, identity: str = IDENTITY, epoch: int = 0) -> Register:
    return Register(name, identity, f"tcp:{name}", ((0, 1), (2, 3, 0), (1, 2), (-1,)), seat, epoch)
