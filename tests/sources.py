"""Sources of the package and of its tests, parsed once in a process."""

import ast
import functools
from pathlib import Path

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src" / "xdeepserve"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())
