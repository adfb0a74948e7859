"""The methods of `xdeepserve quantize --method`, as the techniques that each is made of."""

from __future__ import annotations

import msgspec

from .smoothquant import ALPHAS, DEFAULT_ALPHA


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """Which techniques run, in this order."""

    name: str
    rotate: bool = False  # rotation.py
    alphas: tuple[float, ...] = ()  # smoothquant.py; several: scale search
    compensate: bool = False  # compensation.py
    clip: bool = False  # clipping.py
    gptq: bool = False  # gptq.py; otherwise round to nearest
    max_attention_error: float | None = None  # layers that lose no more have INT8 weights in attention, too
    max_error: float | None = None  # a layer whose outputs are further off (relative, squared) stays float


ATTENTION_ERROR = 1e-4  # about what rounding costs a linear layer

METHODS = {
    method.name: method
    for method in (
        Method(name="rtn"),
        Method(name="smoothquant", alphas=(DEFAULT_ALPHA,)),
        Method(name="gptq", gptq=True),
        Method(
            name="smoothquant+gptq", alphas=(DEFAULT_ALPHA,), gptq=True, max_attention_error=ATTENTION_ERROR
        ),
        Method(name="cloudmatrix", rotate=True, alphas=ALPHAS, compensate=True, clip=True, max_error=5e-4),
    )
}
