"""Shared pages: every memory has its own bytes, wherever they are kept."""

import mmap
import sys

import numpy as np
import pytest

from xdeepserve.hw import pages
from xdeepserve.hw.address_space import AddressSpace
from xdeepserve.hw.memory import Memory
from xdeepserve.hw.pages import SharedPages

SIZE = 300_001  # no whole number of pages


def memories(*offsets: int) -> list[tuple[Memory, np.ndarray]]:
    """Nodes with a view of SIZE bytes each, so far behind the start of a page."""
    space = AddressSpace()
    regions = []
    for node, offset in enumerate(offsets):
        if offset:
            space.plan(node).app.alloc("before", offset)
        regions.append(space.plan(node).app.alloc("weights", SIZE))
        space.plan(node).app.alloc("after", 100)
    space.materialise()
    return [(space[node], space[node].view(region, np.uint8, SIZE)) for node, region in enumerate(regions)]


DATA = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.mark.parametrize("is_on", [True, False])
def test_every_memory_has_the_bytes_and_nothing_else_changes(is_on: bool) -> None:
    nodes = memories(0, 64, 64, 0, 4096, 128)
    for memory, _ in nodes:
        memory.buffer[:] = b"\xee" * len(memory)
    shared = SharedPages()
    shared.is_on = shared.is_on and is_on
    shared.place([view for _, view in nodes], DATA)
    for memory, view in nodes:
        region = memory.app.regions["weights"]
        assert np.array_equal(view, DATA)
        assert bytes(memory.buffer[: region.offset]) == b"\xee" * region.offset
        rest = len(memory) - region.offset - SIZE
        assert bytes(memory.buffer[region.offset + SIZE :]) == b"\xee" * rest
    # 0, 0 and 4096 are alike, 64 and 64 too; 128 is alone.
    assert shared.num_mappings == (5 if is_on and sys.platform == "linux" else 0)


def test_who_writes_gets_a_page_of_its_own() -> None:
    nodes = memories(0, 0, 0)
    SharedPages().place([view for _, view in nodes], DATA)
    nodes[1][1][100_000] ^= 0xFF
    nodes[2][0].write(nodes[2][0].app.regions["weights"].offset + 5, b"xyz")
    assert np.array_equal(nodes[0][1], DATA)
    assert (nodes[1][1] != DATA).nonzero()[0].tolist() == [100_000]
    assert bytes(nodes[2][1][5:8]) == b"xyz"
    assert np.array_equal(nodes[2][1][8:], DATA[8:])


@pytest.mark.skipif(sys.platform != "linux", reason="pages are shared on Linux only")
def test_pages_that_are_only_read_are_kept_once() -> None:
    nodes = memories(0, 0, 0, 0)
    SharedPages().place([view for _, view in nodes], DATA)
    starts = [view.ctypes.data for _, view in nodes]
    assert [start % mmap.PAGESIZE for start in starts] == [0] * 4
    private = 0
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                first = int(head.split("-")[0], 16)
                inside = any(start <= first < start + SIZE for start in starts) and "memfd" in line
            elif inside and head == "Private_Dirty:":
                private += int(line.split()[1])
    assert private == 0  # all of it is the one file's


def test_what_is_small_or_alone_is_copied_and_so_is_all_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = memories(0, 0, 0)
    shared = SharedPages()
    small = DATA[: pages.MIN_NBYTES - 1]
    shared.place([view[: len(small)] for _, view in nodes], small)
    shared.place([nodes[0][1]], DATA)
    assert shared.num_mappings == 0
    monkeypatch.setattr(pages, "MAX_MAPPINGS", 2)
    shared.place([view for _, view in nodes], DATA)
    assert shared.num_mappings == (2 if sys.platform == "linux" else 0)
    assert all(np.array_equal(view, DATA) for _, view in nodes)
