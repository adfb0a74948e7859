"""Rows for the load of a deployment: batches, chunks, caches, launches and arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import NUM_COMPANIONS, Case

SWAP = "cache.preemption=swap"


def loads(name: str, base: tuple[str, ...], tight: tuple[str, ...]) -> list[Case]:
    """List the rows for a deployment of one TE under different loads: alone, crowded, in chunks, preempted,
    cached."""

    def case(variant: str, *overrides: str, **more: Any) -> Case:
        return Case(name, variant, (*base, *overrides), **more)

    host = ("cache.num_host_blocks=64", "cache.load=always")
    return [
        case("1 die" if not base else f"{base[0].removeprefix('dies=')} dies"),
        case("each prompt alone", alone=True),
        case(f"among {NUM_COMPANIONS} others", crowded=True),
        case("2 threads", "threads=2"),
        case("prefill in chunks of 16", "scheduler.max_num_batched_tokens=16"),
        case("KV blocks of 64", "cache.block_size=64"),
        case("preempted, recomputed", *tight, crowded=True),
        case("preempted, swapped", *tight, *host, SWAP, crowded=True),
        case("prefix cache off", "cache.prefix=false"),
        case("prefixes cached in HBM", repeated=True),
        case("prefixes loaded from the host", *tight, *host, repeated=True),
    ]


def one_call(tight: tuple[str, ...], config: ModelConfig) -> list[Case]:
    """List the rows of a single die that runs all layers in one call, its default with a large model."""
    together, drafts = "lockstep=true", "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    return [
        Case("monolithic", "layers in one call", (together,)),
        Case("monolithic", "layers in one call, each prompt alone, 2 threads", (together, "threads=2"), True),
        Case("monolithic", "layers in one call, 2 threads", (together, "threads=2", drafts), crowded=True),
        Case("monolithic", "layers in one call, preempted", (together, drafts, *tight), crowded=True),
    ]


def hosts(names: Sequence[str], tight: tuple[str, ...], config: ModelConfig) -> list[Case]:
    """List the rows for the host's launching and planning of steps, and for arrival times."""
    ahead = "execution.overlap=true"
    drafts = "mtp=2" if config.num_nextn_predict_layers else "mtp=0"
    jitter = ("execution.pin_cores=false", "execution.cache_graphs=false", "execution.control_gc=false")
    rows = []
    for number, name in enumerate(names):
        rows += [
            Case(name, "steps as graphs", ("execution.mode=graph",)),
            Case(name, "operator by operator", ("execution.mode=op",)),
            Case(name, "planned ahead", (ahead,)),
            Case(name, f"planned ahead, {drafts}", (ahead, drafts)),
            Case(name, "random arrivals", crowded=True, arrivals=number),
            Case(name, "random arrivals, planned ahead", (ahead,), crowded=True, arrivals=number + 10),
        ]
    rows += [
        Case("monolithic", "planned ahead, preempted", (ahead, drafts, *tight), crowded=True),
        Case("colocated", "planned ahead, host with jitter", (ahead, *jitter)),
        Case("pd", "planned ahead, few KV blocks", (ahead, drafts, *tight), crowded=True),
    ]
    return rows
