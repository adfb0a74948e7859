"""Costs of requests to expert services and of their answers, by formula: the steps of both ends, added up.

The engine operations are those of `services/client.py` and `services/server.py`, in closed form, for runs in
which no byte moves. All times are ns, not rounded.
"""

from __future__ import annotations

from typing import NamedTuple

from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.comm.services.layout import HEADER
from xdeepserve.hw.spec import Spec


class ServiceCost(NamedTuple):
    """Costs of expert services. `rows` is the layout of requests and answers; `far` is the share of expert
    servers outside the client's server of the pod.

    With `server_sums`, expert servers weigh and sum the outputs for a token, as the paper's do (3.2); then
    the router's scores travel, too.
    """

    spec: Spec
    rows: Layout
    far: float = 0.0
    server_sums: bool = False

    def back_share(self, num_tokens: int, num_rows: int, num_servers: int) -> float:
        """Return the rows of answers per row of a request: 1, or with `server_sums` the expected share of
        (token, server) among (token, expert) if copies go to random servers."""
        if not self.server_sums or not num_rows:
            return 1.0
        copies = num_rows / num_tokens
        return num_servers * (1 - (1 - 1 / num_servers) ** copies) / copies

    def write_ns(self, num_tokens: int, num_rows: int, num_servers: int) -> float:
        """Time (ns) of expert write, 1 to 5: until the last state is on its server."""
        spec, rows = self.spec, self.rows
        operations = 4 * num_tokens * rows.hidden if rows.quantize else 0
        ns = spec.kernel_ns(0, 0) + self._load_ns(4 * num_tokens * rows.hidden) + self._vector_ns(operations)
        if not num_servers:
            return ns
        nbytes = num_rows * (rows.dispatch_row + 4 * self.server_sums)
        ns += spec.startup_ns("mte") + self._load_ns(nbytes)  # the outbox
        ns += self._urma_ns(2 * num_servers, nbytes + num_servers * HEADER.size)
        return ns + self._urma_ns(num_servers, num_servers)

    def answer_ns(self, num_rows: int, num_requests: int, num_back: float) -> float:
        """Time (ns) of expert serve, 2 to 4: a server's work on the outputs of a batch, of which `num_back`
        rows are written."""
        spec, (_, operations) = self.spec, self.rows.answers.work
        elements, hidden = num_rows * self.rows.hidden, self.rows.hidden
        work = operations * num_back * hidden + 2 * elements * self.server_sums
        ns = spec.kernel_ns(0, 0) + self._load_ns(4 * elements) + self._vector_ns(work)
        ns += self._load_ns(num_back * self.rows.combine_row)
        return ns + spec.pieces_ns(num_requests, spec.num_cores("aiv"))

    def read_ns(self, num_tokens: int, num_rows: int, num_servers: int) -> float:
        """Time (ns) of expert read, 1 to 4: from the last answer's state until the sums are there."""
        spec, rows = self.spec, self.rows
        num_back = num_rows * self.back_share(num_tokens, num_rows, num_servers)
        summed = num_back if self.server_sums else num_tokens * rows.top_k
        ns = self._vector_ns(2 * summed * rows.hidden)
        if not num_servers:
            return ns
        nbytes = num_back * rows.combine_row + num_servers * HEADER.size
        ns += spec.startup_ns("urma") + spec.pieces_ns(1, 1) + spec.far_latency_ns()  # the poll that sees it
        return ns + self._urma_ns(2 * num_servers, nbytes) + self._urma_ns(num_servers, num_servers)

    def _load_ns(self, nbytes: float) -> float:
        """Time (ns) of bytes between the die's own memory and its unified buffers."""
        return self.spec.link_ns(nbytes, 0, 0, self.spec.num_cores("aiv"))

    def _vector_ns(self, operations: float) -> float:
        """Time (ns) of a part of a running kernel on all AIV cores."""
        return self.spec.kernel_ns(operations, 0, "aiv", is_fused=True)

    def _urma_ns(self, num_pieces: int, nbytes: float) -> float:
        """Time (ns) of a batch of pieces to or from servers."""
        spec, far = self.spec, nbytes * self.far
        latency = spec.far_latency_ns() if self.far else 0
        ns = spec.startup_ns("urma") + spec.pieces_ns(num_pieces, 1) + latency
        return ns + spec.link_ns(0, nbytes - far, far)
