"""Read an engine's present state as parts of a frame, without changing anything or waiting."""

from __future__ import annotations

from collections.abc import Iterator

from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.page.breaking import MENU
from xdeepserve.page.parts import DieRow, GroupsPart, NowPart, PodPart, PoolPart, TERow


def pod_part(engine: Engine, no_kill: str | None) -> PodPart:
    """Make the part of the model and the TEs that run now."""
    plan, config = engine.plan, engine.plan.config
    topology, tes = plan.pod.topology, [te.plan for te in engine.je.tes]
    runs = "lockstep" if any(te.sizes.walk.is_lockstep for te in tes) else "tasks"
    return PodPart(
        model=engine.model_name,
        deployment=plan.deployment.name,
        precision=plan.recipe,
        num_layers=config.num_hidden_layers,
        num_experts=config.n_routed_experts if config.num_moe_layers else 0,
        top_k=config.num_experts_per_tok if config.num_moe_layers else 0,
        servers=topology.servers,
        superpod_servers=topology.superpod_servers,
        chips_per_server=topology.chips_per_server,
        dies_per_chip=topology.dies_per_chip,
        runs=runs if plan.timing is None else "time only",
        has_text=engine.tokenizer is not None,
        tes=[_te_row(te) for te in tes],
        dies=[row for at, te in enumerate(tes) for row in _die_rows(at, te)],
        no_kill=no_kill,
        breaks=[(kind, rule.button, rule.meaning) for kind, rule in MENU.items()],
    )


def _te_row(te: TEPlan) -> TERow:
    s = te.sizes
    return TERow(
        name=s.place.name,
        role=s.place.role,
        num_groups=s.groups.num_groups,
        num_domains=s.place.num_domains,
        num_microbatches=s.walk.num_microbatches,
        num_blocks=s.kv.num_blocks,
        block_size=s.kv.block_size,
        max_seqs=s.steps.max_seqs,
    )


def _die_rows(at: int, te: TEPlan) -> Iterator[DieRow]:
    """Yield the dies with DP groups, then the dies with experts alone."""
    place, experts = te.sizes.place, te.sizes.experts
    role = "attention" if experts.where == "away" else place.role
    for group, ranks in enumerate(te.team.group_ranks):
        for rank in ranks:
            slots = te.memories[rank].slots
            yield DieRow(te.dies[rank], at, role, rank // place.dies_per_domain, group, *_ends(slots))
    for number, die in enumerate(place.expert_dies if te.members.keeps else ()):
        kind = "vacant" if number in place.vacant else "experts"
        if experts.is_shared(number):
            kind = "shared"
        yield DieRow(die, at, kind, -1, -1, *_ends(experts.slots_of[number]))


def _ends(held: range) -> tuple[int, int]:
    return (held.start, held.stop - 1) if len(held) else (-1, -1)


def now_part(engine: Engine, num_tokens: int) -> NowPart:
    """Make the part of the moment: time, queues, lives of TEs, lost dies."""
    groups = engine.groups
    lost_servers = [server.die for te in engine.je.tes if te.members.keeps for server in te.members.silent]
    return NowPart(
        ns=engine.plan.pod.clock.now,
        num_running=sum(len(group.places.running) for group in groups),
        num_waiting=sum(group.places.num_waiting for group in groups) + engine.je.num_pending,
        num_tokens=num_tokens,
        lives=[te.life for te in engine.je.tes],
        lost=sorted(engine.lost_dies.difference(lost_servers)),
        lost_servers=lost_servers,
    )


def groups_part(engine: Engine) -> GroupsPart:
    """Make the part of the DP groups: KV blocks, queues and prefix hits."""
    groups = engine.groups
    cached = [group.rtc.num_cached for group in groups]
    return GroupsPart(
        used=[g.rtc.num_blocks - g.rtc.num_free - n for g, n in zip(groups, cached, strict=True)],
        cached=cached,
        running=[len(group.places.running) for group in groups],
        waiting=[group.places.num_waiting for group in groups],
        queries=[group.scheduler.prefixes.num_queries for group in groups],
        hits=[group.scheduler.prefixes.num_hits for group in groups],
    )


def pool_part(engine: Engine) -> PoolPart | None:
    """Make the part of the memory pool; None if there is none."""
    use = engine.plan.pool_use
    if use is None:
        return None
    pools = [group.scheduler.pool for group in engine.groups if group.scheduler.pool is not None]
    return PoolPart(
        queries=sum(pool.num_queries for pool in pools),
        hits=sum(pool.num_hits for pool in pools),
        counts=use.pool.counts(),
        usage=use.pool.usage(),
    )
