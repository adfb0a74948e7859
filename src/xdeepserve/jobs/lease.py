"""Leadership by a lease: a right to change jobs or members, kept in the database that it guards (DeepServe
3).

One process at a time holds a lease, and renews it. Another takes it over when its time has run out, under the
next term. A write under an old term is refused within its own transaction. So a leader that has slept past
the end of its lease changes nothing.

Time is a parameter of each call: seconds of a clock that never jumps, the same in all processes of this
computer (time.monotonic). It begins anew when the computer does, so a lease may have an end that no holder
can have set. Such a lease is none.
"""

from __future__ import annotations

import sqlite3

import msgspec

from xdeepserve.errors import XDeepServeError
from xdeepserve.jobs.state_file import transaction

JOB_MASTER, CLUSTER_MANAGER = "job master", "cluster manager"  # what there is to lead


class LeaseLostError(XDeepServeError):
    """Error: another process holds the lease now, under a later term."""


class MasterLease(msgspec.Struct, frozen=True):
    """A lease: `holder` leads `what`, in term number `term`."""

    holder: str
    term: int
    what: str = JOB_MASTER


def take(
    db: sqlite3.Connection, holder: str, now: float, seconds: float, what: str = JOB_MASTER
) -> MasterLease | None:
    """Take the lease until `now + seconds` if it is free, has run out, or is the holder's own; else return
    None. A lease that ends later than that was written before this computer was started, or by its calendar
    clock."""
    with transaction(db):
        row = db.execute("SELECT holder, term, ends_at FROM leases WHERE name = ?", (what,)).fetchone()
        last_holder, term, ends_at = row or ("", 0, 0.0)
        if last_holder != holder:
            if now < ends_at <= now + seconds:
                return None
            term += 1
        values = (what, holder, term, now + seconds)
        db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", values)
    return MasterLease(holder, term, what)


def give_up(db: sqlite3.Connection, lease: MasterLease) -> None:
    """End a lease now, so that a standby need not wait. Harmless if another process holds it by now."""
    with transaction(db):
        held = (lease.what, lease.holder, lease.term)
        db.execute("UPDATE leases SET ends_at = 0 WHERE name = ? AND holder = ? AND term = ?", held)


def check_held(db: sqlite3.Connection, lease: MasterLease) -> None:
    """Raise LeaseLostError, within a transaction, unless the lease is the current one."""
    row = db.execute("SELECT holder, term FROM leases WHERE name = ?", (lease.what,)).fetchone()
    if row != (lease.holder, lease.term):
        holder, term = row or ("nobody", 0)
        raise LeaseLostError(f"{lease.holder} led in term {lease.term}; it is term {term} now, of {holder}")
