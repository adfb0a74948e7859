"""A memory pool's directory: volumes, and the lock of the process that uses them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from xdeepserve.errors import InputError
from xdeepserve.forks import close_in_child
from xdeepserve.hw.volume import Volume
from xdeepserve.hw.volume_file import check_identity, remove

LOCK = "lock"


def check_directory(path: Path) -> None:
    """Raise InputError, with a one-line message and before any change, unless a pool can live at `path`.

    A directory that is not there is made by `lock`.
    """
    try:
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not there.is_dir():
            raise InputError(f"{there}: not a directory; a memory pool has one for its volumes")
    except OSError as error:  # nobody may look there, or no name is as long
        raise InputError(f"{path}: {error.strerror or error}") from None
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise InputError(f"{there}: no permission to read and write there")
    for name in servers_in(path):
        check_identity(volume_path(path, name))


def lock(path: Path) -> IO[str]:
    """Lock a pool's directory, which is made if need be, for as long as the returned file is open. Raises
    InputError if another process holds it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / LOCK).open("a+")
    except OSError as error:
        raise InputError(f"{path / LOCK}: {error.strerror or error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        who = f"process {holder}"
        if holder == str(os.getpid()):
            who = "another LLM of this process; close that one first, or build this one with beside="
        raise InputError(f"{path}: this memory pool is in use by {who}") from None
    close_in_child(file)
    with contextlib.suppress(OSError):  # a full disk: others are refused all the same, by an unknown process
        file.truncate(0)
        os.write(file.fileno(), str(os.getpid()).encode())
    return file


def volume_path(path: Path, server: str) -> Path:
    """Return the path of a server's volume."""
    return path / f"{server}.sqlite"


def server_name(number: int) -> str:
    return f"server-{number:02d}"


def servers_in(path: Path) -> list[str]:
    """Return the names of servers with a volume in the directory."""
    return sorted(file.stem for file in path.glob("server-[0-9][0-9].sqlite"))


def open_volumes(path: Path, names: list[str]) -> dict[str, Volume]:
    """Open the volumes of the servers `names`, and others in the directory. Raises InputError, and leaves
    none open, if a volume cannot be used."""
    volumes: dict[str, Volume] = {}
    try:
        for name in sorted({*names, *servers_in(path)}):
            volume = Volume(volume_path(path, name))
            volume.open()
            volumes[name] = volume
    except BaseException:
        for volume in volumes.values():
            volume.close()
        raise
    return volumes


class VolumeReport(NamedTuple):
    """Content of a volume. `num_bad` counts damaged values, and how often the file was made anew."""

    name: str
    file_nbytes: int
    namespaces: dict[str, tuple[int, int]]  # values and their bytes
    num_bad: int = 0

    @property
    def num_values(self) -> int:
        return sum(count for count, _ in self.namespaces.values())

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.namespaces.values())

    def as_dict(self) -> dict[str, object]:
        """Return the report as a dictionary for JSON."""
        parts = [
            {"namespace": name, "values": count, "bytes": nbytes}
            for name, (count, nbytes) in self.namespaces.items()
        ]
        return {
            "name": self.name,
            "file_bytes": self.file_nbytes,
            "damaged": self.num_bad,
            "namespaces": parts,
        }

    def __str__(self) -> str:
        parts = [
            f"{name} has {count:,} values of {nbytes:,} bytes"
            for name, (count, nbytes) in self.namespaces.items()
        ]
        bad = f"; damaged: {self.num_bad}" if self.num_bad else ""
        return f"{self.name}: {', '.join(parts) or 'empty'}; the file has {self.file_nbytes:,} bytes{bad}"


def inspect(path: Path) -> list[VolumeReport]:
    """Report the content of each volume. Raises InputError if there is none, or if the pool is in use."""
    with _opened(path) as volumes:
        return [_report(path, name, volume) for name, volume in volumes.items()]


def verify(path: Path) -> list[VolumeReport]:
    """Report as `inspect` does, with every value read and compared with its digest. Damaged values are
    deleted."""
    with _opened(path) as volumes:
        reports = []
        for name, volume in volumes.items():
            volume.mend()
            for key in list(volume.rows):
                volume.get(key)
            reports.append(_report(path, name, volume))
        return reports


def clear(path: Path) -> list[VolumeReport]:
    """Delete all volumes, and report their content before."""
    with _opened(path) as volumes:
        reports = [_report(path, name, volume) for name, volume in volumes.items()]
        for name, volume in volumes.items():
            volume.close()
            remove(volume_path(path, name))
    return [report._replace(num_bad=0) for report in reports]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[dict[str, Volume]]:
    """Open the volumes of a directory, locked against other processes."""
    check_directory(path)
    if not path.exists():
        raise InputError(f"{path}: no such directory; an LLM with ems.path={path} makes it")
    if not servers_in(path):
        raise InputError(f"{path}: there is no memory pool in this directory")
    with lock(path):
        volumes = open_volumes(path, [])
        try:
            yield volumes
        finally:
            for volume in volumes.values():
                volume.close()


def _report(path: Path, name: str, volume: Volume) -> VolumeReport:
    counts = Counter(key.namespace for key in volume.rows)
    parts = {each: (counts[each], volume.nbytes[each]) for each in sorted(counts)}
    num_bad = volume.num_mismatches + volume.num_rebuilt
    return VolumeReport(name, volume_path(path, name).stat().st_size, parts, num_bad)
