"""Reuse of cached prefixes: found in HBM, or loaded from host DRAM if that is faster than computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp.prefix_index import Node
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.plans import BlockCopy

# Whether to load so many cached blocks from the host's memory, rather than to compute so many tokens again.
ShouldLoad: TypeAlias = Callable[[int, int], bool]


class Prefixes:
    """Cached prefixes for the sequences of one DP group."""

    def __init__(self, steps: StepSizes, rtc: RTC, should_load: ShouldLoad | None) -> None:
        self.steps, self.rtc, self._should_load = steps, rtc, should_load
        self.num_queries = 0  # tokens of prompts that were looked up
        self.num_hits = 0  # of these, tokens found
        self.num_id_queries = 0  # sequences
        self.num_id_hits = 0  # of these, those that begin with the prefix of this name, or a part of it
        self.num_prefetched = 0  # blocks

    def adopt(self, seq: Sequence) -> None:
        """Give a sequence the cached blocks of its beginning. The last token is always computed."""
        num_held = len(seq.holding.nodes)
        if not self.may_match(seq):
            return
        # The last token's row is computed in any case: its logits choose the next token.
        match = self.rtc.match_by_prefix_token(seq.token_ids[:-1])
        self.rtc.adopt(seq.holding, match.ready[num_held:])
        seq.num_computed = len(seq.holding.nodes) * self.rtc.block_size

    def count(self, seq: Sequence) -> None:
        """Count the prompt of a request that is admitted for the first time, and how much of it was found.

        What is found after a preemption is the sequence's own, and counts no more. Choices share a prompt,
        which the first of them counts.
        """
        if seq.choice or seq.is_counted:
            return
        seq.is_counted = True
        if self.steps.caches_prefixes and not seq.wants_prompt_logits:
            seq.num_cached = seq.num_computed
            self.num_queries += seq.num_prompt
            self.num_hits += seq.num_cached

    def load(self, seq: Sequence) -> tuple[int, list[BlockCopy]] | None:
        """Start to load the rest of a cached prefix from host DRAM, if there is any and loading is faster."""
        if not self.rtc.num_host_blocks or not self.may_match(seq):
            return None
        saved = self.rtc.match_by_prefix_token(seq.token_ids[:-1]).saved
        return self.rtc.populate(saved) if self._pays(saved) else None

    def name(self, seq: Sequence) -> None:
        """Name a sequence's cached prefix by its ID, for the next turn. Decode TEs skip this: prompts do not
        come to them."""
        if seq.cache_id is not None and self.steps.role != "decode":
            self.rtc.name(seq.cache_id, seq.holding)

    def load_by_id(self, seq: Sequence, num_spared: int) -> tuple[int, list[BlockCopy]] | None:
        """Start to load a sequence's named prefix from host DRAM, long before the sequence is admitted.
        Loading must leave `num_spared` blocks available; else nothing is done yet.

        The loaded blocks are not held: if they are evicted before they are adopted, their tokens are computed
        again.
        """
        assert seq.cache_id is not None
        if not self.may_match(seq):
            return None
        match = self.rtc.match_by_id(seq.cache_id, seq.token_ids[:-1])
        if len(match.saved) + num_spared > self.rtc.num_available:
            return None
        seq.has_asked_by_id = True
        self.num_id_queries += 1
        self.num_id_hits += bool(match.ready or match.saved)
        self.rtc.touch(match.ready)
        if not self._pays(match.saved):
            return None
        self.num_prefetched += len(match.saved)
        return self.rtc.populate(match.saved)

    def num_reusable(self, seq: Sequence) -> int:
        """Number of a sequence's tokens that this group need not compute: in HBM, or loadable by ID."""
        tokens = seq.token_ids[:-1]
        if len(tokens) < self.rtc.block_size:
            return 0  # only whole blocks are cached
        num_blocks = len(self.rtc.match_by_prefix_token(tokens).ready)
        if seq.cache_id is not None:
            named = self.rtc.match_by_id(seq.cache_id, tokens)
            if self._pays(named.saved):
                num_blocks = max(num_blocks, len(named.ready) + len(named.saved))
        return num_blocks * self.rtc.block_size

    def _pays(self, saved: list[Node]) -> bool:
        num_blocks = len(saved)
        return (
            num_blocks > 0
            and self._should_load is not None
            and self._should_load(num_blocks, num_blocks * self.rtc.block_size)
        )

    def save(self, limit: int) -> list[tuple[int, list[BlockCopy]]]:
        """Start transfers to keep up to `limit` cached blocks in host DRAM, in the background."""
        started = self.rtc.save(limit) if self.steps.caches_prefixes else None
        return [] if started is None else [started]

    def may_match(self, seq: Sequence) -> bool:
        """Whether a sequence holds only whole cached blocks, so that the cache may have more of its
        beginning."""
        holding = seq.holding
        return (
            self.steps.caches_prefixes
            and not seq.wants_prompt_logits
            and len(holding.slots) == len(holding.nodes)
            and seq.num_computed == len(holding.nodes) * self.rtc.block_size
        )
