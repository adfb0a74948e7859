"""The cluster manager: watches job executors (JEs) and restarts lost ones (DeepServe 3, 7).

The manager is the JE master of the paper. One manager leads, by a lease; others stand by. A standby takes
over with the members of the table, which have gone on serving meanwhile.

    starting   a process was started; it has START_S to be ready
    ready      it reports every second
    suspect    it was silent for SUSPECT_S: other members get requests
    lost       its process has ended, it reports a failed engine, or it was silent for LOST_S: it is
               killed, if it still runs, and started again
    gone       it has ended in order

The TEs of a JE are watched by its engine (engine/serving/control_plane.py, failover.py: the TE master).
Another TE takes the place of a lost one, as `recovery.failover` says. If none can, the engine fails, and its
JE with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.lease import CLUSTER_MANAGER, LeaseLostError, MasterLease
from xdeepserve.jobs.member_table import ClusterMember

MEMBER = "--member"  # stands before its name in the command of a member's process
LEASE_S = 5.0
LOOK_S = 0.2
START_S, SUSPECT_S, LOST_S = 600.0, 3.0, 15.0
FIRST_PAUSE_S, MOST_PAUSE_S = 0.5, 60.0  # before another start, doubled each time

log = logging.getLogger("xdeepserve.jobs")


class BootedProcess(Protocol):
    """Interface of a started process that the manager needs (subprocess.Popen)."""

    pid: int

    def poll(self) -> int | None: ...


class ClusterManager:
    """Keeps the members `names` running, as `holder`. `boot` starts the process of a member.

    If it `is_scaled`, `names` may change, and members without a name there are ended.
    """

    def __init__(
        self,
        store: JobStore,
        holder: str,
        names: Sequence[str],
        boot: Callable[[str], BootedProcess],
        is_scaled: bool = False,
    ) -> None:
        self._store, self._holder, self.names, self._boot = store, holder, list(names), boot
        self.is_scaled = is_scaled
        self._lease: MasterLease | None = None
        self._own: dict[int, BootedProcess] = {}  # by number, of those that this one has started

    @property
    def leads(self) -> bool:
        """Whether the manager held the lease at its last look."""
        return self._lease is not None

    async def run(self) -> None:
        """Look at all members, again and again, until cancelled. An unusable directory delays the next
        look."""
        while True:
            try:
                self.look()
            except (LeaseLostError, sqlite3.Error, OSError) as error:
                log.warning("the manager waits: %s", error)
                self._lease = None
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Take or renew the lease; if the manager leads, check every member and start lost ones."""
        self._lease = self._store.take_lease(self._holder, LEASE_S, CLUSTER_MANAGER)
        if self._lease is None:
            return
        self._store.members.date_back(self._lease)
        found = {member.name: member for member in self._store.members.all()}
        if self.is_scaled:
            for member in found.values():
                if member.name not in self.names and member.state not in ("lost", "gone"):
                    self._part_with(member, self._lease)
        for name in self.names:
            self._see_to(name, found.get(name), self._lease)
        self._own = {pid: process for pid, process in self._own.items() if process.poll() is None}

    def _see_to(self, name: str, member: ClusterMember | None, lease: MasterLease) -> None:
        if member is not None and member.state not in ("lost", "gone"):
            self._judge(member, lease)
            return
        if member is not None:
            end_member(member)
            pause = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(member.boots, 16)) if member.boots else 0.0
            if self._store.now() < member.beat_at + pause:
                return
        process = self._boot(name)
        self._own[process.pid] = process
        try:
            self._store.members.start(name, process.pid, lease)
        except BaseException:
            os.kill(process.pid, signal.SIGKILL)
            raise
        log.warning("%s was started as process %d", name, process.pid)

    def _part_with(self, member: ClusterMember, lease: MasterLease) -> None:
        """End a member that there are too many of, as if it were lost: the pod goes on with its requests, and
        doors ask other members for them."""
        log.warning("%s is taken away", member.name)
        self._store.members.move(member, "gone", "the load is low", lease)
        end_member(member)

    def _judge(self, member: ClusterMember, lease: MasterLease) -> None:
        """Judge a member: lost if its process has ended or was silent for LOST_S, suspect after SUSPECT_S."""
        silent = self._store.now() - member.beat_at
        if (reason := self._ended(member)) is not None:
            pass
        elif member.state == "starting":
            reason = f"it was not ready within {START_S:g} s" if silent >= START_S else None
        elif silent >= LOST_S:
            reason = f"it was silent for {silent:.0f} s"
        elif silent >= SUSPECT_S and member.state == "ready":
            self._store.members.move(member, "suspect", f"silent for {silent:.0f} s", lease)
        if reason is not None:
            log.warning("%s is lost: %s", member.name, reason)
            self._store.members.move(member, "lost", reason, lease)

    def _ended(self, member: ClusterMember) -> str | None:
        """Return why a member's process is not running; None if it is."""
        if (process := self._own.get(member.pid)) is not None:
            code = process.poll()
            return None if code is None else f"its process ended with {code}"
        return None if is_there(member) else "its process has ended"

    def close(self) -> None:
        """End all members in order, and release the lease, if the manager leads. A standby leaves members
        alone."""
        if self._lease is None:
            return
        with contextlib.suppress(LeaseLostError, sqlite3.Error):
            for member in self._store.members.all():
                if member.name in self.names and member.state not in ("lost", "gone"):
                    self._store.members.move(member, "gone", "the cluster ends", self._lease)
                    end_member(member, signal.SIGTERM)
            self._store.give_up(self._lease)


def is_there(member: ClusterMember) -> bool:
    """Whether the member's process runs. The command line is checked because the process id may have been
    reused."""
    try:
        words = Path(f"/proc/{member.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return MEMBER.encode() in words and member.name.encode() in words


def end_member(member: ClusterMember, how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the member's process, if it runs."""
    if is_there(member):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, how)
