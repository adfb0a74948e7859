"""What a sequence need not compute, because RTC has kept it: found, or loaded from host DRAM if it pays."""

from __future__ import annotations

from typing import Protocol

from xdeepserve.engine.dp.block_table import Copy
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.sizes import Sizes


class LoadCost(Protocol):
    """Is it cheaper to load cached blocks from host DRAM, or to compute their tokens again?"""

    def should_load(self, num_blocks: int, num_tokens: int) -> bool: ...


class Prefixes:
    """Cached prefixes for the sequences of one DP group."""

    def __init__(self, sizes: Sizes, rtc: RTC, load_cost: LoadCost | None) -> None:
        self.sizes, self.rtc, self.load_cost = sizes, rtc, load_cost
        self.num_queries = 0  # in tokens
        self.num_hits = 0

    def adopt(self, seq: Sequence) -> None:
        """Take what RTC has of a sequence's beginning. Its last token is always computed."""
        num_held = len(seq.holding.nodes)
        if not self._may_match(seq):
            return
        if not seq.has_matched:
            seq.has_matched = True
            self.num_queries += len(seq.token_ids)
        match = self.rtc.match_by_prefix_token(seq.token_ids[:-1])
        self.rtc.adopt(seq.holding, match.ready[num_held:])
        seq.num_computed = len(seq.holding.nodes) * self.rtc.block_size
        self.num_hits += max(0, seq.num_computed - seq.num_cached)
        seq.num_cached = max(seq.num_cached, seq.num_computed)

    def load(self, seq: Sequence) -> tuple[int, list[Copy]] | None:
        """Start to load the rest of a cached prefix from host DRAM, if there is some and it pays."""
        if self.load_cost is None or not self._may_match(seq):
            return None
        saved = self.rtc.match_by_prefix_token(seq.token_ids[:-1]).saved
        if not saved or not self.load_cost.should_load(len(saved), len(saved) * self.rtc.block_size):
            return None
        return self.rtc.populate(saved)

    def save(self, limit: int) -> list[tuple[int, list[Copy]]]:
        """Transfers that keep up to `limit` cached blocks in host DRAM, to be made in the background."""
        started = self.rtc.save(limit) if self.sizes.caches_prefixes else None
        return [] if started is None else [started]

    def _may_match(self, seq: Sequence) -> bool:
        """Whether all that a sequence holds is whole cached blocks, so that more of them may follow."""
        holding = seq.holding
        return (
            self.sizes.caches_prefixes
            and not seq.wants_prompt_logits
            and len(holding.slots) == len(holding.nodes)
            and seq.num_computed == len(holding.nodes) * self.rtc.block_size
        )
