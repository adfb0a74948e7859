"""Plan of a TE before it runs: its dies' memories, their programs, and the parts the TE is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec

from xdeepserve.comm.distflow.channels import channel_layout, plan_channels
from xdeepserve.comm.distflow.link_probe import plan_link_probe
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.engine.balance.reconfigure import ExpertStorage, Reconfiguration
from xdeepserve.engine.balance.trigger import EPLBTrigger
from xdeepserve.engine.deploy.policies import EVICTION, PLACEMENT, VICTIM
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.dp.events import EventLog, GroupId, ReplicasChanged, StepCut
from xdeepserve.engine.dp.group import DPGroup, GivesWay
from xdeepserve.engine.dp.prefixes import ShouldLoad
from xdeepserve.engine.dp.scheduler import PrefixTier
from xdeepserve.engine.messages import CopyDone, PoolReady, StepFailed
from xdeepserve.engine.numbers import GroupRank, Seat, StepNo
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.recovery.rollback_field import plan_rollback_field
from xdeepserve.engine.run.clock.wiring import ClockWiring
from xdeepserve.engine.run.executors import Wiring, executor
from xdeepserve.engine.run.wiring import ByteWiring
from xdeepserve.engine.te.forecast import EvenLoads, Forecast
from xdeepserve.engine.te.host import Host
from xdeepserve.engine.te.members import Members, ServerSet, Stay
from xdeepserve.engine.te.status_gather import StatusGather, plan_statuses
from xdeepserve.engine.walk.launcher import Launcher
from xdeepserve.engine.ways.services.real import Services
from xdeepserve.errors import OutOfMemoryError
from xdeepserve.hw.memory import Area
from xdeepserve.hw.queue import HostQueue, Queue
from xdeepserve.hw.spec import Spec, Work
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.step.linear import Threads

if TYPE_CHECKING:
    from xdeepserve.engine.run.lockstep.lockstep import Lockstep


# What makes a DP group's tier of prefixes, in a memory pool or on other TEs; it reports what has come to the
# queue of the group's master.
MakeTier = Callable[[DPGroup, Callable[[PoolReady | CopyDone | StepFailed], None]], PrefixTier]


def free_host_of(holder: DieMemory | ExpertMemory) -> None:
    """Free a die's regions in its host's memory."""
    for region in holder.host_regions:
        region.area.free(region)


class TEPlan:
    """Dies of a TE with their memories, and how they exchange tokens."""

    def __init__(
        self, wiring: Wiring, checkpoint: Checkpoint, load_mode: str, servers: ServerSet | None = None
    ) -> None:
        self.wiring, self.team, self.checkpoint, self._load_mode = wiring, wiring.team, checkpoint, load_mode
        self.make_tier: MakeTier | None = None  # where prefixes outlive TEs, or are read from others
        self.num_readers = 0  # TEs that are loading from the memory of this one
        self.num_reports = 0  # of its dies' drivers, so far
        self.is_given_up = False  # then its weights are no good for another TE
        team = wiring.team
        self.pod, self.config, self.recipe, self.sizes = team.pod, team.config, team.recipe, team.sizes
        self.dies = team.dies
        outside = wiring.seats_outside if isinstance(wiring, ByteWiring) else None
        num_seats = 0 if self.services is None else self.services.servers.num_ranks
        self.members = Members(team, num_seats, outside, servers)
        self.memories = [wiring.memory(rank) for rank in team.ranks]
        self._plan_links()
        if self.gathers_statuses:
            for ranks in team.group_ranks:
                plan_statuses(self.pod.plan(self.dies[ranks[0]]), len(team.group_ranks))
        for server in self.members.servers if team.brings_servers else ():
            server.mem = wiring.expert_memory(server.seat)
        for die in self.every_die:
            plan_rollback_field(self.pod.plan(die))
        try:
            self._plan_hosts()
        except OutOfMemoryError:
            self._free_hosts()
            raise

    @property
    def name(self) -> str:
        """Name of the TE, unique in its pod's deployment."""
        return self.sizes.place.name

    def _plan_links(self) -> None:
        """Reserve memory on the dies of prefill and decode TEs for links to TEs of the other role."""
        if self.sizes.place.role == "both":
            return
        kv = self.sizes.kv
        layout = channel_layout(self.kv_weight, has_rings=kv.over == "send-receive")
        for die in self.dies:
            if kv.over != "dma":
                plan_channels(self.pod.plan(die), layout, kv.num_peers)
            plan_link_probe(self.pod.plan(die), self.memories[0].kv.block_nbytes, self.kv_weight)

    @property
    def gathers_statuses(self) -> bool:
        """Whether a leader gathers the statuses of the DP groups; false if there is only one group."""
        return self.sizes.groups.gathers_statuses and self.sizes.groups.num_groups > 1

    @property
    def kv_weight(self) -> float:
        """Bytes of KV represented by each byte sent from TE to TE; 1 unless the run is time-only."""
        return self.memories[0].kv.piece_weight

    def _plan_hosts(self) -> None:
        """Reserve the dies' regions in the memories of their hosts."""
        if self.sizes.kv.num_host_blocks:
            for die, mem in zip(self.dies, self.memories, strict=True):
                mem.kv.plan_host(self._host_of(die), die)
        for die, holder in self.all_memories:
            if holder.redundant is not None:
                holder.redundant.plan_staging(self._host_of(die), die)

    def _host_of(self, die: int) -> Area:
        """Return the memory area of the host that a die belongs to."""
        topology = self.pod.topology
        return self.pod.plan(topology.host(topology.server_of(die))).app

    @property
    def is_in_use(self) -> bool:
        """Whether anything runs on the TE's dies, or uses their memory."""
        pod = self.pod
        return bool(self.num_readers) or any(
            pod.dies[die].running or pod.memories.is_in_use(die)
            for die in (*self.every_die, *self._spare_dies)
            if die in pod.dies
        )

    @property
    def services(self) -> ServiceLayout | None:
        """Memory shared by clients and servers where experts are services; None elsewhere."""
        return self.wiring.services

    @property
    def can_miss_clients(self) -> bool:
        """Whether the TE goes on when DP groups are lost.

        It does if experts are services in the pod, each group has one die, and no leader gathers statuses or
        loads of all groups. With servers in other processes it does not, because the monitor there looks at
        servers alone.
        """
        is_alone = self.sizes.groups.tp == 1 and not (self.gathers_statuses or self.eplb_trigger())
        return self.services is not None and not self.sizes.place.has_servers_outside and is_alone

    @property
    def has_bad_pages(self) -> bool:
        """Whether the dies' memories have lost pages that are not restored yet."""
        return not self.pod.memories.bad_pages.keys().isdisjoint(self.every_die)

    def release(self) -> None:
        """Give all memory and dies back to the pod; HardwareError if something still runs there."""
        self.pod.release((*self.every_die, *self._spare_dies))
        self._free_hosts()
        for member in self._spare:
            self.members.move(member, "free")
        self.members.set.give_up(self.members)

    @property
    def _spare(self) -> list[Stay]:
        return self.members.spare if self.members.keeps else []

    @property
    def _spare_dies(self) -> list[int]:
        return sorted(member.die for member in self._spare)

    def _free_hosts(self) -> None:
        parting = (member.mem for member in self._spare)
        for holder in (*(mem for _, mem in self.all_memories), *parting):
            if holder is not None:
                free_host_of(holder)

    @property
    def _by_services(self) -> Services | None:
        away = self.wiring.away if isinstance(self.wiring, ByteWiring) else None
        return away if isinstance(away, Services) else None

    @property
    def late_servers(self) -> list[int]:
        """Seats of expert servers that clients leave out because an answer is late."""
        return [] if self._by_services is None else self._by_services.late_servers()

    async def look_at_late_servers(self) -> None:
        """Look whether late expert servers in processes of their own have answered."""
        if self._by_services is not None:
            await self._by_services.look_at_late()

    def plan_server(self, number: int, die: int) -> ExpertMemory:
        """Plan and materialise the memory of an expert server that joins at seat `number`.

        OutOfMemoryError if there is no room.
        """
        services, plan = self.services, self.pod.plan(die)
        assert services is not None
        assert isinstance(self.wiring, ByteWiring)
        services.plan_server(plan)
        mem = self.wiring.server_memory(number, die)
        plan_rollback_field(plan)
        if mem.redundant is not None:
            mem.redundant.plan_staging(self._host_of(die), die)
        self.pod.materialise()
        mem.materialise(self.pod.memory(die))
        return mem

    def give_back(self, die: int, mem: ExpertMemory | None) -> None:
        """Free the die of an expert server that has left, or that does not join."""
        if mem is not None:
            free_host_of(mem)
        self.pod.release([die])

    @property
    def expert_dies(self) -> tuple[int, ...]:
        """Dies with experts and no attention that count as the TE's own."""
        return tuple(server.die for server in self._kept)

    @property
    def servers_at_first(self) -> tuple[int, ...]:
        """Dies of all seats of expert servers as they were planned; TEs that share servers agree on them."""
        return self.sizes.place.expert_dies

    @property
    def _kept(self) -> list[Stay]:
        return self.members.servers if self.members.keeps else []

    @property
    def spec(self) -> Spec:
        """Hardware specification of the TE's dies."""
        return self.pod.spec_of(self.dies[0])

    @property
    def every_die(self) -> tuple[int, ...]:
        """Dies with DP groups, then dies with experts alone."""
        return (*self.dies, *self.expert_dies)

    @property
    def all_memories(self) -> list[tuple[int, DieMemory | ExpertMemory]]:
        """Every die of the TE with its memory."""
        return [
            *zip(self.dies, self.memories, strict=True),
            *((server.die, server.mem) for server in self._kept if server.mem is not None),
        ]

    def groups(self, tell: EventLog) -> list[DPGroup]:
        """Create the DP groups, each on neighbours among the dies."""
        all_ranks, should_load, settings = self.team.group_ranks, self.should_load(), self.sizes.settings
        gives_way = GivesWay(VICTIM.function(settings.victim), EVICTION.function(settings.eviction))
        return [
            DPGroup(
                GroupId(self.name, GroupRank(group)),
                [self.pod.dies[self.dies[rank]] for rank in ranks],
                [self.memories[rank] for rank in ranks],
                len(all_ranks),
                self.sizes.steps,
                should_load,
                tell,
                gives_way,
            )
            for group, ranks in enumerate(all_ranks)
        ]

    def inboxes(self, groups: Sequence[DPGroup]) -> list[HostQueue[msgspec.Struct]]:
        """Create the queues of the DP groups' masters, each on the server of its group's first die."""
        return [self.host_queue(group.dies[0].index, f"inbox of {group.id}") for group in groups]

    def status_gather(self, groups: Sequence[DPGroup]) -> StatusGather | None:
        """Create the leader's part that gathers statuses; None if it knows them without."""
        return StatusGather(groups, self.sizes.walk.timeout_ns) if self.gathers_statuses else None

    def executors(self, threads: Threads, reports: Sequence[Queue[msgspec.Struct]]) -> list[Executor]:
        """Create the programs of dies with DP groups, each with the queue for its reports."""
        return [
            executor(self.wiring, rank, mem, threads, queue)
            for rank, mem, queue in zip(self.team.ranks, self.memories, reports, strict=True)
        ]

    def host(self, executors: Sequence[Executor]) -> Host | None:
        """Create the host's delays, and its launchers of the programs of dies; None for a host that costs
        nothing."""
        execution = self.sizes.settings.execution
        if execution is None:
            return None
        for each in executors:
            each.use_launcher(Launcher(each.die, execution))
        seed = self.sizes.settings.seed + 1_000_003 * self.dies[0]  # each TE's delays are its own
        return Host(execution, self.spec, len(self.team.group_ranks), seed)

    @property
    def num_at_once(self) -> int:
        """Number of a DP group's steps that may be under way at once."""
        return 1 + self.sizes.steps.plans_ahead

    @property
    def groups_meet(self) -> bool:
        """Whether every step is a step of all DP groups, whose dies meet in it."""
        return not self.sizes.walk.flows

    def num_parts(
        self, executors: Sequence[Executor], groups: Sequence[DPGroup], tell: EventLog
    ) -> Callable[[StepNo], int]:
        """Create the function that decides how many overlapping microbatches the dies cut a step into."""
        if self.sizes.walk.is_dynamic:
            timing = self.wiring.timing if isinstance(self.wiring, ClockWiring) else None
            loads = EvenLoads(self.config, self.sizes.experts, len(self.dies), timing)
            forecast = Forecast(executors[0], loads, self.team)
            return partial(self._decide, forecast, groups, tell)
        always = self.sizes.walk.num_parts
        return lambda _: always

    def _decide(self, forecast: Forecast, groups: Sequence[DPGroup], tell: EventLog, step: StepNo) -> int:
        """Return how many microbatches a step is cut into, and tell if it is not whole."""
        num_parts = forecast.num_parts([group.outlook(step) for group in groups])
        if num_parts > 1:
            tell(StepCut(self.name, step, num_parts))
        return num_parts

    def make_program(self, server: Stay, threads: Threads, reports: Queue[msgspec.Struct]) -> None:
        """Create the program of an expert die."""
        assert server.mem is not None
        server.program = self.wiring.expert_program(server.seat, server.mem, threads, reports)

    def lockstep_runs(
        self, executors: Sequence[Executor], programs: Sequence[ExpertProgram], threads: int
    ) -> list[Lockstep]:
        """Create the lockstep that runs the layers of these dies; an empty list without lockstep."""
        if not self.sizes.walk.is_lockstep:
            return []
        from xdeepserve.engine.run.lockstep.choice import lockstep_runs  # kernels that take a while to import

        assert isinstance(self.wiring, ByteWiring)
        return lockstep_runs(self.wiring, executors, programs, threads)

    def host_queue(self, die: int, name: str) -> HostQueue[msgspec.Struct]:
        """Create a queue for a loop that runs on the server of a die."""
        topology = self.pod.topology
        return HostQueue(self.pod.clock, name, self.pod.cpu(topology.server_of(die)))

    def eplb_trigger(self) -> EPLBTrigger | None:
        """Create the trigger for new replicas of experts; None without redundant slots, or if copies fill
        them."""
        if not self.sizes.experts.has_slots or self.sizes.experts.copies_of:
            return None
        place = PLACEMENT.function(self.sizes.settings.placement)
        return EPLBTrigger(self.sizes.experts, self.config.num_experts_per_tok, place)

    def reconfiguration(
        self, trigger: EPLBTrigger, reports: Queue[msgspec.Struct], tell: EventLog
    ) -> Reconfiguration:
        """Create the part for changing replicas of experts; the TE must have redundant slots."""
        gates = list(zip(self.dies, self.memories, strict=True))
        holders = self.all_memories[-len(self.sizes.experts.experts_of) :]
        storage = ExpertStorage(self.checkpoint, self.recipe, self.sizes.experts)
        gets_replicas = self.members.gets_replicas
        return Reconfiguration(
            *(self.pod, self.sizes.experts, gates, holders, storage, trigger, reports),
            is_out=lambda holder: self.services is not None and not gets_replicas(Seat(holder)),
            on_change=lambda num_slots: tell(ReplicasChanged(self.name, num_slots)),
        )

    def rollback(self) -> Rollback:
        """Create the host's part of token recomputation."""
        config, timeout_ns = self.sizes.settings.recovery, self.sizes.walk.timeout_ns
        return Rollback(
            *(self.name, self.pod, self.dies, lambda: self.members.taking_part, config, timeout_ns),
            self.members.set.epochs,
        )

    def should_load(self) -> ShouldLoad | None:
        """Create the rule whether cached KV blocks are loaded from host DRAM or their tokens computed again,
        whichever is sooner (DeepServe 4.3); None if there is none to load."""
        if not self.sizes.kv.num_host_blocks or self._load_mode == "never":
            return None
        if self._load_mode == "always":
            return lambda num_blocks, num_tokens: True
        spec, block_nbytes = self.spec, self.memories[0].kv.block_nbytes

        def is_sooner(num_blocks: int, num_tokens: int) -> bool:
            load_ns = spec.startup_ns("dma") + spec.link_ns(0, num_blocks * block_nbytes, 0)
            return load_ns < self.computing_ns(num_tokens)

        return is_sooner

    @cached_property
    def _ops_per_token(self) -> float:
        return 2.0 * sum(each.nbytes for each in self.memories[0].specs.values())  # every weight byte once

    def computing_ns(self, num_tokens: int) -> float:
        """Estimate the time (ns) to compute tokens whose KV blocks could be brought instead."""
        return self.spec.stage_ns(Work(int8=num_tokens * self._ops_per_token))
