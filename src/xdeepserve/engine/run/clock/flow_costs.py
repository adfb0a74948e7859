"""What ways without barriers take in a timing-only run, by formula."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.comm.means import Carrier
from xdeepserve.comm.services.cost import ServiceCost


class Errand(NamedTuple):
    """The tokens of one microbatch, and what becomes of them: rows in all, expert dies that they go to."""

    num_tokens: int
    num_rows: int
    num_experts: int


class WayCost(Protocol):
    """What a way to experts on dies of their own takes, in ns."""

    def post_ns(self, sent: Errand) -> float:
        """Time of the attention die to send; it does nothing else meanwhile."""

    def there_ns(self, sent: Errand) -> float:
        """Time from then until the expert dies have the rows."""

    def answer_ns(self, num_rows: int, num_sent: int, num_back: float) -> float:
        """Time of an expert die to answer `num_sent` sendings with `num_back` rows."""

    def back_share(self, sent: Errand) -> float:
        """Rows that come back for each that goes there."""

    def back_ns(self, sent: Errand) -> float:
        """Time from the last answer until the attention die can read it."""

    def read_ns(self, sent: Errand) -> float:
        """Time of the attention die to read the answers."""


class ByTrampoline(NamedTuple):
    """In bulk to a trampoline, from there to the expert dies, and back: the stages of A2E and E2A, each of
    which a die goes through by itself."""

    cost: CommCost
    num_experts: int
    copies: int
    carrier: Carrier

    def post_ns(self, sent: Errand) -> float:
        """A2E."""
        return self.cost.post_ns(sent.num_tokens, self.carrier)

    def there_ns(self, sent: Errand) -> float:
        """A2E'."""
        return self._among_ns("dispatch", sent)

    def answer_ns(self, num_rows: int, num_sent: int, num_back: float) -> float:
        """A stream of its own does that."""
        return 0.0

    def back_share(self, sent: Errand) -> float:
        """All of them."""
        return 1.0

    def back_ns(self, sent: Errand) -> float:
        """E2A and E2A'."""
        back_ns = self.cost.return_ns(sent.num_tokens, self.copies, self.carrier)
        return self._among_ns("combine", sent) + back_ns

    def _among_ns(self, op: Op, sent: Errand) -> float:
        if not sent.num_rows:
            return 0.0
        return self.cost.among_ns(op, self.num_experts, sent.num_tokens, self.copies, self.carrier)

    def read_ns(self, sent: Errand) -> float:
        """The sums come by themselves."""
        return 0.0


class ByRequest(NamedTuple):
    """Requests that a client writes to servers' slots, and answers that it reads there."""

    cost: ServiceCost

    def post_ns(self, sent: Errand) -> float:
        """Expert write."""
        return self.cost.write_ns(*sent)

    def there_ns(self, sent: Errand) -> float:
        """The server's poll."""
        return self.cost.spec.poll_ns()

    def answer_ns(self, num_rows: int, num_sent: int, num_back: float) -> float:
        """Expert serve."""
        return self.cost.answer_ns(num_rows, num_sent, num_back)

    def back_share(self, sent: Errand) -> float:
        """One for each (token, expert), or for each (token, server)."""
        return self.cost.back_share(*sent)

    def back_ns(self, sent: Errand) -> float:
        """They lie where the client reads them."""
        return 0.0

    def read_ns(self, sent: Errand) -> float:
        """Expert read."""
        return self.cost.read_ns(*sent)
