"""Step 1 of xDeepServe 5.1: one of several job executors takes a request and assigns it a TE.

Job executors share no ledger. Each knows the prompts that it has given to TEs and that are not yet prefilled.
It asks TEs how much of a prompt they have cached, how many requests they have and how full their KV is. The
length of an answer is known if only `max_tokens` can end it; otherwise it is predicted from the prompt, if a
predictor lies beside the weights (model/answer_lengths.py). The job executor that a request reaches is drawn
from the deployment's seed and the request's number, so equal requests take equal ways in each run.
`balance/te_policies.py` chooses the TE.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from xdeepserve.engine.balance.dp import LONG_PROMPT, prefill_cost
from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.engine.balance.te_policies import Known, RoutedRequest, best, scores
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.te.te import TE
from xdeepserve.model.sampling import philox4x32


class GivenPrompt(NamedTuple):
    """Work caused by a prompt at its TE, allowing for the cached prefix."""

    te: str
    cost: float
    is_long: bool


class Ledger:
    """Prompts given to TEs by a job executor and not yet prefilled, by seq_id of a request's first choice."""

    def __init__(self) -> None:
        self.given: dict[int, GivenPrompt] = {}

    def known(self, seq: Sequence, tes: Seq[TE]) -> Known:
        """Collect a job executor's knowledge of the TEs, to choose one for a sequence."""
        known = Known.none(np.array([te.sizes.place.role != "both" for te in tes]))
        for number, te in enumerate(tes):
            given = [each for each in self.given.values() if each.te == te.sizes.place.name]
            known.cached[number] = num_cached(te, seq)
            known.sequences[number] = te.num_sequences
            known.queued[number] = sum(each.cost for each in given) / len(te.groups)
            known.has_long[number] = any(each.is_long for each in given)
            known.has_short[number] = any(not each.is_long for each in given)
            known.kv_load[number] = te.kv_load
            known.positions[number] = sum(
                group.status().num_used_blocks * group.rtc.block_size for group in te.groups
            )
        return known

    def give(self, te: TE, seq: Sequence) -> None:
        """Note the assignment of a sequence to a TE."""
        cached = num_cached(te, seq)
        new = len(seq.token_ids) - cached
        cost = prefill_cost(float(new), float(cached))
        self.given[seq.seq_id] = GivenPrompt(te.sizes.place.name, cost, is_long=new >= LONG_PROMPT)

    def forget(self, seq_id: int) -> None:
        """Remove a sequence from the ledger after its prefill or end, or because it has left its TE."""
        self.given.pop(seq_id, None)


def num_cached(te: TE, seq: Sequence) -> int:
    """Number of a prompt's tokens that the best DP group of a TE need not compute."""
    return max(group.scheduler.prefixes.num_reusable(seq) for group in te.groups)


class Router:
    """Chooses TEs for requests by policy `route`, on behalf of `num_executors` job executors.

    `heat` says which kind of TE is better, and `lengths` predicts answers in tokens, for those that ask.
    """

    def __init__(
        self,
        num_executors: int = 1,
        route: str = "sequences",
        seed: int = 0,
        heat: HeatMap | None = None,
        lengths: Callable[[Seq[int]], float] | None = None,
    ) -> None:
        self.ledgers, self._route, self._seed = [Ledger() for _ in range(num_executors)], route, seed
        self._heat, self._lengths = heat, lengths
        self._num_seen = 0

    def reached(self, seq: Sequence) -> int:
        """Draw the number of the job executor that a request reaches."""
        key = self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF
        return philox4x32((seq.seq_id, 0, 0, 2), key)[0] % len(self.ledgers)

    def choose(self, seq: Sequence, tes: Seq[tuple[tuple[bool, ...], TE]]) -> TE:
        """Choose the TE for a request, by its first choice, among TEs with the fewest troubles. By default it
        has the fewest sequences."""
        least = min(troubles for troubles, _ in tes)
        able = [te for troubles, te in tes if troubles == least]
        if len(able) > 1:  # to count the sequences of hundreds of DP groups takes a while
            able.sort(key=self._order)
        te, ledger = able[0], self.ledgers[self.reached(seq)]
        if not ROUTE.has(self._route, "asks no TE"):
            if len(able) > 1:
                asked = RoutedRequest(self._num_seen, len(seq.token_ids), self._num_output(seq))
                te = able[best(scores(self._route, asked, ledger.known(seq, able), self._heat))]
            ledger.give(te, seq)
        self._num_seen += 1
        return te

    def _order(self, te: TE) -> tuple[int, int]:
        """Return the sort key of a TE: by place for policies that go in turn, else by number of sequences
        first."""
        in_turn = ROUTE.has(self._route, "in turn")
        return 0 if in_turn else te.num_sequences, te.sizes.place.first_die

    def _num_output(self, seq: Sequence) -> float:
        """Number of tokens in the answer, as far as known or predicted; 0 means unknown."""
        if self._heat is None:
            return 0.0
        params = seq.params
        if params.ignore_eos and not params.stop and not params.stop_token_ids:
            return seq.max_tokens
        if self._lengths is None:
            return 0.0
        return min(seq.max_tokens, max(params.min_tokens, self._lengths(seq.token_ids[: seq.num_prompt])))

    def forget(self, seq_id: int) -> None:
        """Remove a sequence from the queued prefill work of its TE."""
        for ledger in self.ledgers:
            ledger.forget(seq_id)
