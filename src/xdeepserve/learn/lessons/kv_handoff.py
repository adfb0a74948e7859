"""Exercise 9: pair ranges of memory that are cut differently. The story is beside this file."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.comm.distflow.spans import Span
from xdeepserve.hw.engines import Copy


def pair(src: Sequence[Span], dst: Sequence[Span]) -> list[Copy]:
    """Return copies to carry the bytes of `src`, in order, to `dst`, in order; each as long as possible.

    Span(address, nbytes); address.plus(n) lies n bytes further. Copy(source address, destination address,
    bytes). AddressError (xdeepserve.errors) if the totals differ; xdeepserve.comm.distflow.spans has
    check_alignment(side, spans), where side is "source" or "destination" for the message, and
    check_overlaps(src, dst), which raise it for the rest.
    """
    raise NotImplementedError
