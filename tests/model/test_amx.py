"""Kernels for a matrix unit, on any CPU: what lies in its tiles, who uses it, and what is compiled for it.

That its instructions give the right bits is shown in an emulator: tools/amx_emulator.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from xdeepserve.errors import InputError
from xdeepserve.jit import amx, compiling
from xdeepserve.model import canonical as c
from xdeepserve.model.kernels import gemm_matrix, matrix_unit
from xdeepserve.model.packing import pack_bf16, pack_int8

TILE = matrix_unit.TILE_SIZE
HOST = {"avx512vnni": True, "avx512bf16": True, "fma": True, **dict.fromkeys(amx.FEATURES, True)}


class Features(dict[str, bool]):
    """What llvmlite says about a CPU."""

    def flatten(self) -> str:
        return ",".join(f"{'+' if has_it else '-'}{name}" for name, has_it in sorted(self.items()))


@njit
def copy_bytes(to: Any, start: int, depth: int, q: Any, m: int, rows: int) -> None:
    gemm_matrix._copy_bytes(to, start, depth, q, m, rows, q.shape[1])


@njit
def copy_factors(to: Any, start: int, depth: int, x: Any, i: int, rows: int, k_size: int) -> None:
    gemm_matrix.copy_factors(to, start, depth, x, i, x.shape[1], rows, k_size)


def tiles(rows: np.ndarray, packed: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Left and right tiles of copied rows [depth, 16, 64] and a group of packed columns, as they are loaded.

    All within the two, in bytes: [16, 64] each.
    """
    weights = packed.view(np.uint8).ravel()
    last = weights.size - TILE
    return [(row, weights[min(k * TILE, last) :][:TILE].reshape(16, 64)) for k, row in enumerate(rows)]


@few
@given(seeds, st.integers(1, 16), st.integers(64, 300), st.integers(1, 40))
def test_rows_and_packed_weights_are_tiles_of_bytes(seed: int, m: int, kk: int, n: int) -> None:
    """16 x 4 bytes of k of each row times those of each column: tdpbsud."""
    rng = np.random.default_rng(seed)
    q, w = (rng.integers(-128, 128, shape, np.int8) for shape in ((m, kk), (n, kk)))
    depth = -(-kk // 64)
    memory = rng.integers(0, 256, 9 + TILE * depth, np.uint8)
    copy_bytes(memory, 9, depth, q, 0, m)
    rows, sums = memory[9:].reshape(depth, 16, 64), np.zeros((16, n), np.int64)
    for g, group in enumerate(pack_int8(w)):
        here = sums[:, 16 * g : 16 * g + 16]
        for left, right in tiles(rows, group):
            x, y = left.view(np.int8).reshape(16, 16, 4), right.reshape(16, 16, 4)
            here += np.einsum("mkb,knb->mn", x.astype(np.int64), y.astype(np.int64))[:, : here.shape[1]]
    starts = -128 * q.astype(np.int64).sum(axis=1)
    assert np.array_equal(sums[:m] + starts[:, None], q.astype(np.int64) @ w.T.astype(np.int64))


@few
@given(seeds, st.integers(1, 16), st.integers(32, 150), st.integers(1, 40), st.integers(0, 5))
def test_rows_and_packed_weights_are_tiles_of_bf16(seed: int, m: int, kk: int, n: int, skip: int) -> None:
    """16 pairs of k of each row times those of each column: tdpbf16ps, in its order."""
    x, w = normal(seed, m, skip + kk), c.factors(normal(seed + 1, kk, n))
    depth = -(-kk // 32)
    memory = np.random.default_rng(seed).integers(0, 256, 10 + TILE * depth + 64, np.uint8)
    copy_factors(memory, 10, depth, x, skip, m, kk)
    rows, sums = memory[10 : 10 + TILE * depth].reshape(depth, 16, 64), np.zeros((16, n), F32)
    for g, group in enumerate(pack_bf16(w)):
        here = sums[:m, 16 * g : 16 * g + 16]
        for left, right in tiles(rows, group):
            floats = [
                (half.copy().view(np.uint16).astype(np.uint32) << np.uint32(16)).view(F32).reshape(16, 16, 2)
                for half in (left, right)
            ]
            chains = np.zeros((2, m, 16), F32)
            for k in range(16):
                for i in range(2):
                    chains[i] += floats[0][:m, k, i, None] * floats[1][k, None, :, i]
            here += (chains[0] + chains[1])[:, : here.shape[1]]
    assert_same_bits(sums[:m].copy(), c.matmul_exact(c.factors(x[:, skip:]), w))


def test_the_configuration_of_tiles() -> None:
    """Palette 1; eight tiles of 16 rows of 64 bytes, or quarters beside whole sums; all else must be zero."""
    for depth, widths, rows in (
        (64, [64] * 8, [16] * 8),
        (16, [64] * 4 + [16] * 2 + [64] * 2, [16] * 6 + [4] * 2),
    ):
        values = np.frombuffer(matrix_unit.configuration(depth), np.uint8)
        assert (values.size, values[0]) == (64, 1)
        assert not np.concatenate([values[1:16], values[32:48], values[56:]]).any()
        assert np.array_equal(values[16:32].view(np.uint16), widths)
        assert np.array_equal(values[48:56], rows)


def rows_at_once(rows: int, width: int) -> int:
    return int(gemm_matrix.rows_at_once.py_func(rows, width))


def test_rows_that_are_computed_together() -> None:
    """A tile of them, or whole blocks of 32 that stay in the cache."""
    assert [rows_at_once(rows, 512) for rows in (1, 16, 17, 32, 33, 512, 10_000)] == [
        16,
        16,
        32,
        32,
        64,
        512,
        512,
    ]
    assert rows_at_once(100, 7168) == 32
    assert rows_at_once(100, 1 << 20) == 32


def choose(
    monkeypatch: pytest.MonkeyPatch, wanted: str, host: dict[str, bool], is_permitted: Callable[[], bool]
) -> str | None:
    """The features that Numba is told, None for the host's, when the environment wants a kind of kernels."""
    monkeypatch.setenv(compiling.ENVIRONMENT_VARIABLE, wanted)
    monkeypatch.setattr(compiling.NUMBA, "CPU_FEATURES", None)
    monkeypatch.setattr(compiling.llvm, "get_host_cpu_features", lambda: Features(host))
    monkeypatch.setattr(compiling.amx, "CAN_ASK", True)
    monkeypatch.setattr(compiling.amx, "is_permitted", is_permitted)

    def of_target() -> tuple[str, str, str]:
        told = compiling.NUMBA.CPU_FEATURES
        return "", "", Features(host).flatten() if told is None else told

    codegen = SimpleNamespace(magic_tuple=of_target)
    context = SimpleNamespace(codegen=lambda: codegen)
    monkeypatch.setattr(compiling, "cpu_target", SimpleNamespace(target_context=context))
    compiling.choose_cpu()
    told: str | None = compiling.NUMBA.CPU_FEATURES
    return told


@pytest.mark.parametrize(
    ("wanted", "is_asked", "without"),
    [
        ("", True, ("avx512bf16",)),
        ("amx", True, ("avx512bf16",)),
        ("vnni", False, ("avx512bf16", *amx.FEATURES)),
        ("portable", False, (*amx.FEATURES, "avx512vnni", "avx512bf16")),
    ],
)
def test_what_is_left_out_on_a_cpu_with_a_matrix_unit(
    monkeypatch: pytest.MonkeyPatch, wanted: str, is_asked: bool, without: tuple[str, ...] | None
) -> None:
    """It is used where the system permits it, unless the environment says otherwise; BF16's dots never."""
    asked: list[bool] = []
    told = choose(monkeypatch, wanted, HOST, lambda: not asked.append(True))
    assert bool(asked) == is_asked
    expected = None if without is None else Features({**HOST, **dict.fromkeys(without, False)}).flatten()
    assert told == expected


def test_nothing_is_left_out_without_a_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    host = {**HOST, **dict.fromkeys(amx.FEATURES, False)}
    for wanted in ("", "vnni"):
        assert choose(monkeypatch, wanted, host, lambda: pytest.fail("asked")) is None
    with pytest.raises(InputError, match="=amx, but the CPU that Numba compiles for does not have AMX"):
        choose(monkeypatch, "amx", host, lambda: pytest.fail("asked"))


def test_a_system_that_does_not_permit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="=amx, but the system does not let this process use AMX"):
        choose(monkeypatch, "amx", HOST, lambda: False)


def test_permission_is_not_asked_of_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "CAN_ASK", False)
    assert not amx.is_permitted.__wrapped__()


COMPILE = """
import re
from collections import Counter
from numba import types
from xdeepserve.jit import compiling
from xdeepserve.model.kernels import gemm_exact, gemm_int8, mla

assert compiling.uses_amx()
f32, u8, u16, i32, size = types.float32, types.uint8, types.uint16, types.int32, types.int64
table, array = (lambda kind: types.Array(kind, 2, "C")), (lambda kind: types.Array(kind, 1, "C"))
cache = lambda kind: types.Array(kind, 5, "C")
for kernel, signature in (
    (gemm_int8.gemm_int8, (
        table(f32), table(types.int8), array(f32), array(u8), array(f32), size, array(i32), size, size,
    )),
    (gemm_exact.gemm_exact, (table(f32), table(f32), array(u16), *[size] * 8)),
    (mla.attention, (
        table(f32), table(f32), table(f32), size, size, array(i32), array(i32), cache(u8), table(f32),
        cache(f32), table(i32), types.float64, types.boolean, array(f32), size, size,
    )),
):
    kernel.compile(signature)
    [code] = kernel.inspect_asm().values()
    print(*sorted(set(re.findall(r"\\b(?:tile(?!_)|tdp|ldtile)\\w*", code))))
"""
MOVES = "ldtilecfg {} tileloadd tilerelease tilestored tilezero"


def test_kernels_are_compiled_to_its_instructions(tmp_path: Path) -> None:
    """For another CPU than this one: machine code is made, but not run; what a cache has cannot be read."""
    environment = {
        name: value for name, value in os.environ.items() if name != compiling.ENVIRONMENT_VARIABLE
    }
    features = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
    environment["NUMBA_CACHE_DIR"] = str(tmp_path)
    environment["NUMBA_CPU_NAME"] = "sapphirerapids"
    environment["NUMBA_CPU_FEATURES"] = ",".join(f"+{each}" for each in (*features, *amx.FEATURES))
    made = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert made.stdout.splitlines() == [
        MOVES.format("tdpbsud"), MOVES.format("tdpbf16ps"), MOVES.format("tdpbf16ps tdpbusd"),
    ], made.stderr  # fmt: skip
