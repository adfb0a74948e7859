"""The ring moves few keys, and the allocator's granularities give memory to each other."""

from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.ems.allocator import Allocator
from xdeepserve.ems.ring import Ring
from xdeepserve.hw.volume import Key

KEYS = [Key("a", number.to_bytes(16, "big")) for number in range(4000)]


@given(count=st.integers(1, 24), leaver=st.integers(0, 23))
def test_a_server_that_leaves_moves_its_own_keys_and_no_others(count: int, leaver: int) -> None:
    names = [f"server-{i:02d}" for i in range(count + 1)]
    leaver %= count + 1
    before, after = Ring(names), Ring([name for name in names if name != names[leaver]])
    moved = [key for key in KEYS if before.owner(key) != after.owner(key)]
    assert all(before.owner(key) == names[leaver] for key in moved)
    assert len(moved) == sum(before.owner(key) == names[leaver] for key in KEYS)
    share = len(KEYS) / (count + 1)
    assert 0.6 * share < len(moved) < 1.5 * share


def test_a_ring_is_the_same_whoever_makes_it() -> None:
    ring = Ring(["b", "a", "c"])
    assert [Ring(["c", "b", "a"]).owner(key) for key in KEYS] == [ring.owner(key) for key in KEYS]
    assert [ring.owner(key) for key in KEYS[:4]] == [ring.owner(key) for key in KEYS[:4]]


SIZES = st.one_of(st.integers(1, 5000), st.integers(1, 300_000))


@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=80))
def test_pieces_never_overlap_and_all_memory_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    allocator, held = Allocator(1 << 20, page=1 << 16), []
    for is_new, nbytes, pick in steps:
        if is_new or not held:
            offset = allocator.alloc(nbytes)
            if offset is not None:
                held.append(offset)
        else:
            allocator.free(held.pop(pick % len(held)))
        allocator.check_integrity()
    for offset in held:
        allocator.free(offset)
    allocator.check_integrity()
    assert allocator.num_used == 0
    assert allocator.alloc(allocator.capacity) == 0


def test_memory_flows_from_one_granularity_to_another() -> None:
    allocator = Allocator(1 << 20, page=1 << 16)
    small = []
    while (offset := allocator.alloc(1000)) is not None:
        small.append(offset)
    assert len(small) == 1024
    assert allocator.alloc(30_000) is None
    for offset in small[:512]:
        allocator.free(offset)
    large = [allocator.alloc(30_000) for _ in range(17)]
    assert None not in large[:16]
    assert large[16] is None
    allocator.check_integrity()
