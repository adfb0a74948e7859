"""A memory pool on a pod: servers on some hosts, each with a volume in a directory of this computer.

Its servers, their volumes and its Controller are parts of the pod for faults to break (`hw.fault_kinds`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

from xdeepserve.ems.directory import check_directory, lock, open_volumes, server_name, volume_path
from xdeepserve.ems.model_cache import ModelCache, ModelCatalogue
from xdeepserve.ems.mp_client import MPClient
from xdeepserve.ems.mp_controller import MPController, rebalance
from xdeepserve.ems.mp_server import MPServer
from xdeepserve.ems.ring import Ring
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.bucket import Bucket
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Plane
from xdeepserve.hw.volume_file import remove

COUNTS = (  # what a server counts, in the order in which it is shown
    "dram hits",
    "dram bytes",
    "volume hits",
    "volume bytes",
    "misses",
    "lost",
    "puts",
    "put bytes",
    "refused",
    "dram evictions",
    "volume evictions",
    "mismatches",
    "failed writes",
    "rebuilt volumes",
)


class MemoryPool:
    """Memory pool of a pod. Planned when made, with InputError for an unusable directory.

    `open` must be called before the pod's memory is materialised, `start` afterwards. If the number of
    servers has changed since the directory was last used, keys move to their new servers. Volumes of servers
    that no longer exist are deleted once they are empty. In time-only runs a byte stands for `weight` bytes
    of the given sizes and of what is counted.
    """

    def __init__(
        self,
        pod: Pod,
        path: Path,
        num_servers: int,
        dram_nbytes: int,
        volume_nbytes: int,
        quotas: Mapping[str, int | None],
        weight: float = 1.0,
    ) -> None:
        check_directory(path)
        topology = pod.topology
        if num_servers > topology.superpod_servers:
            raise DeploymentError(
                f"a memory pool has a server on each of {topology.superpod_servers} hosts at most, found "
                f"{num_servers}"
            )
        self.pod, self.path, self.quotas = pod, path, dict(quotas)
        self.dram_nbytes, self.volume_nbytes = (math.ceil(n / weight) for n in (dram_nbytes, volume_nbytes))
        self._weight = weight
        self._names = [server_name(number) for number in range(num_servers)]
        nodes = [topology.host(number) for number in range(num_servers)]
        self._regions = [pod.plan(node).managed.alloc("memory pool", self.dram_nbytes) for node in nodes]
        self._nodes = nodes
        self._lock: IO[str] | None = None
        self.servers: list[MPServer] = []
        self.catalogue, self.bucket = ModelCatalogue(), Bucket(pod.clock, pod.spec)
        self.num_moved = 0  # values that other servers have now
        self._without_host: set[int] = set()  # servers
        pod.parts.update(self._parts())

    def open(self) -> None:
        """Lock the directory and open its volumes. Raises InputError, without any effect, if it is in use or
        has strange files."""
        self._lock = lock(self.path)
        try:
            volumes = open_volumes(self.path, self._names)
        except BaseException:
            self.close()
            raise
        self.num_moved = rebalance(volumes, Ring(self._names))
        for name in sorted(volumes.keys() - {*self._names}):
            volume = volumes.pop(name)
            is_empty = not volume.rows
            volume.close()
            if is_empty:
                remove(volume_path(self.path, name))
        clock = self.pod.clock
        self.servers = [
            MPServer(name, node, volumes[name], self.dram_nbytes, self.volume_nbytes, lambda: clock.now)
            for name, node in zip(self._names, self._nodes, strict=True)
        ]

    def start(self) -> None:
        """Start the servers; the hosts have their memory now."""
        for server, region in zip(self.servers, self._regions, strict=True):
            server.start(self.pod.memories, region, self.quotas)
        self.controller = MPController(self.servers, self.quotas)

    def share(self, quotas: Mapping[str, int | None]) -> None:
        """Add the namespaces of another model that shares the pool."""
        for name, quota in quotas.items():
            if name not in self.quotas:
                self.quotas[name] = quota
                self.controller.create_namespace(name, quota)

    def client(self) -> MPClient:
        """Make a client of the pool; possible after `start`."""
        return MPClient(self.controller, self.pod.cards(Plane.VPC))

    def models(self, weight: float = 1.0) -> ModelCache:
        """Make an instance's access to the models in the pool; possible after `start`. A byte takes the time
        of `weight` bytes."""
        return ModelCache(self.client(), self.catalogue, self.pod.memories, self.bucket, weight)

    def counts(self) -> dict[str, int]:
        """Return the sum of all servers' counters, by the names in `COUNTS`."""
        total: Counter[str] = Counter()
        for server in self.servers:
            total.update(server.counts)
            total["dram evictions"] += server.dram.num_evictions
            total["mismatches"] += server.volume.num_mismatches
            total["failed writes"] += server.volume.num_failed
            total["rebuilt volumes"] += server.volume.num_rebuilt
        return self._weighed({name: total[name] for name in COUNTS})

    def usage(self) -> dict[str, int]:
        """Return current values and bytes by tier."""
        used = {
            "dram values": sum(len(server.dram) for server in self.servers),
            "dram bytes": sum(server.dram.allocator.num_used for server in self.servers),
            "volume values": sum(len(server.volume.rows) for server in self.servers),
            "volume bytes": sum(server.volume.nbytes.total() for server in self.servers),
        }
        return self._weighed(used)

    def _weighed(self, counts: dict[str, int]) -> dict[str, int]:
        """Return counts, with each byte for as many as it stands for."""
        return {name: round(num * self._weight) if "bytes" in name else num for name, num in counts.items()}

    def close(self) -> None:
        """Close the volumes and unlock the directory. Harmless when repeated."""
        for server in self.servers:
            server.volume.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def check_integrity(self) -> None:
        """Check every server's records against the content of both tiers."""
        for server in self.servers:
            server.check_integrity()

    # ---- faults ------------------------------------------------------------------------------------------

    def _parts(self) -> dict[tuple[str, int], Callable[[str, bool], None]]:
        """Return the breakable parts for `Pod.parts`. Hosts are only those with a server.

        A fault does nothing where there is nothing to break: a server that is already lost, or a ring whose
        Controller is lost.
        """
        parts: dict[tuple[str, int], Callable[[str, bool], None]] = {
            ("mp_controller", 0): self._break_controller
        }
        for number in range(len(self._names)):
            parts["host", number] = partial(self._break_host, number)
            parts["mp_server", number] = partial(self._break_server, number)
            parts["volume", number] = partial(self._break_volume, number)
        return parts

    def _break_volume(self, number: int, kind: str, is_on: bool) -> None:
        self.servers[number].volume.disk.fault = kind if is_on else None

    def _break_controller(self, kind: str, is_on: bool) -> None:
        self.controller.is_lost = is_on

    def _break_host(self, number: int, kind: str, is_on: bool) -> None:
        self._without_host.add(number)
        self._break_server(number, kind, is_on)

    def _break_server(self, number: int, kind: str, is_on: bool) -> None:
        server, controller = self.servers[number], self.controller
        if kind == "lost":
            if is_on and not server.is_lost:
                server.lose()
            elif not is_on and number not in self._without_host:
                server.recover()
        elif not controller.is_lost and (server.name in controller.view().members) == is_on:
            (controller.leave if is_on else controller.join)(server.name)
