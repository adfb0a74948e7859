"""Exercise 1: the fields of a ring. The story is beside this file."""

from __future__ import annotations


def last_chunks(base: int, first: int, stop: int, num_cores: int) -> list[tuple[int, int, int]]:
    """Return the ring's fields as they are after chunks [first, stop) of a message, at least one.

    Chunk i of the message goes through core i mod num_cores; the message begins at ring position `base`.
    Returns (core, chunk ID, pointer) of each core that had one of these chunks, for the last that it had;
    cores ascending. Whole numbers all.
    """
    raise NotImplementedError
