"""How two streams of a die share its AIC cores (CloudMatrix 4.2.3)."""

from __future__ import annotations

from collections import Counter


class CoreSplit:
    """`attention` cores are stream 0's. If they may move, one does after each layer in which one stream was
    at work for more than SLACK longer than the other: so both come to take as long, whatever the batch and
    the lengths of KV. What happened on the die tells, so that nobody else is asked."""

    SLACK = 1.05

    def __init__(self, attention: int, moves: bool = False) -> None:
        self.attention, self.moves = attention, moves
        self._spent_ns: Counter[int] = Counter()

    def spend(self, stream: int, duration_ns: int) -> None:
        """A microbatch's half of a layer."""
        self._spent_ns[stream] += duration_ns

    def end_layer(self, num_cores: int) -> None:
        """All microbatches of a layer have ended, on a die of so many cores."""
        first, second = self._spent_ns[0], self._spent_ns[1]
        self._spent_ns.clear()
        if not self.moves:
            return
        if first > self.SLACK * second:
            self.attention = min(num_cores - 1, self.attention + 1)
        elif second > self.SLACK * first:
            self.attention = max(1, self.attention - 1)
