"""A directory of weights under construction: `DESTINATION.part`, which is no checkpoint until it is complete.

Each finished layer is a safetensors file there, with a small JSON file as its report. Every file is complete
or absent, because it is written under another name first. config.json comes last; then the directory gets its
final name, so nothing half-written ever loads. Only one process at a time works in the directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

from xdeepserve.errors import InputError
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import INDEX_FILE
from xdeepserve.model.config import read_json_object
from xdeepserve.model.tensor_file import TensorFile

JOB_FILE, UNFINISHED, LOCK_FILE = "job.json", "unfinished", "locked"
NO_DESCRIPTOR = -1


class Part:
    """Directory of `num_files` weight files that becomes `destination`. Methods that write raise OSError."""

    def __init__(self, destination: Path, num_files: int) -> None:
        self.destination, self.num_files = destination, num_files
        self.directory = destination.with_name(destination.name + ".part")
        self._lock: int | None = None  # file descriptor, if held

    @property
    def nbytes(self) -> int:
        """Bytes of all files already in the directory."""
        if not self.directory.is_dir():
            return 0
        return sum(path.stat().st_size for path in self.directory.iterdir())

    def lock(self) -> None:
        """Keep other processes out of the directory, which must exist. Raises InputError if another process
        is in it.

        The system releases the lock when the process ends. On a system without file locks, a lock file is
        used; a killed process leaves it behind.
        """
        if self._lock is not None:
            return
        try:
            if fcntl is None:
                os.close(os.open(self.directory / LOCK_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                self._lock = NO_DESCRIPTOR
                return
            lock = os.open(self.directory, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise
        except (FileExistsError, BlockingIOError):
            hint = "" if fcntl is not None else f"; if none is, delete {LOCK_FILE} there"
            raise InputError(f"{self.directory}: another process is at work on it{hint}") from None
        self._lock = lock
        if self.destination.exists():  # the other one got done in between
            raise InputError(f"{self.destination}: exists already; choose a new directory")

    def unlock(self) -> None:
        """Release the lock of the directory, which is removed if no job has begun in it."""
        if self._lock is None:
            return
        if self._lock != NO_DESCRIPTOR:
            os.close(self._lock)
        else:
            (self.directory / LOCK_FILE).unlink(missing_ok=True)
        self._lock = None
        with contextlib.suppress(OSError):  # it has files, or its final name
            self.directory.rmdir()

    def open(self, job: Mapping[str, Any]) -> None:
        """Make the directory, or find that the job in it agrees with this one in everything known so far.

        Raises InputError if the directory holds another job, or another process is in it.
        """
        self.directory.mkdir(exist_ok=True)
        self.lock()
        if not self._has_job():
            return
        path = self.directory / JOB_FILE
        found = read_json_object(path) if path.is_file() else {}
        differing = [key for key, value in json.loads(json.dumps(job)).items() if found.get(key) != value]
        if differing:
            what = f"with another {' and another '.join(differing)}" if found else "none that this is"
            raise InputError(
                f"{self.directory}: holds another unfinished job ({what}); "
                "delete it, or finish it with its settings"
            )

    def begin(self, job: Mapping[str, Any]) -> None:
        """Begin the job, or continue this very job. Raises InputError as `open` does."""
        self.open(job)
        if not self._has_job():
            self.write(JOB_FILE, json.dumps(job).encode())

    def _has_job(self) -> bool:
        return any(one.name not in (UNFINISHED, LOCK_FILE) for one in self.directory.iterdir())

    def save(self, number: int, tensors: Mapping[str, Array]) -> None:
        """Save tensors as weights file `number`."""
        half = self.directory / UNFINISHED
        try:
            save_file({name: _compact(array) for name, array in tensors.items()}, half, {"format": "pt"})
        except SafetensorError as error:  # the library's own error hides the system's
            found = re.search(r"os error (\d+)", str(error))
            code = int(found[1]) if found else errno.EIO
            raise OSError(code, os.strerror(code)) from None
        shutil.copymode(self.directory / JOB_FILE, half)  # the library lets nobody else read what it writes
        half.replace(self.directory / f"layer-{number:05d}.safetensors")

    def write(self, name: str, content: bytes) -> None:
        """Write any file other than weights."""
        half = self.directory / UNFINISHED
        half.write_bytes(content)
        half.replace(self.directory / name)

    def file(self, number: int) -> Path:
        """Return the path of weights file `number`, which may have its final name already."""
        final = self._final(number)
        return final if final.is_file() else self.directory / f"layer-{number:05d}.safetensors"

    def report_file(self, number: int) -> Path:
        """Return the path of layer `number`'s report, which exists once the layer's weights do."""
        return self.directory / f"layer-{number:05d}.json"

    def finish(self, companions: Mapping[str, Path], report: tuple[str, bytes], config: bytes) -> None:
        """Copy `companions` (name -> source), write the index, `report` (name, content) and config.json."""
        weight_map: dict[str, str] = {}
        size = 0
        for number in range(self.num_files):
            new = self._final(number)
            self.file(number).replace(new)
            weight_map |= dict.fromkeys(sorted(TensorFile(new).names), new.name)
            size += new.stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        self.write(INDEX_FILE, (json.dumps(index, indent=1) + "\n").encode())
        for name, source in companions.items():
            shutil.copyfile(source, self.directory / name)
        self.write(*report)
        self.write("config.json", config)
        (self.directory / LOCK_FILE).unlink(missing_ok=True)
        self.directory.replace(self.destination)
        for path in [*self.destination.glob("layer-*.json"), self.destination / JOB_FILE]:
            path.unlink()

    def _final(self, number: int) -> Path:
        return self.directory / f"model-{number + 1:05d}-of-{self.num_files:05d}.safetensors"


def _compact(array: Array) -> Array:
    """Store a float32 array as BF16 if that loses nothing."""
    if array.dtype != np.float32:
        return np.ascontiguousarray(array)
    half = array.astype(ml_dtypes.bfloat16)
    return half if np.array_equal(half.astype(np.float32), array) else np.ascontiguousarray(array)
