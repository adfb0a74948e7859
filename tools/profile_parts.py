"""Where time goes within compiled kernels: perf samples a command, and the parts of kernels have names.

    python tools/profile_parts.py bench decode
    python tools/profile_parts.py generate --prompt 17+25= --ignore-eos --max-tokens 400

Needs perf (Debian: linux-perf) and nm (binutils). All layers of a step may be one call for Python, and for
its profilers. In machine code the larger parts of a kernel stay functions; where they lie is written to
/tmp/perf-PID.map, which perf reads. The others are within those that call them.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numba.core.codegen import CPUCodeLibrary
from numba.core.dispatcher import Dispatcher

RATE = 500  # samples a second
ROWS = 40
INSIDE = "--inside"


def keep_machine_code() -> None:
    """Have Numba keep what it loads from its cache."""
    load = CPUCodeLibrary._unserialize.__func__  # type: ignore[attr-defined]

    def keep(cls: Any, codegen: Any, state: Any) -> Any:
        library = load(cls, codegen, state)
        if state[1] == "object":
            library.from_cache = state[2][0]
        return library

    CPUCodeLibrary._unserialize = classmethod(keep)  # type: ignore[method-assign]


def symbols(code: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, place and size of each function in an object file."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        listed = subprocess.run(["nm", "-S", file.name], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        match line.split():
            case [place, size, ("t" | "T" | "w" | "W"), name]:
                yield name, int(place, 16), int(size, 16)


def readable(mangled: str) -> str:
    """What _ZN10xdeepserve5model7kernels3mla7_attendB3v17... says: xdeepserve.model.kernels.mla._attend."""
    rest, names = mangled.removeprefix("_ZN"), []
    while length := re.match(r"\d+", rest):
        start = length.end()
        names.append(rest[start : start + int(length[0])])
        rest = rest[start + int(length[0]) :]
    return ".".join(names) or mangled


def write_map(folder: Path) -> None:
    """Where the parts of all kernels lie that were used; the name of the file goes to folder/map."""
    lines = set()
    for each in gc.get_objects():
        for compiled in each.overloads.values() if isinstance(each, Dispatcher) else ():
            library, entry = compiled.library, compiled.fndesc.llvm_func_name
            code = getattr(library, "from_cache", None) or library._compiled_object
            found = list(symbols(code)) if code else []
            starts = [place for name, place, _ in found if name == entry]
            if starts:
                base = library.get_pointer_to_function(entry) - starts[0]
                lines |= {f"{base + place:x} {size:x} {readable(name)}" for name, place, size in found}
    path = Path(f"/tmp/perf-{os.getpid()}.map")
    path.write_text("\n".join(sorted(lines)))
    (folder / "map").write_text(str(path))


def main() -> int:
    if sys.argv[1:2] == [INSIDE]:
        from xdeepserve.cli import main as run

        keep_machine_code()
        code = run(sys.argv[3:])
        if code == 0:
            write_map(Path(sys.argv[2]))
        return code
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        samples = str(Path(folder) / "perf.data")
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(RATE), "-o", samples]
        code = subprocess.call([*record, sys.executable, __file__, INSIDE, folder, *sys.argv[1:]])
        if not Path(folder, "map").exists():
            return code
        report = ["perf", "report", "-q", "-g", "none", "-i", samples, "--stdio", "--sort", "symbol"]
        rows = subprocess.run(report, check=True, capture_output=True, text=True).stdout.splitlines()
        Path(Path(folder, "map").read_text()).unlink()
    print("\n".join([row.strip(" -") for row in rows if row.strip()][:ROWS]))
    return code


if __name__ == "__main__":
    sys.exit(main())
