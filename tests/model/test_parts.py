"""What only kernels call is compiled into them, makes no machine code, and is optimised if it has loops."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import numpy as np
from numba.core.codegen import JITCodeLibrary
from xdeepserve.jit.compiling import array_part, kernel, part

made = []
optimised = []
finalize, optimise = JITCodeLibrary._finalize_specific, JITCodeLibrary._optimize_final_module
JITCodeLibrary._finalize_specific = lambda self: (made.append(self.name), finalize(self))
JITCodeLibrary._optimize_final_module = lambda self: (optimised.append(self.name), optimise(self))

@part
def squared(x):
    return x * x

@part
def total(x):
    total = 0
    for each in x:
        total += each
    return total

@array_part
def squares(n):
    out = np.empty(n, np.int64)
    for i in range(n):
        out[i] = squared(i)
    return out

@kernel
def added(n):
    return total(squares(n)) + squared(n)

assert added(5) == 55
assert "added" in made
assert not {"squared", "squares", "total"} & set(made), made
assert {"added", "total"} == {"added", "squared", "squares", "total"} & set(optimised), optimised
"""


def test_parts_have_no_machine_code_of_their_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
