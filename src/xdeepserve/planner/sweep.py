"""The cost of a decode iteration for each combination of settings, batch and context: time only.

Every point is a run of the engine without its arithmetic (`prices/step_run.py`). All DP groups are filled
with sequences in the middle of decoding, and a step of all of them is timed on the virtual clock.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Deployment, Kind, TEConfig
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.roles import SECTIONS, decode_alone, sections
from xdeepserve.engine.deploy.rules import ONLY
from xdeepserve.engine.deploy.settings import given, settings
from xdeepserve.engine.deploy.sizes import Sizes
from xdeepserve.engine.description import lack, memory_uses
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import DeploymentError, InputError, RequestError
from xdeepserve.hw.spec import Spec
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.step_run import DecodeRun, decode_iteration

DIES_PER_CHIP = 2
MORE_THAN_ALL = 105.0  # percent: more than rounding makes of 100
NEW_POSITIONS = 64  # for which there is room behind the context
# Sections and settings that change no decode iteration: of other TEs, of requests, of faults. `decode` is
# read by itself.
NOT_OF_A_STEP = frozenset(
    {"kind", "prefill", "decode", "te", "scheduler", "cache", "output", "health", "recovery", "ems"}
    | {"fabric", "transfer", "transfer_over", "max_model_len", "threads", "invariants", "lockstep"}
)
OF_EXPERTS = ("shared_dies", "redundant_slots", "experts_per_die")  # as experts.KEY, of TEs of a role alone
ATTENTION = ("MLAProlog", "MLA", "QKVProlog", "GQA", "DSA", "OProj")
FEED = ("Gate", "Experts", "MLP", "SharedExpert")
BOUNDS = {  # what a stage's time is the fault of, by its name
    "attention": ATTENTION,
    "experts": FEED,
    "exchange": (
        *("dispatch", "combine", "A2E", "E2A"),
        *("all-reduce", "all-gather", "all-to-all", "reduce-scatter"),
    ),
}


class PublishedRange(NamedTuple):
    """Least and greatest published value of a quantity, with the source."""

    what: str
    least: float
    most: float
    source: str

    def note(self, value: float) -> str:
        """Return a note if a value is outside of the range, else ""."""
        if self.least <= value <= self.most:
            return ""
        return f"{self.what} {value:,g}, published {self.least:,g} to {self.most:,g} ({self.source})"


PUBLISHED = {  # of decode; beyond these, no published time says how far off a value is
    "hidden": PublishedRange("elements of a token", 7168, 7168, "DeepSeek-R1"),
    "batch": PublishedRange("requests of a die", 4, 96, "CM Table 4, XDS 7.1"),
    "context": PublishedRange("positions of a request", 1536, 4224, "CM Table 4: prompts, half of answers"),
    "ranks": PublishedRange("dies of an exchange", 8, 320, "CM Table 6, 4.1"),
}


class Point(msgspec.Struct, frozen=True):
    """A point of a sweep: settings, `batch` requests on each DP group, `context` positions of each request.

    If `dies` is given, the point is refused unless the pod has so many dies in all.
    """

    model: str
    deployment: str
    overrides: tuple[str, ...] = ()
    batch: int = 32
    context: int = 4096
    acceptance: float = 0.9
    dies: int | None = None


class SweepResult(msgspec.Struct, frozen=True):
    """Results of a point, in virtual time; or the reason why it is impossible (`refusal`, and nothing else).

    iteration_ms        a decode iteration of all DP groups
    tpot_ms             with the scheduler's gap, by the tokens that a request gets from an iteration
    tokens_per_s_chip   of all chips of the pod, two dies each
    shares              of each stage and exchange, in percent of the iteration, waiting included, on
                        the dies with attention
    attention_busy      percent of the iteration that these dies compute; None unless experts are on others
    experts_busy        percent that the busiest of those others computes; None alike
    bound               attention or experts: the busier of the two, if they are on dies of their own;
                        else what most of the time goes to: "mostly attention", experts, exchange or other
    beyond              what of the point is beyond all that published times are of
    """

    point: Point
    dies: int = 0
    iteration_ms: float = 0.0
    tpot_ms: float = 0.0
    tokens_per_s_chip: float = 0.0
    shares: dict[str, float] = {}
    attention_busy: float | None = None
    experts_busy: float | None = None
    bound: str = ""
    beyond: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def overlaps(self) -> bool:
        """Whether stages run at the same time on a die, so that their shares exceed the iteration."""
        return sum(self.shares.values()) > MORE_THAN_ALL


def points(
    model: str,
    deployment: str,
    choices: Mapping[str, Sequence[str]],
    batches: Sequence[int] = (32,),
    contexts: Sequence[int] = (4096,),
    acceptance: float = 0.9,
    dies: int | None = None,
) -> list[Point]:
    """List every combination once, the last choice changing first. Raises InputError for values that no run
    can have."""
    for name, numbers in (("batch", batches), ("context", contexts)):
        if not numbers or min(numbers) < 1:
            raise InputError(f"{name} must be 1 or more, found {','.join(map(str, numbers)) or 'none'}")
    if not 0 <= acceptance <= 1:
        raise InputError(f"acceptance must be from 0 to 1, found {acceptance:g}")
    if dies is not None and dies < 1:
        raise InputError(f"dies must be at least 1, found {dies}")
    settings = [[f"{key}={value}" for value in dict.fromkeys(values)] for key, values in choices.items()]
    return [
        Point(model, deployment, overrides, batch, context, acceptance, dies)
        for overrides in itertools.product(*settings)
        for batch in dict.fromkeys(batches)
        for context in dict.fromkeys(contexts)
    ]


def measure(point: Point) -> SweepResult:
    """Run a point. A refused combination gets a result with the reason."""
    try:
        checkpoint = resolve_model(point.model)
        deployment = sized(point)
        timing = TimingConfig(acceptance=point.acceptance)
        plan = PodPlan(checkpoint, deployment, timing=timing)
        if len(plan.tes) > 1:
            raise RequestError(f"sweep times decode alone, and {point.deployment} {several(plan, point)}")
        dies = len(plan.tes[0].every_die)
        if point.dies not in (None, dies):
            raise DeploymentError(f"{dies} dies in all, not {point.dies}")
        check_fits(plan)
        run = decode_iteration(checkpoint, deployment, point.context, point.batch, timing)
    except InputError as error:
        refusal = " ".join(str(error).split())
        if "max_model_len" in refusal and f"found {point.context + NEW_POSITIONS}" in refusal:
            refusal += f" (the context and {NEW_POSITIONS} new positions): give a smaller --context"
        return SweepResult(point, refusal=refusal)
    result = _result(point, run, deployment.mtp, dies)
    return msgspec.structs.replace(result, beyond=beyond_published(point, plan.tes[0]))


def beyond(**values: float) -> tuple[str, ...]:
    """List notes on the values that are beyond published ones, by the names of PUBLISHED."""
    notes = (PUBLISHED[name].note(value) for name, value in values.items())
    return tuple(note for note in notes if note)


def beyond_published(point: Point, te: TEPlan) -> tuple[str, ...]:
    """List the quantities of a point that lie beyond all published times."""
    ranks = te.team.holders.num_ranks
    among = {"ranks": float(ranks)} if ranks > 1 else {}
    return beyond(
        hidden=te.config.hidden_size, batch=point.batch / te.sizes.groups.tp, context=point.context, **among
    )


def room(point: Point) -> dict[str, int | str]:
    """Return settings with room for a point's batch and context in scheduler and cache."""
    rows = point.batch * 3  # at most two drafts
    block = 128
    return {
        "scheduler.max_num_seqs": point.batch,
        "scheduler.max_num_batched_tokens": rows,
        "cache.block_size": block,
        "cache.num_blocks": point.batch * ((point.context + NEW_POSITIONS) // block + 1),
        "max_model_len": point.context + NEW_POSITIONS,
        "cache.prefix": "false",
    }


def sized(point: Point) -> Deployment:
    """Make the deployment of a point, with room for its batch and context where it gives none itself."""
    own = {override.partition("=")[0] for override in point.overrides}
    more = [f"{key}={value}" for key, value in room(point).items() if key not in own]
    return resolve(point.deployment, [*more, *point.overrides])


def _result(point: Point, run: DecodeRun, mtp: int, dies: int) -> SweepResult:
    iteration = run.iteration_ns / 1e6
    gap = 1e3 * Spec().scheduler_gap.value
    tokens = sum(point.acceptance**drafts for drafts in range(mtp + 1))  # of a request, expected
    tpot = (iteration + gap) / tokens
    shares = {name: run.share(name) for name in sorted(run.spent_ns, key=lambda n: -run.spent_ns[n])}
    attention_busy = experts_busy = None
    bound = f"mostly {bound_of(shares)}"
    if run.experts_ns:
        experts_busy = 100 * run.experts_ns / run.iteration_ns
        attention_busy = run.share(*(name for name in shares if name not in BOUNDS["exchange"]))
        bound = "attention" if attention_busy >= experts_busy else "experts"
    return SweepResult(
        point,
        dies,
        iteration,
        tpot,
        run.num_requests / tpot * 1000 * DIES_PER_CHIP / dies,
        {name: share for name, share in shares.items() if share >= 0.05},
        attention_busy,
        experts_busy,
        bound,
    )


def several(plan: PodPlan, point: Point) -> str:
    """Explain the refusal of several TEs, and which decode half to sweep instead."""
    half = decode_alone(plan.deployment.kind)
    if half is None:
        return "has several TEs"
    first = next(te.sizes for te in plan.tes if te.sizes.place.role != "prefill")
    found = _sizes(first) | _of_decode(plan.deployment, half)
    found |= dict(each.split("=", 1) for each in point.overrides if each.partition("=")[0] in room(point))
    options = " ".join(f"--set {key}={_text(value)}" for key, value in found.items())
    return f"has prefill beside it: what decodes there is --deployment {half} {options}"


def _sizes(te: Sizes) -> dict[str, Any]:
    """Return the settings of a TE's dies, for a deployment of this TE alone."""
    place, groups = te.place, te.groups
    if te.experts.where == "away":
        return {
            "attention.domains": place.num_domains,
            "attention.dies": place.dies_per_domain,
            "experts.routed_dies": len(place.routed_dies),
            "experts.shared_dies": te.experts.num_shared_dies,
        }
    shares = {"tp": (groups.tp, 1), "tp_mode": (groups.tp_mode, "tp"), "o_proj_tp": (groups.o_proj_tp, 1)}
    return {"dies": place.num_dies} | {key: ours for key, (ours, usual) in shares.items() if ours != usual}


def _of_decode(d: Deployment, half: Kind) -> dict[str, Any]:
    """Return the other settings on which a decode iteration of a deployment depends, as its decode half has
    them. What the half has anyway is left out."""
    usual = {each.key: each.default for each in settings()} | {
        each.key: value for each, value in given(resolve(half))
    }
    slots = {f"experts.{name}": getattr(d.decode or TEConfig(), name) for name in OF_EXPERTS}
    own = {key: value for key, value in slots.items() if value is not None}
    if own.keys() & {"experts.redundant_slots", "experts.experts_per_die"}:
        own = {key: None for key in slots if key != "experts.shared_dies"} | own  # in place of all TEs'
    launched = None if d.execution is None else d.execution.for_role("decode")
    if launched is not None:
        usual["execution.mode"] = None  # the section has to be there
    alone = msgspec.structs.replace(d, execution=launched)
    values = {each.key: value for each, value in given(alone)} | own
    return {
        key: value
        for key, value in values.items()
        if value is not None and value != usual[key] and _matters(key, half)
    }


def _matters(key: str, half: Kind) -> bool:
    """Return whether a decode iteration may depend on a setting, and deployments of a kind have it."""
    section = key.partition(".")[0]
    is_its_own = section not in SECTIONS or section in sections(half)
    refusing = (row.key for row in ONLY if not row.kinds(half))
    return (
        section not in NOT_OF_A_STEP
        and is_its_own
        and not any(f"{key}.".startswith(f"{row}.") for row in refusing)
    )


def _text(value: Any) -> str:
    """Write a setting's value as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_fits(plan: PodPlan) -> None:
    """Raise DeploymentError if weights and KV exceed a die's memory, which a timing-only run would not
    notice."""
    if missing := lack(plan):
        is_kv = all(die.weights < die.has for die in memory_uses(plan))
        raise DeploymentError(missing + (": give a smaller --batch or --context" if is_kv else ""))


def bound_of(shares: Mapping[str, float]) -> str:
    """Find the kind of stage that takes most of the time on a die with attention and experts."""
    sums = {
        bound: sum(share for name, share in shares.items() if name in names)
        for bound, names in BOUNDS.items()
    }
    sums["other"] = sum(shares.values()) - sum(sums.values())
    return max(sums, key=lambda bound: sums[bound])


def sweep(todo: Sequence[Point], processes: int | None = None) -> Iterator[SweepResult]:
    """Yield results in the order of the points, as soon as each and those before it are there.

    By default there are as many processes as points and cores; with 1 everything runs in this process.
    """
    count = min(len(todo), processes or os.cpu_count() or 1)
    if count <= 1:
        yield from map(measure, todo)
        return
    pool: Executor
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        yield from pool.map(measure, todo)


COLUMNS: dict[str, Callable[[SweepResult], object]] = {
    "batch": lambda r: r.point.batch,
    "context": lambda r: r.point.context,
    "dies_in_all": lambda r: r.dies,
    "iteration_ms": lambda r: round(r.iteration_ms, 3),
    "tpot_ms": lambda r: round(r.tpot_ms, 3),
    "tokens_per_s_chip": lambda r: round(r.tokens_per_s_chip, 1),
    "attention_busy_pct": lambda r: "" if r.attention_busy is None else round(r.attention_busy, 1),
    "experts_busy_pct": lambda r: "" if r.experts_busy is None else round(r.experts_busy, 1),
    "bound": lambda r: r.bound,
}


def write_csv(results: Sequence[SweepResult], path: Path) -> None:
    """Write a row for each result: its settings, its costs, the share of each stage, and the reason of a
    refusal."""
    keys = list(dict.fromkeys(each.partition("=")[0] for r in results for each in r.point.overrides))
    stages = sorted({name for r in results for name in r.shares})
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*keys, *COLUMNS, *(f"{name}_pct" for name in stages), "refusal"])
        for r in results:
            given = dict(each.split("=", 1) for each in r.point.overrides)
            costs = [column(r) if not r.refusal or name in ("batch", "context") else "" for name, column in
                     COLUMNS.items()]  # fmt: skip
            shares = ["" if r.refusal else round(r.shares.get(name, 0.0), 2) for name in stages]
            writer.writerow([*(given.get(key, "") for key in keys), *costs, *shares, r.refusal])
