"""Rows with prefixes from a memory pool: from DRAM or volumes, written by the same or another deployment."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence

import msgspec

from xdeepserve.engine.deploy.deployment import Kind
from xdeepserve.engine.deploy.teams import num_routed_experts
from xdeepserve.history import History
from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import Case, few_tes
from xdeepserve.verify.parallel import REPLICAS, tensor_parallel_sizes

SMALL = ("ems.block_size=16", "ems.servers=2")


@contextlib.contextmanager
def pool_of(case: Case, fill: Callable[[History], object]) -> Iterator[tuple[str, ...]]:
    """Yield the settings of a case, with a memory pool in a temporary directory if the case has one.

    `fill` serves the prompts before, on the deployment that fills the pool.
    """
    if case.pool is None:
        yield case.overrides
        return
    with tempfile.TemporaryDirectory(prefix="xdeepserve-pool-") as directory:
        where = (f"ems.path={directory}", *SMALL)
        if case.pool != "own":
            fill(msgspec.structs.replace(case.pool, settings=(*where, *case.pool.settings)))
        yield (*where, *case.overrides)


def pools(names: Sequence[Kind], dies: int, tight: tuple[str, ...], config: ModelConfig) -> list[Case]:
    """List the rows with a memory pool: each deployment reads its own blocks, of this run or an earlier one,
    and some read other deployments'."""
    drafts = "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    rows = []
    for name in names:
        pair = few_tes(name, dies)
        own = History(name, pair)
        rows += [
            Case(name, "prefixes from the pool's DRAM", (*pair, *tight), repeated=True, pool="own"),
            Case(name, "prefixes from the pool's volumes", pair, pool=own),
            Case(
                name,
                f"pool of 1 MiB, evicting, {drafts}",
                (*pair, *tight, drafts, "ems.servers=1", "ems.dram_mb=1", "ems.volume_mb=1"),
                crowded=True,
                evicts=True,
                pool=History(name, (*pair, drafts)),
            ),
        ]
    return rows + _written_by_others(dies, drafts, config)


def _written_by_others(dies: int, drafts: str, config: ModelConfig) -> list[Case]:
    """List the rows with blocks written by another deployment, and rows with other ways to read a pool."""
    most = max((1, *tensor_parallel_sizes(config, min(4, dies), "tp")))
    wide = History("pd", (f"prefill.dies={most}", f"prefill.tp={most}", f"decode.dies={min(2, dies)}"))
    ahead = "execution.overlap=true"
    rows = [
        Case("colocated", f"pool written by pd at TP{most}", (f"dies={dies}",), pool=wide),
        Case(
            "pd",
            "prefixes from the pool over VPC",
            ("ems.fabric=vpc", f"decode.dies={min(2, dies)}"),
            pool=wide,
        ),
        Case("monolithic", "pool written by colocated", pool=History("colocated", (f"dies={dies}",))),
        Case(
            "pd", "pool written by monolithic, KV by layer", ("transfer=layer",), pool=History("monolithic")
        ),
        Case(
            "colocated",
            "prefixes from the pool, planned ahead",
            (ahead, drafts),
            pool=History("colocated", (drafts,)),
        ),
        Case(
            "colocated", "prefixes from the pool, in lockstep", ("lockstep=true",), pool=History("colocated")
        ),
        Case(
            "monolithic",
            "prefixes from the pool, KV blocks of 32",
            ("cache.block_size=32", "ems.block_size=32"),
            pool=History("monolithic", ("ems.block_size=32",)),
        ),
    ]
    if num_routed_experts(config, 1) > 1:
        ways = (*REPLICAS, f"dies={dies}", drafts)
        rows.append(
            Case(
                "colocated",
                f"prefixes from the pool, EPLB every ms, {drafts}",
                ways,
                crowded=True,
                reconfigurations=1,
                pool=History("colocated", (drafts,)),
            )
        )
    return rows
