"""Methods of `xdeepserve quantize --method`, each as a set of techniques."""

from __future__ import annotations

import msgspec

from xdeepserve.quant.smoothquant import ALPHAS, DEFAULT_ALPHA


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """A quantisation method: techniques, in the order in which they run."""

    name: str
    rotate: bool = False  # rotation_search.py: where it helps
    alphas: tuple[float, ...] = ()  # smoothquant.py; several: scale search
    compensate: bool = False  # compensation.py: folded into the weights
    clip: bool = False  # clipping.py
    gptq: bool = False  # gptq.py; otherwise round to nearest
    max_attention_error: float | None = None  # layers that lose no more have INT8 weights in attention, too
    # sensitivity.py: layers whose error is so many times the median stay float, up to a share of all weights.
    keep_ratio: float | None = None
    keep_share: float = 1 / 8

    @property
    def needs_text(self) -> bool:
        """Whether the method looks at what layers compute on calibration text; rounding alone does not."""
        is_rounding = Method(name=self.name, keep_share=self.keep_share)
        return self != is_rounding


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
        Method(name="cloudmatrix", rotate=True, alphas=ALPHAS, compensate=True, clip=True, keep_ratio=10),
    )
}
