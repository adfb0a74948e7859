"""A pod: the dies and memories of one deployment on one clock."""

from __future__ import annotations

from collections.abc import Iterable

from .address_space import AddressSpace
from .clock import Clock
from .die import Die
from .engines import Fabric
from .memory import Memory, MemoryPlan
from .ports import Ports
from .spec import Spec
from .topology import Topology
from .trace import Trace


class Pod:
    """Plan the memories, materialise them, then run programs on the dies.

    pod = Pod()
    kv = pod.plan(0).app.alloc("kv", 4096)
    pod.materialise()
    await pod.dies[0].spawn(program(pod.dies[0], kv))
    """

    def __init__(
        self,
        topology: Topology | None = None,
        spec: Spec | None = None,
        clock: Clock | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.topology = topology or Topology()
        self.spec = spec or Spec()
        self.clock = clock or Clock()
        self.trace = trace or Trace(is_on=False)
        self.memories = AddressSpace()
        ports = Ports(self.spec, self.topology)
        self.fabric = Fabric(self.clock, self.memories, self.topology, self.spec, self.trace, ports)
        self.dies: dict[int, Die] = {}

    def equip(self, nodes: Iterable[int], spec: Spec) -> None:
        """Make dies of other hardware, which exchange tokens with each other alone, before any is planned."""
        fabric = self.fabric._replace(spec=spec, ports=Ports(spec, self.topology))
        self.dies.update((node, Die(node, fabric)) for node in nodes)

    def spec_of(self, node: int) -> Spec:
        return self.dies[node].spec if node in self.dies else self.spec

    def plan(self, node: int) -> MemoryPlan:
        """The memory plan of a die or host. Planning a die makes it part of the pod."""
        if self.topology.is_die(node):
            if node not in self.dies:
                self.dies[node] = Die(node, self.fabric)
            capacity = int(self.dies[node].spec.hbm_bytes.value)
        else:
            capacity = None
        self.trace.node_names[node] = self.topology.name(node)
        return self.memories.plan(node, capacity)

    def materialise(self, limit: int | None = None) -> None:
        """Allocate all planned memory; DeploymentError if a die, or the sum against `limit`, is too small."""
        self.memories.materialise(limit)

    def memory(self, node: int) -> Memory:
        return self.memories[node]
