"""Which TE gets which request (xDeepServe 5.1, step 1): by cache status, prompt length and load together.

The load of a TE is the prefill cost (`balance/dp.py`) of what it has been given and has not yet prefilled,
for each of its DP groups. A request goes where that load and its own cost, cached prefix counted, are least
in sum: so a cached prefix draws requests until waiting there costs more than computing it elsewhere. Long and
short prompts meet only if there is no other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xdeepserve.engine.balance.dp import LONG_PROMPT, prefill_cost


class PromptCost(NamedTuple):
    """What a prompt asks of a TE."""

    cost: float
    is_long: bool


class TEStatus(NamedTuple):
    """What is known of a TE."""

    given: Sequence[PromptCost]
    num_groups: int
    num_cached: int = 0  # tokens of the prompt in question that one of its groups need not compute


def cost_of(num_tokens: int, status: TEStatus) -> PromptCost:
    """What a prompt asks of a TE, cached prefix counted."""
    cost = prefill_cost(num_tokens - status.num_cached, status.num_cached)
    return PromptCost(cost, is_long=num_tokens - status.num_cached >= LONG_PROMPT)


def te_key(num_tokens: int, status: TEStatus) -> tuple[bool, float]:
    """The less, the better a TE is for a prompt."""
    own = cost_of(num_tokens, status)
    is_mixed = any(given.is_long != own.is_long for given in status.given)
    return is_mixed, sum(given.cost for given in status.given) / status.num_groups + own.cost
