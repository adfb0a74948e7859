"""Ledger of a job executor: the prompts that it has given to TEs and that are not yet computed.

Each prompt has a cost, allowing for its cached prefix. Sums are of whole numbers, so a prompt that has come
and gone leaves nothing behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Final, NamedTuple

from xdeepserve.engine.balance.dp import ATTENTION, LONG_PROMPT

WHOLE: Final = round(2 / ATTENTION)  # a prefill cost of 1, in units in which every cost is a whole number


def whole_cost(num_tokens: int, num_cached: int) -> int:
    """Return the cost to prefill `num_tokens` after `num_cached` cached ones, in parts of WHOLE."""
    return num_tokens * (WHOLE + 2 * num_cached + num_tokens)


class GivenPrompt(NamedTuple):
    """A prompt at its TE, with its cost in parts of WHOLE."""

    te: Hashable
    cost: int
    is_long: bool


class TELedger:
    """Prompts that are queued at TEs, by number of the request; TEs have names or numbers."""

    def __init__(self) -> None:
        self.given: dict[int, GivenPrompt] = {}
        self._cost: dict[Hashable, int] = defaultdict(int)
        self._num: dict[tuple[Hashable, bool], int] = defaultdict(int)  # by TE, and whether they are long

    def give(self, request: int, te: Hashable, num_tokens: int, cached: int) -> None:
        """Note that a TE has got a prompt, of which it should have `cached` tokens."""
        new = num_tokens - cached
        prompt = GivenPrompt(te, whole_cost(new, cached), new >= LONG_PROMPT)
        self.given[request] = prompt
        self._cost[te] += prompt.cost
        self._num[te, prompt.is_long] += 1

    def forget(self, request: int) -> None:
        """Remove a prompt, which is computed or has left its TE."""
        prompt = self.given.pop(request, None)
        if prompt is not None:
            self._cost[prompt.te] -= prompt.cost
            self._num[prompt.te, prompt.is_long] -= 1

    def cost(self, te: Hashable) -> float:
        """Return the cost of the prompts that are queued at a TE."""
        return self._cost[te] / WHOLE

    def has(self, te: Hashable, is_long: bool) -> bool:
        """Whether long, or short, prompts are queued at a TE."""
        return self._num[te, is_long] > 0
