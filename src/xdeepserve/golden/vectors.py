"""Golden vectors as files, and the comparison of somebody else's.

    DIR/manifest.json                     cases; each with description, parameters, regions, files and digests
    DIR/<case>/inputs.safetensors         rank0.x, ...
    DIR/<case>/steps/NN-<step>.safetensors    rank0.metadata, rank0.managed, rank0.app: uint8 images
    DIR/<case>/outputs.safetensors        rank0.combined, ...

An image shows every rank after the step and nobody within the next. To compare an implementation: run a case
from its inputs, overwrite its step and output files with your own, and check. Step files that are missing are
not compared, so outputs alone will do. Digests are sha256 over the file's tensors (names, types, shapes,
bytes), so that another writer of safetensors, with another header, gets the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from xdeepserve import __version__
from xdeepserve.errors import InputError
from xdeepserve.golden.cases import CASES
from xdeepserve.golden.cells import Region, locate, members
from xdeepserve.golden.harness import Done
from xdeepserve.golden.recorder import Arrays

FORMAT = 1


class CaseManifest(msgspec.Struct):
    description: str
    parameters: dict[str, Any]
    regions: dict[str, list[dict[str, Any]]]
    digests: dict[str, str]


class Manifest(msgspec.Struct):
    format: int
    xdeepserve: str
    cases: dict[str, CaseManifest]


class Difference(NamedTuple):
    """The first place where two recordings of a case differ."""

    case: str
    where: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.case}: {self.where}: expected {self.expected}, found {self.found}"


def select(names: Sequence[str] | None) -> list[str]:
    """All cases, or those named. InputError for an unknown one."""
    for name in names or ():
        if name not in CASES:
            raise InputError(f"no golden case '{name}': there are {', '.join(CASES)}")
    return list(dict.fromkeys(names)) if names else list(CASES)


def files_of(done: Done) -> dict[str, Arrays]:
    """A case's files, by path within its directory."""
    inputs, steps, outputs = done.recording
    return {
        "inputs.safetensors": inputs,
        **{f"steps/{step.name}.safetensors": step.images for step in steps},
        "outputs.safetensors": outputs,
    }


def digest(arrays: Arrays) -> str:
    """sha256 over names, types, shapes and bytes, in the order of the names."""
    state = hashlib.sha256()
    for name in sorted(arrays):
        x = np.ascontiguousarray(arrays[name])
        state.update(f"{name} {x.dtype.str} {list(x.shape)}\n".encode())
        state.update(x.tobytes())
    return f"sha256:{state.hexdigest()}"


def write(directory: Path, names: Sequence[str] | None = None) -> list[str]:
    """Record cases into a directory, which may not hold others yet. Returns their names."""
    chosen = select(names)
    manifest = Manifest(FORMAT, __version__, {})
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} exists and is not an empty directory")
    try:
        for name in chosen:
            done = CASES[name].run(None)
            files = files_of(done)
            for path, arrays in files.items():
                target = directory / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                save_file({key: np.ascontiguousarray(x) for key, x in arrays.items()}, target)
            regions = {f"rank{rank}": [_described(r) for r in some] for rank, some in enumerate(done.regions)}
            digests = {path: digest(arrays) for path, arrays in files.items()}
            description = CASES[name].description
            manifest.cases[name] = CaseManifest(description, done.parameters, regions, digests)
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        (directory / "manifest.json").write_bytes(text + b"\n")
    except OSError as error:
        raise InputError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None
    return chosen


def _described(region: Region) -> dict[str, Any]:
    """A region in the manifest: where it lies in its area, and what it is an array of."""
    dtype = region.cells.dtype
    element: Any = dtype.str
    if dtype.names is not None:
        element = {
            name: {"dtype": this.base.str, "shape": list(this.shape), "offset": first}
            for name, (this, first) in members(dtype).items()
        }
    return {
        "area": region.area,
        "name": region.name,
        "offset": region.offset,
        "nbytes": region.nbytes,
        "shape": dict(region.cells.dims),
        "element": element,
        "element_nbytes": dtype.itemsize,
    }


# ---- comparison -----------------------------------------------------------------------------------------


def check(directory: Path, names: Sequence[str] | None = None) -> tuple[list[str], list[Difference]]:
    """Compare a directory with what this package records: cases compared, and the first difference of each.

    InputError if the directory, its manifest or a file cannot be read, or nothing is there to compare.
    """
    manifest = _manifest(directory)
    chosen = select(names) if names else list(manifest.cases)
    differences = []
    for name in chosen:
        if name not in manifest.cases or name not in CASES:
            known = ", ".join(manifest.cases if name in CASES else CASES)
            raise InputError(f"{directory}: no golden case '{name}': there are {known}")
        difference = next(_differences(name, directory / name, CASES[name].run(None)), None)
        if difference is not None:
            differences.append(difference)
    return chosen, differences


def _manifest(directory: Path) -> Manifest:
    path = directory / "manifest.json"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise InputError(f"{path}: not a manifest of golden vectors: {error}") from None
    if manifest.format != FORMAT:
        raise InputError(f"{path}: format {manifest.format} is not supported, only {FORMAT}")
    if not manifest.cases:
        raise InputError(f"{path}: there are no cases")
    return manifest


def _differences(case: str, directory: Path, done: Done) -> Iterator[Difference]:
    """All that differ, in the order of the protocol."""
    num_compared = 0
    for path, expected in files_of(done).items():
        file = directory / path
        is_step = path.startswith("steps/")
        if not file.exists() and is_step:
            continue
        found = _load(file)
        num_compared += path != "inputs.safetensors"
        label = f"step {Path(path).stem}" if is_step else Path(path).stem
        yield from _file_differences(case, label, expected, found, done.regions if is_step else None)
    unknown = sorted({f"steps/{p.name}" for p in directory.glob("steps/*")} - set(files_of(done)))
    if unknown:
        yield Difference(case, f"file {unknown[0]}", "no such step", "a file")


def _load(file: Path) -> Arrays:
    try:
        return load_file(file)
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: not a safetensors file: {error}") from None


def _file_differences(
    case: str, label: str, expected: Arrays, found: Arrays, regions: list[list[Region]] | None
) -> Iterator[Difference]:
    for name in sorted(set(expected) | set(found)):
        rank, _, what = name.partition(".")
        where = f"{label}, rank {rank.removeprefix('rank')}, {what}"
        if name not in expected or name not in found:
            words = ("a tensor", "none") if name in expected else ("none", "a tensor")
            yield Difference(case, where, *words)
            continue
        ours, theirs = expected[name], found[name]
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            shapes = [f"{x.dtype} {list(x.shape)}" for x in (ours, theirs)]
            yield Difference(case, where, *shapes)
        elif ours.tobytes() != theirs.tobytes():
            a, b = (np.frombuffer(x.tobytes(), np.uint8) for x in (ours, theirs))
            offset = int(np.flatnonzero(a != b)[0])
            if regions is None:
                index = offset // ours.itemsize
                place = "".join(f"[{i}]" for i in np.unravel_index(index, ours.shape))
                yield Difference(case, where + place, ours.flat[index], theirs.flat[index])
            else:
                cell, span, dtype = locate(regions[int(rank.removeprefix("rank"))], what, offset)
                values = [np.frombuffer(x[span].tobytes(), dtype)[0] for x in (a, b)]
                yield Difference(case, f"{where} byte {offset} ({cell})", *values)
