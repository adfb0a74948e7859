"""Layout of a pod: 48 servers x 8 chips x 2 dies, one host memory per server, three network planes.

A *node* is an integer: dies come first (0 .. num_dies - 1, numbered server by server, chip by chip), then
one host per server. Sources: XDS section 2.2, CM section 3.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import msgspec

from ..errors import DeploymentError, HardwareError


class Plane(enum.Enum):
    """Network plane of a pod: UB, RoCE or VPC."""

    UB = "ub"  # scale-up: every die and every CPU, memory semantics
    ROCE = "roce"  # scale-out RDMA: dies only; also reaches other pods
    VPC = "vpc"  # Ethernet through each server's one card: hosts only


class Location(NamedTuple):
    """Place of a die: server, chip and die."""

    server: int
    chip: int
    die: int


class Topology(msgspec.Struct, frozen=True):
    """Shape of a pod. The defaults are a CloudMatrix384 (CM 3.2: 48 servers, 384 chips, 768 dies).

    Servers after the first `superpod_servers` are beside it: UB does not lead there, RoCE and VPC do.
    """

    servers: int = 48
    superpod_servers: int = 48
    chips_per_server: int = 8
    dies_per_chip: int = 2

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if getattr(self, field) < 1:
                raise DeploymentError(f"topology: {field} must be at least 1, not {getattr(self, field)}")

    @property
    def dies_per_server(self) -> int:
        return self.chips_per_server * self.dies_per_chip

    @property
    def num_dies(self) -> int:
        return self.servers * self.dies_per_server

    @property
    def num_nodes(self) -> int:
        """Number of dies and hosts together."""
        return self.num_dies + self.servers

    def is_die(self, node: int) -> bool:
        return 0 <= self._check(node) < self.num_dies

    def host(self, server: int) -> int:
        """Return the node of a server's DRAM."""
        if not 0 <= server < self.servers:
            raise HardwareError(f"server {server} does not exist: the pod has servers 0..{self.servers - 1}")
        return self.num_dies + server

    def server_of(self, node: int) -> int:
        if self.is_die(node):
            return node // self.dies_per_server
        return node - self.num_dies

    def locate(self, die: int) -> Location:
        if not self.is_die(die):
            raise HardwareError(f"node {die} is a host, not a die")
        server, rest = divmod(die, self.dies_per_server)
        return Location(server, *divmod(rest, self.dies_per_chip))

    def name(self, node: int) -> str:
        """Return a node's name: 's03.c5.d1' for a die, 's03.host' for a host."""
        if self.is_die(node):
            server, chip, die = self.locate(node)
            return f"s{server:02d}.c{chip}.d{die}"
        return f"s{self.server_of(node):02d}.host"

    def planes_of(self, node: int) -> frozenset[Plane]:
        """Return the networks of a node. Dies reach the VPC plane only through their host."""
        return frozenset({Plane.UB, Plane.ROCE}) if self.is_die(node) else frozenset({Plane.UB, Plane.VPC})

    def check_path(self, a: int, b: int, plane: Plane) -> None:
        """Check for a path between two nodes on `plane`; UB does not leave a SuperPod. Raises HardwareError
        if there is none."""
        for node in (a, b):
            if plane not in self.planes_of(node):
                raise HardwareError(f"{self.name(node)} is not on the {plane.name} plane")
        if plane is Plane.UB and self._is_beside(a) != self._is_beside(b):
            raise HardwareError(
                f"{self.name(a)} and {self.name(b)} have no UB plane in common: none leaves a SuperPod"
            )

    def _is_beside(self, node: int) -> bool:
        return self.server_of(node) >= self.superpod_servers

    def _check(self, node: int) -> int:
        if not 0 <= node < self.num_nodes:
            raise HardwareError(
                f"node {node} does not exist: the pod has dies 0..{self.num_dies - 1} "
                f"and hosts {self.num_dies}..{self.num_nodes - 1}"
            )
        return node


# Switches between the servers of a SuperPod: how many there are, and how full (CM 3.3, Table 10).
#
# A server has a chip of its own in each of seven sub-planes, with sixteen links up. A switch is two chips of
# 48 ports each, and serves one sub-plane.

SUB_PLANES, LINKS_OF_SERVER, PORTS = 7, 16, 2 * 48


def num_switches(servers: int) -> int:
    """Number of switches needed to give every link of a server a port."""
    return SUB_PLANES * math.ceil(servers * LINKS_OF_SERVER / PORTS)


def utilisation(servers: int) -> float:
    """Share of the switches' ports with a link, 0 to 1."""
    return SUB_PLANES * servers * LINKS_OF_SERVER / (num_switches(servers) * PORTS)
