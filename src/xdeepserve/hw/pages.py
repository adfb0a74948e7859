"""Shared pages: equal bytes in many memories, kept once until a node writes to them.

Every node's memory holds its own bytes, whatever the computer does behind them. What all of them hold alike
needs the computer's memory, and its caches, only once: its whole pages are private mappings of one file in
memory, so a node that writes to such a page gets a copy of its own, as after a fork. Where the system cannot
do that, bytes are copied, and nothing but room and speed is different.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MIN_NBYTES = 256 << 10
"""Less is copied: each shared piece is two entries in the system's table of mappings."""

MAX_MAPPINGS = 10_000
"""Pieces that the memories of one pod share at most; Linux allows a process some 65,000 mappings."""

MAP_FIXED = 0x10  # Linux, on every architecture that Python runs on but MIPS, Alpha and PA-RISC
MAP_FAILED = ctypes.c_void_p(-1).value


HUGE_PAGE = 2 << 20  # on most computers; a part of one stays as it is


def prefer_huge_pages(views: Sequence[npt.NDArray[Any]]) -> None:
    """Ask the system for huge pages for neighbouring arrays that will be filled: reading them is then a
    quarter faster. Only for arrays of one node, because pages that nodes share are small."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    begin = min(view.ctypes.data for view in views)
    end = max(view.ctypes.data + view.nbytes for view in views)
    begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    if begin < end:
        # Advice: a system that does not take it is as right as one that does.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


class SharedPages:
    """Places equal bytes in many memories at once, on shared pages where possible."""

    def __init__(self) -> None:
        self.num_mappings = 0
        self.is_on = sys.platform == "linux" and hasattr(os, "memfd_create")
        if self.is_on:
            self._mmap = ctypes.CDLL(None, use_errno=True).mmap
            self._mmap.restype = ctypes.c_void_p
            self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def place(self, views: Sequence[npt.NDArray[Any]], data: npt.NDArray[Any]) -> None:
        """Write `data` to each of `views`, contiguous arrays of its size in nodes' memories (`hw.memory`).

        Views that lie alike within their pages share the whole pages.
        """
        by_phase: dict[int, list[npt.NDArray[Any]]] = {}
        for view in views:
            by_phase.setdefault(view.ctypes.data % mmap.PAGESIZE, []).append(view)
        for phase, alike in by_phase.items():
            if len(alike) > 1 and data.nbytes >= MIN_NBYTES and self.is_on:
                self._share(phase, alike, data)
            else:
                for view in alike:
                    view[...] = data

    def _share(self, phase: int, views: Sequence[npt.NDArray[Any]], data: npt.NDArray[Any]) -> None:
        page = mmap.PAGESIZE
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        head = -phase % page  # bytes before the first whole page
        body = (len(raw) - head) // page * page
        fd = os.memfd_create("xdeepserve")
        try:
            os.truncate(fd, body)
            with mmap.mmap(fd, body) as file:
                file[:] = raw[head : head + body].data
            for view in views:
                assert view.flags.c_contiguous
                target = view.reshape(-1).view(np.uint8)
                if self.num_mappings < MAX_MAPPINGS and self._map(target[head:].ctypes.data, body, fd):
                    target[:head], target[head + body :] = raw[:head], raw[head + body :]
                    self.num_mappings += 1
                else:
                    target[:] = raw
        finally:
            os.close(fd)  # the mappings keep the file

    def _map(self, address: int, nbytes: int, fd: int) -> bool:
        flags = mmap.MAP_PRIVATE | MAP_FIXED
        found = self._mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        return bool(found != MAP_FAILED)
