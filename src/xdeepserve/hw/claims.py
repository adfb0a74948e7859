"""Claims on ranges of a memory by transfers under way, to write or to read."""

from __future__ import annotations

from bisect import bisect_right, insort

from ..errors import AddressError


class Claims:
    """Claimed ranges of a node's memory.

    A transfer claims the bytes that it will write and shares the bytes that it will read.

    Two transfers to the same bytes would leave a mixture of both that depends on timing, and a transfer that
    reads bytes while another writes them would carry such a mixture on. So the second is refused, through
    whatever handle it comes: a claim belongs to the memory. Any number of transfers may read the same bytes.
    """

    def __init__(self, node: int) -> None:
        self.node = node
        self._ranges: list[tuple[int, int, str]] = []  # start, stop, who; disjoint, so sorted by stop as well
        self._readers: list[tuple[int, int, str]] = []

    def __len__(self) -> int:
        return len(self._ranges) + len(self._readers)

    def take(self, start: int, nbytes: int, who: str) -> None:
        """Claim the non-empty range [start, start + nbytes) to write. Raises AddressError if a byte is in
        use."""
        self._check_writers(start, start + nbytes, who)
        for begin, end, other in self._readers:
            self._check(start, start + nbytes, who, begin, end, other, "reading")
        insort(self._ranges, (start, start + nbytes, who))

    def release(self, start: int) -> None:
        """Give back the claim with the given `start`."""
        at = bisect_right(self._ranges, start, key=lambda claim: claim[0]) - 1
        assert at >= 0
        assert self._ranges[at][0] == start
        del self._ranges[at]

    def share(self, start: int, nbytes: int, who: str) -> None:
        """Share the non-empty range [start, start + nbytes) to read. Raises AddressError if a byte is claimed
        for writing."""
        self._check_writers(start, start + nbytes, who)
        self._readers.append((start, start + nbytes, who))

    def unshare(self, start: int, nbytes: int, who: str) -> None:
        """Give back a range taken by `share`."""
        self._readers.remove((start, start + nbytes, who))

    def _check_writers(self, start: int, stop: int, who: str) -> None:
        after = bisect_right(self._ranges, start, key=lambda claim: claim[0])
        at = max(after - 1, 0)
        while at < len(self._ranges) and self._ranges[at][0] < stop:
            self._check(start, stop, who, *self._ranges[at], "writing")
            at += 1

    def _check(self, start: int, stop: int, who: str, begin: int, end: int, other: str, does: str) -> None:
        if begin < stop and start < end:
            raise AddressError(
                f"{who}: [{start}, {stop}) of node {self.node} overlaps [{begin}, {end}), which {other} is "
                f"{does}"
            )
