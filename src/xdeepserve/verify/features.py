"""Table of features by serving modes: which combinations work, and the deployment's own reason for each that
does not.

A cell joins the settings of its feature (a row) and of its mode (a column), fitted to a model.
tools/write_features.py writes `docs/features.md` from the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from xdeepserve.engine.deploy.deployment import Exchange, Kind, Over
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.roles import DEPLOYMENTS, has_expert_dies, sections
from xdeepserve.engine.deploy.rules import without_effect
from xdeepserve.errors import DeploymentError
from xdeepserve.model.config import ModelConfig


class Feature(NamedTuple):
    """A row of the table: a feature and its settings.

    `elsewhere` holds the settings for deployments that use other names.
    """

    name: str
    overrides: tuple[str, ...]
    elsewhere: Mapping[Kind, tuple[str, ...]] = {}


class ServingMode(NamedTuple):
    """A column of the table: a preset, its settings, and whether it computes times only."""

    name: str
    deployment: Kind
    overrides: tuple[str, ...] = ()
    is_timing_only: bool = False


class Cell(NamedTuple):
    """A cell of the table: one feature in one mode.

    `reason` says why they do not work together; empty if they do.
    """

    feature: Feature
    mode: ServingMode
    reason: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """Settings of the mode, then those of the feature."""
        own = self.feature.elsewhere.get(self.mode.deployment, self.feature.overrides)
        return (*self.mode.overrides, *own)


WITH_PREFILL = [kind for kind in DEPLOYMENTS if "prefill" in sections(kind)]
WITH_DECODE = [kind for kind in DEPLOYMENTS if "decode" in sections(kind)]


def _in_prefill(*settings: str) -> dict[Kind, tuple[str, ...]]:
    """Settings of a feature under the `prefill` section, for the deployments that have one."""
    prefill = ("prefill.dies=2", *(f"prefill.{setting}" for setting in settings))
    return dict.fromkeys(WITH_PREFILL, prefill)


SLOTS = "experts.redundant_slots=1"
HOST = ("cache.num_host_blocks=64", "cache.load=always", "cache.preemption=swap")

MANY_DIES: dict[Kind, tuple[str, ...]] = {
    **dict.fromkeys(WITH_DECODE, ("decode.dies=18", SLOTS)),
    **dict.fromkeys(filter(has_expert_dies, DEPLOYMENTS), ("experts.routed_dies=18", SLOTS)),
}

ONE_EACH: dict[Kind, tuple[str, ...]] = {
    **dict.fromkeys(WITH_DECODE, ("decode.dies=20", "decode.shared_dies=2", "decode.experts_per_die=1")),
    **dict.fromkeys(
        filter(has_expert_dies, DEPLOYMENTS),
        ("experts.routed_dies=18", "experts.shared_dies=2", "experts.experts_per_die=1"),
    ),
}
ONE_EACH["transformerless"] += ("prefill.experts_per_die=6",)

O_PROJ: dict[Kind, tuple[str, ...]] = {
    **_in_prefill("o_proj_tp=2"),
    **dict.fromkeys(WITH_DECODE, ("prefill.o_proj_tp=2", "decode.o_proj_tp=2")),
}

GATHER = "scheduler.statuses=all-gather"
GATHER_IN_PREFILL: dict[Kind, tuple[str, ...]] = dict.fromkeys(WITH_PREFILL, ("prefill.tp=1", GATHER))

FEATURES = (
    Feature("2 drafts (MTP)", ("mtp=2",)),
    Feature("replicas of experts (EPLB)", (SLOTS, "experts.balance_interval=0.001")),
    Feature("copies of experts from the start", ("experts.copies=1",)),
    Feature("copies of the shared expert elsewhere", ("experts.shared_dies=2",)),
    Feature("more dies than routed experts", ("dies=18", SLOTS), MANY_DIES),
    Feature(
        "one expert on each die", ("dies=20", "experts.shared_dies=2", "experts.experts_per_die=1"), ONE_EACH
    ),
    Feature("tensor parallelism", ("tp=2",), _in_prefill("tp=2")),
    Feature("SP-TP-SP", ("tp=2", "tp_mode=sp-tp-sp"), _in_prefill("tp=2", "tp_mode=sp-tp-sp")),
    Feature("output projections shared", ("o_proj_tp=2",), O_PROJ),
    Feature("2 microbatches on a die, by cores", ("pipeline.microbatches=2", "pipeline.overlap=cores")),
    Feature("2 microbatches on a die, by engines", ("pipeline.microbatches=2", "pipeline.overlap=engines")),
    Feature("2 microbatches in steps that gain", ("pipeline.microbatches=2", "pipeline.dynamic=true")),
    Feature("3 microbatches away at the experts", ("attention.microbatches=3",)),
    *(
        Feature(f"exchange by {way}{end}", (f"exchange={way}", *more))
        for way in get_args(Exchange)[1:]
        for end, more in (("", ()), (", EPLB, 2 drafts", (SLOTS, "mtp=2")))
    ),
    Feature("INT8 combine", ("combine=int8",)),
    Feature("A2E by URMA", ("attention.carrier=urma",)),
    Feature("experts on other hardware (M2N)", ("attention.hardware=h20", "experts.hardware=l40s")),
    Feature("experts without barriers (dataflow)", ("dataflow=true",)),
    Feature("dies as one (lockstep)", ("lockstep=true",)),
    Feature("statuses of DP groups by all-gather", (GATHER,), GATHER_IN_PREFILL),
    Feature("statuses of DP groups from time to time", ("scheduler.status_period=0.001",)),
    Feature("2 job executors", ("scheduler.job_executors=2",)),
    Feature("2 prefill TEs", ("prefill.count=2",)),
    Feature("steps planned ahead", ("execution.overlap=true",)),
    Feature("operator by operator", ("execution.mode=op",)),
    Feature("KV by layer", ("transfer=layer",)),
    *(Feature(f"KV by {over.replace('-', ' ')}", (f"transfer_over={over}",)) for over in get_args(Over)[1:]),
    Feature("KV over RoCE", ("fabric=roce",)),
    Feature("prefill on Ascend 910B", ("prefill.hardware=910b",)),
    Feature("blocks in the host's memory", HOST),
)

MODES = (
    ServingMode("one die", "monolithic"),
    ServingMode("one die, one call", "monolithic", ("lockstep=true",)),
    ServingMode("colocated", "colocated", ("dies=4",)),
    ServingMode("colocated, lockstep", "colocated", ("dies=4", "lockstep=true")),
    ServingMode("colocated, time only", "colocated", ("dies=4",), True),
    ServingMode("pd", "pd"),
    ServingMode("pd, lockstep", "pd", ("lockstep=true",)),
    ServingMode("pd, time only", "pd", (), True),
    ServingMode("moe-attention", "moe-attention"),
    ServingMode("moe-attention, lockstep", "moe-attention", ("lockstep=true",)),
    ServingMode("moe-attention, dataflow", "moe-attention", ("dataflow=true",)),
    ServingMode("moe-attention, time only", "moe-attention", (), True),
    ServingMode("moe-attention, dataflow, time only", "moe-attention", ("dataflow=true",), True),
    ServingMode("eaas", "eaas"),
    ServingMode("eaas, time only", "eaas", (), True),
    ServingMode("transformerless", "transformerless"),
    ServingMode("transformerless, lockstep", "transformerless", ("lockstep=true",)),
    ServingMode("transformerless, dataflow", "transformerless", ("dataflow=true",)),
    ServingMode("transformerless, time only", "transformerless", (), True),
)


def cells(config: ModelConfig) -> Iterator[Cell]:
    """Yield the cells of the table, row by row, each with its reason."""
    for feature in FEATURES:
        for mode in MODES:
            cell = Cell(feature, mode, "")
            yield cell._replace(reason=_reason(cell, config))


def _reason(cell: Cell, config: ModelConfig) -> str:
    """Return the reason why a feature does not work, or has no effect, in a mode; empty if it works."""
    mode = cell.mode
    try:
        deployment = resolve(mode.deployment, cell.overrides)
        fit(deployment, config, mode.is_timing_only)
    except DeploymentError as error:
        return str(error).removeprefix(f"deployment {mode.deployment}: ")
    own = cell.overrides[len(mode.overrides) :]
    idle = without_effect(deployment, own)
    return f"no effect: {idle[0][1]}" if idle else ""
