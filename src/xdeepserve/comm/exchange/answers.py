"""Formats of experts' answers on their way: float32, bfloat16, or INT8 with a scale per row.

    float32   the fp32 recipe, in which nothing is rounded
    bf16      the int8 recipe: the answers' 14 KB of CloudMatrix 4.2.1
    int8      the same with expert outputs quantised before transfer, too (xDeepServe 4.7)

A row is its payload; in INT8, scale f32 | payload.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.handle import Quantize
from xdeepserve.jit.bf16 import from_bf16, to_bf16

Float32: TypeAlias = npt.NDArray[np.float32]
DTYPES = {"float32": "<f4", "bf16": "<u2", "int8": "i1"}  # bfloat16 is kept as its 16 bits
SCALE_NBYTES = 4


@dataclass(frozen=True)
class AnswerFormat:
    """Format of answer rows with `hidden` elements."""

    form: Literal["float32", "bf16", "int8"]
    hidden: int

    @classmethod
    def of(cls, hidden: int, quantize: bool, int8_answers: bool) -> AnswerFormat:
        """Return the format for a layout, by whether it quantises tokens and answers."""
        return cls("float32" if not quantize else "int8" if int8_answers else "bf16", hidden)

    @cached_property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of an element in the payload."""
        return np.dtype(DTYPES[self.form])

    @property
    def payload_at(self) -> int:
        """Offset of the payload in a row (bytes)."""
        return SCALE_NBYTES if self.form == "int8" else 0

    @cached_property
    def nbytes(self) -> int:
        """Size of a row without padding (bytes)."""
        return self.payload_at + self.hidden * self.dtype.itemsize

    @property
    def work(self) -> tuple[str, int]:
        """Kernel name and operations per element for preparing answers on the vector units; 0 means none."""
        return {"float32": ("", 0), "bf16": ("to bf16", 1), "int8": ("quantise", 4)}[self.form]

    def pack(self, answers: Float32, row_nbytes: int, quantize: Quantize | None) -> npt.NDArray[np.uint8]:
        """Pack answers [N, H] into rows, uint8 [N, row_nbytes], rounded and padded."""
        rows = np.zeros((len(answers), row_nbytes), np.uint8)
        payload: npt.NDArray[np.generic] = answers
        if self.form == "bf16":
            payload = to_bf16(answers)
        elif self.form == "int8":
            assert quantize is not None  # whoever quantises tokens can
            payload, scale = quantize(answers)
            rows[:, :SCALE_NBYTES] = scale.view(np.uint8).reshape(-1, SCALE_NBYTES)
        rows[:, self.payload_at : self.nbytes] = np.ascontiguousarray(payload).view(np.uint8)
        return rows

    def unpack(self, rows: npt.NDArray[np.uint8]) -> Float32:
        """Unpack rows [N, row_nbytes] to float32 [N, H]."""
        payload = np.ascontiguousarray(rows[:, self.payload_at : self.nbytes]).view(self.dtype)
        if self.form == "bf16":
            return from_bf16(payload)
        if self.form == "int8":
            scale = np.ascontiguousarray(rows[:, :SCALE_NBYTES]).view("<f4")
            return payload.astype(np.float32) * scale
        return payload
