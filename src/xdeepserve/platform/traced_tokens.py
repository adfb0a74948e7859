"""Tokens of a traced request as an RTC sees them: by counts, and by names of blocks instead of ids.

A trace tells which blocks of prompts are equal, and no token. So a KV block is named by the block of the
trace in which it ends, and by its last position. Equal numbers of a trace's blocks are equal blocks after
equal blocks, so equal names are equal prefixes. No other request has a block of generated tokens, or of a
prompt whose blocks the trace does not know: its name has the number of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

Name = tuple[int, ...]
OWN: Final = -1  # begins the names of blocks that one request alone has; numbers of a trace's blocks do not


class TracedTokens(list[int]):
    """A list of `length` tokens without their ids; a slice that begins at a block is the block's name.

    The first `num_known` tokens are those of the trace's `blocks`, each of `size` tokens.
    """

    __slots__ = ("_length", "_names", "name")

    def __init__(self, number: int, length: int, num_known: int, blocks: Sequence[int], size: int) -> None:
        super().__init__()
        self._length = length
        self.name = _namer(number, min(num_known, len(blocks) * size), blocks, size)
        self._names: list[Name] = []

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        raise TypeError("tokens of a trace have no ids")

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            raise TypeError("tokens of a trace have no ids")
        if index.start is not None:
            return self.name(index.start, index.stop)
        first = TracedTokens.__new__(TracedTokens)
        length, stop = self._length, index.stop
        first._length = min(length, stop) if stop >= 0 else max(0, length + stop)
        first.name, first._names = self.name, self._names
        return first

    def names(self, size: int) -> list[Name]:
        """Return the names of all whole KV blocks, each of `size` tokens, which is always the same size."""
        names, count = self._names, self._length // size
        if len(names) < count:
            names += [self.name(at * size, (at + 1) * size) for at in range(len(names), count)]
        return names if len(names) == count else names[:count]

    def __iadd__(self, tokens: Any) -> TracedTokens:  # type: ignore[override,misc]
        self._length += len(tokens)
        return self

    def grow(self, count: int) -> None:
        """Append `count` generated tokens to the sequence."""
        self._length += count


def _namer(number: int, num_known: int, blocks: Sequence[int], size: int) -> Callable[[int, int], Name]:
    """Make the function that names a sequence's blocks, from start to stop; each is named once."""
    names: dict[int, Name] = {}

    def name(start: int, stop: int) -> Name:
        found = names.get(stop)
        if found is None:
            if stop > num_known:
                found = OWN, number, start
            else:
                found = (*blocks[start // size : stop // size], blocks[(stop - 1) // size], stop)
            names[stop] = found
        return found

    return name


def blocks_ending_in(name: Name) -> Name:
    """Return the trace's blocks whose last token is in the KV block of this name."""
    return () if name[0] == OWN else name[:-2]
