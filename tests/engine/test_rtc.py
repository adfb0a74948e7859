"""KV blocks: none leaked, shared by mistake or evicted in use, whatever the order of operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.plans import BlockCopy
from xdeepserve.errors import XDeepServeError

BLOCK = 4


class Tiers:
    """What each slot holds: the tokens of a block, or None for junk. Plays the die that moves them."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.tier: dict[str, list[tuple[int, ...] | None]] = {
            "hbm": [None] * num_blocks,
            "host": [None] * num_host_blocks,
        }

    def run(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            self.tier[copy.dst_tier][copy.dst] = self.tier[copy.src_tier][copy.src]


class RTCMachine(RuleBasedStateMachine):
    """Sequences over a two-letter alphabet, so that prefixes meet; slots remember what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.rtc = RTC(num_blocks=10, block_size=BLOCK, num_host_blocks=6, max_ids=3)
        self.tiers = Tiers(10, 6)
        self.live: list[tuple[Holding, list[int]]] = []  # tokens computed so far
        self.swapped: list[tuple[list[int], list[int]]] = []
        self.pending: dict[int, list[BlockCopy]] = {}
        self.leaving: dict[int, tuple[list[int], list[int]]] = {}
        self.entering: dict[int, tuple[Holding, list[int], list[int]]] = {}
        self.named: dict[str, list[int]] = {}  # the tokens that each name was given to last

    def write(self, holding: Holding, tokens: list[int], new: list[int]) -> bool:
        """Compute `new` after `tokens`; False if there is no room."""
        if not self.rtc.alloc_blocks(holding, len(tokens) + len(new)):
            return False
        touched = range(len(tokens) // BLOCK, self.rtc.blocks_for(len(tokens) + len(new)))
        for block in touched:
            if self.rtc.num_available == 0:
                return False
            copy = self.rtc.copy(holding, block)
            if copy is not None:
                self.tiers.run([copy])
        tokens += new
        for block in touched:
            written = tuple(tokens[block * BLOCK : (block + 1) * BLOCK])
            self.tiers.tier["hbm"][holding.slots[block]] = written
        return True

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, prompt: list[int]) -> None:
        holding = Holding()
        match = self.rtc.match_by_prefix_token(prompt)
        self.rtc.adopt(holding, match.ready)
        tokens = prompt[: len(match.ready) * BLOCK]
        if self.write(holding, tokens, prompt[len(tokens) :]):
            self.live.append((holding, tokens))
        else:
            self.rtc.free(holding)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, data: st.DataObject, new: list[int]) -> None:
        holding, tokens = data.draw(st.sampled_from(self.live))
        self.write(holding, tokens, new)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holding, tokens = data.draw(st.sampled_from(self.live))
        self.rtc.publish(holding, tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), cache_id=st.sampled_from("abcde"))
    def name(self, data: st.DataObject, cache_id: str) -> None:
        holding, tokens = data.draw(st.sampled_from(self.live))
        self.rtc.name(cache_id, holding)
        if holding.nodes:
            self.named[cache_id] = tokens[: len(holding.nodes) * BLOCK]
            assert self.rtc.match_by_id(cache_id, tokens).ready == holding.nodes

    @rule(
        cache_id=st.sampled_from("abcdef"),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        is_own=st.booleans(),
    )
    def match_by_id(self, cache_id: str, prompt: list[int], is_own: bool) -> None:
        """Never more than was named, nor other tokens than the prompt's, nor more than tokens would find."""
        prompt = self.named.get(cache_id, prompt) if is_own else prompt
        match, by_tokens = self.rtc.match_by_id(cache_id, prompt), self.rtc.match_by_prefix_token(prompt)
        nodes = [*match.ready, *match.saved]
        spelled = [token for node in nodes for token in node.tokens]
        assert spelled == self.named.get(cache_id, [])[: len(spelled)] == prompt[: len(spelled)]
        assert nodes == [*by_tokens.ready, *by_tokens.saved][: len(nodes)]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holding, tokens = data.draw(st.sampled_from(self.live))
        self.live.append((self.rtc.fork(holding), list(tokens)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holding, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.rtc.free(holding)

    @rule(limit=st.integers(1, 3))
    def save(self, limit: int) -> None:
        started = self.rtc.save(limit)
        if started is not None:
            self.pending[started[0]] = started[1]

    @rule(prompt=st.lists(st.integers(0, 1), min_size=8, max_size=14))
    def populate(self, prompt: list[int]) -> None:
        match = self.rtc.match_by_prefix_token(prompt)
        if match.saved:
            keeper = Holding()
            self.rtc.adopt(keeper, match.ready)
            started = self.rtc.populate(match.saved)
            self.rtc.free(keeper)
            if started is not None:
                assert not self.rtc.query_populate(started[0])
                self.pending[started[0]] = started[1]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        holding, tokens = self.live[data.draw(st.integers(0, len(self.live) - 1))]
        started = self.rtc.swap_out(holding)
        if started is not None:
            self.live = [entry for entry in self.live if entry[0] is not holding]
            ticket, host_slots, copies = started
            self.pending[ticket] = copies
            self.leaving[ticket] = (host_slots, tokens)

    @precondition(lambda self: self.swapped)
    @rule()
    def swap_in(self) -> None:
        host_slots, tokens = self.swapped[0]
        started = self.rtc.swap_in(host_slots)
        if started is not None:
            self.swapped.pop(0)
            ticket, holding, copies = started
            self.pending[ticket] = copies
            self.entering[ticket] = (holding, host_slots, tokens)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        self.tiers.run(self.pending.pop(ticket))  # bytes are read at completion
        self.rtc.finish(ticket)
        assert self.rtc.query_populate(ticket)
        if ticket in self.leaving:
            self.swapped.append(self.leaving.pop(ticket))
        if ticket in self.entering:
            holding, host_slots, tokens = self.entering.pop(ticket)
            self.rtc.release_host(host_slots)
            self.live.append((holding, tokens))

    @invariant()
    def books_agree(self) -> None:
        holdings = [h for h, _ in self.live] + [h for h, _, _ in self.entering.values()]
        swapped = [s for s, _ in self.swapped] + [s for s, _ in self.leaving.values()]
        swapped += [s for _, s, _ in self.entering.values()]
        self.rtc.check_integrity(holdings, swapped)

    @invariant()
    def content_is_what_was_computed(self) -> None:
        for holding, tokens in self.live:
            for block in range(self.rtc.blocks_for(len(tokens))):
                expected = tuple(tokens[block * BLOCK : (block + 1) * BLOCK])
                held = self.tiers.tier["hbm"][holding.slots[block]]
                assert held is not None
                assert held[: len(expected)] == expected
        for node in self.rtc.index.nodes():
            if node.is_ready:
                assert self.tiers.tier["hbm"][node.slot] == node.tokens
            if node.is_saved:
                assert self.tiers.tier["host"][node.host_slot] == node.tokens


RTCMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRTC = RTCMachine.TestCase


def test_least_recently_used_goes_first_and_leaves_before_roots() -> None:
    rtc = RTC(4, BLOCK)
    a, b = Holding(), Holding()
    for holding, tokens in ((a, [0] * 8), (b, [1] * 8)):
        assert rtc.alloc_blocks(holding, 8)
        rtc.publish(holding, tokens)
    rtc.free(a)
    rtc.free(b)
    assert rtc.usage == 0
    assert rtc.num_available == 4
    c = Holding()
    assert rtc.alloc_blocks(c, BLOCK)
    assert len(rtc.match_by_prefix_token([0] * 8).ready) == 1  # its second block went
    assert len(rtc.match_by_prefix_token([1] * 8).ready) == 2


def test_equal_blocks_are_kept_once() -> None:
    rtc = RTC(4, BLOCK)
    a, b = Holding(), Holding()
    for holding in (a, b):
        assert rtc.alloc_blocks(holding, BLOCK)
        rtc.publish(holding, [7] * BLOCK)
    assert a.slots == b.slots
    assert rtc.num_available == 3


def named(rtc: RTC, cache_id: str, tokens: list[int]) -> Holding:
    """A prefix that is cached under a name, and held."""
    holding = Holding()
    assert rtc.alloc_blocks(holding, len(tokens))
    rtc.publish(holding, tokens)
    rtc.name(cache_id, holding)
    return holding


def test_a_name_shrinks_with_its_blocks_and_goes_with_the_last() -> None:
    rtc, tokens = RTC(4, BLOCK), list(range(1, 9))
    holding = named(rtc, "system prompt", tokens)
    assert [n.tokens for n in rtc.match_by_id("system prompt", tokens).ready] == [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert [n.tokens for n in rtc.match_by_id("system prompt", [*tokens[:6], 0]).ready] == [(1, 2, 3, 4)]
    assert rtc.match_by_id("system prompt", [0, *tokens]).ready == []
    assert rtc.match_by_id("unknown", tokens).ready == []
    rtc.free(holding)
    other = Holding()
    for num_tokens, num_left in ((12, 1), (16, 0)):
        assert rtc.alloc_blocks(other, num_tokens)
        assert len(rtc.match_by_id("system prompt", tokens).ready) == num_left
        assert rtc.index.num_ids == num_left
        rtc.check_integrity([other])


def test_the_least_recently_used_name_is_forgotten_but_not_its_blocks() -> None:
    rtc = RTC(8, BLOCK, max_ids=2)
    held = [named(rtc, cache_id, [number] * 4) for number, cache_id in enumerate("ab")]
    assert rtc.match_by_id("a", [0] * 4).ready  # so b is older now
    held.append(named(rtc, "c", [2] * 4))
    assert [len(rtc.match_by_id(each, [i] * 4).ready) for i, each in enumerate("abc")] == [1, 0, 1]
    assert len(rtc.match_by_prefix_token([1] * 4).ready) == 1
    rtc.name("a", held[2])  # a second name for c's, and none for a's
    assert rtc.match_by_id("a", [0] * 4).ready == []
    assert rtc.match_by_id("a", [2] * 4).ready == rtc.match_by_id("c", [2] * 4).ready != []
    rtc.check_integrity(held)


def test_check_integrity_sees_a_name_of_nothing() -> None:
    rtc = RTC(4, BLOCK)
    holding = named(rtc, "a", [1] * 4)
    rtc.index.by_id["b"] = holding.nodes[0]
    with pytest.raises(
        XDeepServeError, match=r"IDs on the books \['a', 'b'\], of nodes in the index \['a'\]"
    ):
        rtc.check_integrity([holding])


def test_full_means_nothing_changes() -> None:
    rtc = RTC(2, BLOCK)
    a, b = Holding(), Holding()
    assert rtc.alloc_blocks(a, 5)
    assert not rtc.alloc_blocks(b, 1)
    assert b.slots == []
    assert rtc.swap_out(a) is None
    forked = rtc.fork(a)
    with pytest.raises(XDeepServeError, match="all 2 blocks are in use"):
        rtc.copy(forked, 0)


def test_freeing_what_nobody_uses_is_an_error() -> None:
    rtc = RTC(2, BLOCK)
    a = Holding()
    a.slots.append(1)
    with pytest.raises(XDeepServeError, match="nobody uses"):
        rtc.free(a)


def test_check_integrity_sees_a_leak() -> None:
    rtc = RTC(2, BLOCK)
    a = Holding()
    assert rtc.alloc_blocks(a, 5)
    with pytest.raises(XDeepServeError):
        rtc.check_integrity([])


@pytest.mark.parametrize("num_host_blocks", [1, 3, 4, 8])
def test_saving_ends_when_nothing_changes(num_host_blocks: int) -> None:
    """Blocks do not push each other out of the host's memory for ever."""
    rtc = RTC(num_blocks=8, block_size=BLOCK, num_host_blocks=num_host_blocks)
    for first in (0, 100):
        holding = Holding()
        tokens = list(range(first, first + 4 * BLOCK))
        assert rtc.alloc_blocks(holding, len(tokens))
        rtc.publish(holding, tokens)
        rtc.free(holding)
    rounds = 0
    while (started := rtc.save(2)) is not None:
        rtc.finish(started[0])
        rounds += 1
        assert rounds < 20
    rtc.check_integrity([])


def test_what_cannot_be_is_refused() -> None:
    rtc = RTC(num_blocks=2, block_size=BLOCK, num_host_blocks=2)
    first = Holding()
    assert rtc.alloc_blocks(first, 2 * BLOCK)
    with pytest.raises(XDeepServeError, match="all 2 blocks are in use"):
        rtc.append_block(Holding())
    tokens = list(range(2 * BLOCK))
    rtc.publish(first, tokens)
    with pytest.raises(XDeepServeError, match="only blocks in host DRAM alone"):
        rtc.populate(rtc.match_by_prefix_token([*tokens, 1]).ready)
    with pytest.raises(XDeepServeError, match="no ticket 7; the newest is 0"):
        rtc.query_populate(7)
    rtc.free(first)
    rtc.check_integrity([])
