"""Exchanges and carriers that a deployment may choose, and their traits; they cost no import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

Exchange: TypeAlias = Literal["pull", "push"]
"""Operators that move tokens: xDeepServe's (XDS 3.2), or the fused ones of CloudMatrix (CM 4.2.1)."""

Carrier: TypeAlias = Literal["mte", "urma"]
"""What carries bulk data: the AIV cores' own engines, or the DMA engine that they ask directly (XDS 3.3)."""


class ExchangeTraits(NamedTuple):
    """Traits of an exchange, by which deployments accept it or refuse it, and dies make room for it."""

    how: str  # tokens travel, for the list of settings
    prefix: str = ""  # of its operations' names in traces and errors
    waits_for: str = ""  # what each rank hears of all others, in need or not: dataflow and services cannot
    sums: bool = False  # a token's answers, weighted, where they arrive
    is_apart: bool = True  # it is also among dies that have experts alone, behind trampolines
    has_twin: bool = True  # in lockstep (`engine/run/lockstep/choice.py:TWINS`)


EXCHANGES: Final[Mapping[Exchange, ExchangeTraits]] = {
    "pull": ExchangeTraits("dispatch and combine"),
    "push": ExchangeTraits("FusedDispatch and FusedCombine", "fused ", "a flag of every die", sums=True),
}
