"""Rotary position embedding: configuration and cos/sin tables, plain or YaRN.

Frequencies follow YaRN (arXiv:2309.00071, section 3.2) in the form that Hugging Face transformers uses for
DeepSeek-V3: dimensions that turn more than `beta_fast` times within the original context keep their
frequency, those that turn fewer than `beta_slow` times are slowed by `factor`, a linear ramp lies between.

The tables must have the same bits on every machine, but `cos`, `pow` and `log` differ: NumPy and the C
library choose them by processor. So frequencies come from `decimal` (correctly rounded everywhere) and
cosines from a polynomial of plain float64 additions and multiplications, rounded once to float32.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from xdeepserve.model.config import RopeConfig, YarnConfig

_EXACT = Context(prec=40)
_TWO_PI = 2 * Decimal("3.141592653589793238462643383279502884197")


def inverse_frequencies(rope: RopeConfig, rope_dim: int) -> NDArray[np.float64]:
    """Return the radians per position of each rotated pair, float64 [rope_dim / 2], the same bits on every
    machine."""
    theta = Decimal(rope.theta)
    with localcontext(_EXACT):
        base = np.array([float(theta ** (Decimal(-2 * i) / rope_dim)) for i in range(rope_dim // 2)])
    if rope.yarn is None:
        return base
    low, high = _ramp_bounds(rope.yarn, theta, rope_dim)
    ramp = np.clip((np.arange(rope_dim // 2) - low) / (high - low), 0.0, 1.0)
    return base / rope.yarn.factor * ramp + base * (1.0 - ramp)


def _ramp_bounds(yarn: YarnConfig, theta: Decimal, rope_dim: int) -> tuple[float, float]:
    """Return the pair indices at which the ramp begins and ends: those that turn `beta_fast` and `beta_slow`
    times."""

    def pair_that_turns(num_turns: float) -> float:
        with localcontext(_EXACT):
            turns = yarn.original_max_position_embeddings / (Decimal(num_turns) * _TWO_PI)
            return float(rope_dim * turns.ln() / (2 * theta.ln()))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = float(np.floor(low)), float(np.ceil(high))
    low, high = max(low, 0.0), min(high, rope_dim - 1.0)
    return (low, high + 0.001) if low == high else (low, high)


def rope_tables(
    rope: RopeConfig, rope_dim: int, num_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cos and sin of position x frequency, each float32 [num_positions, rope_dim / 2].

    YaRN's table scale is already multiplied in. Pair i of an interleaved head is (x[2i], x[2i+1]).
    """
    frequencies = inverse_frequencies(rope, rope_dim)
    cos, sin = cos_sin(np.arange(num_positions, dtype=np.float64)[:, None] * frequencies)
    scale = rope.yarn.table_scale if rope.yarn else 1.0
    return (cos * scale).astype(np.float32), (sin * scale).astype(np.float32)


# pi/2 in three parts: the first two have 27 trailing zero bits, so that k x part is exact for k < 2^26.
_HALF_PI_PARTS = (
    float.fromhex("0x1.921fb50000000p+0"),
    float.fromhex("0x1.110b460000000p-26"),
    float.fromhex("0x1.1a62633145c07p-54"),
)
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")


def _series(first_power: int) -> list[float]:
    """Return Taylor coefficients 1/p! with alternating sign for p = first_power, first_power + 2, ... up to
    20."""
    coefficients, factorial = [], 1
    for power in range(1, 21):
        factorial *= power
        if power >= first_power and (power - first_power) % 2 == 0:
            coefficients.append((-1) ** (power // 2) / factorial)
    return coefficients


def _horner(x: NDArray[np.float64], coefficients: list[float]) -> NDArray[np.float64]:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def cos_sin(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute cos and sin of non-negative angles to within 2 units in float64's last place of 1."""
    quarter = np.rint(x * _TWO_OVER_PI)
    r = x
    for part in _HALF_PI_PARTS:
        r = r - quarter * part
    square = r * r
    sin = r + r * square * _horner(square, _series(3))
    cos = 1.0 + square * _horner(square, _series(2))
    turn = quarter.astype(np.int64) & 3
    return (
        np.select([turn == 0, turn == 1, turn == 2], [cos, -sin, -cos], sin),
        np.select([turn == 0, turn == 1, turn == 2], [sin, cos, -sin], -cos),
    )
