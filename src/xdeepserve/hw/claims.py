"""Ranges of a memory that transfers under way will write."""

from __future__ import annotations

from bisect import bisect_right, insort

from ..errors import AddressError


class Claims:
    """Disjoint ranges of one node's memory. Who is to write bytes over some time claims them first.

    Two transfers to the same bytes would leave a mixture of both that depends on timing, so the second is
    refused, whoever asks for it: a claim belongs to the memory, not to one handle on it.
    """

    def __init__(self, node: int) -> None:
        self.node = node
        self._ranges: list[tuple[int, int, str]] = []  # start, stop, who; disjoint, so sorted by stop as well

    def __len__(self) -> int:
        return len(self._ranges)

    def take(self, start: int, nbytes: int, who: str) -> None:
        """Claim [start, start + nbytes), which is not empty. AddressError if a byte of it is claimed."""
        stop = start + nbytes
        after = bisect_right(self._ranges, start, key=lambda claim: claim[0])
        for begin, end, other in self._ranges[max(after - 1, 0) : after + 1]:
            if begin < stop and start < end:
                raise AddressError(
                    f"{who}: [{start}, {stop}) of node {self.node} overlaps [{begin}, {end}), which {other} "
                    "is writing"
                )
        insort(self._ranges, (start, stop, who))

    def release(self, start: int) -> None:
        """Give back the claim that begins at `start`."""
        at = bisect_right(self._ranges, start, key=lambda claim: claim[0]) - 1
        assert at >= 0
        assert self._ranges[at][0] == start
        del self._ranges[at]
