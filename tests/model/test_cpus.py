"""One set of bits for every CPU that kernels are compiled for."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from xdeepserve.engine.run.lockstep.kernels.side_by_side import layer_stage
from xdeepserve.jit import amx, compiling
from xdeepserve.model import canonical, kernels

HAS_AMX = all(compiling.llvm.get_host_cpu_features().get(each) for each in amx.FEATURES)

PROGRAM = """
import hashlib, json
import numpy as np
from tests.model.tools import Pages
from tests.model.bits import normal
from xdeepserve.model import canonical as c, kernels as k
from xdeepserve.model.cache_layout import scratch_size
from xdeepserve.jit import compiling
from xdeepserve.model.packing import pack_bf16, pack_f32, pack_int8

x, w = normal(1, 7, 70), normal(2, 90, 70)
(q, s), (wq, ws) = c.quantize_rows(x), c.quantize_rows(w)
product, act, act_scale = np.empty((7, 90), np.float32), np.empty((7, 45), np.int8), np.empty(7, np.float32)
k.matmul_int8(product, q, s, pack_int8(wq).ravel(), ws)
k.swiglu_quantize(act, act_scale, product.copy())
pages = Pages(3, 40, 16, 24, 8, True)
q_lat, query, out = normal(4, 1, 5 * 24), normal(5, 1, 5 * 12), np.empty((1, 5 * 24), np.float32)
one, last = np.zeros(1, np.int32), np.full(1, 39, np.int32)
scratch = np.empty(scratch_size(40, 24, 8), np.float32)
k.attention(out, q_lat, query, 5, 8, one, last, *pages.cache, pages.table[None], 0.1, False, scratch, 0, 1)
rounded, tables = out.copy(), pages.table[None]
k.attention(rounded, q_lat, query, 5, 8, one, last, *pages.cache, tables, 0.1, True, scratch, 0, 1)
digest = hashlib.sha256()
exact, blocked, factors = np.empty((7, 90), np.float32), np.empty((7, 90), np.float32), c.factors(w.T)
k.matmul_exact(exact, x * np.float32(1e-12), pack_bf16(factors).ravel())
k.matmul_exact_blocked(blocked, x, pack_f32(factors).ravel())
x, w = normal(8, 9, 330), normal(9, 140, 330)  # enough for a matrix unit
(q, s), (wq, ws), big = c.quantize_rows(x), c.quantize_rows(w), np.empty((9, 140), np.float32)
k.matmul_int8(big, q, s, pack_int8(wq).ravel(), ws)
for array in (big, product, act, act_scale, out, rounded, exact, blocked):
    digest.update(array.tobytes())
print(json.dumps([compiling.uses_vnni(), digest.hexdigest()]))
"""


def compiled_for(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a process that compiles as this says, whatever this one does."""
    inherited = {name: value for name, value in os.environ.items() if name != compiling.ENVIRONMENT_VARIABLE}
    return {**inherited, **environment}


def run(environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=compiled_for(environment), capture_output=True, text=True)


@pytest.fixture(scope="module")
def native() -> list[object]:
    """Whether this CPU has the instruction, and the digest."""
    return json.loads(run({}).stdout)


def without(*features: str) -> dict[str, str]:
    """The environment in which code is made for this CPU, but as if it did not have some features."""
    own = compiling.llvm.get_host_cpu_features()
    own.update(dict.fromkeys(features, False))
    return {"NUMBA_CPU_NAME": compiling.llvm.get_host_cpu_name(), "NUMBA_CPU_FEATURES": own.flatten()}


@pytest.mark.campaign  # kernels without them are those that VNNI or "portable" below ask for
def test_the_bits_do_not_depend_on_dots_of_pairs(native: list[object]) -> None:
    assert json.loads(run(without(*amx.FEATURES)).stdout) == native


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "environment", [{compiling.ENVIRONMENT_VARIABLE: "portable"}, {"NUMBA_CPU_NAME": "generic"}]
)
def test_the_bits_do_not_depend_on_the_cpu(native: list[object], environment: dict[str, str]) -> None:
    assert json.loads(run(environment).stdout) == [False, native[1]]


def test_vnni_is_used_where_it_is(native: list[object]) -> None:
    forced = run({compiling.ENVIRONMENT_VARIABLE: "vnni"})
    if native[0]:
        assert json.loads(forced.stdout) == native
    else:
        assert "does not have AVX-512 VNNI" in forced.stderr


def test_amx_is_used_where_it_is(native: list[object]) -> None:
    forced = run({compiling.ENVIRONMENT_VARIABLE: "amx"})
    if HAS_AMX:
        assert json.loads(forced.stdout) == native
    else:
        assert (
            "XDEEPSERVE_KERNELS=amx, but the CPU that Numba compiles for does not have AMX" in forced.stderr
        )


@pytest.mark.skipif(compiling.ENVIRONMENT_VARIABLE in os.environ, reason="kernels of one kind are asked for")
def test_a_matrix_unit_is_used_where_it_may_be_and_slow_dots_are_not() -> None:
    assert compiling.uses_amx() == (HAS_AMX and amx.is_permitted())
    assert not (HAS_AMX and compiling.uses_bf16_dots())


def test_another_kind_of_kernels_is_refused() -> None:
    refused = run({compiling.ENVIRONMENT_VARIABLE: "fast"})
    assert refused.returncode
    assert "InputError: XDEEPSERVE_KERNELS=fast: known are amx, vnni, portable" in refused.stderr


def test_the_command_line_refuses_it_in_one_line() -> None:
    command = [sys.executable, "-m", "xdeepserve", "generate", "--prompt", "a", "--max-tokens", "1"]
    environment = {**os.environ, compiling.ENVIRONMENT_VARIABLE: "fast"}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines() == [
        "xdeepserve generate: error: XDEEPSERVE_KERNELS=fast: known are amx, vnni, portable"
    ]


GENERATE = """
import hashlib
from xdeepserve import LLM, SamplingParams

digest = hashlib.sha256()
for threads in (1, 2):
    with LLM("tiny-random", overrides=[f"threads={threads}"]) as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
        for output in llm.generate([[7] * 40, [9, 8, 7]], params):
            digest.update(repr([(c.token_ids, c.logprobs) for c in output.outputs]).encode())
    print(digest.hexdigest())
    digest = hashlib.sha256()
"""


@pytest.mark.campaign
def test_a_model_says_the_same_with_each_kind_of_kernels() -> None:
    digests: set[str] = set()
    for chosen in (
        *([{compiling.ENVIRONMENT_VARIABLE: "amx"}] if HAS_AMX else []),
        *([{compiling.ENVIRONMENT_VARIABLE: "vnni"}] if compiling.uses_vnni() else []),
        without(compiling.BF16, *amx.FEATURES),
        {compiling.ENVIRONMENT_VARIABLE: "portable"},
        {"NUMBA_CPU_NAME": "generic"},
    ):
        command = [sys.executable, "-c", GENERATE]
        made = subprocess.run(command, env=compiled_for(chosen), check=True, capture_output=True, text=True)
        digests.update(made.stdout.split())
    assert len(digests) == 1


def callees(function: Any) -> Iterator[Any]:
    """The compiled functions that one calls by a name in its file, or in a module that its file imports."""
    names, around = function.py_func.__code__.co_names, function.py_func.__globals__
    for name in names:
        value = around.get(name)
        found = [getattr(value, other, None) for other in names] if isinstance(value, ModuleType) else [value]
        yield from (each for each in found if hasattr(each, "py_func"))


@pytest.mark.parametrize("kernel", [kernels.attention, kernels.gate, layer_stage])
def test_the_cache_notices_a_change_in_any_file(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code holds parts from other files; Numba by itself looks at the kernel's own file only."""
    compiled, new = set(), {kernel}
    while new:
        compiled |= new
        new = {each for function in new for each in callees(function)} - compiled
    files = {Path(function.py_func.__code__.co_filename) for function in compiled}
    assert len(files) > 1
    own = Path(kernel.py_func.__code__.co_filename)
    stamp = kernel._cache._cache_file._source_stamp
    assert stamp == compiling.sources(own)
    read = Path.read_bytes
    for changed in files | {Path(canonical.__file__), Path(compiling.__file__)}:
        monkeypatch.setattr(Path, "read_bytes", lambda self, at=changed: read(self) + b"#" * (self == at))
        assert compiling.sources.__wrapped__(own) != stamp, changed


def test_two_processes_that_compile_at_once_do_not_load_each_others_code(tmp_path: Path) -> None:
    """Both find an empty cache; while one is about to write its machine code, the other writes all of its."""
    one, other = (compiling.CacheFile(str(tmp_path), "kernel", "sources") for _ in range(2))
    write = one._save_data

    def write_late(name: str, data: str) -> None:
        other.save("code for integers", "integers")
        write(name, data)

    one._save_data = write_late
    other._load_index = dict
    one.save("code for floats", "floats")
    found = compiling.CacheFile(str(tmp_path), "kernel", "sources")
    assert found.load("code for floats") == "floats"
    assert found.load("code for integers") in ("integers", None)


TAKE_AND_HOLD = """
import sys
from xdeepserve.jit.compiling import CacheFile

file = CacheFile(sys.argv[1], "kernel", "sources")
print(file.load("code for integers"), flush=True)
if sys.stdin.readline() == "save\\n":
    file.save("code for integers", "integers")
"""


@pytest.mark.parametrize("ends", ["it saves", "it goes without"])
def test_what_another_process_compiles_is_waited_for(tmp_path: Path, ends: str) -> None:
    arguments = [sys.executable, "-c", TAKE_AND_HOLD, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == "None\n"
        here = compiling.CacheFile(str(tmp_path), "kernel", "sources")
        assert here.load("code for floats") is None  # nobody is at it
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(here.load, "code for integers")
            assert not wait([found], timeout=0.2).done
            other.stdin.write("save\n" if ends == "it saves" else "\n")
            other.stdin.close()
            assert found.result(60) == ("integers" if ends == "it saves" else None)


HOLD_AND_LOSE = """
import sys
from xdeepserve.jit.compiling import CacheFile

file, found = CacheFile(sys.argv[1], "kernel", "sources"), CacheFile._load_index
file._load_index = lambda: {}  # what the other process has saved comes just before the lock
lock = file._lock

def late(key, **how):
    file._load_index = lambda: found(file)
    return lock(key, **how)

file._lock = late
print(file.load("code for integers"), flush=True)
sys.stdin.readline()
"""


def test_what_came_before_the_lock_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise who misses it later, as after an upgrade, would wait for a process that does not compile."""
    here = compiling.CacheFile(str(tmp_path), "kernel", "sources")
    here.save("code for integers", "integers")
    arguments = [sys.executable, "-c", HOLD_AND_LOSE, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "integers\n"
        here._save_index({})
        monkeypatch.setattr(compiling.time, "sleep", lambda _: pytest.fail("it waits for the other process"))
        assert here.load("code for integers") is None


ADD_LINES = """
import sys
from xdeepserve.jit.compiling import CacheFile

file = CacheFile(sys.argv[1], "kernel", "sources")
for number in range(100):
    file.save(f"{sys.argv[2]} {number}", number)
"""


def test_no_line_of_the_index_is_lost(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", ADD_LINES, str(tmp_path)]
    with subprocess.Popen([*arguments, "one"]) as one, subprocess.Popen([*arguments, "other"]) as other:
        assert one.wait(60) == other.wait(60) == 0
    assert len(compiling.CacheFile(str(tmp_path), "kernel", "sources")._load_index()) == 200


def test_patience_with_another_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "PATIENCE_S", 0.1)
    arguments = [sys.executable, "-c", TAKE_AND_HOLD, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "None\n"
        assert compiling.CacheFile(str(tmp_path), "kernel", "sources").load("code for integers") is None


COMPILE = """
import sys
import numpy as np
from numba.core.bytecode import FunctionIdentity
from tests.model.bits import normal
from xdeepserve.model import canonical as c
from xdeepserve.model.kernels import gemm, gemm_int8
from xdeepserve.model.packing import pack_int8

for _ in range(int(sys.argv[1])):  # as if it had compiled so much else before
    next(FunctionIdentity._unique_ids)
(q, s), (wq, ws) = c.quantize_rows(normal(1, 13, 70)), c.quantize_rows(normal(2, 150, 70))
for is_writeable in sys.argv[2:]:  # another type of argument, but the same ones for the tiles
    bounds = np.empty(0, np.int32)
    bounds.flags.writeable = is_writeable == "1"
    memory = np.full((40, 150), np.nan, np.float32)
    out = memory[:13]
    gemm_int8.gemm_int8(out, q, s, pack_int8(wq).ravel(), ws, 150, bounds, 0, gemm.num_groups(150))
    assert np.array_equal(out, c.matmul_int8(q, s, wq, ws))
    assert np.isnan(memory[13:]).all()
"""


def test_code_that_several_processes_have_cached_runs_together(tmp_path: Path) -> None:
    """Each process counts what it compiles; equal numbers must not make one tile stand for another."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for arguments in (["0", "1"], ["3", "0"], ["0", "1", "0"]):
        made = subprocess.run(
            [sys.executable, "-c", COMPILE, *arguments], env=environment, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr


def test_two_parts_of_one_name_are_refused() -> None:
    def make(what: object) -> object:
        def inner() -> object:
            return what

        return compiling.named(inner)

    assert make(1).__qualname__ != make(2).__qualname__  # type: ignore[attr-defined]
    make("a")
    with pytest.raises(TypeError, match=r"two parts of kernels have the name .*inner"):
        make("b")


def test_machine_code_of_types_that_have_gone_is_made_again(tmp_path: Path) -> None:
    """After an upgrade in place the index may name types of modules that are no more."""
    module = ModuleType("xdeepserve_gone")
    module.Shape = type("Shape", (), {"__module__": "xdeepserve_gone"})
    sys.modules["xdeepserve_gone"] = module
    index = compiling.CacheFile(str(tmp_path), "kernel-1", "stamp")
    index._save_index({(module.Shape,): "data"})
    assert index._load_index()
    del sys.modules["xdeepserve_gone"]
    assert index._load_index() == {}


def test_machine_code_lies_in_the_users_cache_directory(tmp_path: Path) -> None:
    """And nothing beside the sources, so that removing a package leaves nothing behind."""
    code = (
        "from xdeepserve.jit import compiling\n"
        "from xdeepserve.model.kernels import rows\n"
        "path = rows.add._cache.cache_path\n"
        "assert path == str(compiling.cache_directory() / 'model' / 'kernels'), path\n"
        "print(path)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sys.platform == "darwin" or done.stdout.startswith(str(tmp_path))
