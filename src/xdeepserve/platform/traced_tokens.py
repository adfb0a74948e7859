"""Tokens of a traced request as an RTC sees them: by counts, and by names of blocks instead of ids.

A trace tells which blocks of prompts are equal, and no token. So a KV block is named by the block of the
trace in which it ends, and by its last position. Equal numbers of a trace's blocks are equal blocks after
equal blocks, so equal names are equal prefixes. No other request has a block of generated tokens, or of a
prompt whose blocks the trace does not know: its name has the number of the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final

Name = tuple[int, ...]
OWN: Final = -1  # begins the names of blocks that one request alone has; numbers of a trace's blocks do not


class TracedTokens(list[int]):
    """A list of `length` tokens without their ids, whose blocks have names; a slice that begins at a block is
    the block's name.

    The first `num_known` tokens are those of the trace's `blocks`, each of `size` tokens.
    """

    __slots__ = ("_blocks", "_length", "_names", "_num_known", "_number", "_size")

    def __init__(self, number: int, length: int, num_known: int, blocks: Sequence[int], size: int) -> None:
        super().__init__()
        self._number, self._length, self._blocks, self._size = number, length, blocks, size
        self._num_known = min(num_known, len(blocks) * size)
        self._names: list[Name] = []  # of KV blocks from the first on, as far as they have been asked for

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        raise TypeError("tokens of a trace have no ids")

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            raise TypeError("tokens of a trace have no ids")
        if index.start is not None:
            size = index.stop - index.start
            return self.names(size, index.start // size, index.stop // size)[0]
        first = TracedTokens.__new__(TracedTokens)
        length, stop = self._length, index.stop
        first._length = min(length, stop) if stop >= 0 else max(0, length + stop)
        first._number, first._blocks, first._size = self._number, self._blocks, self._size
        first._num_known, first._names = self._num_known, self._names
        return first

    def names(self, size: int, start: int, stop: int) -> list[Name]:
        """Return the names of the KV blocks from `start` to `stop`, each of `size` tokens: always the same
        size."""
        names = self._names
        if len(names) < stop:
            names += map(self._name, range(len(names) * size, stop * size, size), repeat(size))
        return names[start:stop]

    def _name(self, start: int, size: int) -> Name:
        stop, blocks, of_trace = start + size, self._blocks, self._size
        if stop > self._num_known:
            return OWN, self._number, start
        return *blocks[start // of_trace : stop // of_trace], blocks[(stop - 1) // of_trace], stop

    def __iadd__(self, tokens: Any) -> TracedTokens:  # type: ignore[override,misc]
        self._length += len(tokens)
        return self

    def grow(self, count: int) -> None:
        """Append `count` generated tokens to the sequence."""
        self._length += count


def blocks_ending_in(name: Name) -> Name:
    """Return the trace's blocks whose last token is in the KV block of this name."""
    return () if name[0] == OWN else name[:-2]


def opening_name(blocks: Sequence[int], block: int, size: int) -> Name | None:
    """Return the name of a prompt's first KV block, of `size` tokens; None unless the trace knows all of it.

    The trace's `blocks` have `block` tokens each.
    """
    length = len(blocks) * block
    return TracedTokens(0, length, length, blocks, block).names(size, 0, 1)[0] if size <= length else None
