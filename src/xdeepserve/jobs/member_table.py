"""The table of members: job executors (JEs), each a process with TEs, and the manager's knowledge of them.
Where JEs share the TEs of a pod, the pod is a member, too.

A member reports itself and its TEs by heartbeats (soft state: a lost report comes again with the next
heartbeat). The cluster manager finds out which members are silent, have failed or have ended. A member is
known by its name and process id. A process that was replaced, because it counted as lost, learns that from
its next heartbeat, and ends.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from xdeepserve.errors import XDeepServeError
from xdeepserve.jobs import lease as leases
from xdeepserve.jobs.job_states import MEMBER_MOVES, MemberState, check_move
from xdeepserve.jobs.lease import MasterLease
from xdeepserve.jobs.state_file import transaction

POD = "pod"  # name of the member with the TEs, where job executors share them
COLUMNS = "name, state, address, pid, boots, beat_at, reason, tes"


class MemberTE(msgspec.Struct, frozen=True):
    """A task executor (TE) as reported by its job executor (JE). `life` is a state of engine/te/life.py."""

    name: str
    model: str
    role: str
    life: str


class ClusterMember(msgspec.Struct, frozen=True):
    """A job executor (JE) process of a cluster.

    `boots` counts its starts since it was ready last; `beat_at` is in seconds.
    """

    name: str
    state: MemberState
    address: str | None
    pid: int
    boots: int
    beat_at: float
    reason: str | None
    tes: list[MemberTE]


class ReplacedError(XDeepServeError):
    """Error: another process has the place of this member now."""


class MemberTable:
    """Members of a state directory. Each change is a transaction; `now` is the clock of
    heartbeats, which never jumps."""

    def __init__(self, db: sqlite3.Connection, now: Callable[[], float]) -> None:
        self._db, self.now = db, now

    def all(self) -> list[ClusterMember]:
        """List all members by name."""
        rows = self._db.execute(f"SELECT {COLUMNS} FROM members ORDER BY name").fetchall()
        return [self._member(*row) for row in rows]

    @staticmethod
    def _member(*row: Any) -> ClusterMember:
        *columns, tes = row
        values = [*columns, msgspec.json.decode(tes, type=list[MemberTE])]
        return ClusterMember(*values)

    def start(self, name: str, pid: int, lease: MasterLease) -> None:
        """Record the manager's start of a process for a member. Raises LeaseLostError."""
        with transaction(self._db) as db:
            leases.check_held(db, lease)
            found = self._state(name)
            if found is not None:
                check_move(f"member {name}", MEMBER_MOVES, found[0], "starting")
            boots = 1 + (0 if found is None else found[2])
            values = (name, "starting", None, pid, boots, self.now(), None, b"[]")
            db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)

    def beat(self, name: str, pid: int, address: str, tes: list[MemberTE]) -> None:
        """Record a heartbeat of a member that serves at `address`. Raises ReplacedError if the process was
        replaced."""
        with transaction(self._db) as db:
            state = self._own(name, pid)
            if state != "ready":
                check_move(f"member {name}", MEMBER_MOVES, state, "ready")
            db.execute(
                "UPDATE members SET state = 'ready', address = ?, boots = 0, beat_at = ?, reason = NULL,"
                " tes = ? WHERE name = ?",
                (address, self.now(), msgspec.json.encode(tes), name),
            )

    def date_back(self, lease: MasterLease) -> None:
        """Let heartbeats that lie in the future count as of now: another clock wrote them, such as that of
        the time before a restart of this computer. Raises LeaseLostError."""
        with transaction(self._db) as db:
            leases.check_held(db, lease)
            now = self.now()
            db.execute("UPDATE members SET beat_at = ? WHERE beat_at > ?", (now, now))

    def end(self, name: str, pid: int, state: MemberState, reason: str) -> None:
        """Record a member's own report that it has failed or ends. Ignored if the process was replaced."""
        with transaction(self._db):
            found = self._state(name)
            if found is not None and found[1] == pid and state in MEMBER_MOVES[found[0]]:
                self._set(name, state, reason)

    def move(self, member: ClusterMember, state: MemberState, reason: str, lease: MasterLease) -> None:
        """Move a member to a state by the manager's finding, unless the member has changed meanwhile. Raises
        LeaseLostError."""
        with transaction(self._db) as db:
            leases.check_held(db, lease)
            if self._state(member.name) == (member.state, member.pid, member.boots):
                check_move(f"member {member.name}", MEMBER_MOVES, member.state, state)
                self._set(member.name, state, reason)

    def _set(self, name: str, state: MemberState, reason: str) -> None:
        row = (state, reason, name)
        self._db.execute("UPDATE members SET state = ?, reason = ? WHERE name = ?", row)

    def _state(self, name: str) -> tuple[str, int, int] | None:
        row: tuple[str, int, int] | None = self._db.execute(
            "SELECT state, pid, boots FROM members WHERE name = ?", (name,)
        ).fetchone()
        return row

    def _own(self, name: str, pid: int) -> str:
        found = self._state(name)
        if found is None or found[1] != pid or found[0] in ("lost", "gone"):
            raise ReplacedError(f"process {pid} is not {name} any more: it was held for lost")
        return found[0]
