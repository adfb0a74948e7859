"""Tokens of a traced request as an RTC sees them: by counts, and by names of blocks instead of ids.

A trace tells which blocks of prompts are equal, and no token. So a KV block is named by the block of the
trace in which it ends, and by its last position. Equal numbers of a trace's blocks are equal blocks after
equal blocks, so equal names are equal prefixes. No other request has a block of generated tokens, or of a
prompt whose blocks the trace does not know: its name has the number of the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

Name = tuple[int, ...]
OWN: Final = -1  # begins the names of blocks that one request alone has; numbers of a trace's blocks do not


class TracedTokens(list[int]):
    """A list of `length` tokens without their ids; a slice that begins at a block is the block's name.

    The first `num_known` tokens are those of the trace's `blocks`, each of `size` tokens.
    """

    __slots__ = ("_blocks", "_length", "_num_known", "_number", "_size")

    def __init__(self, number: int, length: int, num_known: int, blocks: Sequence[int], size: int) -> None:
        super().__init__()
        self._number, self._length, self._blocks, self._size = number, length, blocks, size
        self._num_known = min(num_known, len(blocks) * size)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        raise TypeError("tokens of a trace have no ids")

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            raise TypeError("tokens of a trace have no ids")
        if index.start is None:
            length = len(range(*index.indices(self._length)))
            return TracedTokens(self._number, length, self._num_known, self._blocks, self._size)
        start, stop, size = index.start, index.stop, self._size
        if stop > self._num_known:
            return OWN, self._number, start
        return (*self._blocks[start // size : stop // size], self._blocks[(stop - 1) // size], stop)

    def __iadd__(self, tokens: Any) -> TracedTokens:  # type: ignore[override,misc]
        self._length += len(tokens)
        return self

    def grow(self, count: int) -> None:
        """Append `count` generated tokens."""
        self._length += count


def blocks_ending_in(name: Name) -> Name:
    """Return the trace's blocks whose last token is in the KV block of this name."""
    return () if name[0] == OWN else name[:-2]
