"""AMX, the matrix unit of Intel's server CPUs: LLVM's names for it, and Linux's permission to use it.

Its tiles are 8 KiB of state for each thread, which Linux keeps for those processes only that ask for it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

FEATURES = ("amx-tile", "amx-int8", "amx-bf16")
ARCH_PRCTL = 158  # the system call, on x86-64
ARCH_REQ_XCOMP_PERM = 0x1023  # what it is asked for
XFEATURE_XTILEDATA = 18
CAN_ASK = sys.platform == "linux" and platform.machine() == "x86_64"


@functools.cache
def is_permitted() -> bool:
    """Ask Linux for AMX, once for all threads of this process. Return whether it agrees; False elsewhere."""
    return CAN_ASK and ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
