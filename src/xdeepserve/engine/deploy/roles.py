"""Kinds of task executors (TEs), as rows, and the kinds that make up each deployment.

A new deployment is a row here, a name in `Kind`, a preset of that name, and perhaps a schedule
(engine/walk/schedule.py).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from xdeepserve.engine.deploy.deployment import Kind, Role

Turns = Literal["serial", "overlap", "away-and-back", "dataflow", "services"]
"""Kinds of schedules: stages one after another; two overlapping microbatches on one die; microbatches that go
away to expert dies in turn; the same without barriers, so a die waits only for dies that its tokens go to;
the same with experts as services, which know no step and no group."""


class TEKind(NamedTuple):
    """Kind of TE, a row of the table: what such TEs run, and which settings apply to them.

    sections   sections of a deployment that apply to these TEs; the first has the number of their dies
    turns      schedules that a step can have; the first is the default
    dies       default number of dies, at most; of routed experts where these have dies of their own
    tp         default number of dies that a DP group spans, at most (XDS 5.1: 4 in prefill)
    lockstep   whether all dies can run in lockstep; "large": by default with a large model
    can_share  whether a die with attention may have a copy of the shared expert for all others
    is_single  whether there is exactly one die
    """

    role: Role
    sections: tuple[str, ...]
    turns: tuple[Turns, ...]
    dies: int
    tp: int = 1
    lockstep: Literal["never", "asked", "large"] = "never"
    can_share: bool = False
    is_single: bool = False

    @property
    def is_apart(self) -> bool:
        """Whether experts have dies of their own."""
        return self.turns[0] in AT_EXPERTS

    @property
    def has_services(self) -> bool:
        """Whether experts are services, on expert servers."""
        return self.turns == SERVICES

    @property
    def section(self) -> str:
        """Section with the number of the TE's dies; "" if it is the deployment itself."""
        return "" if self.sections[0] == "dies" else self.sections[0]

    def te_name(self, number: int) -> str:
        """Return the name of a TE of this kind, by its number."""
        if self.role == "both":
            return f"te {number}" if number else "te"
        return f"{self.role} {number}"


TOGETHER: tuple[Turns, ...] = ("serial", "overlap")
AWAY: tuple[Turns, ...] = ("away-and-back", "dataflow")
SERVICES: tuple[Turns, ...] = ("services",)
AT_EXPERTS: tuple[Turns, ...] = (*AWAY, *SERVICES)  # which have dies of their own
FLOWING: tuple[Turns, ...] = ("dataflow", *SERVICES)  # without barriers: each DP group has steps of its own

MONOLITHIC = TEKind("both", ("dies",), ("serial",), dies=1, lockstep="large", is_single=True)
OF_POD = ("dies", "tp", "tp_mode", "o_proj_tp", "pipeline", "experts")
COLOCATED = TEKind("both", OF_POD, TOGETHER, dies=8, lockstep="large", can_share=True)
PREFILL = TEKind("prefill", ("prefill", "pipeline", "experts"), TOGETHER, dies=4, tp=4)
DECODE = TEKind("decode", ("decode", "pipeline", "experts"), TOGETHER, dies=4)
APART = TEKind("both", ("attention", "experts"), AWAY, dies=4, lockstep="asked")
DECODE_APART = APART._replace(role="decode")
WITH_SERVICES = TEKind("both", ("attention", "experts", "services"), SERVICES, dies=4)

LISTED = tuple(
    row._replace(sections=("te", "pipeline", "experts"))
    for row in (COLOCATED._replace(lockstep="asked"), PREFILL, DECODE._replace(lockstep="asked"))
)

DEPLOYMENTS: dict[Kind, tuple[TEKind, ...]] = {
    "monolithic": (MONOLITHIC,),
    "colocated": (COLOCATED,),
    "pd": (PREFILL._replace(can_share=True), DECODE._replace(can_share=True, lockstep="asked")),
    "moe-attention": (APART,),
    "transformerless": (PREFILL, DECODE_APART),
    "eaas": (WITH_SERVICES,),
    "mixed": LISTED,
}

# Settings and sections that are about dies: each is heeded by some kinds of deployment alone.
SECTIONS = tuple(
    dict.fromkeys(name for rows in DEPLOYMENTS.values() for row in rows for name in row.sections)
)


def sections(kind: Kind) -> set[str]:
    """Return the deployment's sections heeded by at least one of its TEs."""
    return {section for row in DEPLOYMENTS[kind] for section in row.sections}


def is_listed(kind: Kind) -> bool:
    """Whether a file lists the deployment's TEs in [[te]], so that there is no preset."""
    return "te" in sections(kind)


def is_one_die(kind: Kind) -> bool:
    """Whether the deployment is a single die."""
    return all(row.is_single for row in DEPLOYMENTS[kind])


def has_prefill(kind: Kind) -> bool:
    """Whether the deployment has TEs for prefill alone."""
    return any(row.role == "prefill" for row in DEPLOYMENTS[kind])


def has_expert_dies(kind: Kind) -> bool:
    """Return whether experts have dies of their own."""
    return any(row.is_apart for row in DEPLOYMENTS[kind])


def takes_steps_away(kind: Kind) -> bool:
    """Return whether steps go to experts on dies of their own and back, all dies together."""
    return any("away-and-back" in row.turns for row in DEPLOYMENTS[kind])


def has_services(kind: Kind) -> bool:
    """Whether the deployment's experts are services, on expert servers."""
    return any(row.has_services for row in DEPLOYMENTS[kind])


def decode_alone(kind: Kind) -> Kind | None:
    """Return the kind of deployment equal to the decode part of a kind with prefill apart; None if there is
    none."""
    decode = [row.turns for row in DEPLOYMENTS[kind] if row.role == "decode" and not is_listed(kind)]
    return next((alone for alone, rows in DEPLOYMENTS.items() if [row.turns for row in rows] == decode), None)
