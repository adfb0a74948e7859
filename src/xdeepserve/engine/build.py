"""Builds a pod from a model and a deployment: sizes first, then memory, then weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol

import msgspec

from xdeepserve import wings
from xdeepserve.engine.deploy.deployment import Deployment, Role
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.roles import DEPLOYMENTS
from xdeepserve.engine.deploy.scale_down import largest
from xdeepserve.engine.deploy.sizes import Sizes, TEPlace
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.shape_memory import piece_weight
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.lanes import DEFAULT_SHOWN_DIES, name_lanes
from xdeepserve.engine.loading import Loading, PoolSource, Source, read_again, read_weights
from xdeepserve.engine.run.clock.wiring import ClockWiring
from xdeepserve.engine.run.wiring import ByteWiring
from xdeepserve.engine.te.te_plan import MakeTier, TEPlan
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.engine.weight_digests import WeightDigests
from xdeepserve.errors import (
    CheckpointError,
    DeploymentError,
    HardwareError,
    LostDieError,
    PageLostError,
    XDeepServeError,
)
from xdeepserve.hw.accelerators import ACCELERATORS, atlas_a2
from xdeepserve.hw.clock import Clock, Hears
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import Recipe


class PodPool(Protocol):
    """The memory pool of a pod, as a deployment with `ems.path` uses it (ems/pool_use.py)."""

    pool: Any  # its servers and what they count
    models: Any  # its cache of models

    @property
    def make_tier(self) -> MakeTier | None:
        """Factory of a DP group's tier of cached prefixes in the pool; None before `start`."""

    def open(self) -> None:
        """Take the pool's directory, before any memory is allocated."""

    def start(self, tes: Sequence[TEPlan]) -> None:
        """Connect TEs to the pool, once their memory is allocated."""

    def weights(self, te: TEPlan) -> PoolSource:
        """Return a source for the weights of a new TE, by way of the pool."""

    def crowd(self) -> None:
        """Leave no room in the pool, so the next value put there evicts others."""

    def close(self) -> None:
        """Release the pool's directory. Harmless when repeated."""


class OutsideServers(Protocol):
    """Expert servers of a TE in processes of their own (remote/servers_outside.py)."""

    def launch(self) -> None:
        """Start the monitor and the servers, unless the deployment names a monitor.

        The servers load their weights meanwhile.
        """

    async def start(self, hears: Hears) -> None:
        """Wait for links to servers of all experts; raise XDeepServeError if some cannot be reached.

        `hears` is told of an error by which links are no longer kept.
        """

    async def stop(self) -> None:
        """End all links and server processes."""

    def close(self) -> None:
        """End the server processes. Harmless when repeated."""


class PodPlan:
    """Plan of a pod: sized and checked, without memory. Raises DeploymentError if it cannot be built.

    `description.describe` describes it. `materialise` allocates memories; `pieces` allocates all of them and
    loads the weights. `spec` replaces the default hardware. `trace_dies` is how many dies of each role a
    trace shows (0: all). With `timing`, runs take virtual time and compute nothing, and any checkpoint will
    do: only its config is read. With `pod`, the plan becomes part of a running pod, on its hardware and
    clock, where dies are free.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        deployment: Deployment,
        recipe: Recipe = "int8",
        clock_seed: int | None = None,
        trace: bool = False,
        spec: Spec | None = None,
        trace_dies: int = DEFAULT_SHOWN_DIES,
        timing: TimingConfig | None = None,
        pod: Pod | None = None,
    ) -> None:
        self.timing = timing
        if timing is None and not checkpoint.has_weights:
            raise CheckpointError(
                f"model {checkpoint.name}: a configuration without weights; only timing-only runs "
                "(xdeepserve generate --timing-only, sweep, plan, bench superpod, bench engine) can use it"
            )
        self.checkpoint, self.deployment, self.recipe = checkpoint, deployment, recipe
        self.config = with_answers(checkpoint.config, deployment, recipe)
        sizes = fit(deployment, self.config, is_timing_only=timing is not None)
        self.max_model_len = sizes[0].steps.max_model_len
        self.is_guest = pod is not None
        self.pod = pod or self._make_pod(
            [te.place for te in sizes], spec or Spec(), Clock(clock_seed), Trace(is_on=trace)
        )
        self.pod.fabric.checksums.is_on |= deployment.checksums
        weight = (
            1.0
            if timing is None
            else piece_weight(self.config, recipe, sizes[0].kv.block_size, sizes[0].steps)
        )
        self.pool_use = self._plan_pool_use(weight)
        self.tes: list[TEPlan] = []
        self.loadings: dict[str, Loading] = {}  # of TEs that join, by name
        self._digests = WeightDigests()
        self._cached: set[int] = set()  # servers whose page cache has the checkpoint
        self.num_added = Counter(te.place.role for te in sizes)  # TEs of each role that there have been
        self._first: dict[Role, Sizes] = {}  # of each role, before a place was found for it
        self.outside: list[OutsideServers] = []  # expert servers that are processes
        for te in sizes:
            self._first.setdefault(te.place.role, te)
        try:
            for te in sizes:
                self.tes.append(self._plan_te(te if pod is None else self._moved(te)))
        except XDeepServeError:
            for planned in self.tes:
                planned.release()
            raise
        self._trace_dies = trace_dies
        name_lanes(self.pod, [te.sizes.place for te in self.tes], trace_dies)

    def _make_pod(self, tes: Sequence[TEPlace], spec: Spec, clock: Clock, trace: Trace) -> Pod:
        """Make a pod with room for these TEs.

        Dies that do not fit into a CloudMatrix384, or are of other hardware, are beside it.
        """
        pod = pod_for(tes, self._sized(spec), clock, trace)
        for te in tes:
            if te.hardware == "910b":
                pod.equip(te.dies, self._sized(atlas_a2(te.num_dies)))
            for device, dies in zip(te.devices, (te.dies, te.expert_dies), strict=True):
                if device != "cm384":
                    pod.equip(dies, self._sized(ACCELERATORS[device].spec))
        return pod

    def _moved(self, sizes: Sizes) -> Sizes:
        """Return the same TE on the first free dies of the pod."""
        if sizes.place.is_foreign:
            foreign = {sizes.place.hardware, *sizes.place.devices} - {"cm384"}
            raise DeploymentError(
                f"deployment {self.deployment.name}: a pod has {', '.join(sorted(foreign))} dies from its "
                "start, or none"
            )
        shared = self._servers_for(sizes)
        if shared is not None:
            return shared.sizes.at(
                [*self.pod.find_free(shared.sizes.place.num_dies), *shared.servers_at_first]
            )
        return sizes.at(self.pod.find_free(sizes.place.num_dies + sizes.place.num_expert_dies))

    def _servers_for(self, sizes: Sizes) -> TEPlan | None:
        """Return a TE whose expert servers one more TE can share; None if it must bring its own."""
        if sizes.groups.num_tes == 1:
            return None
        return next((te for te in self.tes if te.members.set.free_number is not None), None)

    def most_dies(self, role: Role, limit: int) -> int | None:
        """Return how many of `limit` dies a TE like the first of its role can use; None if it needs more."""
        shared = self._servers_for(self._first[role]) if role in self._first else None
        if shared is not None:
            num_dies = shared.sizes.place.num_dies
            return num_dies if num_dies <= limit else None
        sizes = self._largest(role, limit)
        return None if sizes is None else len(sizes.place.every_die)

    def least_dies(self, role: Role) -> int:
        """Return the smallest number of dies with which a TE of this role can be built."""
        return next(num for num in count(1) if self.most_dies(role, num) is not None)

    def _largest(self, role: Role, most: int) -> Sizes | None:
        return largest(self.deployment, self.config, role, most, self.timing is not None)

    def _fitted(self, role: Role, dies: Sequence[int]) -> Sizes:
        """Return the largest TE of a role that these dies have room for, on the first of them."""
        shared = self._servers_for(self._first[role])
        if shared is not None and shared.sizes.place.num_dies <= len(dies):
            return shared.sizes.at([*dies[: shared.sizes.place.num_dies], *shared.servers_at_first])
        sizes = self._largest(role, len(dies))
        if sizes is None:
            needed = self.least_dies(role)
            raise DeploymentError(
                f"deployment {self.deployment.name}: {len(dies)} dies are too few for a TE of role {role}: "
                f"{needed} are needed at least"
            )
        return sizes.at(dies[: len(sizes.place.every_die)])

    def add(self, role: Role = "both", dies: Sequence[int] | None = None) -> TEPlan:
        """Plan a further TE on free dies, like the first of its role.

        With `dies`, it is the largest such TE that these have room for, on the first of them.
        DeploymentError, and nothing has happened, if the deployment has no such TEs or the pod has no room.
        """
        if self.outside:
            raise DeploymentError(
                f"deployment {self.deployment.name}: with expert servers that are processes there is one TE"
            )
        sizes = self._first.get(role) if isinstance(role, str) else None
        if sizes is None:
            roles = " and ".join(self._first)
            raise DeploymentError(
                f"deployment {self.deployment.name} has {roles} TEs, none of role {role} that another could "
                "be like"
            )
        number = self.num_added[role]
        name = next(row for row in DEPLOYMENTS[self.deployment.kind] if row.role == role).te_name(number)
        placed = self._moved(sizes) if dies is None else self._fitted(role, dies)
        te = self._plan_te(placed.called(name))
        self.num_added[role] += 1
        self.tes.append(te)
        name_lanes(self.pod, [te.sizes.place for te in self.tes], self._trace_dies)
        return te

    def _sized(self, spec: Spec) -> Spec:
        """Return a hardware specification with the HBM size set by the deployment."""
        if self.deployment.hardware.hbm_mb is None:
            return spec
        hbm = Param(self.deployment.hardware.hbm_mb * 2**20, "B", "the deployment's hardware.hbm_mb")
        return msgspec.structs.replace(spec, hbm_bytes=hbm)

    @property
    def kv_weight(self) -> float:
        """Bytes of KV represented by each byte sent from TE to TE; 1 unless the run is time-only."""
        return next((te for te in self.tes if te.sizes.place.role != "both"), self.tes[0]).kv_weight

    def _plan_te(self, sizes: Sizes) -> TEPlan:
        """Take the dies of a TE and plan their memories.

        DeploymentError, and nothing has happened, if that fails.
        """
        shared = self._servers_for(sizes)
        servers = None if shared is None else shared.members.set
        number = 0 if servers is None else servers.free_number or 0
        team = Team(self.pod, self.config, self.recipe, sizes, number, brings_servers=servers is None)
        dies = sizes.place.every_die if servers is None else sizes.place.dies
        self.pod.hold(dies, f"{sizes.place.name} of {self.checkpoint.name}")
        try:
            wiring = ByteWiring(team) if self.timing is None else self._clock_wiring(team, shared)
            load_mode = self.deployment.cache.load if self.timing is None else "never"
            te = TEPlan(wiring, self.checkpoint, load_mode, servers)
            self.pod.memories.check(limit=physical_memory())
        except (DeploymentError, HardwareError) as error:
            self.pod.release(dies)
            raise DeploymentError(f"deployment {self.deployment.name}: {error}") from None
        if isinstance(wiring, ByteWiring) and wiring.seats_outside is not None:
            servers = wings.part("servers outside")(wiring.seats_outside, te, self.deployment, self.recipe)
            self.outside.append(servers)
        return te

    def _clock_wiring(self, team: Team, shared: TEPlan | None) -> ClockWiring:
        assert self.timing is not None
        other = None if shared is None else shared.wiring
        return ClockWiring(team, self.timing, other if isinstance(other, ClockWiring) else None)

    def _plan_pool_use(self, weight: float) -> PodPool | None:
        """Plan the use of a memory pool, if the deployment has one, in which a byte stands for `weight`
        bytes; InputError if its directory is unusable."""
        if self.deployment.ems.path is None:
            return None
        pool: PodPool = wings.part("memory pool")(self.pod, self.deployment, self.is_guest, weight)
        return pool

    def close(self) -> None:
        """Release all resources outside the process, and a guest's dies of a pod that goes on.

        Harmless when repeated.
        """
        if self.is_guest:
            for te in list(self.tes):
                self.release(te)
        if self.pool_use is not None:
            self.pool_use.close()
        for outside in self.outside:
            outside.close()

    def materialise(self, tes: Sequence[TEPlan]) -> None:
        """Allocate the memories of TEs, and bind their buffers to them."""
        self.pod.materialise()
        for te in tes:
            te.make_tier = None if self.pool_use is None else self.pool_use.make_tier
            for die, mem in te.all_memories:
                mem.materialise(self.pod.memory(die))

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Allocate all memories and load the weights into them, before the engine starts.

        Yields after each tensor: bytes done, bytes in all.
        """
        try:
            yield from self._pieces()
        except BaseException:
            self.close()
            raise

    def _pieces(self) -> Iterator[tuple[int, int]]:
        if self.pool_use is not None:
            self.pool_use.open()
        for outside in self.outside:
            outside.launch()
        self.materialise(self.tes)
        if self.pool_use is not None:
            self.pool_use.start(self.tes)
        if self.timing is None:
            yield from read_weights(self.tes)
            self._digests.learn(self.tes)
        self._cache(self.tes)

    async def mend(self, te: TEPlan, pages: Sequence[PageLostError]) -> None:
        """Read weights again from storage, in virtual time, for pages that a TE has lost.

        From within a process. HardwareError if the bytes differ from the earlier ones.
        """
        prefix = "weights/"
        lost: dict[int, set[str]] = {}
        for page in pages:
            regions = self.pod.memory(page.die).regions_at(page.offset, page.stop)
            found = {each.name.removeprefix(prefix) for each in regions if each.name.startswith(prefix)}
            lost[page.die] = lost.get(page.die, set()) | found
        await read_again(te, te.all_memories, lost)
        if self.pod.lost.isdisjoint(te.every_die):
            self._digests.check_arrays(te.all_memories, "storage", lost)

    async def bring_server(self, te: TEPlan, die: int, mem: ExpertMemory) -> None:
        """Bring the weights of a further expert server from storage, in virtual time.

        From within a process. HardwareError if the bytes differ from those of other servers like it.
        """
        wanted = {die: mem.specs.keys()}
        await read_again(te, [(die, mem)], wanted)
        if die not in self.pod.lost:
            self._digests.check_arrays([(die, mem)], "storage", wanted)

    async def bring(
        self,
        te: TEPlan,
        source: Source,
        peers: Callable[[], Sequence[TEPlan]],
        mend: Callable[[], Awaitable[None]],
    ) -> None:
        """Bring the weights of a further TE in virtual time, then `mend` pages lost meanwhile.

        From within a process. `peers` returns the TEs that are ready. HardwareError if the bytes differ from
        the first load; LostDieError if a die has failed meanwhile.
        """
        pool = None if self.pool_use is None else self.pool_use.weights(te)
        self.loadings[te.name] = loading = Loading(te, source, peers, self._cached, pool, self.loadings)
        try:
            await loading.run(is_timing_only=self.timing is not None)
            await mend()
            for die in sorted(self.pod.lost.intersection(te.every_die)):
                raise LostDieError(f"die {die} of {te.name} is lost: its memory does not answer")
            if self.timing is None:
                self._digests.check(te, loading.source)
        except BaseException:
            loading.give_up()
            raise
        finally:
            del self.loadings[te.name]
        self._cache([te])

    def _cache(self, tes: Sequence[TEPlan]) -> None:
        """Record page caches: the servers of these TEs have the weights there now."""
        server_of = self.pod.topology.server_of
        self._cached |= {server_of(die) for te in tes for die, _ in te.all_memories}

    def release(self, te: TEPlan) -> None:
        """Release the dies of a planned task executor that will not be started."""
        self.tes.remove(te)
        te.release()


def pod_for(
    tes: Sequence[TEPlace], spec: Spec | None = None, clock: Clock | None = None, trace: Trace | None = None
) -> Pod:
    """Make a CloudMatrix384, or a pod with more servers if these TEs need them."""
    topology = Topology()
    needed = 1 + max(die for te in tes for die in te.every_die)
    servers = max(topology.servers, -(-needed // topology.dies_per_server))
    return Pod(msgspec.structs.replace(topology, servers=servers), spec, clock, trace)


def with_answers(config: ModelConfig, deployment: Deployment, recipe: Recipe) -> ModelConfig:
    """Return the model's configuration with the rounding of experts' outputs that the deployment asks for.

    DeploymentError if the recipe has no such rounding. The rounding of outputs on their way back is part of
    the arithmetic, like the recipe.
    """
    if deployment.combine == "bf16":
        return config
    if recipe != "int8":
        raise DeploymentError(
            f"deployment {deployment.name}: combine=int8 is for precision int8; in {recipe} nothing that "
            "travels is rounded"
        )
    return msgspec.structs.replace(config, int8_answers=True)


def physical_memory() -> int | None:
    """Return the bytes of memory in this computer; None if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
