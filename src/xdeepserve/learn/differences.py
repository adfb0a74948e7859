"""Find the first bit unlike the package's own, and describe it in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def first_difference(
    expected: Mapping[str, Any], found: Mapping[str, Any], axes: Mapping[str, Sequence[str]]
) -> str | None:
    """Compare part by part, in the order of `expected`; None if all bits are equal."""
    for part, value in expected.items():
        if part not in found:
            return f"{part} is missing"
        if text := _different(value, found[part], part, axes.get(part, ())):
            return text
    return None


def _different(expected: Any, found: Any, part: str, axes: Sequence[str]) -> str | None:
    if isinstance(expected, np.ndarray):
        return _arrays(expected, found, part, axes)
    if isinstance(expected, list | tuple):
        return _sequences(expected, found, part, axes)
    if type(expected) is bool or not isinstance(expected, int):
        is_equal = type(found) is type(expected) and found == expected
    else:  # NumPy's whole numbers are as good as Python's
        is_equal = isinstance(found, int | np.integer) and not isinstance(found, bool) and found == expected
    return None if is_equal else f"{part}: expected {_shown(expected)}, yours is {_shown(found)}"


def _sequences(expected: Sequence[Any], found: Any, part: str, axes: Sequence[str]) -> str | None:
    if not isinstance(found, list if isinstance(expected, list) else tuple):  # others go on with it
        return f"{part}: expected a {type(expected).__name__}, yours is {_shown(found)}"
    axis, *rest = axes or ("item",)
    for index, (mine, yours) in enumerate(zip(expected, found, strict=False)):
        if text := _different(mine, yours, f"{part}, {axis} {index}", rest):
            return text
    if len(expected) != len(found):
        return f"{part}: expected {len(expected)} of them ({axis}), yours are {len(found)}"
    return None


def _arrays(expected: np.ndarray[Any, Any], found: Any, part: str, axes: Sequence[str]) -> str | None:
    if not isinstance(found, np.ndarray):
        return f"{part}: expected an array {expected.dtype} {expected.shape}, yours is {_shown(found)}"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return (
            f"{part}: expected {expected.dtype} {list(expected.shape)}, "
            f"yours is {found.dtype} {list(found.shape)}"
        )
    mine, yours = (_bits(array) for array in (expected, found))
    if np.array_equal(mine, yours):
        return None
    index = tuple(int(i) for i in np.argwhere((mine != yours).reshape(*expected.shape, -1).any(axis=-1))[0])
    names = [*axes, *("axis " + str(i) for i in range(len(axes), expected.ndim))]
    at = "".join(f", {name} {i}" for name, i in zip(names, index, strict=False))
    count = int((mine != yours).reshape(*expected.shape, -1).any(axis=-1).sum())
    return (
        f"{part}{at}: expected {_value(expected[index])}, yours is {_value(found[index])} "
        f"({count} of {expected.size} differ)"
    )


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View an array as bytes [..., bytes of an element], by which -0.0 is not 0.0, and a NaN equals
    itself."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def _value(value: Any) -> str:
    """Write a number; for a floating-point number also its bits, since only the last one may differ."""
    if isinstance(value, np.floating):
        return f"{value!s} (0x{value.tobytes()[::-1].hex()})"
    return str(value)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
