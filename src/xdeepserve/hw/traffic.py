"""Bytes of an operation by distance: within the issuing die, within its server, between servers."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .faulty_links import FaultyLinks
from .spec import Spec
from .topology import Plane, Topology

Integers: TypeAlias = npt.NDArray[np.int64]

FEW = 32  # up to so many pieces one by one are quicker than arrays of them


class Place(NamedTuple):
    """Position of a node among the others, for distances."""

    node: int
    first: int  # die of its server
    last: int  # after the last one
    host: int
    far_latency_ns: int
    links: FaultyLinks

    @classmethod
    def of(cls, node: int, topology: Topology, spec: Spec, links: FaultyLinks) -> Place:
        server = topology.server_of(node)
        first = server * topology.dies_per_server
        last = first + topology.dies_per_server
        return cls(node, first, last, topology.host(server), spec.far_latency_ns(), links)


class Traffic:
    """Bytes moved by a batch from `place`, by distance; `latency_ns` is set if some go to another server.

    Until `free_ns` a link that it goes by is blocked; bytes on a slow one (`is_slowed`) count several times.
    """

    __slots__ = ("far", "free_ns", "is_slowed", "latency_ns", "local", "near", "place")

    def __init__(self, place: Place, local: int = 0) -> None:
        self.place = place
        self.local, self.near, self.far = local, 0, 0
        self.latency_ns = self.free_ns = 0
        self.is_slowed = False

    def add(self, node: int, nbytes: int) -> None:
        place = self.place
        if node == place.node:
            self.local += nbytes
            return
        if place.links:
            billed, free_ns = place.links.passes(Plane.UB, place.node, node, nbytes)
            self.free_ns = max(self.free_ns, free_ns)
            self.is_slowed |= billed > nbytes
            nbytes = billed
        if place.first <= node < place.last or node == place.host:
            self.near += nbytes
        else:
            self.far += nbytes
            self.latency_ns = place.far_latency_ns

    def add_many(self, nodes: Integers, sizes: Integers | int) -> None:
        """Add `sizes` bytes for each node, or sizes[i] bytes for nodes[i]."""
        sizes = np.broadcast_to(sizes, nodes.shape)
        if len(nodes) <= FEW or self.place.links:
            for node, nbytes in zip(nodes.tolist(), sizes.tolist(), strict=True):
                self.add(node, nbytes)
            return
        place = self.place
        is_local = nodes == place.node
        is_near = (nodes >= place.first) & (nodes < place.last) | (nodes == place.host)
        local, near = int(sizes[is_local].sum()), int(sizes[is_near & ~is_local].sum())
        self.local += local
        self.near += near
        self.far += int(sizes.sum()) - local - near
        if not (is_local | is_near).all():
            self.latency_ns = place.far_latency_ns

    @property
    def nbytes(self) -> int:
        return self.local + self.near + self.far
