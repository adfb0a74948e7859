"""Raw memory ranges, paired for a transfer: arithmetic on addresses, no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import NamedTuple

from xdeepserve.comm.checks import is_integer
from xdeepserve.errors import AddressError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address

SPAN_ALIGNMENT = 32


class Span(NamedTuple):
    """Range of `nbytes` in a node's memory from `address` on. Both are multiples of 32 bytes, as engines
    need."""

    address: Address
    nbytes: int


def pair(src: Sequence[Span], dst: Sequence[Span]) -> list[Copy]:
    """List the copies from `src`, in order, to `dst`, in order.

    The two sides may be cut differently (KV blocks of different sizes): copies end wherever either side does.
    Raises AddressError if the totals differ, a span is misaligned, or a destination overlaps anything else.
    """
    total, room = sum(span.nbytes for span in src), sum(span.nbytes for span in dst)
    if total != room:
        raise AddressError(f"transfer: the source has {total} bytes, the destination {room}")
    check_alignment("source", src)
    check_alignment("destination", dst)
    check_overlaps(src, dst)
    copies = []
    src_idx = dst_idx = src_done = dst_done = 0
    while src_idx < len(src):
        source, target = src[src_idx], dst[dst_idx]
        nbytes = min(source.nbytes - src_done, target.nbytes - dst_done)
        copies.append(Copy(source.address.plus(src_done), target.address.plus(dst_done), nbytes))
        src_done += nbytes
        dst_done += nbytes
        if src_done == source.nbytes:
            src_idx, src_done = src_idx + 1, 0
        if dst_done == target.nbytes:
            dst_idx, dst_done = dst_idx + 1, 0
    return copies


def cut(copies: Sequence[Copy], sizes: Sequence[int]) -> list[list[Copy]]:
    """Deal copies, in order, to parts of the given sizes (bytes); parts end where copies do."""
    parts, left = [], iter(copies)
    for size in sizes:
        part: list[Copy] = []
        while size > 0:
            part.append(next(left))
            size -= part[-1].nbytes
        parts.append(part)
    return parts


def spans_of(side: str, pieces: Sequence[tuple[Address, int]]) -> tuple[Span, ...]:
    """Convert a caller's pieces to spans. Raises AddressError unless all numbers are whole and aligned."""
    spans = []
    for piece in pieces:
        match piece:
            case (Address(node, offset), nbytes) if all(map(is_integer, (node, offset, nbytes))):
                # Python's numbers: sums of NumPy's may wrap around.
                spans.append(Span(Address(index(node), index(offset)), index(nbytes)))
            case _:
                raise AddressError(
                    f"transfer: a {side} span is an Address and a size, in whole numbers, not {piece!r}"
                )
    check_alignment(side, spans)
    return tuple(spans)


def check_alignment(side: str, spans: Sequence[Span]) -> None:
    """Check the alignment of spans: offsets and sizes must be multiples of 32, and no size 0. Raises
    AddressError if not."""
    for span in spans:
        if span.nbytes <= 0 or span.nbytes % SPAN_ALIGNMENT or span.address.offset % SPAN_ALIGNMENT:
            raise AddressError(
                f"transfer: {side} span of {span.nbytes} bytes at offset {span.address.offset} of node "
                f"{span.address.node}: both must be multiples of {SPAN_ALIGNMENT}, the size not 0"
            )


def check_overlaps(src: Sequence[Span], dst: Sequence[Span]) -> None:
    """Check for overlaps: no written byte may also be read, or written twice, because the order of copies
    must not matter. Raises AddressError if one is."""
    ranges = sorted(
        [(s.address.node, s.address.offset, s.nbytes, "source") for s in src]
        + [(s.address.node, s.address.offset, s.nbytes, "destination") for s in dst]
    )
    # Sources may overlap each other, so a destination is compared with the furthest end of each kind.
    end = {"source": (-1, 0), "destination": (-1, 0)}
    for node, offset, nbytes, side in ranges:
        for other in ("destination",) if side == "source" else ("source", "destination"):
            if end[other] > (node, offset):
                raise AddressError(
                    f"transfer: {side} span of {nbytes} bytes at offset {offset} of node {node} overlaps a "
                    f"{other} span"
                )
        end[side] = max(end[side], (node, offset + nbytes))
