"""xdeepserve: the CloudMatrix384 serving stack on a laptop, bit for bit.

from xdeepserve import LLM, SamplingParams
with LLM(model="tiny", deployment="colocated") as llm:
    outputs = llm.generate(["Hello"], SamplingParams(max_tokens=16, temperature=0.0))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xdeepserve.engine.dp.sampling_params import SamplingParams
    from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
    from xdeepserve.llm import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Importing the package must not import numba: that takes longer than many commands need.
    if name == "SamplingParams":
        from xdeepserve.engine.dp.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams

        return StructuredOutputsParams
    if name in __all__:
        from xdeepserve import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'xdeepserve' has no attribute '{name}'")
