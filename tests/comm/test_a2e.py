"""A2E and E2A: trampolines, domains that overlap, and what else `contract` does not say of them."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.comm.contract import FULL, Scene, a2e, answers, batch, one_token, opened, run
from tests.comm.tools import expert, quantize, same_bits
from xdeepserve.comm import oracles
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.means import Means
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.errors import DeploymentError, ProtocolError
from xdeepserve.hw.pod import Pod

SMALL = {**FULL, "attention": 2, "experts": 3}


def test_answers_that_are_not_to_be_added_up_cannot_be_pushed() -> None:
    layout = A2ELayout(Sides((0,), Group((1,), (0, 0))), max_tokens=2, top_k=2, hidden=8, reduce=False)
    with pytest.raises(DeploymentError, match="pushes=True is for reduce"):
        msgspec.structs.replace(layout, pushes=True)


@pytest.mark.parametrize(("attention", "experts"), [(3, 5), (4, 4), (5, 2), (1, 1)])
def test_an_attention_die_posts_one_field_where_the_naive_one_posts_as_many_as_there_are_experts(
    attention: int, experts: int
) -> None:
    async def body(num_fields: int, scene: Scene) -> None:
        sides, posted = scene.ranks[0].handle.sides, list[int]()
        served = [sides.served(rank) for rank in range(experts)]
        assert sorted(itertools.chain(*served)) == list(range(attention))
        assert sum(map(bool, served)) == sides.num_trampolines == min(attention, experts)
        assert max(map(len, served)) == sides.max_served
        for rank in scene.ranks[:attention]:
            scatter = rank.die.mte.scatter

            async def count(targets: Any, *rest: Any, scatter: Callable[..., Any] = scatter) -> None:
                posted.append(len(targets.nodes))
                await scatter(targets, *rest)

            rank.die.mte.scatter = count
        assert not any(end.error for end in await run(scene, 2))
        assert posted == [num_fields] * attention * 2

    for way, num_fields in (("pull", 1), ("naive", experts)):
        sizes = {**FULL, "attention": attention, "experts": experts, "way": way}
        opened(a2e, lambda scene, n=num_fields: body(n, scene), **sizes)


async def test_domains_on_handles_of_their_own_overlap_on_the_same_expert_dies() -> None:
    """Two domains of attention dies; expert dies take A2E of one before they have sent E2A of the other."""
    group, rng, pod = Group((20, 21, 22), (0, 1, 1, 2)), np.random.default_rng(8), Pod()
    layouts = [
        A2ELayout(Sides(dies, group), max_tokens=3, top_k=2, hidden=8, name=f"d{domain}")
        for domain, dies in enumerate(((1, 2), (46, 47)))
    ]
    for layout in layouts:
        for die in layout.sides.attention:
            layout.plan_attention(pod.plan(die))
        for die in group.dies:
            layout.plan_expert(pod.plan(die))
    pod.materialise()

    async def both(rank: int, die: int) -> None:
        ends = [ExpertSide(pod.dies[die], rank, layout, quantize) for layout in layouts]
        received = [await end.a2e(1) for end in ends]
        for end, got in zip(ends, received, strict=True):
            await end.e2a(answers(got), 1)

    async def attend(side: AttentionSide) -> None:
        x, topk, weights = batch(rng, 3, 8, 2, 4)
        await side.a2e(x, topk, weights, 1)
        expected = oracles.weighted_sum(oracles.combine(x, topk, expert, quantize), weights)
        assert same_bits(await side.e2a(1), expected)

    tasks = [pod.dies[die].spawn(both(rank, die)) for rank, die in enumerate(group.dies)]
    for layout in layouts:
        for rank, die in enumerate(layout.sides.attention):
            tasks.append(pod.dies[die].spawn(attend(AttentionSide(pod.dies[die], rank, layout, quantize))))
    await asyncio.gather(*tasks)


def test_a_trampoline_that_answers_another_count_is_named() -> None:
    async def body(scene: Scene) -> None:
        rank = scene.ranks[0]
        side = rank.handle

        async def forgetful() -> None:
            await side.a2e(*one_token(side.layout), 1)
            side.num_sent += 1
            await side.e2a(1)

        tasks = [each.die.spawn(each.call(0, 1)) for each in scene.ranks[1:]]
        results = await asyncio.gather(rank.die.spawn(forgetful()), *tasks, return_exceptions=True)
        (error,) = [result for result in results if isinstance(result, BaseException)]
        assert isinstance(error, ProtocolError)
        said = "E2A': attention 0 handed 2 tokens to expert 0 in event 1, which answers with 1"
        assert str(error) == said

    opened(a2e, body, **SMALL)


def test_ends_that_cannot_be_are_refused() -> None:
    async def body(scene: Scene) -> None:
        attention, there = scene.ranks[0].handle, scene.ranks[2].handle
        die, layout = attention.die, attention.layout
        with pytest.raises(DeploymentError, match="is not attention rank 1"):
            AttentionSide(die, 1, layout, quantize)
        with pytest.raises(DeploymentError, match="needs a kernel"):
            ExpertSide(there.die, 0, layout)
        with pytest.raises(DeploymentError, match=r"1\.\.48 AIV cores to use, not 49"):
            AttentionSide(die, 0, layout, quantize, Means(49))
        with pytest.raises(DeploymentError, match="carried by mte or urma, not 'tcp'"):
            AttentionSide(die, 0, layout, quantize, Means(carrier="tcp"))  # type: ignore[arg-type]
        with pytest.raises(DeploymentError, match="attention and experts need different dies"):
            Sides((1, 2), Group((2, 3), (0, 1)))
        crowded = Sides((die.index, *range(50, 53)), Group((there.die.index,), (0,)))
        said = "cannot hold 4 attention dies, planned for 2, 4 attention dies on a trampoline, planned for 1"
        with pytest.raises(DeploymentError, match=said):
            AttentionSide(die, 0, layout, quantize, sides=crowded)

    opened(a2e, body, **SMALL)


def test_to_lose_an_expert_die_of_as_many_needs_planned_room() -> None:
    attention, experts = (0, 1, 2), (16, 17, 18)
    after = Sides(attention, Group(experts[:2], (0, 1, 1)))
    exact = A2ELayout(Sides(attention, Group(experts, (0, 1, 2))), max_tokens=2, top_k=2, hidden=8)
    with pytest.raises(
        DeploymentError,
        match="hold 2 attention dies on a trampoline, planned for 1, 2 experts on a die, planned for 1",
    ):
        exact.check_sides(after)
    spare = A2ELayout(Sides((*attention, 3), Group(experts, (0, 1, 2, 2))), max_tokens=2, top_k=2, hidden=8)
    spare.check_sides(exact.sides)
    spare.check_sides(after)
