"""Ports of the dies on the UB plane, both directions, as operators on token copies are billed for them.

Between dies an exchange of tokens is bound by messages, not bytes: CM Table 6 has the same times for messages
of 7.5 KB and of 14 KB. So each copy that leaves its package takes `Spec.exchange_copy` of the port that it
leaves by and of the port that it arrives at, more between servers. Copies of one call are all under way at
once; at each port they queue behind those of earlier calls.

What DMA and URMA carry in bulk passes the same ports, by its bytes: so a far die that many pull from is a
bottleneck, and KV caches on their way over UB delay a dispatch, as they do not over RoCE (CM 4.3.3).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .spec import Spec
from .topology import Topology


class Ports:
    """State of all UB ports: times (virtual ns) until which each is busy, out and in."""

    def __init__(self, spec: Spec, topology: Topology) -> None:
        self.spec, self.topology = spec, topology
        self.out = np.zeros(topology.num_nodes)
        self.into = np.zeros(topology.num_nodes)

    def pull(self, node: int, nodes: npt.NDArray[np.int64], copies: npt.NDArray[np.int64], ready: int) -> int:
        """Bill `node` for reading copies[i] messages from the different nodes[i], from `ready` on; return the
        end (ns)."""
        return self._pass(self.out, self.into, node, nodes, copies, ready)

    def push(self, node: int, nodes: npt.NDArray[np.int64], copies: npt.NDArray[np.int64], ready: int) -> int:
        """Bill `node` for writing copies[i] messages to the different nodes[i], from `ready` on; return the
        end (ns)."""
        return self._pass(self.into, self.out, node, nodes, copies, ready)

    def carry(self, src: int, dst: int, nbytes: float, ready: int) -> int:
        """Bill a bulk transfer of `nbytes` from one node to another, from `ready` on; return the end (ns)."""
        topology = self.topology
        if src // topology.dies_per_chip == dst // topology.dies_per_chip:
            return ready
        is_far = src // topology.dies_per_server != dst // topology.dies_per_server
        ns = self.spec.link_ns(0, 0, nbytes) if is_far else self.spec.link_ns(0, nbytes, 0)
        self.out[src] = sent = max(float(self.out[src]), ready) + ns
        self.into[dst] = received = max(float(self.into[dst]), ready) + ns
        return math.ceil(max(sent, received))

    def _pass(
        self,
        theirs: npt.NDArray[np.float64],
        mine: npt.NDArray[np.float64],
        node: int,
        nodes: npt.NDArray[np.int64],
        copies: npt.NDArray[np.int64],
        ready: int,
    ) -> int:
        topology = self.topology
        leaves = nodes // topology.dies_per_chip != node // topology.dies_per_chip
        nodes, copies = nodes[leaves], copies[leaves]
        if not copies.any():
            return ready
        is_far = nodes // topology.dies_per_server != node // topology.dies_per_server
        weights = 1 + self.spec.inter_server_loss.value * is_far
        ns = 1e9 * self.spec.exchange_copy.value * weights * copies
        theirs[nodes] = np.maximum(theirs[nodes], ready) + ns
        mine[node] = max(mine[node], ready) + ns.sum()
        return math.ceil(max(theirs[nodes].max(), mine[node]))
