"""How kernels are compiled, and for which CPU.

    XDEEPSERVE_KERNELS=amx        insist on AMX, a matrix unit for INT8 and BF16
    XDEEPSERVE_KERNELS=vnni       insist on AVX-512 VNNI's INT8 dot product, without the matrix unit
    XDEEPSERVE_KERNELS=portable   do without both and AVX-512 BF16's, as on any CPU that lacks them

Unset, all are used that the CPU has and the system permits, except that a CPU with a matrix unit does without
AVX-512 BF16's dot product, which takes four times as long there as a fused multiply-add. The bits are the
same each way. What machine code is made for belongs to the key of Numba's cache, so all kinds lie there side
by side: in the user's cache directory, in a folder for each place that the package is installed at, or in
NUMBA_CACHE_DIR if that is set.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from llvmlite import binding as llvm
from numba import njit as numba_njit
from numba import types
from numba.core import config as numba_config
from numba.core.caching import IndexDataCacheFile
from numba.core.registry import cpu_target

from xdeepserve.errors import InputError
from xdeepserve.jit import amx
from xdeepserve.jit.parts import PartCompiler

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ENVIRONMENT_VARIABLE = "XDEEPSERVE_KERNELS"
VNNI, BF16 = "avx512vnni", "avx512bf16"
KINDS = {"amx": (True, True), "vnni": (True, False), "portable": (False, False)}  # with VNNI, with AMX
PACKAGE = Path(__file__).parent.parent
# With another process that compiles the same; then it is compiled here, too. The largest kernels take two
# minutes of a core, several times that on a busy machine. A process that ends lets go of its locks.
PATIENCE_S = 600.0
INDEX = "index"  # what is locked while a line is added to it
IMPORTS = re.compile(r"^(?:from|import) ([\w.]+)(?: import (\([^)]*\)|.*))?", re.MULTILINE)
# Divisions do not check for zero; no wrapper for calls from C is made, which takes time to compile.
NUMBA: Any = numba_config
njit: Any = numba_njit  # its annotations do not know all options
# Whether references to arrays are counted (_nrt) is said each time: what is silent does as its caller does.
OPTIONS: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": True}
# A part borrows the arrays that it is given. Otherwise it would count references to each of them, twice a
# call and atomically, which takes a tile of a GEMM longer than a tenth of its arithmetic.
ARRAY_OPTIONS: Any = {**OPTIONS, "no_cpython_wrapper": True, "pipeline_class": PartCompiler}
PART_OPTIONS: Any = {**ARRAY_OPTIONS, "_nrt": False}
TILE_OPTIONS: Any = {**PART_OPTIONS, "forceinline": True}


def choose_cpu() -> None:
    """Choose the CPU that XDEEPSERVE_KERNELS asks for. Raises InputError for an unknown or impossible one."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if wanted not in ("", *KINDS):
        raise InputError(f"{ENVIRONMENT_VARIABLE}={wanted}: known are {', '.join(KINDS)}")
    if NUMBA.CPU_FEATURES is None and (amx.CAN_ASK or wanted == "portable"):
        _leave_out(wanted)
    # Whoever names the features makes code for another machine, perhaps, and needs no permission on this one.
    if uses_amx() and not amx.is_permitted() and wanted == "amx":
        raise InputError(f"{ENVIRONMENT_VARIABLE}=amx, but the system does not let this process use AMX")
    if wanted:
        needs_vnni, needs_amx = KINDS[wanted]
        for name, has, needs in (("AMX", uses_amx(), needs_amx), ("AVX-512 VNNI", uses_vnni(), needs_vnni)):
            if has != needs:
                kind = f"does not have {name}" if needs else f"has {name} by what was set before"
                raise InputError(
                    f"{ENVIRONMENT_VARIABLE}={wanted}, but the CPU that Numba compiles for {kind}"
                )


def _leave_out(wanted: str) -> None:
    """Make Numba do without unwanted features of this CPU."""
    features = llvm.get_host_cpu_features()
    unwanted = [VNNI, BF16] if wanted == "portable" else []
    if any(features.get(each) for each in amx.FEATURES):
        unwanted.append(BF16)
        if wanted != "amx" and (wanted or not amx.is_permitted()):
            unwanted += amx.FEATURES
    if unwanted:
        features.update(dict.fromkeys(unwanted, False))
        NUMBA.CPU_FEATURES = features.flatten()


def uses_vnni() -> bool:
    """Whether kernels are compiled for a CPU with the 512-bit INT8 dot product."""
    return _compiles_for(VNNI)


def uses_bf16_dots() -> bool:
    """Whether kernels are compiled for a CPU with the 512-bit dot product of pairs of BF16."""
    return _compiles_for(BF16)


def uses_amx() -> bool:
    """Whether kernels are compiled for a CPU with a matrix unit for INT8 and BF16."""
    return all(_compiles_for(each) for each in amx.FEATURES)


def instructions() -> str:
    """Name the instructions for products on the CPU that kernels are compiled for."""
    dots = "AVX-512 VNNI and BF16" if uses_bf16_dots() else "AVX-512 VNNI"
    if uses_amx() or uses_vnni():
        return "AMX" if uses_amx() else dots
    if _compiles_for("avx"):
        wide = next((each for each in ("avx512f", "avx2") if _compiles_for(each)), "avx")
        names = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}
        return names[wide] + (" and FMA" if _compiles_for("fma") else "")
    return "NEON" if _compiles_for("neon") else "no vectors but of 128 bits"


def register_floats() -> int:
    """Count the floats in all vector registers of the CPU that kernels are compiled for."""
    if _compiles_for("avx512f"):
        return 32 * 16
    return 128 if _compiles_for("avx") or _compiles_for("neon") else 64


def _compiles_for(feature: str) -> bool:
    return f"+{feature}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


@functools.cache
def _imported(file: Path) -> frozenset[Path]:
    """List the files of this package imported by one of them, by name and at the left margin."""
    found = set()
    for module, names in IMPORTS.findall(file.read_text()):
        bare = module.lstrip(".")
        root = file.parents[len(module) - len(bare) - 1] if module != bare else PACKAGE.parent
        for name in (bare, *(f"{bare}.{each}" for each in re.findall(r"\w+", names))):
            path = root.joinpath(*name.split("."))
            found |= {each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()}
    return frozenset(found)


@functools.cache
def sources(file: Path) -> str:
    """Hash the sources of a file's kernels: the file, its imports, their imports, and so on."""
    reached, new = set(), {file, Path(__file__)}
    while new:
        reached |= new
        new = {other for each in new for other in _imported(each)} - reached
    digest = hashlib.sha256()
    for each in sorted(reached):
        digest.update(each.read_bytes())
    return digest.hexdigest()


def cache_directory() -> Path:
    """Return the directory for this installation's machine code, which is not kept beside the sources."""
    base = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    if sys.platform != "darwin" and os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    place = hashlib.sha256(str(PACKAGE.resolve()).encode()).hexdigest()[:12]
    return base / "xdeepserve" / place


class Locator:
    """Locator for Numba: the directory and the source stamp of the machine code of one file's kernels."""

    def __init__(self, file: Path, numbas: Any) -> None:
        self._directory = cache_directory() / file.relative_to(PACKAGE).parent
        self._stamp, self._numbas = sources(file), numbas

    def ensure_cache_path(self) -> None:
        """Make the directory of the machine code. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        """Return the directory of the machine code."""
        return str(self._directory)

    def get_source_stamp(self) -> str:
        """Return a stamp that changes with the kernels' sources."""
        return self._stamp

    def get_disambiguator(self) -> str:
        """Tell functions of one name apart by their first lines."""
        return str(self._numbas.get_disambiguator())


@functools.cache
def _locks(directory: str) -> int:
    """Open the file whose bytes stand for kernels being compiled. Closing the file would free all locks."""
    return os.open(os.path.join(directory, "compiling.lock"), os.O_RDWR | os.O_CREAT, 0o644)


class CacheFile(IndexDataCacheFile):
    """Cache of machine code in files named by content. Of processes that need a kernel, one compiles.

    Numba numbers a function's files in the order in which they come. Of two processes that compile at once
    each may then take the same number, and load the code of the other's types. Here the worst that can happen
    is that a line of the index is lost, where files cannot be locked, and something is compiled once more.
    """

    def _load_index(self) -> Any:
        """Load the index; empty if its types have gone or moved, as after an upgrade in place."""
        try:
            return super()._load_index()
        except (ImportError, AttributeError):
            return {}

    def load(self, key: Any) -> Any:
        """Load machine code, perhaps after waiting for another process; None if this one has to compile."""
        deadline = time.monotonic() + PATIENCE_S
        while (data := super().load(key)) is None and time.monotonic() < deadline:
            if self._lock(key):
                data = super().load(key)  # it may have come just before the lock
                if data is not None:
                    self._lock(key, is_done=True)
                break
            time.sleep(0.02)
        return data

    def save(self, key: Any, data: Any) -> None:
        """Write the machine code before the index that names this code."""
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        file = self._data_name_pattern.replace("{number:d}", name)
        self._save_data(file, data)
        deadline = time.monotonic() + PATIENCE_S
        while not self._lock(INDEX) and time.monotonic() < deadline:
            time.sleep(0.001)  # another process adds a line to what it has read
        self._save_index(self._load_index() | {key: file})
        for done in (INDEX, key):
            self._lock(done, is_done=True)

    def _lock(self, key: Any, *, is_done: bool = False) -> bool:
        """Take the lock on a kernel and keep the lock until `save`; False if another process compiles now."""
        if fcntl is None:
            return True
        byte = int(hashlib.sha256(f"{self._index_name} {key!r}".encode()).hexdigest()[:15], 16)
        try:
            how = fcntl.LOCK_UN if is_done else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(_locks(self._cache_path), how, 1, byte)
        except BlockingIOError:
            return False
        except OSError:  # a folder that cannot be written, a file system without locks
            pass
        return True


def _without_literals(template: Any, args: Any, kws: Any) -> Any:
    """Have a kernel that calls another one with constants use the machine code for variables.

    Numba would compile the callee once more for each set of constants: seconds of a core each, and no faster,
    as all that is constant there bounds outer loops.
    """
    kinds = {name: types.unliteral(kind) for name, kind in kws.items()}
    return template(tuple(map(types.unliteral, args)), kinds)


def kernel(function: Any) -> Any:
    """Decorate a kernel called from Python: compiled on first call, without the GIL, and kept in a cache."""
    dispatcher = njit(cache=True, **OPTIONS)(function)
    dispatcher.get_call_template = functools.partial(_without_literals, dispatcher.get_call_template)
    cache = dispatcher._cache
    file = Path(function.__code__.co_filename)
    if not NUMBA.CACHE_DIR and file.is_relative_to(PACKAGE):
        locator = Locator(file, cache._impl.locator)
        with contextlib.suppress(OSError):  # where it cannot be made Numba's own choice stands
            locator.ensure_cache_path()
            cache._impl._locator, cache._cache_path = locator, locator.get_cache_path()
    # Numba looks at the function's own file only, but its code holds the parts it calls from others.
    cache._cache_file = CacheFile(cache.cache_path, cache._impl.filename_base, sources(file))
    return dispatcher


def part(function: Any) -> Any:
    """Decorate a part: a function called from kernels only, and compiled into them."""
    return njit(**PART_OPTIONS)(named(function))


def tile_part(function: Any) -> Any:
    """Decorate a part compiled into each place that calls it, for tiles: a call would pass each array by its
    seven fields, on the stack."""
    return njit(**TILE_OPTIONS)(named(function))


def array_part(function: Any) -> Any:
    """Decorate a part that makes arrays, for itself or to return them.

    Where it hands back other arrays than those at an address, a `part` must not call it: it would lose them.
    """
    return njit(**ARRAY_OPTIONS)(named(function))


def as_part(dispatcher: Any) -> Any:
    """Return a kernel as an `array_part`, for kernels that call it and do not use its own machine code."""
    return array_part(dispatcher.py_func)


_bodies: dict[tuple[str, str], object] = {}  # by module and qualified name


def named(function: Any) -> Any:
    """Give a function made inside another one a name that tells it from others of its kind.

    Machine code in the cache calls functions by name: module, qualified name, types, and a number that counts
    what a process has compiled. What several processes have cached may carry the same number, and would call
    each other's functions if names did not tell an 8x2 tile from a 4x2 one.
    """
    outer = [cell.cell_contents for cell in function.__closure__ or ()]
    constants = [str(each) for each in outer if isinstance(each, int)]
    function.__qualname__ = "_".join([function.__qualname__, *constants])
    name = function.__module__, function.__qualname__
    body = function.__code__, [each for each in outer if not isinstance(each, int)]
    if _bodies.setdefault(name, body) != body:
        raise TypeError(f"two parts of kernels have the name {'.'.join(name)}")
    return function


choose_cpu()
