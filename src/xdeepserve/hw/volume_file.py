"""File of a volume: how it is made, how it is told from foreign files, and what counts as damage.

One SQLite file with a write-ahead log, synchronised fully: what has been committed survives the process, and
what has not leaves no trace. Its header says whose it is in an application id, and in which format in a
user version of four equal bytes; both are read by majority, so that one damaged byte turns it neither into
somebody else's file nor into one of another format. It is made beside its place and then renamed, so that
there is never half a file of that name.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import Counter
from pathlib import Path

from ..errors import InputError

MAGIC = b"SQLite format 3\0"
APPLICATION_ID = b"xEMS"
FORMAT = 1
PAGE_SIZE = 16384
HEADER = 100  # bytes; the user version at 60, the application id at 68
CORRUPT = frozenset({1, 7, 11, 18, 19, 20, 24, 25, 26})  # SQLite's result codes for what no sound file causes
SHORT_READ = 522
TABLES = """
CREATE TABLE blocks
    (id INTEGER PRIMARY KEY, namespace TEXT, key BLOB, nbytes INTEGER, digest BLOB, age INTEGER);
CREATE TABLE content (id INTEGER PRIMARY KEY, value BLOB);
"""


class DamagedError(Exception):
    """Error for a volume file with an unsound structure."""


def is_damage(error: Exception) -> bool:
    """Whether an SQLite error means a damaged file, rather than a write that is impossible now."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # raised by Python's wrapper: a value that cannot be what was written
        return True
    return code == SHORT_READ or code & 0xFF in CORRUPT


def check_identity(path: Path) -> None:
    """Check the header of a file: it must be of a volume of this format, sound or not. Raises InputError, in
    one line, if not."""
    try:
        if not path.is_file() and not path.is_dir():  # to open a pipe would be to wait for who writes there
            raise InputError(f"{path}: not a file, so no volume of a memory pool")
        with path.open("rb") as file:
            header = file.read(HEADER)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if not os.access(path, os.W_OK):
        raise InputError(f"{path}: no permission to write it")
    if len(header) < HEADER and MAGIC.startswith(header[: len(MAGIC)]):
        return  # cut off: too short to be anybody's
    ids = sum(a == b for a, b in zip(header[68:72], APPLICATION_ID, strict=False))
    if len(header) < HEADER or ids < len(APPLICATION_ID) - 1 or _differing(header[:16], MAGIC) > 1:
        raise InputError(f"{path}: not a volume of a memory pool; somebody else's file is left alone")
    version = header[60:64]
    byte, count = Counter(version).most_common(1)[0]
    if count < len(version) - 1 or byte != FORMAT:
        found = int.from_bytes(version, "big")
        raise InputError(
            f"{path}: a volume of another format ({found:#x}); this version reads {_version():#x}"
        )


def _mend_header(db: sqlite3.Connection) -> None:
    """Repair damaged bytes of the header: the application id and the format."""
    for pragma, expected in (
        ("application_id", int.from_bytes(APPLICATION_ID, "big")),
        ("user_version", _version()),
    ):
        if db.execute(f"PRAGMA {pragma}").fetchone()[0] != expected:
            db.execute(f"PRAGMA {pragma} = {expected}")


def _differing(found: bytes, expected: bytes) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=True))


def _version() -> int:
    return int.from_bytes(bytes([FORMAT] * 4), "big")


def create(path: Path) -> sqlite3.Connection:
    """Create an empty volume file at `path` and return a connection. The file is not in use yet; see
    `put_in_place`."""
    remove(path)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute(f"PRAGMA page_size = {PAGE_SIZE}")
    db.execute(f"PRAGMA application_id = {int.from_bytes(APPLICATION_ID, 'big')}")
    db.execute(f"PRAGMA user_version = {_version()}")
    db.execute("PRAGMA synchronous = FULL")
    db.executescript(f"BEGIN; {TABLES} COMMIT;")
    return db


def put_in_place(made: Path, path: Path) -> None:
    """Replace the volume at `path`, if there is one, by a new, closed file."""
    for rest in ("-wal", "-shm", "-journal"):
        Path(f"{path}{rest}").unlink(missing_ok=True)
    os.replace(made, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove(path: Path) -> None:
    """Delete a volume with all its side files."""
    for rest in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{rest}")


def connect(path: Path) -> sqlite3.Connection:
    """Open an existing file for this process alone. Raises DamagedError, or sqlite3.Error if it is in use."""
    db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    db.text_factory = bytes
    try:
        for pragma in (
            "locking_mode = EXCLUSIVE",
            "trusted_schema = OFF",
            "cell_size_check = ON",
            "journal_mode = WAL",
            "synchronous = FULL",
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
        # A write that changes nothing: the lock is taken, and a header that forbids writing is found.
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM blocks WHERE 0")
        db.execute("COMMIT")
        _mend_header(db)
    except sqlite3.Error as error:
        db.close()
        is_writable = os.access(path, os.W_OK)
        if is_damage(error) or (getattr(error, "sqlite_errorcode", 0) & 0xFF == 8 and is_writable):
            raise DamagedError(str(error)) from None
        raise
    return db
