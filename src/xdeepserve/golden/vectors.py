"""Golden vectors as files, and the comparison with files of another implementation.

    DIR/manifest.json                     cases; each with description, parameters, regions, files and digests
    DIR/<case>/inputs.safetensors         rank0.x, ...
    DIR/<case>/steps/NN-<step>.safetensors    rank0.metadata, rank0.managed, rank0.app: uint8 images
    DIR/<case>/outputs.safetensors        rank0.combined, ...

An image shows every rank after the step, and no rank within the next one. To compare an implementation: run
a case from its inputs, overwrite its step and output files with your own, and check. Missing step files are
not compared, so outputs alone will do. Leave the manifest as it was written: its parameters, regions and
digests are compared as well. Digests are sha256 over the file's tensors (names, types, shapes, bytes), so
another writer of safetensors, with another header, gets the same digests.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from xdeepserve import __version__
from xdeepserve.comm.cells import members
from xdeepserve.errors import InputError
from xdeepserve.golden.cases import CASES
from xdeepserve.golden.harness import Done
from xdeepserve.golden.locate import ManifestRegion, locate
from xdeepserve.golden.recorder import Arrays
from xdeepserve.reading import read

FORMAT = 1
NOTHING = "nothing"
"""Stands for what is missing on one side of a comparison."""


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
    """List the cases to work on: all of them, or those named. InputError for an unknown name."""
    for name in names or ():
        if name not in CASES:
            raise InputError(f"no golden case '{name}': there are {', '.join(CASES)}")
    return list(dict.fromkeys(names)) if names else list(CASES)


def files_of(done: Done) -> dict[str, Arrays]:
    """Arrays of a case's files, by path within its directory."""
    inputs, steps, outputs = done.recording
    return {
        "inputs.safetensors": inputs,
        **{f"steps/{step.name}.safetensors": step.images for step in steps},
        "outputs.safetensors": outputs,
    }


def digest(arrays: Arrays) -> str:
    """Digest of arrays: sha256 over names, types, shapes and bytes, in the order of the names."""
    state = hashlib.sha256()
    for name in sorted(arrays):
        x = np.ascontiguousarray(arrays[name])
        state.update(f"{name} {x.dtype.str} {list(x.shape)}\n".encode())
        state.update(x.tobytes())
    return f"sha256:{state.hexdigest()}"


def write(directory: Path, names: Sequence[str] | None = None) -> list[str]:
    """Record cases into a directory that must be new or empty, and return their names."""
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
            manifest.cases[name] = _manifest_of(name, done)
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        (directory / "manifest.json").write_bytes(text + b"\n")
    except OSError as error:
        raise InputError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None
    return chosen


def _manifest_of(case: str, done: Done) -> CaseManifest:
    regions = {f"rank{rank}": [_described(r) for r in some] for rank, some in enumerate(done.regions)}
    digests = {path: digest(arrays) for path, arrays in files_of(done).items()}
    return CaseManifest(CASES[case].description, done.parameters, regions, digests)


def _described(region: ManifestRegion) -> dict[str, Any]:
    """Describe a region for the manifest: its place in its area, and the array it holds."""
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
    """Compare a directory with the package's recordings: return the cases compared and each case's first
    difference.

    By default all cases that the manifest names. A file that is missing or cannot be read is a difference of
    its case. InputError if the directory or its manifest cannot be read, if it holds no case, or if the
    manifest omits a case that is there.
    """
    manifest = _manifest(directory)
    chosen = select(names) if names else list(manifest.cases)
    for name in chosen:
        if name not in manifest.cases or name not in CASES:
            known = ", ".join(manifest.cases if name in CASES else CASES)
            raise InputError(f"{directory}: no golden case '{name}': there are {known}")
    for name in CASES:
        if name not in manifest.cases and (directory / name).exists():
            raise InputError(f"{directory}: the manifest does not name '{name}', which is there")
    differences = []
    for name in chosen:
        done = CASES[name].run(None)
        files = _differences(name, directory / name, done)
        # The manifest comes last: a file's first different byte says more than its digest.
        manifests = _manifest_differences(name, _manifest_of(name, done), manifest.cases[name])
        difference = next(itertools.chain(files, manifests), None)
        if difference is not None:
            differences.append(difference)
    return chosen, differences


def _manifest(directory: Path) -> Manifest:
    path = directory / "manifest.json"
    manifest = read(path, "JSON", "manifest").to(Manifest)
    if manifest.format != FORMAT:
        raise InputError(f"{path}: format {manifest.format} is not supported, only {FORMAT}")
    if not manifest.cases:
        raise InputError(f"{path}: there are no cases")
    return manifest


def _manifest_differences(case: str, expected: CaseManifest, found: CaseManifest) -> Iterator[Difference]:
    """Yield the differences between two manifest entries: parameters, regions and digests, in this order."""
    ours, theirs = (msgspec.json.decode(msgspec.json.encode(manifest)) for manifest in (expected, found))
    for member in ("parameters", "regions", "digests"):
        yield from _tree_differences(case, f"manifest, {member}", ours[member], theirs[member])


def _tree_differences(case: str, where: str, expected: Any, found: Any) -> Iterator[Difference]:
    """Yield the innermost values in which two JSON values differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in (*expected, *(key for key in found if key not in expected)):
            inner = f"{where}, {key}"
            yield from _tree_differences(case, inner, expected.get(key, NOTHING), found.get(key, NOTHING))
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
            yield from _tree_differences(case, f"{where}[{index}]", ours, theirs)
    elif expected != found or type(expected) is not type(found):
        yield Difference(case, where, expected, found)


def _differences(case: str, directory: Path, done: Done) -> Iterator[Difference]:
    """Yield every difference between a case's files and its recording, in the order of the protocol."""
    for path, expected in files_of(done).items():
        file = directory / path
        is_step = path.startswith("steps/")
        if is_step and not file.exists():
            continue
        found = _load(file)
        if isinstance(found, str):
            yield Difference(case, f"file {path}", "a safetensors file", found)
            continue
        label = f"step {Path(path).stem}" if is_step else Path(path).stem
        yield from _file_differences(case, label, expected, found, done.regions if is_step else None)
    # Desktops leave files of their own, whose names begin with a dot.
    found_steps = {f"steps/{p.name}" for p in directory.glob("steps/*") if not p.name.startswith(".")}
    unknown = sorted(found_steps - set(files_of(done)))
    if unknown:
        yield Difference(case, f"file {unknown[0]}", "no such step", "a file")


class _FileTensor(NamedTuple):
    """A tensor as read from its file, even of a type that NumPy does not have."""

    dtype: str
    shape: list[int]
    data: bytes

    def __str__(self) -> str:
        return f"{_NUMPY.get(self.dtype, self.dtype)} {self.shape}"


_NUMPY = {"BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64"}
_NUMPY |= {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}


def _load(file: Path) -> dict[str, _FileTensor] | str:
    """Load a file's tensors by name, or return words for what is there instead."""
    try:
        if not file.exists():
            return NOTHING
        if not file.is_file():
            return "a directory" if file.is_dir() else "no regular file"
        tensors = deserialize(file.read_bytes())
    except OSError as error:
        return f"a file that cannot be read: {error.strerror}"
    except SafetensorError as error:
        return f"something else: {error}"
    return {name: _FileTensor(x["dtype"], list(x["shape"]), bytes(x["data"])) for name, x in tensors}


def _file_differences(
    case: str,
    label: str,
    expected: Arrays,
    found: dict[str, _FileTensor],
    regions: list[list[ManifestRegion]] | None,
) -> Iterator[Difference]:
    for name in sorted(set(expected) | set(found)):
        of_rank = re.fullmatch(r"rank(\d+)\.(.+)", name)
        where = f"{label}, rank {of_rank[1]}, {of_rank[2]}" if of_rank else f"{label}, tensor '{name}'"
        if name not in expected or name not in found:
            words = ("a tensor", "none") if name in expected else ("none", "a tensor")
            yield Difference(case, where, *words)
            continue
        ours, theirs = expected[name], found[name]
        described = f"{ours.dtype} {list(ours.shape)}"
        if described != str(theirs):
            yield Difference(case, where, described, theirs)
        elif ours.tobytes() != theirs.data:
            a, b = (np.frombuffer(data, np.uint8) for data in (ours.tobytes(), theirs.data))
            offset = int(np.flatnonzero(a != b)[0])
            if regions is None or of_rank is None:
                index = offset // ours.itemsize
                place = "".join(f"[{i}]" for i in np.unravel_index(index, ours.shape))
                value = np.frombuffer(theirs.data, ours.dtype)[index]
                yield Difference(case, where + place, ours.flat[index], value)
            else:
                cell, span, dtype = locate(regions[int(of_rank[1])], of_rank[2], offset)
                values = [np.frombuffer(x[span].tobytes(), dtype)[0] for x in (a, b)]
                yield Difference(case, f"{where} byte {offset} ({cell})", *values)
