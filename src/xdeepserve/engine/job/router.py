"""Step 1 of xDeepServe 5.1: a request comes to one of several job executors, which assigns it a TE.

Job executors share no ledger: each knows what it has given to whom and has not heard to be prefilled, and
asks TEs what of a prompt they have cached. Which of them a request reaches is drawn from the deployment's
seed and the request's number, so that the same requests take the same ways again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from xdeepserve.engine.balance.te_choice import PromptCost, TEStatus, cost_of, te_key
from xdeepserve.engine.deploy.deployment import Route
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.te.te import TE
from xdeepserve.model.sampling import philox4x32


class Ledger:
    """What one job executor has given to TEs."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[str, PromptCost]] = {}  # TE and request, by seq_id of its first choice

    def status(self, te: TE, seq: Sequence) -> TEStatus:
        """What is known of a TE, for whoever looks for one for a sequence."""
        name, groups = te.sizes.name, te.groups
        given = [each for at, each in self._given.values() if at == name]
        cached = max(group.scheduler.prefixes.num_reusable(seq) for group in groups)
        return TEStatus(given, len(groups), cached)

    def give(self, te: TE, seq: Sequence) -> None:
        """It goes there."""
        self._given[seq.seq_id] = te.sizes.name, cost_of(len(seq.token_ids), self.status(te, seq))

    def forget(self, seq_id: int) -> None:
        """It has been prefilled, has ended, or has left its TE."""
        self._given.pop(seq_id, None)


class Router:
    """`num_executors` job executors that choose TEs by `route`: "cost" (`balance/te_choice.py`), or
    "sequences", the fewest of them.
    """

    def __init__(self, num_executors: int = 1, route: Route = "sequences", seed: int = 0) -> None:
        self._ledgers, self._route, self._seed = [Ledger() for _ in range(num_executors)], route, seed

    def reached(self, seq: Sequence) -> int:
        """The number of the job executor that a request reaches."""
        key = self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF
        return philox4x32((seq.seq_id, 0, 0, 2), key)[0] % len(self._ledgers)

    def choose(self, seq: Sequence, tes: Seq[tuple[tuple[bool, ...], TE]]) -> TE:
        """The TE for a request, by its first choice; those come first whose troubles are fewer."""
        ledger = self._ledgers[self.reached(seq)]

        def key(each: tuple[tuple[bool, ...], TE]) -> tuple[object, ...]:
            troubles, te = each
            load = te_key(len(seq.token_ids), ledger.status(te, seq)) if self._route == "cost" else ()
            return troubles, load, te.num_sequences, te.sizes.first_die

        te = min(tes, key=key)[1] if len(tes) > 1 else tes[0][1]
        if self._route == "cost":
            ledger.give(te, seq)
        return te

    def forget(self, seq_id: int) -> None:
        """A sequence weighs on no TE's prefill any more."""
        for ledger in self._ledgers:
            ledger.forget(seq_id)
