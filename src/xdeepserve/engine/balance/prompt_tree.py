"""Who has which beginnings of prompts: DeepServe's prompt tree (5.2), global over TEs or local to one.

Prompts are chains of blocks whose numbers name all that stands before them, too, as hashes of a chain do; so
a map from a block to its holders says what a tree would. What it says may be stale: a hint that is wrong
costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


class PromptTree:
    """Holders are small numbers, of TEs or of DP groups."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # bit n: holder n has it

    def __len__(self) -> int:
        """Blocks that somebody has."""
        return len(self._holders)

    @property
    def blocks(self) -> Collection[int]:
        """Blocks that some holder has."""
        return self._holders.keys()

    def publish(self, holder: int, blocks: Iterable[int]) -> None:
        """It has these now."""
        bit, holders = 1 << holder, self._holders
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit

    def evict(self, holder: int, blocks: Iterable[int]) -> None:
        """It has them no more; harmless when repeated."""
        keep, holders = ~(1 << holder), self._holders
        for block in blocks:
            left = holders.get(block, 0) & keep
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)

    def is_held(self, block: int) -> bool:
        """Whether anybody has it."""
        return block in self._holders

    def match(self, blocks: Sequence[int]) -> dict[int, int]:
        """How many blocks each holder has from the first on without a gap; who has none is left out."""
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
