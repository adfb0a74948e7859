"""Queue of requests waiting for a TE, kept while another TE is on its way."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from xdeepserve.engine.dp.sequence import Sequence


class Homeless:
    """Keeps requests without a TE, in order. `is_open` says that a TE may still come for them."""

    def __init__(self) -> None:
        self.is_open = False
        self._requests: list[list[Sequence]] = []

    def take(self, seqs: Seq[Sequence]) -> None:
        """Queue the choices of a request, or its remaining ones."""
        self._requests.append(list(seqs))

    def let_go(self) -> list[list[Sequence]]:
        """Empty the queue and return the requests that waited."""
        requests, self._requests = self._requests, []
        return requests

    def leave(self, seq: Sequence) -> None:
        """Remove an ended or aborted sequence from the queue."""
        for seqs in self._requests:
            if seq in seqs:
                seqs.remove(seq)
                seq.is_finished = True
        self._requests = [seqs for seqs in self._requests if seqs]

    def __len__(self) -> int:
        return sum(map(len, self._requests))
