"""Counts all tokens of an exchange; a die's bill depends on its share of them."""

from __future__ import annotations

from xdeepserve.hw.spec import Spec

KEPT = 64  # events that are remembered: more than any two dies of an exchange can be apart


class Tally:
    """Counts the tokens of each event, as their senders report them.

    `num_holders` dies share the routed copies, `top_k` of each token, evenly on average. This is bookkeeping
    for the bill; no program on a die looks at it.
    """

    def __init__(self, spec: Spec, num_holders: float, top_k: int) -> None:
        self._spec, self._share = spec, top_k / num_holders
        self._tokens: dict[int, float] = {}

    def come(self, event: int, num_tokens: int) -> None:
        """Add the tokens from a die to an event."""
        if event not in self._tokens:
            self._tokens[event] = 0
            self._tokens.pop(event - KEPT, None)
        self._tokens[event] += num_tokens

    def billed(self, event: int, received: float) -> float:
        """Return the token copies to bill to a die that has received `received` of them."""
        return self._spec.billed_copies(received, self._tokens.get(event, 0) * self._share)
