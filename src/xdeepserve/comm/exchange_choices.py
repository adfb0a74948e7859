"""Names of the exchanges and carriers that a deployment may choose; they cost no import."""

from __future__ import annotations

from typing import Literal, TypeAlias

Exchange: TypeAlias = Literal["pull", "push"]
"""Operators that move tokens: xDeepServe's (XDS 3.2), or the fused ones of CloudMatrix (CM 4.2.1)."""

Carrier: TypeAlias = Literal["mte", "urma"]
"""What carries bulk data: the AIV cores' own engines, or the DMA engine that they ask directly (XDS 3.3)."""
