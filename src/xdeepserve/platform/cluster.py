"""A cluster of TEs as described by a file, with prices: `replay --cluster FILE` serves a trace with it.

model = "deepseek-r1"
policy = "deepserve"

[[te]]
count = 8
dies = 32

[scale]  # TEs come and go, at first there are `count`
most = 24

Or, where there are TEs with role = "prefill" and alike ones with role = "decode":

[roles]  # they change their roles as the workload does

And for any:

[pool]  # all share a memory pool of prompts' KV, whose servers come and go as the workload does
server_gib = 256
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import (
    Attention,
    CacheConfig,
    Combine,
    Deployment,
    Exchange,
    ExecutionConfig,
    ExpertConfig,
    PipelineConfig,
    SchedulerConfig,
    TPMode,
)
from xdeepserve.engine.deploy.policies import ROUTE, Route
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds
from xdeepserve.engine.description import memory_uses
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import InputError, meant
from xdeepserve.hw.spec import Spec
from xdeepserve.model.cache_layout import entries_nbytes
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_pool import FleetPool
from xdeepserve.platform.fleet_roles import FleetRoles
from xdeepserve.platform.fleet_scaling import FleetScaler
from xdeepserve.platform.fleet_words import FleetTE, KVTransfer, TERole
from xdeepserve.platform.length_predictor import Lengths
from xdeepserve.platform.pool_size import PoolBounds
from xdeepserve.platform.role_ratio import RoleBounds
from xdeepserve.platform.scale_up import ScaleUp, ScaleWays, dummy_ns, held_weights
from xdeepserve.platform.service_report import Bounds
from xdeepserve.platform.step_te import StepLimits
from xdeepserve.prices.profile import usable_nbytes
from xdeepserve.prices.step_price import Progress, StepPrice, priced, with_room
from xdeepserve.reading import Mistake, read

MAX_TES, MAX_DIES = 4096, 768
KV_BLOCK = 128  # positions
PIECES = 2  # of a KV block in each layer: latents, and keys with positions
FleetChange = FleetScaler | FleetRoles | FleetPool  # what a fleet's TEs or servers follow


class TECache(CacheConfig, frozen=True, forbid_unknown_fields=True):
    """KV cache of a cluster's TE; by default its blocks are of 128 positions, or of the trace's if larger."""

    block_size: int | None = None  # type: ignore[assignment]


class ClusterTE(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TEs of a kind, with settings and sections that a deployment of one such TE has.

    A TE that is `apart` has a half for prefill and a half for decode.
    """

    count: Annotated[int, "how many", Meta(ge=1, le=MAX_TES)] = 1
    dies: Annotated[int, "of each", Meta(ge=1, le=MAX_DIES)] = 32
    apart: Annotated[bool, "prefill and decode on a half each"] = False
    role: Annotated[TERole, "both, or prefill or decode alone, beside TEs with the other"] = "both"
    tp: Annotated[int, "dies that share a DP group", Meta(ge=1, le=MAX_DIES)] = 1
    mtp: Annotated[int, "drafts of a step", Meta(ge=0, le=2)] = 1
    acceptance: Annotated[float, "of a draft", Meta(ge=0, le=1)] = 0.9
    max_num_seqs: Annotated[int, "of a DP group", Meta(ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, "rows of a DP group's step", Meta(ge=1, le=8192)] = 1024
    tp_mode: TPMode = "tp"
    o_proj_tp: int = 1
    pipeline: PipelineConfig | None = None
    experts: ExpertConfig | None = None
    exchange: Exchange = "pull"
    combine: Combine = "bf16"
    prefill_attention: Attention = "absorbed"
    execution: ExecutionConfig = ExecutionConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: TECache = TECache()

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """Yield every contradiction, with the field concerned."""
        if self.apart and self.role != "both":
            yield "apart", f"=true has both roles, found role={self.role}"
        if self.apart and self.dies % 2:
            yield "dies", f"must be an even number, as apart=true has two halves, found {self.dies}"
        halves = self.dies // 2 if self.apart else self.dies
        if halves % self.tp:
            yield "tp", f"={self.tp} does not divide {halves} dies"
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self.scheduler, name) != getattr(SchedulerConfig(), name):
                yield "scheduler", f".{name} stands in [[te]] itself"
        if self.max_num_seqs * (1 + self.mtp) > self.max_num_batched_tokens:
            yield (
                "max_num_seqs",
                f"={self.max_num_seqs} with {self.mtp} drafts each are more rows than "
                f"max_num_batched_tokens={self.max_num_batched_tokens}",
            )


class ClusterScale(ScaleBounds, frozen=True, forbid_unknown_fields=True):
    """AutoScaler and start of TEs.

    `warm` is the number of pre-warmed TEs; by default there are always enough.
    """

    prewarmed: bool = True
    warm: int | None = None
    preloaded: bool = True
    fork: bool = True

    def wrong(self) -> list[str]:
        """List every contradiction in the section."""
        found = super().wrong()
        if self.warm is not None and not 0 <= self.warm <= MAX_TES:
            found.append(f"scale: warm must lie in [0, {MAX_TES}], found {self.warm}")
        if self.warm and not self.prewarmed:
            found.append(f"scale: warm={self.warm}, and prewarmed=false")
        return found


class ClusterPool(PoolBounds, frozen=True, forbid_unknown_fields=True):
    """A memory pool of prompts' KV: the number of servers at first, and each one's capacity."""

    servers: int = 1
    server_gib: float = 256.0

    def wrong(self) -> list[str]:
        """List every contradiction in the section."""
        found = super().wrong()
        if not self.least <= self.servers <= self.most:
            found.append(f"pool: servers={self.servers} lies outside its least and most")
        if not 1 <= self.server_gib <= 1e6:
            found.append(f"pool: server_gib must lie in [1, 1e+06], found {self.server_gib:g}")
        return found


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cluster of TEs with a routing policy for requests."""

    te: tuple[ClusterTE, ...]
    model: str = "deepseek-r1"
    policy: Route = "cost"
    stale_ms: Annotated[float, "age of hints about prefixes", Meta(ge=0, le=1e9)] = 0.05
    lengths: Lengths = "none"  # what policies are told of answers that are yet to come
    scale: ClusterScale | None = None
    roles: RoleBounds | None = None
    pool: ClusterPool | None = None

    def mistakes(self) -> Iterator[Mistake]:
        """Yield every contradiction, with the section concerned."""
        if not self.te:
            yield Mistake(("te",), "must list a section [[te]] at least")
        for number, te in enumerate(self.te):
            yield from (Mistake(("te", number, field), text) for field, text in te.mistakes())
        if wrong := ROUTE.wrong(self.policy):
            yield Mistake(("policy",), f"={self.policy} {wrong}")
        roles = {te.role for te in self.te}
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            if one in roles and other not in roles:
                yield Mistake((), f"there are TEs with role={one}, and none with role={other}")
        for name in ("scale", "roles", "pool"):
            section = getattr(self, name)
            for wrong in [] if section is None else section.wrong():
                yield Mistake((name,), wrong.removeprefix(name))
        if self.scale is not None:
            if [te.role for te in self.te] != ["both"]:
                yield Mistake(("scale",), "needs TEs of one kind, with role=both")
            elif not self.scale.least <= self.te[0].count <= self.scale.most:
                yield Mistake(("scale",), f": count={self.te[0].count} lies outside its least and most")
        if self.roles is not None:
            if [te.role for te in self.te] != ["prefill", "decode"]:
                needed = 'needs a [[te]] with role="prefill" and, after it, one with role="decode"'
                yield Mistake(("roles",), needed)
            elif self.te[0].dies != self.te[1].dies:
                yield Mistake(("roles",), "needs TEs of equally many dies")


def read_cluster(path: Path) -> Cluster:
    """Read a cluster's file. Raises InputError, in one line, for an invalid file."""
    document = read(path, "TOML", "cluster")
    cluster = document.to(Cluster)
    if wrong := list(cluster.mistakes()):
        raise document.refusal(wrong)
    return cluster


def policies_of(names: str) -> list[str]:
    """Read names of policies, with commas between them, or `all`. Raises InputError for an unknown one."""
    if names == "all":
        return list(ROUTE.rows)
    for name in names.split(","):
        if ":" in name and (wrong := ROUTE.wrong(name)):
            raise InputError(f"policy {name} {wrong}")
        if ":" not in name and name not in ROUTE.rows:
            hint, every = meant(name, ROUTE.rows), ", ".join(ROUTE.rows)
            raise InputError(f"unknown policy '{name}'{hint}: known are {every}")
    return list(dict.fromkeys(names.split(",")))


class PricedKind(msgspec.Struct, frozen=True):
    """Description of a kind of TE for a fleet, without a name."""

    price: StepPrice
    limits: StepLimits
    apart: tuple[StepPrice, StepLimits] | None
    transfer: KVTransfer
    role: TERole = "both"


def priced_kinds(
    cluster: Cluster, block: int, progress: Progress = lambda done, total: None
) -> list[PricedKind]:
    """Price the steps of each kind of TE; kinds with equal steps are priced once."""
    model, prices = resolve_model(cluster.model), dict[Deployment, tuple[StepPrice, int]]()

    def price_of(te: ClusterTE) -> tuple[StepPrice, int]:
        deployment = deployment_of(te, block)
        if deployment not in prices:
            positions = kv_positions(model, deployment)  # refused before prices are found
            prices[deployment] = priced(model, deployment, progress), positions
        return prices[deployment]

    kinds = []
    for te in cluster.te:
        price, positions = price_of(te)
        tokens = sum(te.acceptance**drafts for drafts in range(te.mtp + 1))
        limits = StepLimits(
            *(te.max_num_seqs, te.max_num_batched_tokens, positions, block, 1 + te.mtp, tokens),
            kv_block=deployment_of(te, block).cache.block_size,
        )
        apart = (price, limits) if te.apart else None
        moves = te.apart or te.role != "both"
        transfer = transfer_of(model, limits) if moves else KVTransfer()
        kinds.append(PricedKind(price, limits, apart, transfer, te.role))
    return kinds


def deployment_of(te: ClusterTE, block: int = KV_BLOCK) -> Deployment:
    """Make the deployment of a TE for the engine, or of a half of a TE that is apart. Its KV blocks are no
    smaller than the trace's, of `block` tokens."""
    dies = te.dies // 2 if te.apart else te.dies
    limits = {"max_num_seqs": te.max_num_seqs, "max_num_batched_tokens": te.max_num_batched_tokens}
    block_size = te.cache.block_size or max(KV_BLOCK, -(-block // 16) * 16)
    return Deployment(
        name=f"{dies} dies",
        kind="colocated",
        dies=dies,
        tp=te.tp,
        mtp=te.mtp,
        tp_mode=te.tp_mode,
        o_proj_tp=te.o_proj_tp,
        pipeline=te.pipeline,
        experts=te.experts,
        exchange=te.exchange,
        combine=te.combine,
        prefill_attention=te.prefill_attention,
        scheduler=msgspec.structs.replace(te.scheduler, **limits),
        cache=CacheConfig(**{**msgspec.structs.asdict(te.cache), "block_size": block_size}),
        execution=te.execution,
    )


def check_simulated(cluster: Cluster) -> None:
    """Raise InputError for settings that make no difference to TEs at the grain of a step."""
    known = {"num_blocks", "block_size"}
    for number, te in enumerate(cluster.te, 1):
        given = {
            f"{section}.{name}": value != getattr(default, name)
            for section, default in (("cache", TECache()), ("scheduler", SchedulerConfig()))
            for name, value in msgspec.structs.asdict(getattr(te, section)).items()
            if name not in known
        }
        if idle := [name for name, is_given in given.items() if is_given]:
            raise InputError(
                f"[[te]] {number}: {', '.join(idle)}: TEs at the grain of a step do without; see --exact"
            )


def scaler_of(
    cluster: Cluster, kinds: Sequence[PricedKind], fleet: Fleet, service: Bounds
) -> FleetScaler | FleetRoles | None:
    """Make the scaler of the fleet, which adds and removes TEs or changes their roles; None if the cluster
    has neither."""
    scale = cluster.scale
    if cluster.roles is not None:
        first, second = (next(te for te in fleet.tes if te.role == each.role) for each in kinds)
        model = resolve_model(cluster.model)
        scale_up = scale_up_of(model, cluster.te[0], kinds[0].price, ScaleWays())
        tes: dict[TERole, FleetTE] = {"prefill": first, "decode": second}
        return FleetRoles(fleet, tes, scale_up, cluster.roles, service)
    if scale is None:
        return None
    ways = ScaleWays(scale.prewarmed, scale.preloaded, scale.fork)
    scale_up = scale_up_of(resolve_model(cluster.model), cluster.te[0], kinds[0].price, ways)
    return FleetScaler(fleet, fleet.tes[0], scale_up, scale, service, scale.warm)


def pool_of(cluster: Cluster, fleet: Fleet) -> FleetPool | None:
    """Make the memory pool of a fleet; None without one. Raises InputError for a server without room for a
    block."""
    pool, limits = cluster.pool, fleet.tes[0].limits
    if pool is None:
        return None
    block_nbytes = limits.block * position_nbytes(resolve_model(cluster.model))
    room = int(pool.server_gib * 2**30 // block_nbytes)
    if not room:
        raise InputError(
            f"pool: server_gib={pool.server_gib:g} has no room for a block of {block_nbytes} bytes"
        )
    return FleetPool(fleet, pool.servers, room, block_nbytes, pool, Spec())


def scale_up_of(model: Checkpoint, te: ClusterTE, price: StepPrice, ways: ScaleWays) -> ScaleUp:
    """Make the costs of adding TEs of a kind."""
    return ScaleUp(held_weights(model, deployment_of(te)), dummy_ns(price), te.dies, ways)


def fleet_tes(cluster: Cluster, kinds: Sequence[PricedKind]) -> list[FleetTE]:
    """Make all TEs of the cluster, each with a name."""
    of_each = [kind for te, kind in zip(cluster.te, kinds, strict=True) for _ in range(te.count)]
    names = names_of(cluster)
    return [FleetTE(name, *msgspec.structs.astuple(kind)) for name, kind in zip(names, of_each, strict=True)]


def names_of(cluster: Cluster) -> list[str]:
    """Name all TEs of the cluster."""
    return [f"{'apart' if te.apart else te.role} {number}" for te in cluster.te for number in range(te.count)]


def kv_positions(model: Checkpoint, deployment: Deployment) -> int:
    """Compute the positions of KV of a DP group: of the blocks that are given, or as many as there is room
    for beside weights. Raises InputError for none, or too many."""
    plan = PodPlan(model, with_room(deployment), timing=TimingConfig())
    cache = plan.tes[0].sizes
    each = position_nbytes(model)
    room = min(usable_nbytes(die.has) - die.need for die in memory_uses(plan))
    free = room + cache.kv.num_blocks * cache.kv.block_size * each
    if free < each:
        raise InputError(f"deployment {deployment.name}: no room for KV beside the weights")
    has, given = int(free // each), deployment.cache.num_blocks
    if given is None:
        return has
    if given * deployment.cache.block_size > has:
        raise InputError(
            f"deployment {deployment.name}: cache.num_blocks={given}: there is room for "
            f"{has // deployment.cache.block_size} blocks of {deployment.cache.block_size} positions"
        )
    return given * deployment.cache.block_size


def position_nbytes(model: Checkpoint) -> int:
    """Return the bytes of a cached position, in all layers, on the hardware."""
    return entries_nbytes(model.config, "int8", model.config.num_hidden_layers)


def transfer_of(model: Checkpoint, limits: StepLimits) -> KVTransfer:
    """Return the times of KV from die to die over UB, by the DMA engine of the one that decodes."""
    spec, num_layers = Spec(), model.config.num_hidden_layers + limits.rows_each - 1  # each draft has one
    nbytes = limits.block_size * entries_nbytes(model.config, "int8", num_layers)
    return KVTransfer(
        ask_ns=2 * spec.command_ns(),
        start_ns=spec.startup_ns("dma"),
        block_ns=spec.pieces_ns(PIECES * num_layers, 1),
        port_ns=spec.link_ns(0, 0, nbytes),
        tell_ns=spec.command_ns(),
    )
