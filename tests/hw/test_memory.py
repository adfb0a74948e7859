"""Planning and materialising memory, bounds, views and watches."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.errors import AddressError, DeploymentError, HardwareError, OutOfMemoryError
from xdeepserve.hw.address_space import AddressSpace
from xdeepserve.hw.memory import METADATA_LIMIT, SCRIBBLE, Address, Memory, MemoryPlan


def small_memory() -> Memory:
    """Metadata [0, 128), managed [128, 192), app [192, 448)."""
    plan = MemoryPlan(5)
    plan.metadata.alloc("fields", 100)
    plan.managed.alloc("blocks", 64)
    plan.app.alloc("weights", 10)
    plan.app.alloc("kv", 192)
    return Memory(plan)


def test_layout_is_metadata_then_managed_then_app() -> None:
    memory = small_memory()
    assert [(a.name, a.base, a.end) for a in (memory.metadata, memory.managed, memory.app)] == [
        ("metadata", 0, 128),
        ("managed", 128, 192),
        ("app", 192, 448),
    ]
    assert len(memory.buffer) == 448
    assert memory.app.regions["kv"].address == Address(5, 256)
    memory.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 32, 64, 128, 512])), max_size=20))
def test_regions_are_aligned_disjoint_and_inside(sizes: list[tuple[int, int]]) -> None:
    plan = MemoryPlan(0)
    areas = plan.areas
    regions = [areas[i % 3].alloc(f"r{i}", n, align) for i, (n, align) in enumerate(sizes)]
    expected = plan.nbytes
    memory = Memory(plan)
    memory.check_integrity()
    assert len(memory.buffer) == expected
    owner = np.zeros(len(memory.buffer), np.int32)
    for (nbytes, align), region in zip(sizes, regions, strict=True):
        assert region.offset % align == 0
        assert not owner[region.offset : region.offset + nbytes].any()
        owner[region.offset : region.offset + nbytes] = 1
        memory.check(region.offset, nbytes)
    assert owner.sum() == sum(nbytes for nbytes, _ in sizes)


def test_offsets_in_memory_are_aligned_not_only_those_in_an_area() -> None:
    plan = MemoryPlan(0)
    plan.metadata.alloc("fields", 32)
    plan.managed.alloc("small", 8)
    aligned = [plan.managed.alloc("message", 512, align=512), plan.app.alloc("page", 1, align=4096)]
    assert plan.nbytes == 4096 + 64
    memory = Memory(plan)
    assert [region.offset for region in aligned] == [1024, 4096]
    assert [(a.base, a.end) for a in plan.areas] == [(0, 512), (512, 4096), (4096, 4160)]
    memory.check_integrity()


def test_check_integrity_finds_an_overlap() -> None:
    memory = small_memory()
    memory.app.regions["kv"].start = 5
    with pytest.raises(AddressError, match="overlaps"):
        memory.check_integrity()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (448, 1), (440, 9), (120, 16), (190, 4), (0, -1)])
def test_every_access_outside_one_area_is_refused(offset: int, nbytes: int) -> None:
    memory = small_memory()
    with pytest.raises(AddressError) as caught:
        memory.read(offset, nbytes)
    assert str(caught.value) == (
        f"node 5: {nbytes} bytes at offset {offset} do not lie within one area: "
        "metadata [0, 128), managed [128, 192), app [192, 448)"
    )


def test_views_and_addresses_see_the_same_bytes() -> None:
    space = AddressSpace()
    kv = space.plan(3).app.alloc("kv", 64)
    space.materialise()
    view = space[3].view(kv, np.float32, (4, 4))
    view[1, 2] = 1.5
    assert bytes(space.read(kv.address.plus(24), 4)) == np.float32(1.5).tobytes()
    space.write(kv.address, np.float32(-2).tobytes())
    assert view[0, 0] == -2
    with pytest.raises(AddressError, match="cannot hold"):
        space[3].view(kv, np.float64, (4, 4))
    with pytest.raises(AddressError, match="node 4 has no memory"):
        space.read(Address(4, 0), 1)


def test_a_region_of_another_node_is_refused() -> None:
    with pytest.raises(AddressError, match="not in the memory of node 5"):
        small_memory().view(MemoryPlan(6).app.alloc("x", 4), np.int8, 4)


def test_areas_refuse_what_does_not_fit() -> None:
    plan = MemoryPlan(0)
    with pytest.raises(OutOfMemoryError, match="metadata area: no room for 'fields'"):
        plan.metadata.alloc("fields", METADATA_LIMIT + 1)
    region = plan.app.alloc("kv", 10)
    with pytest.raises(AddressError, match="already allocated"):
        plan.app.alloc("kv", 10)
    with pytest.raises(HardwareError, match="before it is materialised"):
        _ = region.offset
    Memory(plan)
    with pytest.raises(OutOfMemoryError, match="0 of 64 are free"):
        plan.app.alloc("more", 1)


def test_a_pod_that_does_not_fit_is_refused_with_every_reason() -> None:
    space = AddressSpace()
    for node in range(3):
        space.plan(node, capacity=100).app.alloc("kv", 64 * (node + 1))
    assert space.nbytes == 384
    with pytest.raises(DeploymentError) as caught:
        space.materialise(limit=300)
    assert str(caught.value) == (
        "node 1 needs 128 bytes of memory but has 100; node 2 needs 192 bytes of memory but has 100; "
        "the pod's 3 memories add up to 384 bytes; the limit is 300"
    )


def test_watches_see_exactly_the_writes_that_touch_them() -> None:
    memory = small_memory()
    seen: list[tuple[int, int]] = []
    watch = memory.watch(32, 32, lambda offset, nbytes: seen.append((offset, nbytes)))
    for offset, nbytes in [(0, 32), (64, 8), (31, 2), (63, 1), (0, 100)]:
        memory.write(offset, bytes(nbytes))
    assert seen == [(31, 2), (63, 1), (0, 100)]
    memory.unwatch(watch)
    memory.write(32, b"x")
    assert len(seen) == 3


def resident_nbytes() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("VmRSS")) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the resident memory")
def test_only_written_pages_are_resident_and_they_go_with_the_memory() -> None:
    space = AddressSpace()
    kv = space.plan(0).app.alloc("kv", 1 << 30)
    before = resident_nbytes()
    space.materialise()
    view = space[0].view(kv, np.uint8, kv.nbytes)
    assert not view[::4096].any(), "all zeros"
    view[: 64 << 20 : 4096] = 1
    assert 60 << 20 < resident_nbytes() - before < 80 << 20
    with pytest.raises(DeploymentError, match="add up to 1,073,741,824 bytes; the limit is 1,073,741,823"):
        space.check(limit=(1 << 30) - 1)
    del space, view, kv
    gc.collect()
    assert resident_nbytes() - before < 20 << 20


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_a_memory_that_the_computer_cannot_map_is_refused(nbytes: int) -> None:
    space = AddressSpace()
    space.plan(3).app.alloc("kv", nbytes)
    with pytest.raises(OutOfMemoryError, match=f"node 3: this computer has no {nbytes:,} bytes"):
        space.materialise()


def test_an_empty_memory_has_no_byte() -> None:
    memory = Memory(MemoryPlan(0))
    assert len(memory) == 0
    with pytest.raises(AddressError):
        memory.read(0, 1)


def test_numpys_integers_do_not_wrap_around() -> None:
    """np.int8(100) + np.int8(100) is -56, which lies before any end."""
    memory, far = small_memory(), np.int8(100)
    for call in (memory.check, memory.read, lambda at, n: memory.watch(at, n, lambda *_: None)):
        with pytest.raises(AddressError, match="100 bytes at offset 100"):
            call(far, far)
    with pytest.raises(AddressError):
        memory.write(far, bytes(100))
    plan = MemoryPlan(0)
    for i in range(3):
        plan.app.alloc(f"r{i}", far)
    assert plan.nbytes == 384
    space = AddressSpace()
    space.plan(0).app.alloc("kv", 100)
    space.materialise()
    many = np.array([100], np.int8)
    for sizes in (many, far, 100):
        with pytest.raises(AddressError, match="100 bytes at offset 100"):
            space.check_many(many - many, many, sizes)  # type: ignore[arg-type]


def test_regions_of_real_memory_come_from_what_was_given_back() -> None:
    plan = MemoryPlan(0)
    first, second, third = (plan.app.alloc(name, 64) for name in ("first", "second", "third"))
    memory = Memory(plan)
    plan.app.free(first)
    plan.app.free(second)  # joins its neighbour
    with pytest.raises(AddressError, match="is not allocated"):
        plan.app.free(second)
    memory.check_integrity()
    with pytest.raises(OutOfMemoryError, match=r"no room for 'large' .129 bytes.: 128 of 192 are free"):
        plan.app.alloc("large", 129)
    again = plan.app.alloc("again", 65)
    assert (again.offset, third.offset) == (0, 128)
    assert plan.app.alloc("rest", 32, align=32).offset == 96
    memory.check_integrity()


def test_memory_that_is_given_back_is_scribbled_over_and_planned_anew() -> None:
    space = AddressSpace()
    kv = space.plan(0).app.alloc("kv", 64)
    space.materialise()
    memory = space[0]
    view = memory.view(kv, np.uint8, 64)
    view[:] = 7
    watch = memory.watch(0, 8, lambda offset, nbytes: None)
    with pytest.raises(HardwareError, match="node 0 cannot give its memory back: 1 waits and 0 transfers"):
        space.release(0)
    memory.unwatch(watch)
    memory.claims.take(0, 8, "a transfer")
    with pytest.raises(HardwareError, match="0 waits and 1 transfers"):
        space.release(0)
    memory.claims.release(0)
    assert (view == 7).all()
    space.release(0)
    assert (view == SCRIBBLE).all()
    with pytest.raises(AddressError, match="node 0 has no memory"):
        space.read(Address(0, 0), 1)
    space.plan(0).app.alloc("other", 32)
    space.materialise()
    assert bytes(space.read(Address(0, 0), 32)) == bytes(32)
    with pytest.raises(AddressError):
        space.check_many(np.array([0] * 40), np.arange(40), 32)  # the old limits hold no more
