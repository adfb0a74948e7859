"""Step 1 of xDeepServe 5.1: one of several job executors takes a request and assigns it a TE.

Job executors share no ledger. Each knows the prompts that it has given to TEs and that are not yet prefilled.
It asks TEs how many requests they have and how full their KV is. How much of a prompt they have cached all
job executors read in a prompt tree (DeepServe 5.2), to which DP groups send messages. A prefix that the tree
promises may be gone when the request comes, and is computed then. The length of an answer is known if only
`max_tokens` can end it; otherwise it is predicted from the prompt, if a predictor lies beside the weights
(model/answer_lengths.py). The job executor that a request reaches is drawn from the deployment's seed and the
request's number, so equal requests take equal ways in each run; where job executors are processes of their
own (jobs/door/pod_door.py) it is the one that has it. `balance/te_policies.py` chooses the TE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.engine.balance.prompt_tree import PromptTree
from xdeepserve.engine.balance.te_ledger import TELedger
from xdeepserve.engine.balance.te_policies import Known, RoutedRequest, best, scores
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.engine.dp.events import GroupId
from xdeepserve.engine.dp.prefix_index import Node, block_keys
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.te.te import TE
from xdeepserve.model.sampling import philox4x32


class CachedPrompts:
    """The prompt tree of an engine's job executors: what TEs have cached, as known `late_ns` later."""

    def __init__(self, now: Callable[[], int], late_ns: int) -> None:
        self._now, self._tree = now, PromptTree(late_ns)
        self._holders: dict[int, GroupId] = {}  # DP groups, which are the tree's holders, by number
        self._num_holders = 0

    def join(self, te: TE) -> None:
        """Hear of the caches of a TE's DP groups from now on."""
        for group in te.groups:
            holder, self._num_holders = self._num_holders, self._num_holders + 1
            self._holders[holder] = group.id

            def tell(nodes: Seq[Node], has: bool, holder: int = holder) -> None:
                self._tree.tell(self._now(), holder, [node.key for node in nodes], has)

            group.rtc.tell = tell
            tell([node for node in group.rtc.index.nodes() if node.is_ready], True)

    def leave(self, te: TE) -> None:
        """Forget the caches of a TE."""
        for holder in [number for number, group in self._holders.items() if group.te == te.plan.name]:
            del self._holders[holder]
            self._tree.forget(holder)

    def match(self, seq: Sequence, block_size: int) -> dict[str, int]:
        """Return how many tokens of a sequence a DP group of each TE has, by name; without TEs that have
        none."""
        found: dict[str, int] = {}
        for (te, _), num_blocks in self.groups(seq.token_ids[:-1], block_size).items():
            found[te] = max(found.get(te, 0), num_blocks * block_size)
        return found

    def groups(self, tokens: Seq[int], block_size: int) -> dict[GroupId, int]:
        """Return how many blocks of `tokens`, from the first on, each DP group has; without groups that have
        none."""
        self._tree.catch_up(self._now())
        found = self._tree.match(block_keys(tokens, block_size))
        return {self._holders[holder]: num_blocks for holder, num_blocks in found.items()}


class Router:
    """Chooses TEs for requests by policy `route`, on behalf of `num_executors` job executors.

    `cached` is their prompt tree. `heat` says which kind of TE is better, and `lengths` predicts answers in
    tokens, for those that ask. If `joins`, the tree hears of the TEs even if the policy asks for nothing.
    """

    def __init__(
        self,
        cached: CachedPrompts,
        num_executors: int = 1,
        route: str = "sequences",
        seed: int = 0,
        heat: HeatMap | None = None,
        lengths: Callable[[Seq[int]], float] | None = None,
        joins: bool = False,
    ) -> None:
        self.ledgers, self._route, self._seed = [TELedger() for _ in range(num_executors)], route, seed
        self._cached, self._heat, self._lengths = cached, heat, lengths
        self._asks = not ROUTE.has(route, "asks no TE")
        self._joins = joins or self._asks
        self._num_seen = 0
        self._promised: dict[int, int] = {}  # by seq_id: tokens that should be cached at its TE
        self.num_promised = 0  # tokens of prompts that TEs should have had cached
        self.num_broken = 0  # of these, tokens that were computed after all

    def join(self, te: TE) -> None:
        """Hear of the prefix cache of a TE from now on, if the policy or another part asks for it."""
        if self._joins:
            self._cached.join(te)

    def leave(self, te: TE) -> None:
        """Forget the prefix cache of a TE."""
        self._cached.leave(te)

    def reached(self, seq: Sequence) -> int:
        """Return the number of the job executor that a request reaches: a draw where none is given."""
        if seq.je is not None:
            return seq.je % len(self.ledgers)
        key = self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF
        return philox4x32((seq.seq_id, 0, 0, 2), key)[0] % len(self.ledgers)

    def choose(self, seq: Sequence, tes: Seq[tuple[tuple[bool, ...], TE]]) -> TE:
        """Choose the TE for a request, by its first choice, among TEs with the fewest troubles. By default it
        has the fewest sequences, and of several such TEs it is the one that came first."""
        least = min(troubles for troubles, _ in tes)
        able = [te for troubles, te in tes if troubles == least]
        if len(able) > 1 and not ROUTE.has(self._route, "in turn"):
            # To count the sequences of hundreds of DP groups takes a while.
            able.sort(key=lambda te: te.num_sequences)
        te, ledger = able[0], self.ledgers[self.reached(seq)]
        if self._asks:
            cached = self._cached.match(seq, te.sizes.kv.block_size)
            if len(able) > 1:
                asked = RoutedRequest(self._num_seen, len(seq.token_ids), self._num_output(seq))
                facts = known(ledger, cached, able)
                te = able[best(scores(self._route, asked, facts, self._heat), facts.sequences)]
            there = cached.get(te.plan.name, 0)
            ledger.give(seq.seq_id, te.plan.name, len(seq.token_ids), there)
            self._promised[seq.seq_id] = 0 if seq.is_counted else there  # else at another TE before
        self._num_seen += 1
        return te

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

    def forget(self, seq: Sequence) -> None:
        """Remove a sequence from the queued prefill work of its TE, after its prefill or end, or because it
        has left; and count what was promised of its prompt and was not there."""
        for ledger in self.ledgers:
            ledger.forget(seq.seq_id)
        promised = self._promised.pop(seq.seq_id, 0)
        if seq.is_counted:
            self.num_promised += promised
            self.num_broken += max(0, promised - seq.num_cached)


def known(ledger: TELedger, cached: Mapping[str, int], tes: Seq[TE]) -> Known:
    """Collect a job executor's knowledge of the TEs, to choose one for a prompt.

    `cached` has the prompt's tokens that TEs have cached, by name.
    """
    found = Known.none(np.array([te.sizes.place.role != "both" for te in tes]))
    for number, te in enumerate(tes):
        name = te.plan.name
        found.cached[number] = cached.get(name, 0)
        found.sequences[number] = te.num_sequences
        found.queued[number] = ledger.cost(name) / len(te.groups)
        found.has_long[number], found.has_short[number] = ledger.has(name, True), ledger.has(name, False)
        found.kv_load[number] = te.kv_load
        found.positions[number] = sum(group.num_used_blocks * group.rtc.block_size for group in te.groups)
    return found
