"""Disk below a volume, with faults as SQLite would see them on a real disk.

error   nothing can be read or written: SQLITE_IOERR
full    what is there can be read; a commit finds no room: SQLITE_FULL
torn    once: of what a commit writes, the second half never gets there, and nobody is told
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

IOERR, FULL = 10, 13  # SQLite's result codes


class Disk:
    """State of a disk: `fault` names what is wrong with it now; None means nothing."""

    def __init__(self, path: Path) -> None:
        self._log = Path(f"{path}-wal")
        self.fault: str | None = None
        self._before: bytes | None = None

    def check_readable(self) -> None:
        """Raise sqlite3.OperationalError if nothing can be read."""
        if self.fault == "error":
            raise _error("disk I/O error", IOERR)

    def check_writable(self) -> None:
        """Raise sqlite3.OperationalError if nothing new can be written."""
        self.check_readable()
        if self.fault == "full":
            raise _error("database or disk is full", FULL)

    def commits(self) -> None:
        """Prepare for the commit of a fully written transaction. Raises sqlite3.OperationalError on a faulty
        disk."""
        self.check_writable()
        self._before = self._read_log() if self.fault == "torn" else None

    def committed(self) -> None:
        """Take note of a commit that SQLite believes safe; on a torn disk, undo the second half of its
        log."""
        if self._before is None:
            return
        before, after = self._before, self._read_log()
        self.fault = self._before = None
        before = before[: len(after)] + bytes(max(0, len(after) - len(before)))
        changed = [at for at in range(0, len(after), 512) if before[at : at + 512] != after[at : at + 512]]
        with self._log.open("r+b") as log:
            for at in changed[(len(changed) + 1) // 2 :]:
                log.seek(at)
                log.write(before[at : at + 512])

    def _read_log(self) -> bytes:
        return self._log.read_bytes() if self._log.exists() else b""


def _error(message: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = code
    return error
