"""Sources of the package and of its tests, parsed once in a process."""

import ast
import functools
import gc
from pathlib import Path

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src" / "xdeepserve"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file.

    Python 3.11 fails in `ast.parse` if a finalizer runs meanwhile, as those of earlier tests may.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        if was_on:
            gc.enable()
