"""The database of a state directory: its tables, the check for foreign files, and transactions."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from xdeepserve.errors import InputError

NAME = "jobs.sqlite"
APPLICATION_ID = int.from_bytes(b"xJOB", "big")
VERSION = 2
BUSY_SECONDS = 5.0  # that a write waits for one of another process
MEMBERS = """CREATE TABLE members (name TEXT PRIMARY KEY, state TEXT, address TEXT, pid INTEGER,
                      boots INTEGER, beat_at REAL, reason TEXT, tes BLOB)"""
TABLES = """
CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT, purpose TEXT, num_bytes INTEGER,
                    created_at INTEGER);
CREATE TABLE jobs (number INTEGER PRIMARY KEY AUTOINCREMENT, work BLOB, state TEXT, created_at INTEGER,
                   finished_at INTEGER, reason TEXT);
CREATE TABLE tasks (job INTEGER, place INTEGER, kind TEXT, state TEXT, attempts INTEGER, result BLOB,
                    PRIMARY KEY (job, place)) WITHOUT ROWID;
CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER, created_at INTEGER, level TEXT,
                     message TEXT, data BLOB);
CREATE TABLE models (name TEXT PRIMARY KEY, job INTEGER, created_at INTEGER);
CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT, term INTEGER, ends_at REAL);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX events_by_job ON events (job);
"""


def open_state(directory: Path) -> sqlite3.Connection:
    """Open the database in `directory`, or make it. Raises InputError with a one-line message."""
    where = f"--state {directory}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for folder in ("files", "work"):
            (directory / folder).mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{where}: cannot be made: {error.strerror or error}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InputError(f"{where}: no permission to write it")
    path = directory / NAME
    try:
        db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            db.execute("PRAGMA synchronous = NORMAL")  # outlives any process; no write waits for the disk
            with transaction(db):
                _make_or_check(db, path)
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        raise InputError(f"{where}: {NAME} cannot be used: {error}") from None
    return db


def check_state(directory: Path) -> None:
    """Raise InputError, with a one-line message, if the state directory is unusable."""
    open_state(directory).close()


def _make_or_check(db: sqlite3.Connection, path: Path) -> None:
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")
        for statement in [*TABLES.split(";\n"), MEMBERS]:
            db.execute(statement)
        return
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise InputError(f"{path}: not a database of jobs; somebody else's file is left alone")
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found == 1:  # it had no members
        db.execute(MEMBERS)
        db.execute(f"PRAGMA user_version = {VERSION}")
    elif found != VERSION:
        raise InputError(f"{path}: of version {found}; this program reads version {VERSION}")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Write all changes within the block, or none; other writers wait meanwhile."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
