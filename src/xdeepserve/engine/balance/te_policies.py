"""Policies for choosing a TE for a request: pure functions of facts known about the TEs.

Scores are float64 [TEs, keys]. The TE with the least keys wins: earlier keys decide first, and among equals
the number of sequences, then the order of the TEs. The policies are ours, and others' as published, all on
the same facts. Their names are those of the table `ROUTE` (`engine/deploy/policies.py`):

sequences     the fewest requests
round-robin   the next in turn
load          DeepServe's load_aware: the least queued prefill cost, then the fewest requests
prefix        DeepServe 5.2: the longest cached prefix, then the fewest requests
cost          xDeepServe 5.1: the least sum of waiting and own cost, cached prefix counted: so a prefix
              draws requests until waiting there costs more than computing it elsewhere; long prompts and
              short ones meet only if there is no other way
deepserve     DeepServe's Algorithm 1: the kind of TE that the heat map names; then prefix if load is
              balanced, else load
pd-aware      DeepServe 5.3 alone: the kind of TE that the heat map names, and of those the next in turn
dynamo        NVIDIA Dynamo's KV router, design page: overlap weight x new prefill blocks + decode blocks
llm-d         scorers of its router's guides: prefix cache 3, queue 2, KV use 2, each within [0, 1]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from xdeepserve.engine.balance.dp import LONG_PROMPT, prefill_cost
from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.engine.deploy.policies import ROUTE

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

BALANCED = (
    0.2  # (most - least) / mean of queued cost, below which load counts as balanced [the paper is open]
)
OVERLAP_WEIGHT = 1.0  # Dynamo's default
BLOCK = 16  # tokens of a block, in Dynamo's count
LLM_D = {"prefix": 3.0, "queue": 2.0, "kv": 2.0}  # weights of its guides; older ones had 2, 1 and 1


class RoutedRequest(NamedTuple):
    """Facts about a request for routing policies."""

    number: int  # in order of arrival
    num_tokens: int  # of its prompt
    num_output: float = 0.0  # tokens of its answer, as predicted


class Known(NamedTuple):
    """Facts about the TEs for routing policies, an array element for each TE.

    cached      tokens of the prompt that need not be computed there
    sequences   sequences that are there
    queued      prefill cost of requests there that are not prefilled, averaged over the DP groups
    has_long, has_short   whether such prompts are among these requests
    kv_load     share of the TE's KV in use or reserved
    positions   KV positions that the TE's requests have in all
    is_apart    whether prefill and decode are on different dies of the TE
    """

    cached: Floats
    sequences: Floats
    queued: Floats
    has_long: Flags
    has_short: Flags
    kv_load: Floats
    positions: Floats
    is_apart: Flags

    @staticmethod
    def none(is_apart: Flags) -> Known:
        """Return the facts for idle TEs of these kinds."""
        count = len(is_apart)
        cached, sequences, queued, kv_load, positions = (np.zeros(count) for _ in range(5))
        long, short = np.zeros(count, bool), np.zeros(count, bool)
        return Known(cached, sequences, queued, long, short, kv_load, positions, is_apart)

    def among(self, some: Flags) -> Known:
        """Return the same facts for a subset of the TEs."""
        return Known(
            self.cached[some], self.sequences[some], self.queued[some], self.has_long[some],
            self.has_short[some], self.kv_load[some], self.positions[some], self.is_apart[some],
        )  # fmt: skip


# A policy, from facts about a request, facts about TEs, and a heat map if there is one: its keys of the TEs.
RoutePolicy: TypeAlias = Callable[[RoutedRequest, Known, HeatMap | None], list[Floats]]


def scores(route: str, asked: RoutedRequest, known: Known, heat: HeatMap | None = None) -> Floats:
    """Return the keys of every TE by a policy of the table ROUTE, float64 [TEs, keys]."""
    policy: RoutePolicy = ROUTE.function(route)
    return np.array(policy(asked, known, heat), np.float64).T


def best(keys: Floats, sequences: Floats) -> int:
    """Return the index of the TE with the least keys; among equals that with the fewest sequences."""
    return int(np.lexsort((sequences, *keys.T[::-1]))[0])


def sequences(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer the TE with the fewest sequences."""
    return [known.sequences]


def round_robin(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer the next TE in turn, by the number of the request."""
    count = len(known.sequences)
    return [((np.arange(count) - asked.number) % count).astype(np.float64)]


def load(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer the TE with the least queued prefill cost, then the fewest sequences."""
    return [known.queued, known.sequences]


def prefix(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer the TE with the longest cached prefix, then the fewest sequences."""
    return [-known.cached, known.sequences]


def cost(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer the TE with the least waiting and own prefill cost, long prompts apart from short ones."""
    new = asked.num_tokens - known.cached
    is_mixed = np.where(new >= LONG_PROMPT, known.has_short, known.has_long).astype(np.float64)
    return [is_mixed, known.queued + prefill_cost(new, known.cached), known.sequences]


def _is_other(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> Floats:
    """Return 1.0 for each TE of the kind not named by the heat map; all 0 if TEs are of one kind."""
    apart = known.is_apart
    if heat is None or apart.all() or not apart.any():
        return np.zeros(len(apart))
    return (apart != (heat.value(asked.num_tokens, asked.num_output) > 0)).astype(np.float64)


def pd_aware(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer TEs of the kind that the heat map names, and of these the next in turn."""
    return [_is_other(asked, known, heat), *round_robin(asked, known, heat)]


def deepserve(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer TEs of the heat map's kind, then by prefix if load is balanced, else by load (Algorithm 1)."""
    is_other = _is_other(asked, known, heat)
    queued = known.queued[is_other == 0]
    spread = (queued.max() - queued.min()) / max(queued.mean(), 1e-9)
    if spread < BALANCED or queued.max() == 0:
        return [is_other, -known.cached, known.queued, known.sequences]
    return [is_other, known.queued, known.sequences, -known.cached]


def dynamo(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer the TE with the fewest blocks to prefill and to read, by Dynamo's formula."""
    new_blocks = (asked.num_tokens - known.cached) / BLOCK
    return [OVERLAP_WEIGHT * new_blocks + (known.positions + asked.num_tokens) / BLOCK]


def llm_d(asked: RoutedRequest, known: Known, heat: HeatMap | None) -> list[Floats]:
    """Prefer the TE with the best sum of llm-d's scores."""
    queue = known.sequences
    spread = queue.max() - queue.min()
    queue_score = (queue.max() - queue) / spread if spread else np.ones(len(queue))
    prefix_score = known.cached / max(1, asked.num_tokens)
    kv_score = 1 - known.kv_load
    total = LLM_D["prefix"] * prefix_score + LLM_D["queue"] * queue_score + LLM_D["kv"] * kv_score
    return [-total]
