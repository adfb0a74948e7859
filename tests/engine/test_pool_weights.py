"""Weights by way of the memory pool: the same bytes, read from storage once, kept for the next process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.weight_digests import digests
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.fault_kinds import Moment
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint

PODS = [
    ("colocated", ("dies=2", "experts.redundant_slots=1")),
    ("pd", ("prefill.dies=2", "decode.dies=1")),
    ("moe-attention", ("attention.dies=1", "experts.routed_dies=2")),
]
ROLE = {"pd": "prefill"}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def added(engine: Engine, role: Any, source: Any) -> tuple[int, int]:
    """One more TE: ns that it took, and bytes that were read from storage for it. Its weights are right."""
    assert engine.plan.pool_use is not None
    cache, clock = engine.plan.pool_use.models, engine.plan.pod.clock
    assert cache is not None
    start, before = clock.now, cache.bucket.nbytes
    name = await engine.add_te(role, source)
    te = next(te for te in engine.plan.tes if te.sizes.place.name == name)
    alike = next(other for other in engine.plan.tes if other.sizes.place.role == te.sizes.place.role)
    mine, theirs = ([digests(mem) for _, mem in each.all_memories] for each in (te, alike))
    assert mine == theirs
    return clock.now - start, cache.bucket.nbytes - before


@pytest.mark.parametrize(("deployment", "overrides"), PODS)
def test_storage_is_read_once_for_all(
    tiny: TinyCheckpoint, tmp_path: Path, deployment: str, overrides: tuple[str, ...]
) -> None:
    settings = ["max_model_len=64", *overrides, f"ems.path={tmp_path}", "ems.servers=2"]
    role = ROLE.get(deployment, "both")

    async def first() -> None:
        engine = build_engine(tiny, deployment, "int8", overrides=settings)
        await engine.start()
        cold, read = await added(engine, role, "pool")
        warm, again = await added(engine, role, "pool")
        assert read > 0
        assert again == 0
        assert warm < cold
        await engine.stop()

    async def second() -> None:
        engine = build_engine(tiny, deployment, "int8", overrides=settings)
        await engine.start()
        _, read = await added(engine, role, "pool")
        assert read == 0  # from volumes
        assert engine.stats().pool["volume hits"] > 0
        engine.check_integrity()
        await engine.stop()

    run(first())
    run(second())


def test_without_a_pool_there_is_nothing_to_load_from(tiny: TinyCheckpoint) -> None:
    async def main() -> None:
        engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2", "max_model_len=64"])
        await engine.start()
        with pytest.raises(DeploymentError, match=r"there is none \(ems.path\)"):
            await engine.add_te(source="pool")
        await engine.stop()

    run(main())


def test_a_server_that_is_lost_while_dies_copy_costs_time_and_no_bit(
    tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    """Some blocks are read from storage first; then one comes from a host that has just failed."""
    settings = ["dies=2", "max_model_len=64", f"ems.path={tmp_path}", "ems.servers=2"]

    async def main() -> None:
        engine = build_engine(tiny, "colocated", "int8", overrides=settings)
        await engine.start()
        assert engine.plan.pool_use is not None
        await added(engine, "both", "pool")
        servers = engine.plan.pool_use.pool.servers
        servers[0].forget("models")  # what it had has to be read again
        moments = engine.plan.pod.fabric.moments
        shares = []

        def lose() -> None:
            servers[1].lose()
            shares.append(engine.tes()[-1].loaded)

        late = len(servers[1].volume.rows) // 2
        moments.at(Moment("get", 1, late, servers[1].node), lose)
        _, read = await added(engine, "both", "pool")
        assert read > 0
        assert 0 < shares[0] < 1
        servers[1].recover()
        engine.check_integrity()
        await engine.stop()

    run(main())
