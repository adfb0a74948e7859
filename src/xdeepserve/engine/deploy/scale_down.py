"""Vertical scale-down: a TE like those of a deployment, with fewer dies (xDeepServe 6.2, stage 2).

The smaller TE has fewer DP groups and fewer EP ranks, and each routed expert still has a die. Where experts
have dies of their own, both sides shrink in proportion, as nearly as possible.
"""

from __future__ import annotations

from collections.abc import Iterator

from xdeepserve.engine.deploy.deployment import AttentionConfig, Deployment, Role
from xdeepserve.engine.deploy.fitting import size
from xdeepserve.engine.deploy.sizes import Sizes
from xdeepserve.engine.deploy.teams import Teams, TEDies
from xdeepserve.model.config import ModelConfig


def largest(
    deployment: Deployment, config: ModelConfig, role: Role, most: int, is_timing_only: bool = False
) -> Sizes | None:
    """Size the first TE of a role, or a smaller one like it, to have at most `most` dies.

    None if even the smallest has more. The TE's place is not decided yet.
    """
    tes = [te for te in Teams(deployment, config, is_timing_only).tes() if te.kind.role == role]
    if not tes:
        return None
    smaller = _smaller(tes[0], (deployment.attention or AttentionConfig()).domains)
    for te, num_domains in ((te, num_domains) for te, num_domains in smaller if te.total <= most):
        return size(deployment, config, te, 0, is_timing_only, num_domains)
    return None


def _smaller(te: TEDies, num_domains: int) -> Iterator[tuple[TEDies, int]]:
    """Yield the TE itself and then ever smaller ones, each with its number of DP domains."""
    if not te.num_routed_dies:
        step = max(te.given.tp or 1, te.given.o_proj_tp)
        for num_dies in range(te.num_dies, 0, -step):
            yield te._replace(num_dies=num_dies, num_shared_dies=min(te.num_shared_dies, num_dies)), 1
        return
    per_domain = te.num_dies // num_domains
    attention = {d * dies: d for d in range(1, num_domains + 1) for dies in range(1, per_domain + 1)}
    pairs = [(num, routed) for num in attention for routed in range(1, te.num_routed_dies + 1)]

    def key(pair: tuple[int, int]) -> tuple[int, float]:
        shares = pair[0] / te.num_dies, pair[1] / te.num_routed_dies
        return -sum(pair), -min(shares)

    for num, routed in sorted(pairs, key=key):
        yield te._replace(num_dies=num, num_routed_dies=routed), attention[num]
