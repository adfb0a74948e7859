"""Requests that no TE can serve, while another one is on its way."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from xdeepserve.engine.dp.sequence import Sequence


class Homeless:
    """They wait in order. `is_open` while somebody may come for them."""

    def __init__(self) -> None:
        self.is_open = False
        self._requests: list[list[Sequence]] = []

    def take(self, seqs: Seq[Sequence]) -> None:
        """The choices of a request, or what is left of one, wait from now on."""
        self._requests.append(list(seqs))

    def let_go(self) -> list[list[Sequence]]:
        """Nobody waits any more; who has waited."""
        requests, self._requests = self._requests, []
        return requests

    def leave(self, seq: Sequence) -> None:
        """It is not wanted any more."""
        for seqs in self._requests:
            if seq in seqs:
                seqs.remove(seq)
                seq.is_finished = True
        self._requests = [seqs for seqs in self._requests if seqs]

    def __len__(self) -> int:
        return sum(map(len, self._requests))
