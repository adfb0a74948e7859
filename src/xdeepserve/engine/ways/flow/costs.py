"""Costs of ways without barriers in a timing-only run, by formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from xdeepserve.comm.cost import CommCost, Op
from xdeepserve.comm.exchange_choices import Carrier
from xdeepserve.comm.services.cost import ServiceCost
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.comm.services.server import AT_ONCE, Batching
from xdeepserve.engine.deploy.roles import Turns
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.ways.away import row_sizes


class Errand(NamedTuple):
    """Size of a sending, the tokens of a microbatch: tokens, rows in all, and expert dies with some."""

    num_tokens: int
    num_rows: int
    num_experts: int


class WayCost(Protocol):
    """Costs of a way to experts on dies of their own, in ns."""

    def post_ns(self, sent: Errand) -> float:
        """Time for the attention die to send; it does nothing else meanwhile."""

    def there_ns(self, sent: Errand) -> float:
        """Time from sending until the expert dies have the rows."""

    def answer_ns(self, num_rows: int, num_sent: int, num_back: float) -> float:
        """Time for an expert die to answer `num_sent` sendings with `num_back` rows."""

    def back_share(self, sent: Errand) -> float:
        """Number of rows back for each row sent."""

    def back_ns(self, sent: Errand) -> float:
        """Time from the last answer until the attention die can read it."""

    def read_ns(self, sent: Errand) -> float:
        """Time for the attention die to read the answers."""


class ByTrampoline(NamedTuple):
    """Costs of the way by A2E and E2A.

    Tokens go in bulk to a trampoline, from there to the expert dies, and back. A die goes through each of
    these stages by itself.
    """

    cost: CommCost
    num_experts: int
    copies: int
    carrier: Carrier

    def post_ns(self, sent: Errand) -> float:
        """Time of A2E, in bulk to the trampoline, in ns."""
        return self.cost.post_ns(sent.num_tokens, self.carrier)

    def there_ns(self, sent: Errand) -> float:
        """Time of A2E', among the expert dies, in ns."""
        return self._among_ns("dispatch", sent)

    def answer_ns(self, num_rows: int, num_sent: int, num_back: float) -> float:
        """Return 0, because a stream of its own sends the answers."""
        return 0.0

    def back_share(self, sent: Errand) -> float:
        """Return 1: every row has an answer."""
        return 1.0

    def back_ns(self, sent: Errand) -> float:
        """Time of E2A and E2A' together, in ns."""
        back_ns = self.cost.return_ns(sent.num_tokens, self.copies, self.carrier)
        return self._among_ns("combine", sent) + back_ns

    def _among_ns(self, op: Op, sent: Errand) -> float:
        if not sent.num_rows:
            return 0.0
        return self.cost.among_ns(op, self.num_experts, sent.num_tokens, self.copies, self.carrier)

    def read_ns(self, sent: Errand) -> float:
        """Return 0, because sums arrive in the attention die's memory."""
        return 0.0


class ByRequest(NamedTuple):
    """Costs of requests written by a client to servers' slots, and of answers that it reads there."""

    cost: ServiceCost

    def post_ns(self, sent: Errand) -> float:
        """Time of the expert write, in ns."""
        return self.cost.write_ns(*sent)

    def there_ns(self, sent: Errand) -> float:
        """Time of the server's poll, in ns."""
        return self.cost.spec.poll_ns()

    def answer_ns(self, num_rows: int, num_sent: int, num_back: float) -> float:
        """Time of the expert serve, in ns."""
        return self.cost.answer_ns(num_rows, num_sent, num_back)

    def back_share(self, sent: Errand) -> float:
        """Number of rows back for each row sent.

        One for each (token, expert), or with sums at servers one for each (token, server).
        """
        return self.cost.back_share(*sent)

    def back_ns(self, sent: Errand) -> float:
        """Return 0, because answers lie where the client reads them."""
        return 0.0

    def read_ns(self, sent: Errand) -> float:
        """Time of the expert read, in ns."""
        return self.cost.read_ns(*sent)


def _by_trampoline(team: Team, cost: CommCost) -> tuple[WayCost, Batching]:
    """Return the costs of the way by trampolines, and how an expert die forms batches."""
    carrier = team.sizes.walk.carrier
    assert carrier != "rdma"  # M2N has no trampolines
    return ByTrampoline(cost, len(team.expert_dies), team.num_copies, carrier), AT_ONCE


def _by_request(team: Team, cost: CommCost) -> tuple[WayCost, Batching]:
    """Return the costs of the way by URMA, to and from servers' memories, and how servers form batches."""
    times = team.sizes.walk.services
    assert times is not None
    layout = ServiceLayout(clients=team.dies, servers=team.holders, **row_sizes(team))
    server_of = team.pod.topology.server_of
    pairs = [server_of(client) != server_of(die) for client in team.dies for die in team.expert_dies]
    service = ServiceCost(cost.spec, layout.rows, sum(pairs) / len(pairs), times.server_sums)
    return ByRequest(service), Batching(times.batch_clients, round(1e3 * times.batch_timeout_us))


COSTS: Final[Mapping[Turns, Callable[[Team, CommCost], tuple[WayCost, Batching]]]] = {
    "dataflow": _by_trampoline,
    "services": _by_request,
}
