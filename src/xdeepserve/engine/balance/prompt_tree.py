"""DeepServe's prompt tree (5.2): the holders (TEs or DP groups) of cached prompt beginnings.

Prompts are chains of blocks. A block's number depends on all blocks before it, as in a chain of hashes. So a
map from a block to its holders holds the same information as a tree. It is stale, as holders tell of changes
by messages; a wrong hint costs time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence


class PromptTree:
    """Map from prompt blocks to holders, which are small numbers of TEs or DP groups.

    What a holder tells is known `late_ns` later.
    """

    def __init__(self, late_ns: int = 0) -> None:
        self._late_ns = late_ns
        self._holders: dict[int, int] = {}  # bit n: holder n has it
        self._notices: deque[tuple[float, int, Sequence[int], bool]] = deque()  # with the time when told

    def tell(self, now: float, holder: int, blocks: Sequence[int], has: bool) -> None:
        """Note that `holder` has these blocks from now on, or has them no more."""
        self._notices.append((now, holder, blocks, has))

    def catch_up(self, now: float) -> None:
        """Take in all that has become known by now [ns]."""
        while self._notices and self._notices[0][0] + self._late_ns <= now:
            _, holder, blocks, has = self._notices.popleft()
            (self.publish if has else self.evict)(holder, blocks)

    def forget(self, holder: int) -> None:
        """Forget a holder that is gone, with its notices."""
        self._notices = deque(notice for notice in self._notices if notice[1] != holder)
        self.evict(holder, [*self._holders])

    def __len__(self) -> int:
        """Number of blocks with at least one holder."""
        return len(self._holders)

    @property
    def blocks(self) -> Collection[int]:
        """All blocks held by at least one holder."""
        return self._holders.keys()

    def publish(self, holder: int, blocks: Iterable[int]) -> None:
        """Record `holder` as a holder of these blocks."""
        bit, holders = 1 << holder, self._holders
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit

    def evict(self, holder: int, blocks: Iterable[int]) -> None:
        """Remove `holder` from the holders of these blocks; harmless when repeated."""
        keep, holders = ~(1 << holder), self._holders
        for block in blocks:
            left = holders.get(block, 0) & keep
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)

    def is_held(self, block: int) -> bool:
        """Whether a block has any holder."""
        return block in self._holders

    def match(self, blocks: Sequence[int]) -> dict[int, int]:
        """Count each holder's blocks, from the first on without a gap.

        Holders without the first block are left out.
        """
        found: dict[int, int] = {}
        alive = -1
        for number, block in enumerate(blocks):
            have = alive & self._holders.get(block, 0)
            if number:
                _note(found, alive & ~have, number)
            alive = have
            if not alive:
                return found
        if blocks:
            _note(found, alive, len(blocks))
        return found


def _note(found: dict[int, int], bits: int, number: int) -> None:
    while bits:
        low = bits & -bits
        found[low.bit_length() - 1] = number
        bits ^= low
