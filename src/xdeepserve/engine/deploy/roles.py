"""The kinds of task executors (TEs), as rows, and which of them a deployment is made of.

    row            role      its settings      its dies hold             a step takes turns        lockstep
    -------------  --------  ----------------  ------------------------  ------------------------  --------
    MONOLITHIC     both      dies              all                       serial                    large
    COLOCATED      both      dies, tp, ...     attention and experts     serial, overlap           large
    PREFILL        prefill   prefill           attention and experts     serial, overlap           never
    DECODE         decode    decode            attention and experts     serial, overlap           never
    APART          both      attention         attention; experts have   away-and-back, dataflow   asked
    DECODE_APART   decode    attention         dies of their own         away-and-back, dataflow   asked

A new deployment is a row here, a preset, and perhaps a schedule (engine/run/schedule.py).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from xdeepserve.engine.deploy.deployment import Kind, Role

Turns = Literal["serial", "overlap", "away-and-back", "dataflow"]
"""Whose stage is next: one after another; two microbatches on one die; microbatches away at the experts in
turn; the same without barriers, so that nobody waits for dies that its tokens do not go to."""


class TEKind(NamedTuple):
    """A row."""

    role: Role
    sections: tuple[
        str, ...
    ]  # of a deployment, that say something about it; the first has the number of dies
    turns: tuple[Turns, ...]  # that a step can take
    dies: int  # by default, at most; where experts have dies of their own, of routed ones
    tp: int = 1  # dies that a DP group spans by default, at most (XDS 5.1: 4 in prefill)
    lockstep: Literal["never", "asked", "large"] = (
        "never"  # whether its dies can run as one: large: unless it
    )
    # is said, they do with a large model
    is_single: bool = False  # one die, and no other number

    @property
    def is_apart(self) -> bool:
        """Experts have dies of their own."""
        return "dataflow" in self.turns

    @property
    def section(self) -> str:
        """The section with the number of its dies; "" if that is the deployment itself."""
        return "" if self.sections[0] == "dies" else self.sections[0]

    def te_name(self, number: int) -> str:
        """Of one of its TEs."""
        return "te" if self.role == "both" else f"{self.role} {number}"


TOGETHER: tuple[Turns, ...] = ("serial", "overlap")
AWAY: tuple[Turns, ...] = ("away-and-back", "dataflow")

MONOLITHIC = TEKind("both", ("dies",), ("serial",), dies=1, lockstep="large", is_single=True)
COLOCATED = TEKind(
    "both", ("dies", "tp", "tp_mode", "pipeline", "experts"), TOGETHER, dies=8, lockstep="large"
)
PREFILL = TEKind("prefill", ("prefill", "pipeline", "experts"), TOGETHER, dies=4, tp=4)
DECODE = TEKind("decode", ("decode", "pipeline", "experts"), TOGETHER, dies=4)
APART = TEKind("both", ("attention", "experts"), AWAY, dies=4, lockstep="asked")
DECODE_APART = APART._replace(role="decode")

DEPLOYMENTS: dict[Kind, tuple[TEKind, ...]] = {
    "monolithic": (MONOLITHIC,),
    "colocated": (COLOCATED,),
    "pd": (PREFILL, DECODE),
    "moe-attention": (APART,),
    "transformerless": (PREFILL, DECODE_APART),
}


def sections(kind: Kind) -> set[str]:
    """Those of a deployment's sections that one of its TEs heeds."""
    return {section for row in DEPLOYMENTS[kind] for section in row.sections}


def has_prefill(kind: Kind) -> bool:
    """Prefill has TEs of its own."""
    return any(row.role == "prefill" for row in DEPLOYMENTS[kind])


def in_lockstep(kind: Kind) -> TEKind | None:
    """The TEs whose dies can run as one, if there are some."""
    return next((row for row in DEPLOYMENTS[kind] if row.lockstep != "never"), None)
