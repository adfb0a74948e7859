"""RTC, the relational tensor cache: which KV blocks of a DP group's HBM belong to whom (DeepServe 4.3).

A block holds the latents of `block_size` consecutive positions, in every layer at the same index. The pool
hands out block numbers only; the bytes are the die's.
"""

from __future__ import annotations

from xdeepserve.errors import XDeepServeError


class RTC:
    """A free list over `num_blocks` blocks. Blocks are handed out lowest number first after a fresh start."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owner: dict[int, int] = {}  # block -> sequence id

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def grow(self, seq_id: int, table: list[int], num_tokens: int) -> bool:
        """Append blocks to `table` until it holds `num_tokens`; False, changing nothing, if too few."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.pop()
            self._owner[block] = seq_id
            table.append(block)
        return True

    def free(self, seq_id: int, table: list[int]) -> None:
        """Take back every block of `table`, which ends empty."""
        while table:
            block = table.pop()
            if self._owner.pop(block, None) != seq_id:
                raise XDeepServeError(f"RTC: sequence {seq_id} frees block {block}, which it does not own")
            self._free.append(block)

    def check_integrity(self, tables: dict[int, list[int]]) -> None:
        """Every block is free or in exactly one of the `tables` (by sequence id), and the books agree."""
        owned = {block: seq_id for seq_id, table in tables.items() for block in table}
        num_owned = sum(len(table) for table in tables.values())
        free = set(self._free)
        if len(free) != len(self._free) or len(owned) != num_owned:
            raise XDeepServeError("RTC: a block is listed twice")
        if owned != self._owner or free | set(owned) != set(range(self.num_blocks)) or free & set(owned):
            raise XDeepServeError(
                f"RTC: {len(free)} free + {len(owned)} in tables, {len(self._owner)} on the books, "
                f"{self.num_blocks} in all"
            )
