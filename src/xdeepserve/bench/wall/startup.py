"""`xdeepserve bench startup`: the wait of a user for the import, and for the first token, cold and warm.

Each measurement is a process of its own, with modules that Python has already compiled, as for a user. Cold
means that no kernel has been compiled yet: Numba's cache is an empty directory.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from xdeepserve.bench.report import Row
from xdeepserve.errors import XDeepServeError

REPEATS = 5
IMPORT = ("-c", "import xdeepserve")
FIRST_TOKEN = ("-m", "xdeepserve", "generate", "--prompt", "Hello", "--max-tokens", "1")


def all_rows(model: str = "tiny") -> list[Row]:
    """Measure import, first token cold, and first token warm; takes a minute or two."""
    first_token = (*FIRST_TOKEN, "--model", model)
    with tempfile.TemporaryDirectory() as cache:
        environment = {"NUMBA_CACHE_DIR": cache}
        cold = seconds_of(first_token, environment)
        warm = statistics.median(seconds_of(first_token, environment) for _ in range(REPEATS))
    interpreter = statistics.median(seconds_of(("-c", "pass")) for _ in range(REPEATS))
    imported = statistics.median(seconds_of(IMPORT) for _ in range(REPEATS))
    return [
        Row("startup/interpreter", interpreter, "s", "measured"),
        Row("startup/import xdeepserve", imported, "s", "measured"),
        Row(f"startup/first token of {model}, warm", warm, "s", "measured"),
        Row(f"startup/first token of {model}, cold", cold, "s", "measured"),
    ]


def seconds_of(arguments: tuple[str, ...], environment: Mapping[str, str] | None = None) -> float:
    """Measure the wall time of a Python process."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    process = subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, **(environment or {})},
        capture_output=True,
        text=True,
    )
    elapsed = time.perf_counter() - start
    if process.returncode:
        raise XDeepServeError(f"bench startup: {' '.join(arguments)} failed: {process.stderr.strip()[-300:]}")
    return elapsed
