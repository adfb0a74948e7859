"""RTC's books while blocks come from a memory pool, do not come, or are kept to be copied there."""

from __future__ import annotations

import random

import pytest

from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.rtc import RTC

SIZE = 4
PROMPTS = [[prefix] * 8 + [prefix * 7 + i for i in range(12)] for prefix in range(4)]


def test_what_comes_is_found_and_what_does_not_is_not() -> None:
    rtc, tokens = RTC(8, SIZE), PROMPTS[1]
    assert rtc.missing(tokens, 0, 4) == [0, 1, 2, 3]
    ticket, slots = rtc.expect(tokens, [0, 1, 2, 3])
    assert rtc.missing(tokens, 0, 5) == [4]
    assert rtc.is_expected(tokens)
    assert rtc.match_by_prefix_token(tokens) == ([], [])
    assert rtc.num_available == 4
    rtc.miss(ticket, slots[2:])
    rtc.finish(ticket)
    ready = rtc.match_by_prefix_token(tokens).ready
    assert [node.slot for node in ready] == slots[:2]
    assert not rtc.is_expected(tokens)
    assert rtc.num_available == 8
    rtc.check_integrity([])


def test_a_block_in_the_middle_may_be_missing() -> None:
    rtc, tokens = RTC(8, SIZE), PROMPTS[1]
    ticket, slots = rtc.expect(tokens, [0, 1, 2])
    rtc.miss(ticket, [slots[1]])
    rtc.finish(ticket)
    assert len(rtc.match_by_prefix_token(tokens).ready) == 1
    assert rtc.missing(tokens, 0, 3) == [1]
    again, _ = rtc.expect(tokens, [1])
    rtc.finish(again)
    assert len(rtc.match_by_prefix_token(tokens).ready) == 3
    rtc.check_integrity([])


def test_what_is_evicted_for_what_comes_takes_no_node_away_from_it() -> None:
    """The only other cached block is a deeper one of the same prompt."""
    rtc, tokens = RTC(3, SIZE), PROMPTS[2]
    ticket, slots = rtc.expect(tokens, [0, 1, 2])
    rtc.miss(ticket, slots[:2])
    rtc.finish(ticket)
    assert rtc.missing(tokens, 0, 3) == [0, 1]
    ticket, _ = rtc.expect(tokens, [0, 1])
    rtc.finish(ticket)
    ticket, _ = rtc.expect(PROMPTS[0], [0, 1, 2])
    rtc.finish(ticket)
    assert len(rtc.match_by_prefix_token(PROMPTS[0]).ready) == 3
    rtc.check_integrity([])


@pytest.mark.parametrize("seed", range(60))
def test_books_agree_after_any_history(seed: int) -> None:
    rng, rtc = random.Random(seed), RTC(12, SIZE)
    held: list[tuple[Holding, list[int]]] = []
    coming: list[tuple[int, list[int]]] = []
    kept: list[int] = []
    for _ in range(80):
        tokens = rng.choice(PROMPTS)
        match rng.randrange(6):
            case 0:
                start = rng.randrange(3)
                blocks = rtc.missing(tokens, start, rng.randrange(start + 1, 6))[: rtc.num_available]
                if blocks:
                    coming.append(rtc.expect(tokens, blocks))
            case 1 if coming:
                ticket, slots = coming.pop(rng.randrange(len(coming)))
                rtc.miss(ticket, [slot for slot in slots if rng.random() < 0.3])
                rtc.finish(ticket)
            case 2:
                holding = Holding()
                rtc.adopt(holding, rtc.match_by_prefix_token(tokens).ready)
                if rtc.alloc_blocks(holding, len(tokens)):
                    rtc.publish(holding, tokens)
                    held.append((holding, tokens))
                else:
                    rtc.free(holding)
            case 3 if held:
                holding, _ = held.pop(rng.randrange(len(held)))
                if rng.random() < 0.5:
                    kept.append(rtc.keep(holding.slots[: len(holding.nodes)]))
                rtc.free(holding)
            case 4 if kept:
                rtc.finish(kept.pop(rng.randrange(len(kept))))
        rtc.check_integrity([holding for holding, _ in held])
    for ticket in [*(ticket for ticket, _ in coming), *kept]:
        rtc.finish(ticket)
    for holding, _ in held:
        rtc.free(holding)
    rtc.check_integrity([])
    assert rtc.num_available == rtc.num_blocks
