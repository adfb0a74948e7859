"""What a TE at the grain of a step has to do for one request, and what its DP groups have room for."""

from __future__ import annotations

from typing import NamedTuple

from xdeepserve.engine.balance.dp import LONG_PROMPT
from xdeepserve.platform.traces import TracedRequest


class StepLimits(NamedTuple):
    """What a DP group has room for, and how far a step brings a request.

    num_seqs         sequences
    num_rows         token rows of a step
    num_positions    of KV
    block            tokens of a block of the trace
    rows_each        of a sequence that decodes, in a step: one, and its drafts
    tokens_each      that it gets of them on average
    """

    num_seqs: int
    num_rows: int
    num_positions: int
    block: int
    rows_each: int = 1
    tokens_each: float = 1.0


class TETask:
    """A request's prefill, decode or both, at one TE. Of its prompt a memory pool has the first `pooled`
    blocks, and its DP group has `own` in its cache."""

    __slots__ = (
        *("base", "before", "cached", "cost", "group", "left", "need", "number", "own", "pooled", "request"),
        "serial",
    )

    def __init__(self, number: int, request: TracedRequest, serial: int) -> None:
        self.number, self.request, self.serial = number, request, serial
        self.group, self.cached, self.before, self.left = -1, 0, 0, 0
        self.cost, self.base, self.need = 0.0, 0.0, 0
        self.own = self.pooled = 0

    @property
    def is_long(self) -> bool:
        return self.request.input_length >= LONG_PROMPT
