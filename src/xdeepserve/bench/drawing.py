"""Matplotlib, which only `--plot` needs."""

from __future__ import annotations

from typing import Any

from xdeepserve.errors import InputError


def pyplot() -> Any:
    """Matplotlib's, without a window. InputError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install '.[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
