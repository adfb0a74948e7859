"""Elastic volume: values by key in a file that outlives the process (EVS, CloudMatrix 4.4.1).

Values are written all or none, and each has a digest of 128 bits over its key and its bytes, which every
read checks: what does not agree is deleted and counted, and is not there. A file whose structure is damaged
is made anew from what can still be read. So a read gives the bytes that were written, or nothing.

Age is a counter that the file keeps: every use of a value makes it the youngest. That a value has been read
is written down with the next commit, so after a crash the order of the last uses may be lost, and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError
from .disk import Disk
from .volume_file import DamagedError, check_identity, connect, create, is_damage, put_in_place, remove

MAX_AGE = 1 << 60
FAILURES = (sqlite3.Error, UnicodeError, OverflowError, MemoryError, ValueError, TypeError)


class Key(NamedTuple):
    """Name of a value. A namespace sees no values of another."""

    namespace: str
    digest: bytes  # 16 bytes


class Entry(NamedTuple):
    """Position of a value in the file, with size, digest and age."""

    id: int
    nbytes: int
    digest: bytes
    age: int


def digest_of(key: Key, value: bytes | memoryview) -> bytes:
    """Digest a key and value (16 bytes): a value under another key is as wrong as other bytes."""
    sha = hashlib.blake2b(f"{len(key.namespace)}:{key.namespace}".encode() + key.digest, digest_size=16)
    sha.update(value)
    return sha.digest()


def _checked(row: tuple[int, bytes, bytes, int, bytes, int]) -> tuple[Key, Entry]:
    """Check a row of the index. Raises DamagedError if this program cannot have written it."""
    id_, namespace, key, nbytes, digest, age = row
    if not (type(nbytes) is type(age) is int and 0 <= age < MAX_AGE and nbytes >= 0 and len(digest) == 16):
        raise DamagedError("a row that nobody wrote")
    return Key(namespace.decode(), bytes(key)), Entry(id_, nbytes, digest, age)


class Volume:
    """Key-value store in a file. Call `open` before use; a file has a single user at a time.

    num_mismatches   values whose bytes did not agree with their digest
    num_failed       writes that the file system refused
    num_rebuilt      times that the file was damaged and made anew
    """

    def __init__(self, path: Path) -> None:
        self.path, self.disk = path, Disk(path)
        self.rows: dict[Key, Entry] = {}  # in order of age, oldest first
        self.nbytes: Counter[str] = Counter()  # of all values, by namespace
        self.num_mismatches = self.num_failed = self.num_rebuilt = 0
        self._db: sqlite3.Connection | None = None  # None: closed, or it can neither be read nor made anew
        self._age = self._last_id = 0
        self._touched: dict[Key, None] = {}
        self._forgotten: list[Entry] = []  # rows that are in the file although they have been deleted

    def _set_rows(self, rows: Iterable[tuple[Key, Entry]]) -> None:
        self.rows, self.nbytes = {}, Counter()
        for key, row in rows:
            self._add(key, row)

    def _add(self, key: Key, row: Entry) -> None:
        self._remove(key)
        self.rows[key] = row
        self.nbytes[key.namespace] += row.nbytes

    def _remove(self, key: Key) -> None:
        row = self.rows.pop(key, None)
        if row is not None:
            self.nbytes[key.namespace] -= row.nbytes

    # ---- life ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the file, or make an empty one. Raises InputError, in one line, if the file is not a volume or
        cannot be used."""
        new = Path(f"{self.path}.new")
        try:
            remove(new)
            if not self.path.exists():
                create(new).close()
                put_in_place(new, self.path)
            check_identity(self.path)
            try:
                self._db = connect(self.path)
                self._read()
            except DamagedError:
                self._rebuild()
        except (OSError, sqlite3.Error) as error:
            self._close()
            raise InputError(f"{self.path}: cannot be used as a volume: {error}") from None

    def close(self) -> None:
        """Write the ages of recently used values, and close the file."""
        self.flush()
        self._close()

    def _close(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = None

    # ---- values -------------------------------------------------------------------------------------

    def put(self, values: Mapping[Key, bytes | memoryview]) -> bool:
        """Commit values, all or none. Returns False, with nothing changed, if they cannot be written now."""
        rows = {}
        for key, value in values.items():
            self._age, self._last_id = self._age + 1, self._last_id + 1
            rows[key] = Entry(self._last_id, len(value), digest_of(key, value), self._age)

        def write(db: sqlite3.Connection) -> None:
            self._delete(db, [self.rows[key] for key in rows if key in self.rows])
            db.executemany(
                "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)",
                [(row.id, *key, row.nbytes, row.digest, row.age) for key, row in rows.items()],
            )
            db.executemany("INSERT INTO content VALUES (?, ?)", [(rows[k].id, v) for k, v in values.items()])

        if not self._commit(write):
            return False
        for key, row in rows.items():
            self._add(key, row)
        return True

    def get(self, key: Key) -> bytes | None:
        """Return a value with the bytes that were written; None if there is none, or they are damaged."""
        row = self.rows.get(key)
        if row is None or self._db is None:
            return None
        try:
            value = self._value(self._db, key, row)
        except DamagedError:
            self._rebuild()
            return None
        except sqlite3.Error:  # it cannot be read now
            self.num_failed += 1
            return None
        if value is None:
            self.num_mismatches += 1
            self._drop_bad(key)
        return value

    def touch(self, key: Key) -> None:
        """Note the use of a value, which makes it the youngest."""
        row = self.rows.pop(key, None)
        if row is not None:
            self._age += 1
            self.rows[key] = row._replace(age=self._age)
            self._touched[key] = None

    def delete(self, keys: Sequence[Key]) -> None:
        """Delete values. If the file cannot be written now, the next commit deletes them from it."""
        present = [key for key in keys if key in self.rows]
        for key in present:
            self._forgotten.append(self.rows[key])
            self._remove(key)
            self._touched.pop(key, None)
        if present:
            self._commit(lambda db: None)

    def flush(self) -> None:
        """Write ages and deletions to the file."""
        if self._touched or self._forgotten:
            self._commit(lambda db: None)

    def is_sound(self) -> bool:
        """Whether SQLite finds the file's structure sound."""
        try:
            self.disk.check_readable()
            return self._db is not None and self._db.execute("PRAGMA quick_check(1)").fetchone()[0] == b"ok"
        except FAILURES:
            return False

    def mend(self) -> None:
        """Rebuild a damaged file, even if no value shows damage."""
        if self._db is not None and not self.is_sound():
            self._rebuild()

    # ---- the engine room ----------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the index from the file. Raises DamagedError, keeping the rows read so far, if not all can be
        read."""
        assert self._db is not None
        rows: list[tuple[Key, Entry]] = []
        try:
            for row in self._db.execute("SELECT id, namespace, key, nbytes, digest, age FROM blocks"):
                rows.append(_checked(row))
        except (*FAILURES, AttributeError) as error:
            if is_damage(error):
                raise DamagedError(str(error)) from None
            raise
        finally:
            self._set_rows(sorted(rows, key=lambda each: (each[1].age, each[1].id)))
            self._age = max((row.age for row in self.rows.values()), default=0)
            self._last_id = max((row.id for row in self.rows.values()), default=0)
        if not len(rows) == len(self.rows) == len({row.id for row in self.rows.values()}):
            raise DamagedError("rows that nobody wrote")

    def _value(self, db: sqlite3.Connection, key: Key, row: Entry) -> bytes | None:
        """Read the bytes of a row; None if they do not agree with the digest. Raises DamagedError."""
        self.disk.check_readable()
        try:
            with db.blobopen("content", "value", row.id, readonly=True) as blob:
                value: bytes = blob.read()
        except FAILURES as error:
            if is_damage(error):
                raise DamagedError(str(error)) from None
            raise
        return value if len(value) == row.nbytes and digest_of(key, value) == row.digest else None

    def _drop_bad(self, key: Key) -> None:
        """Delete a bad value, if the structure around it is sound; else rebuild the file."""
        if self.is_sound():
            self.delete([key])
        else:
            self._rebuild()

    @staticmethod
    def _delete(db: sqlite3.Connection, rows: Sequence[Entry]) -> None:
        ids = [(row.id,) for row in rows]
        db.executemany("DELETE FROM blocks WHERE id = ?", ids)
        db.executemany("DELETE FROM content WHERE id = ?", ids)

    def _commit(self, write: Callable[[sqlite3.Connection], None]) -> bool:
        """Write in a single transaction, together with pending ages and deletions. Returns False if the file
        cannot be written now."""
        for _ in range(2):
            if self._db is None:
                return False
            try:
                with self._transaction(self._db) as db:
                    ages = [(self.rows[key].age, self.rows[key].id) for key in self._touched]
                    db.executemany("UPDATE blocks SET age = ? WHERE id = ?", ages)
                    self._delete(db, self._forgotten)
                    write(db)
                    self.disk.commits()
            except FAILURES as error:
                if not is_damage(error):
                    self.num_failed += 1
                    return False
                self._rebuild()
            else:
                self.disk.committed()
                self._touched.clear()
                self._forgotten.clear()
                return True
        self.num_failed += 1
        return False

    @staticmethod
    @contextlib.contextmanager
    def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _rebuild(self) -> None:
        """Rebuild the file from the values still readable. Without room for them it starts empty; without
        room for an empty file there is no volume until the next `open`."""
        self.num_rebuilt += 1
        new, old, self._touched, self._forgotten = Path(f"{self.path}.new"), self._db, {}, []
        try:
            self.disk.check_writable()
            db = create(new)
            with contextlib.closing(db):
                self._set_rows([] if old is None else self._salvage(old, db).items())
            self._close()
            put_in_place(new, self.path)
            self._db = connect(self.path)
        except (OSError, sqlite3.Error, DamagedError):
            self.num_failed += 1
            self._set_rows([])
            self._close()

    def _salvage(self, old: sqlite3.Connection, new: sqlite3.Connection) -> dict[Key, Entry]:
        """Copy every sound value from one file to another."""
        rows: dict[Key, Entry] = {}
        for key, row in list(self.rows.items()):
            try:
                value = self._value(old, key, row)
            except (DamagedError, sqlite3.Error):
                value = None
            if value is None:
                self.num_mismatches += 1
                continue
            kept = row._replace(id=len(rows) + 1)
            with self._transaction(new):
                entry = (kept.id, *key, kept.nbytes, kept.digest, kept.age)
                new.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)", entry)
                new.execute("INSERT INTO content VALUES (?, ?)", (kept.id, value))
            rows[key] = kept
        return rows
