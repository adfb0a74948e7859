"""Threads that share a stage: their parts of it, and how they wait for each other in between."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.model.canonical import Array

SPINS = 4000  # looks at the others before a thread lets them have its core
PATIENCE = 100_000_000  # such offers, some ten seconds at least, before it gives the others up
CAME, LOST = 0, 8  # in `sync`, on cache lines of their own
SYNC_SIZE = 16

HAS_TEAMS = hasattr(os, "sched_yield")  # what threads that wait do; without it there can be one only

if HAS_TEAMS:
    _yield = types.ExternalFunction("sched_yield", types.int32())
else:

    @part
    def _yield():
        return 0


@intrinsic
def _count(typingctx: Any, sync: Any, index: Any) -> Any:
    """sync[index] += 1 in one piece; what it was. Everything written before is seen by who sees this."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        data = context.make_array(sync)(context, builder, args[0]).data
        return builder.atomic_rmw(
            "add", builder.gep(data, [args[1]]), ir.Constant(ir.IntType(64), 1), "seq_cst"
        )

    return types.int64(sync, types.intp), codegen


@intrinsic
def _look(typingctx: Any, sync: Any, index: Any) -> Any:
    """sync[index] as the other threads have left it."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        data = context.make_array(sync)(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(sync, types.intp), codegen


@part
def wait(sync, num):
    """Go on when all `num` threads have come here. sync int64 [SYNC_SIZE], zeros before the first time."""
    goal = (_count(sync, CAME) // num + 1) * num
    looks = 0
    while _look(sync, CAME) < goal:
        looks += 1
        if looks > SPINS:
            _yield()
            if looks > PATIENCE or _look(sync, LOST):
                _count(sync, LOST)
                return


@part
def are_lost(sync):
    """Whether threads have waited for each other in vain: what follows would go on with half of the bytes."""
    return _look(sync, LOST) > 0


@kernel
def wait_for_others(sync, num):
    """`wait`, for a thread that is in no kernel."""
    wait(sync, num)


def new_sync() -> Array:
    """What threads wait by, int64 [SYNC_SIZE]."""
    return np.zeros(SYNC_SIZE, np.int64)


@part
def share(size, worker, num):
    """A thread's part of `size` neighbouring things: its first, and its last + 1."""
    return size * worker // num, size * (worker + 1) // num
