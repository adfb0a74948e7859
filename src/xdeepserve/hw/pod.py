"""A pod: dies and hosts with their memories, on one clock. Users take free dies and give them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import DeploymentError, HardwareError
from .address_space import AddressSpace
from .clock import Clock
from .die import Die
from .engines import Checksums, Fabric
from .fault_kinds import Moments
from .faulty_links import FaultyLinks
from .memory import PAGE_NBYTES, Memory, MemoryPlan
from .nic import Cards
from .ports import Ports
from .queue import HostCPU
from .rdma import RDMANetwork
from .spec import Spec
from .topology import Plane, Topology
from .trace import Trace


class Pod:
    """Virtual SuperPod: plan the memories, materialise them, then run programs on the dies.

    A die is free, held by a holder (`hold`), or lost. A die that is given back (`release`) is planned anew by
    its next holder.

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
        links, moments = FaultyLinks(self.clock), Moments()
        self.fabric = Fabric(
            self.clock,
            self.memories,
            self.topology,
            self.spec,
            self.trace,
            ports,
            links,
            moments,
            Checksums(),
            {},
        )
        self.dies: dict[int, Die] = {}
        self.holders: dict[int, str] = {}  # of dies that are not free, by whom
        self.lost: set[int] = set()  # dies that nobody may hold any more
        self.services: dict[str, Any] = {}  # that all who share the pod may use, by name
        # What can break besides dies, by place and number (`hw.fault_kinds`): told the kind of a fault, and
        # whether it begins or is over.
        self.parts: dict[tuple[str, int], Callable[[str, bool], None]] = {}
        self._cards: dict[Plane, Cards] = {}
        self._rdma: RDMANetwork | None = None
        self._cpus: dict[int, HostCPU] = {}

    def cpu(self, server: int) -> HostCPU:
        """Return the CPU of a server."""
        return self._cpus.setdefault(server, HostCPU(self.clock))

    def equip(self, nodes: Iterable[int], spec: Spec) -> None:
        """Make dies of other hardware before any of them is planned; they exchange tokens only with each
        other."""
        fabric = self.fabric._replace(spec=spec, ports=Ports(spec, self.topology))
        self.dies.update((node, Die(node, fabric)) for node in nodes)

    def cards(self, plane: Plane) -> Cards:
        """Return the network cards of a plane."""
        if plane not in self._cards:
            self._cards[plane] = Cards(self.fabric, plane)
        return self._cards[plane]

    @property
    def rdma(self) -> RDMANetwork:
        """Network cards of the RoCE plane, as CPU libraries use them."""
        if self._rdma is None:
            self._rdma = RDMANetwork(self.fabric, self.spec_of)
        return self._rdma

    def spec_of(self, node: int) -> Spec:
        return self.dies[node].spec if node in self.dies else self.spec

    def hbm_nbytes(self, die: int) -> int:
        """Size of a die's memory in bytes, by its own hardware. All comparisons with it call this."""
        return int(self.spec_of(die).hbm_bytes.value)

    def plan(self, node: int) -> MemoryPlan:
        """Return the memory plan of a die or host. Planning a die makes it part of the pod."""
        if self.topology.is_die(node):
            if node not in self.dies:
                self.dies[node] = Die(node, self.fabric)
            capacity = self.hbm_nbytes(node)
        else:
            capacity = None
        self.trace.node_names[node] = self.topology.name(node)
        plan = self.memories.plan(node, capacity)
        if capacity is None:  # each die of the server may come to need as much of its host
            plan.growth = self.topology.dies_per_server
        return plan

    def find_free(self, num_dies: int, start: int = 0, stop: int | None = None) -> range:
        """Find the first run of free neighbours within [start, stop). Raises DeploymentError if there is
        none."""
        first, stop = start, self.topology.num_dies if stop is None else stop
        for die in range(start, stop):
            if die in self.holders or die in self.lost:
                first = die + 1
            elif die + 1 - first == num_dies:
                return range(first, die + 1)
        num_free = sum(die not in self.holders and die not in self.lost for die in range(start, stop))
        raise DeploymentError(
            f"the pod has no {num_dies} free dies side by side: {num_free} of {stop - start} are free"
        )

    def free_dies(self, dies: Iterable[int]) -> list[int]:
        """List the free dies among `dies`."""
        return [die for die in dies if die not in self.holders and die not in self.lost]

    def restore(self, dies: Iterable[int]) -> None:
        """Make given-up dies available again, because they are well."""
        self.lost.difference_update(dies)

    def hold(self, dies: Sequence[int], holder: str) -> None:
        """Take dies for a holder. Raises DeploymentError, with none taken, if one of them is not free."""
        for die in dies:
            if die in self.lost or die in self.holders:
                why = "is lost" if die in self.lost else f"is held by {self.holders[die]}"
                raise DeploymentError(f"{holder} cannot have die {die}, which {why}")
        self.holders.update(dict.fromkeys(dies, holder))

    def lose(self, dies: Sequence[int]) -> None:
        """Note the failure of dies: their memory is scribbled over, and no holder gets them again."""
        self.lost.update(dies)
        for die in dies:
            if self.memories.is_materialised(die):
                self.memories[die].scribble()

    def break_die(self, die: int) -> None:
        """Break a die without telling anybody: its processes end, and its memory no longer answers."""
        self.lose([die])
        self.memories.silent.add(die)
        for process in self.dies[die].running:
            process.cancel()

    def lose_page(self, die: int, page: int | str) -> None:
        """Lose the content of a page of a die's memory (`hw.faults`), which its driver reports. Nothing
        happens if nothing uses the page."""
        start = self.memories.plans[die].find_page(page) if self.memories.is_materialised(die) else None
        if start is not None:
            self.dies[die].lose_page(start, min(PAGE_NBYTES, len(self.memories[die]) - start))

    def break_host(self, host: int) -> None:
        """Break a server without telling anybody: all its dies, and its DRAM."""
        first = host * self.topology.dies_per_server
        for die in range(first, first + self.topology.dies_per_server):
            if die not in self.dies:
                self.lost.add(die)
            elif die not in self.lost:
                self.break_die(die)
        if ("host", host) in self.parts:
            self.parts["host", host]("lost", True)

    def release(self, dies: Sequence[int]) -> None:
        """Give dies back to the pod. Their memory, if planned, is scribbled over and free for a new plan.

        Raises HardwareError, naming the process, if one of them still runs or waits.
        """
        planned = [die for die in dies if die in self.dies]
        for die in planned:
            running = sorted(process.get_name() for process in self.dies[die].running)
            if running:
                raise HardwareError(f"die {die} cannot be given back: {', '.join(running)} still run there")
        for die in planned:
            if die in self.memories.plans:
                self.memories.release(die)
            self.dies[die] = Die(die, self.dies[die].fabric)
        for die in dies:
            del self.holders[die]

    def materialise(self, limit: int | None = None) -> None:
        """Allocate all planned memory. Raises DeploymentError if a die, or the sum against `limit`, is too
        small."""
        self.memories.materialise(limit)

    def memory(self, node: int) -> Memory:
        return self.memories[node]
