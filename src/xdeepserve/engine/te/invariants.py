"""Invariants of a task executor (TE): one table, checked after every turn if the setting `invariants` is on.

A turn ends when the master of a DP group has collected, planned and launched what it could. The rows read the
books of the group and its steps under way, and change nothing: with the setting on, every virtual time and
every bit is the same.

An invariant that does not hold is a fault of this program, whatever faults were injected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.shell import TEShell
from xdeepserve.engine.te.step_set import StepSet
from xdeepserve.errors import XDeepServeError


class InvariantError(AssertionError):
    """A sentence of `INVARIANTS` that does not hold; names the DP group, its step, and what was found."""


def is_breach(error: object) -> bool:
    """Whether something that ended a request or a TE comes from an invariant that did not hold."""
    while isinstance(error, XDeepServeError):
        error = error.__cause__ or error.__context__
    return isinstance(error, InvariantError)


class Turn(NamedTuple):
    """A DP group and its steps at the end of a turn, with the parts of its TE that know of it."""

    group: DPGroup
    steps: StepSet
    health: Heartbeats
    shell: TEShell[DPGroup]


class Invariant(NamedTuple):
    """A sentence that holds after every turn, and its check: a description of what is wrong, or None."""

    says: str
    check: Callable[[Turn], str | None]


def _places(turn: Turn) -> None:
    turn.group.places.check_integrity()


def _handover(turn: Turn) -> None:
    turn.group.handover.check_integrity()


def _blocks(turn: Turn) -> None:
    turn.group.scheduler.check_blocks()


def _progress(turn: Turn) -> str | None:
    """Check positions of all sequences that are not on their way from another DP group."""
    for seq in turn.group.places.sequences():
        has, computed = len(seq.token_ids), seq.num_computed
        if not 0 < seq.num_prompt <= has <= turn.group.steps.max_model_len:
            return f"sequence {seq.seq_id} has {has} tokens, {seq.num_prompt} of them its prompt"
        if not 0 <= computed <= has:
            return f"sequence {seq.seq_id} has {has} tokens, {computed} of them computed"
    return None


def _written(turn: Turn) -> str | None:
    """Compare computed positions with the blocks that must contain their KV."""
    blocks_for, places = turn.group.rtc.blocks_for, turn.group.places
    for place, seqs, slots in (
        ("running", places.running, lambda seq: seq.holding.slots),
        ("swapped", places.swapped, lambda seq: seq.host_slots),
    ):
        for seq in seqs:
            needed, held = blocks_for(seq.num_computed), len(slots(seq))
            if held < needed:
                return f"{place} sequence {seq.seq_id} needs {needed} blocks and holds {held}"
    return None


def _room(turn: Turn) -> str | None:
    running, most = len(turn.group.places.running), turn.group.steps.max_seqs
    return None if running <= most else f"{running} sequences are running, at most {most} may"


def _steps(turn: Turn) -> str | None:
    steps, numbers, planned = turn.steps, list(turn.steps), turn.group.planned
    again = steps.again
    if numbers != sorted(set(numbers)) or len(numbers) > steps.room or any(n >= steps.next for n in numbers):
        return f"steps {numbers} are under way, at most {steps.room} may, and step {steps.next} is the next"
    if not {*numbers, *again} <= set(planned) <= {*numbers, *again, steps.next}:
        return f"steps {numbers} are under way, {again} wait to run again, and steps {planned} are planned"
    return None


def _given_up(turn: Turn) -> str | None:
    group = turn.group
    if turn.health.is_given_up(group.rank) and group.num_sequences:
        return f"the group is given up, and has {group.num_sequences} sequences"
    return None


def _known(turn: Turn) -> str | None:
    group, expected = turn.group, turn.shell.group_of
    here = [seq for seq in group.places.sequences() if not seq.is_finished]
    strangers = [seq.seq_id for seq in here if expected(seq) is not group]
    return f"sequences {strangers} are in a group to which the shell did not give them" if strangers else None


INVARIANTS = (
    Invariant(
        "A sequence is in the list of one place, and has a ticket where it waits for a transfer.", _places
    ),
    Invariant(
        "KV blocks are kept for sequences that send, and reserved for those that are reserved.", _handover
    ),
    Invariant(
        "A KV block is free, or cached, or counted once for each holder; so is a block of the host.", _blocks
    ),
    Invariant(
        "A sequence has computed at most the tokens that it has, and has at most a context.", _progress
    ),
    Invariant(
        "Blocks are held for every computed position of a sequence that runs, or is swapped out.", _written
    ),
    Invariant("At most `max_num_seqs` sequences run in a DP group.", _room),
    Invariant(
        "Steps under way, or to run again, are in order and have plans, and only the next has one, too.",
        _steps,
    ),
    Invariant("A DP group that was given up has no sequences.", _given_up),
    Invariant("The TE-shell gave each sequence of a DP group to that group.", _known),
)


def check(health: Heartbeats, shell: TEShell[DPGroup], steps: StepSet) -> None:
    """Check every row for the DP group of some steps. Raises InvariantError for the first row that does not
    hold."""
    turn = Turn(steps.group, steps, health, shell)
    for invariant in INVARIANTS:
        try:
            found = invariant.check(turn)
        except XDeepServeError as error:
            found = str(error)
        if found is not None:
            raise InvariantError(
                f"invariant of {turn.group.id} before step {steps.next}: {invariant.says} But {found}"
            )
