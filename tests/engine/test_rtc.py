"""KV blocks: none leaked, none shared, whatever the order of operations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.errors import XDeepServeError


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 120)), max_size=60))
def test_any_sequence_of_operations_keeps_the_books(operations: list[tuple[int, int]]) -> None:
    rtc = RTC(num_blocks=12, block_size=16)
    tables: dict[int, list[int]] = {}
    for seq_id, num_tokens in operations:
        table = tables.setdefault(seq_id, [])
        before = list(table)
        if num_tokens == 0:
            rtc.free(seq_id, table)
        elif rtc.grow(seq_id, table, num_tokens):
            assert len(table) == max(len(before), rtc.blocks_for(num_tokens))
            assert table[: len(before)] == before
        else:
            assert table == before
        rtc.check_integrity(tables)
    for seq_id, table in tables.items():
        rtc.free(seq_id, table)
    assert rtc.num_free == 12
    assert rtc.usage == 0.0


def test_freeing_a_foreign_block_is_refused() -> None:
    rtc = RTC(4, 16)
    mine: list[int] = []
    assert rtc.grow(1, mine, 20)
    with pytest.raises(XDeepServeError, match="does not own"):
        rtc.free(2, list(mine))


def test_check_integrity_sees_a_leak_and_a_shared_block() -> None:
    rtc = RTC(4, 16)
    table: list[int] = []
    rtc.grow(1, table, 20)
    with pytest.raises(XDeepServeError):
        rtc.check_integrity({1: table[:1]})
    with pytest.raises(XDeepServeError):
        rtc.check_integrity({1: table, 2: table[:1]})
