"""Who leads, and may move what there is: a lease with a term, in the database that it guards (DeepServe 3).

One process at a time holds it, and renews it; another takes it over when its time has run out, under the next
term. A write under a term that is not the current one is refused within its own transaction, so that a leader
who has slept through the end of its lease changes nothing. Time is handed in.
"""

from __future__ import annotations

import sqlite3

import msgspec

from xdeepserve.errors import XDeepServeError
from xdeepserve.jobs.state_file import transaction

JOB_MASTER, CLUSTER_MANAGER = "job master", "cluster manager"  # what there is to lead


class LeaseLostError(XDeepServeError):
    """Somebody else has the lease now, under a later term."""


class MasterLease(msgspec.Struct, frozen=True):
    """That `holder` leads `what`, as the `term`th one who did."""

    holder: str
    term: int
    what: str = JOB_MASTER


def take(
    db: sqlite3.Connection, holder: str, now: float, seconds: float, what: str = JOB_MASTER
) -> MasterLease | None:
    """The lease until `now + seconds`, if it is free, has run out, or is the holder's own; else None."""
    with transaction(db):
        row = db.execute("SELECT holder, term, ends_at FROM leases WHERE name = ?", (what,)).fetchone()
        last_holder, term, ends_at = row or ("", 0, 0.0)
        if last_holder != holder:
            if ends_at > now:
                return None
            term += 1
        values = (what, holder, term, now + seconds)
        db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", values)
    return MasterLease(holder, term, what)


def give_up(db: sqlite3.Connection, lease: MasterLease) -> None:
    """End it now, so that a standby need not wait. Harmless when it is somebody else's by now."""
    with transaction(db):
        held = (lease.what, lease.holder, lease.term)
        db.execute("UPDATE leases SET ends_at = 0 WHERE name = ? AND holder = ? AND term = ?", held)


def check_held(db: sqlite3.Connection, lease: MasterLease) -> None:
    """Within a transaction: LeaseLostError unless it is the current one."""
    row = db.execute("SELECT holder, term FROM leases WHERE name = ?", (lease.what,)).fetchone()
    if row != (lease.holder, lease.term):
        holder, term = row or ("nobody", 0)
        raise LeaseLostError(f"{lease.holder} led in term {lease.term}; it is term {term} now, of {holder}")
