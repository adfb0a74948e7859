"""Error codes with which a die's driver reports what has failed while the die goes on: its memory has stayed
(glitches), or all of it but a page.

The paper speaks of known error codes without naming any (xDeepServe 6.2); these stand for the kinds of faults
that CANN's runtime tells apart.
"""

from __future__ import annotations

from typing import NamedTuple


class ErrorCode(NamedTuple):
    """What a code means, and whether the same work may well succeed when it is done again; after `PAGE_LOST`
    only once what the page held has been put right."""

    meaning: str
    is_transient: bool


ERROR_CODES = {
    "aicore-exception": ErrorCode("a kernel on AI cores has ended with an exception", True),
    "vector-core-exception": ErrorCode("a kernel on vector cores has ended with an exception", True),
    "mte-error": ErrorCode("a memory transfer engine has ended a copy with a bus error", True),
    "dma-error": ErrorCode("the DMA engine has ended a copy with an error", True),
    "link-error": ErrorCode("a link has given a packet up after sending it again and again", True),
    "task-timeout": ErrorCode("the driver has ended a task that took too long", True),
    "unspecified": ErrorCode("the driver does not say what has failed", False),
    "hbm-page": ErrorCode("a page of memory was lost, and a healthy one is in its place", True),
}
PAGE_LOST = "hbm-page"
GLITCHES = [code for code in ERROR_CODES if code != PAGE_LOST]  # after these the memory is as it was
