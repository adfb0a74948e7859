"""Division of a stage among threads, and barriers between them."""

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
    """Increment sync[index] atomically and return its old value.

    A thread that sees the new value sees all earlier writes, too.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        data = context.make_array(sync)(context, builder, args[0]).data
        return builder.atomic_rmw(
            "add", builder.gep(data, [args[1]]), ir.Constant(ir.IntType(64), 1), "seq_cst"
        )

    return types.int64(sync, types.intp), codegen


@intrinsic
def _look(typingctx: Any, sync: Any, index: Any) -> Any:
    """Read sync[index] atomically, as the other threads have left it."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        data = context.make_array(sync)(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(sync, types.intp), codegen


@part
def wait(sync, num):
    """Wait until all `num` threads have come here, or give up after PATIENCE and mark the threads as lost.

    sync int64 [SYNC_SIZE], zeros before the first time.
    """
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
    """Whether threads have waited for each other in vain; going on would use incomplete bytes."""
    return _look(sync, LOST) > 0


@kernel
def wait_for_others(sync, num):
    """Call `wait` from a thread outside of any kernel."""
    wait(sync, num)


def new_sync() -> Array:
    """Create the counters for `wait`, int64 [SYNC_SIZE]."""
    return np.zeros(SYNC_SIZE, np.int64)


@part
def share(size, worker, num):
    """Return a thread's part of `size` neighbouring things: its first, and its last + 1."""
    return size * worker // num, size * (worker + 1) // num
