"""Sums of quantities over all TEs, including past ones, so that counters never fall.

Preemptions, rollbacks, changes of replicas and whatever else happens are counted by the log of events
(`engine/dp/events.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xdeepserve.engine.dp.stats import summed
from xdeepserve.engine.job.peer_prefixes import PeerPrefixes
from xdeepserve.engine.te.te import TE


class Counters(NamedTuple):
    """Counters of `EngineStats`, as opposed to momentary values."""

    prefix_cache_queries: int
    prefix_cache_hits: int
    cache_key_queries: int
    cache_key_hits: int
    num_prefetched_blocks: int
    pool_queries: int
    pool_hits: int
    peer_queries: int
    peer_hits: int
    rows_per_step: Counter[int]
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]

    @classmethod
    def of(cls, tes: Sequence[TE]) -> Counters:
        """Sum the counters of all given TEs."""
        schedulers = [group.scheduler for te in tes for group in te.groups]
        prefixes, steps = [each.prefixes for each in schedulers], [each.stats for each in schedulers]
        tiers = [each.pool for each in schedulers if each.pool is not None]
        peers = [tier for tier in tiers if isinstance(tier, PeerPrefixes)]
        pools = [tier for tier in tiers if not isinstance(tier, PeerPrefixes)]
        return cls(
            prefix_cache_queries=sum(each.num_queries for each in prefixes),
            prefix_cache_hits=sum(each.num_hits for each in prefixes),
            cache_key_queries=sum(each.num_id_queries for each in prefixes),
            cache_key_hits=sum(each.num_id_hits for each in prefixes),
            num_prefetched_blocks=sum(each.num_prefetched for each in prefixes),
            pool_queries=sum(each.num_queries for each in pools),
            pool_hits=sum(each.num_hits for each in pools),
            peer_queries=sum(each.num_queries for each in peers),
            peer_hits=sum(each.num_hits for each in peers),
            rows_per_step=sum((each.rows_per_step for each in steps), Counter()),
            num_drafted=summed([each.num_drafted for each in steps]),
            num_accepted=summed([each.num_accepted for each in steps]),
        )

    def plus(self, other: Counters) -> Counters:
        """Add two sets of counters."""
        pairs: Iterable[tuple[Any, Any]] = zip(self, other, strict=True)
        return Counters._make(summed([a, b]) if isinstance(a, tuple) else a + b for a, b in pairs)
