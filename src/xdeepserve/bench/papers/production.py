"""xDeepServe's production pod (7.2): the preset `production`, its TPOT and its TTFT.

The paper gives mean lengths, mean TPOT and mean TTFT. The load and the share of cached prefixes are not
published. So the requests a die with which decode takes the published TPOT are found first: TPOT is
calibrated, and says what the load is. Prefill follows from that load.

Without cached prefixes the four prefill TEs cannot keep up with the load, and the queue grows without end.
The row of TTFT is therefore that of a quiet pod, where no prompt waits: the least mean TTFT at any load. TTFT
ends with prefill, before KV moves to decode, because prefill makes the first token (xDeepServe 4.6). Prefill
times are not calibrated. Of a prompt alone, most is exchanges: the dies of one DP group send and get all rows
of a chunk, and the other dies' ports are idle.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np

from xdeepserve.bench.papers.sizes import DIES_PER_CHIP, MODEL
from xdeepserve.bench.papers.superpod import XDS_ACCEPTANCE, gap_ms
from xdeepserve.bench.report import Row, published
from xdeepserve.comm.cost import OPS
from xdeepserve.engine.deploy.deployment import Deployment, ExecutionConfig, ExpertConfig
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import FleetTE, ServedRequest
from xdeepserve.platform.step_te import StepLimits
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.prices.step_price import SAMPLING, priced
from xdeepserve.prices.step_run import StepShare, decode_iteration, one_step

MEAN_PROMPT, LONGEST, MEAN_OUTPUT = 13_000, 65_536, 2_100
SPREAD = 1.0  # assumed: sigma of the logarithm of prompts' lengths
NUM_PROMPTS = 2_000
QUIET = 1e-3  # prompts per second: none waits for another
PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("MLA",),
    "projections": (),  # and all that has no name here
    "collectives": ("all-reduce", "all-gather", "all-to-all"),
    "experts": ("Experts",),
    "sampling": SAMPLING,  # and drafts
}
ROWS = (1, 64, 256, 512, 1024, 2048, 4096)  # of the prices' tables


def rows() -> list[Row]:
    """Compute both rows: decode's TPOT at the load that gives it, and prefill's TTFT."""
    model, deployment = resolve_model(MODEL), resolve("production")
    targets = (published()[f"xds.prod.perf/{name}"].value for name in ("tpot", "ttft"))
    return of_pod(model, deployment, *targets)


def of_pod(model: Checkpoint, deployment: Deployment, tpot_ms: float, ttft_ms: float) -> list[Row]:
    """Compute the rows of a `pd` deployment for a published TPOT and TTFT."""
    assert deployment.prefill is not None
    assert deployment.decode is not None
    assert deployment.decode.dies is not None
    requests, tpot = decode_load(model, deployment, tpot_ms)
    rate = deployment.decode.dies * requests / (MEAN_OUTPUT * tpot / 1000)
    tes = prefill_tes(model, deployment)
    ttft = mean_ttft_ms(serve(tes, QUIET))
    served = serve(tes, rate)
    capacity = len(served) / max(each.first_ns for each in served) * 1e9
    chips = len(tes) * (deployment.prefill.dies or 0) / DIES_PER_CHIP
    load = f"{requests} requests a die (found), {rate:.1f} a second"
    parts = parts_ms(model, deployment)
    alone = ", ".join(f"{name} {ms:,.0f}" for name, ms in parts.items())
    notes = (
        f"no queue, nothing cached; of the load, {rate * MEAN_PROMPT / chips:,.0f} tokens/s a chip, the TEs "
        f"prefill {min(1.0, capacity / rate):.0%} without cached prefixes",
        f"{ttft_ms:g} ms at this load with {cached_share(tes, rate, ttft_ms):.0%} of each prompt cached",
        f"a prompt of {MEAN_PROMPT:,} tokens alone takes {sum(parts.values()):,.0f} ms: {alone}",
        f"lengths assumed: log-normal, sigma {SPREAD:g}, cut at {LONGEST // 1024}K",
        "prefill is not calibrated",
    )
    return [
        Row("xds.prod.perf/tpot", tpot, "ms", "calibrated", load),
        Row("xds.prod.perf/ttft", ttft, "ms", "predicted", "; ".join(notes)),
    ]


def decode_load(model: Checkpoint, deployment: Deployment, tpot_ms: float) -> tuple[int, float]:
    """Find the requests of a decode die, of those that a deployment takes, with which TPOT [ms] comes nearest
    to a value, and that TPOT. The mean request is half way through its answer."""
    decode = deployment.decode
    assert decode is not None
    most = decode.max_num_seqs or deployment.scheduler.max_num_seqs
    # The first step would capture the graph, which no later one does.
    plain = msgspec.structs.replace(deployment, execution=None)
    context, timing = MEAN_PROMPT + MEAN_OUTPUT // 2, TimingConfig(acceptance=XDS_ACCEPTANCE)

    @functools.cache
    def tpot(requests: int) -> float:
        run = decode_iteration(model, plain, context, requests, timing)
        return (run.iteration_ns / 1e6 + gap_ms()) / (1 + XDS_ACCEPTANCE)

    above = 1 + bisect_left(range(1, most), tpot_ms, key=tpot)
    nearest = min((max(1, above - 1), above), key=lambda requests: abs(tpot(requests) - tpot_ms))
    return nearest, tpot(nearest)


# ---- prefill ----------------------------------------------------------------------------------------------


def prefill_tes(model: Checkpoint, deployment: Deployment) -> list[FleetTE]:
    """Make the prefill TEs of a `pd` deployment, with prices of steps. What launches cost is not in them."""
    alone, cache = prefill_te(model, deployment), deployment.cache
    assert deployment.prefill is not None
    assert cache.num_blocks is not None
    execution = (deployment.execution or ExecutionConfig()).for_role("prefill")
    price = priced(model, msgspec.structs.replace(alone, execution=execution), rows=ROWS)
    scheduler = alone.scheduler
    positions = cache.num_blocks * cache.block_size
    limits = StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, positions, cache.block_size)
    count = deployment.prefill.count
    return [FleetTE(f"prefill {number}", price, limits, role="prefill") for number in range(count)]


def prefill_te(model: Checkpoint, deployment: Deployment) -> Deployment:
    """Make the deployment of one prefill TE by itself, without its launches."""
    te = deployment.prefill
    assert te is not None
    scheduler = msgspec.structs.replace(
        deployment.scheduler,
        max_num_seqs=te.max_num_seqs or deployment.scheduler.max_num_seqs,
        max_num_batched_tokens=te.max_num_batched_tokens or deployment.scheduler.max_num_batched_tokens,
    )
    slots = fit(deployment, model.config, is_timing_only=True)[0].experts.redundant_of[0]
    experts = msgspec.structs.replace(
        deployment.experts or ExpertConfig(), redundant_slots=slots, experts_per_die=None
    )
    return Deployment(
        name="prefill",
        kind="colocated",
        dies=te.dies,
        tp=te.tp,
        tp_mode=te.tp_mode,
        mtp=deployment.mtp,
        exchange=deployment.exchange,
        experts=experts,
        prefill_attention=deployment.prefill_attention,
        scheduler=scheduler,
        cache=deployment.cache,
        max_model_len=deployment.max_model_len,
    )


def parts_ms(model: Checkpoint, deployment: Deployment, prompt: int = MEAN_PROMPT) -> dict[str, float]:
    """Take the time of a prompt alone on an idle prefill TE apart [ms], chunk after chunk.

    Only the dies of its DP group have rows, and all dies exchange and have experts, so the exchanges are what
    is neither a stage nor a collective of that group, nor experts.
    """
    te = prefill_te(model, deployment)
    most, parts = te.scheduler.max_num_batched_tokens, dict.fromkeys((*PARTS, "exchanges"), 0.0)
    groups = (te.dies or 1) // (te.tp or 1)
    for before in range(0, prompt, most):
        chunk = [StepShare(before, min(most, prompt - before))]
        run = one_step(model, te, lambda group, chunk=chunk: [] if group else chunk, TimingConfig())  # type: ignore[misc]
        known = dict(parts)
        # Only the last chunk ends with a token, which is sampled, and drafted for.
        left_out = () if before + most >= prompt else SAMPLING
        for name, ns in run.spent_ns.items():
            if name not in (*OPS, *left_out):
                part = next((part for part, names in PARTS.items() if name in names), "projections")
                parts[part] += ns * (1 if name == "Experts" else groups) / 1e6
        taken = run.iteration_ns - groups * run.spent(*left_out)
        parts["exchanges"] += taken / 1e6 - sum(parts.values()) + sum(known.values())
    return parts


class CachedShare:
    """Pool that has the same share of each prompt, at no cost."""

    block_ns = 0.0

    def __init__(self, share: float) -> None:
        self._share = share

    def match(self, blocks: tuple[int, ...]) -> int:
        """Return the number of a prompt's first blocks that are cached."""
        return int(self._share * len(blocks))

    def use(self, blocks: tuple[int, ...], known: int) -> None:
        """Do nothing: the share stays."""


def serve(tes: Sequence[FleetTE], rate: float, cached: float = 0.0) -> list[ServedRequest]:
    """Prefill prompts that arrive by Poisson, `rate` a second, with a share of each one cached."""
    fleet = Fleet(tes, "cost")
    fleet.share(CachedShare(cached))
    return fleet.run(prompts(rate, tes[0].limits.block))


def prompts(rate: float, block: int) -> list[TracedRequest]:
    """Draw prompts, the same ones at every rate; no two share a prefix."""
    rng = np.random.default_rng(0)
    at_ns = (np.cumsum(rng.exponential(1.0, NUM_PROMPTS)) * 1e9 / rate).astype(np.int64).tolist()
    drawn = rng.lognormal(0.0, SPREAD, NUM_PROMPTS)
    lengths = drawn
    for _ in range(100):  # the cut lowers the mean, so the scale has to make up for it
        drawn = drawn * MEAN_PROMPT / lengths.mean()
        lengths = np.minimum(LONGEST, drawn)
    found, block_id = [], 0
    for at, length in zip(at_ns, np.maximum(1, lengths.round()).astype(int).tolist(), strict=True):
        last = block_id + -(-length // block)
        found.append(TracedRequest(at, length, 1, tuple(range(block_id, last))))
        block_id = last
    return found


def mean_ttft_ms(served: Sequence[ServedRequest]) -> float:
    """Compute the mean time to the first token [ms]."""
    return float(np.mean([each.ttft_ns for each in served])) / 1e6


def cached_share(tes: Sequence[FleetTE], rate: float, ttft_ms: float) -> float:
    """Find the share of each prompt that has to be cached for a mean TTFT, in whole percent. It is the least
    one from which on every share gives the TTFT or a shorter one."""
    percent = 100
    while percent and mean_ttft_ms(serve(tes, rate, (percent - 1) / 100)) <= ttft_ms:
        percent -= 1
    return percent / 100
