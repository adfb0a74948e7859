"""How large the source is, and how often it says the same: numbers to watch while its shape changes.

    python tools/sizes.py [CHECKOUT] [--json]

Lines are those of `wc -l`, in Python files of `src/xdeepserve`. The other numbers follow from rules:

    programs    classes of `engine` (or `step`), but for `engine/serving`, whose names end in one of KINDS:
                what a die, a group of dies or a whole pod runs
    sides       classes anywhere whose names end in Side: ends of an exchange
    MLA         files that define `mla` or `attend` and name the output projection: each of them goes through
                multi-head latent attention from its beginning to its end
    build       modules of this package that engine/build.py imports
    query       files that name the query projection: what a new weight touches is about as many
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = ("Layers", "Executor", "Program", "Lockstep", "Drafter")
MLA = re.compile(r"def _?(mla|attend|attended)\b")
OUTPUT_PROJECTION = re.compile(r"\b(wo|WO|o_proj)\b")
QUERY_PROJECTION = re.compile(r"wq_b|q_b_proj")


def classes(text: str) -> list[str]:
    """The names of all classes in a file, inner ones too."""
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def imports(text: str) -> set[str]:
    """The modules of this package that a file imports, as it spells them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return {name for name in found if name.startswith(("xdeepserve", "."))}


def room(path: str) -> list[str]:
    """The rooms that a file counts for: its top-level package, or itself; inside engine, its folder, too."""
    first, *rest = path.split("/")
    return [first, f"{first}/{rest[0]}"] if first == "engine" and rest else [first]


def measure(checkout: Path) -> dict[str, Any]:
    source = checkout / "src" / "xdeepserve"
    files = {
        str(path.relative_to(source).as_posix()): path.read_text(encoding="utf-8")
        for path in sorted(source.rglob("*.py"))
    }
    lines = {name: text.count("\n") for name, text in files.items()}
    by_room: Counter[str] = Counter()
    for name, count in lines.items():
        by_room.update(dict.fromkeys(room(name), count))
    programs, sides = [], []
    for name, text in files.items():
        is_engine = name.startswith(("engine/", "step/")) and not name.startswith("engine/serving/")
        programs += [each for each in classes(text) if is_engine and each.endswith(KINDS)]
        sides += [each for each in classes(text) if each.endswith("Side")]
    longest = max(lines, key=lambda name: (lines[name], name))
    build = imports(files["engine/build.py"]) if "engine/build.py" in files else set()
    return {
        "lines": sum(lines.values()),
        "lines_by_room": dict(sorted(by_room.items())),
        "programs": len(programs),
        "programs_by_kind": {kind: sum(name.endswith(kind) for name in programs) for kind in KINDS},
        "sides": len(sides),
        "mla": [n for n, text in files.items() if MLA.search(text) and OUTPUT_PROJECTION.search(text)],
        "build_imports": len(build),
        "query_projection": [name for name, text in files.items() if QUERY_PROJECTION.search(text)],
        "longest_file": [longest, lines[longest]],
    }


def show(found: dict[str, Any]) -> None:
    print(f"{found['lines']:6,}  lines of src")
    for name, count in found["lines_by_room"].items():
        print(f"{count:6,}  {'    ' if '/' in name else '  '}{name}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["programs_by_kind"].items())
    print(f"{found['programs']:6}  classes that are programs: {kinds}")
    print(f"{found['sides']:6}  classes that are sides of an exchange")
    for key, what in (("mla", "go through MLA"), ("query_projection", "name the query projection")):
        print(f"{len(found[key]):6}  files {what}: {', '.join(found[key])}")
    print(f"{found['build_imports']:6}  modules that engine/build.py imports")
    name, count = found["longest_file"]
    print(f"{count:6}  lines of the longest file, {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Numbers of a checkout's source.")
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("checkout", type=Path, nargs="?", default=here, help="default: this one")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    args = parser.parse_args()
    if not (args.checkout / "src" / "xdeepserve").is_dir():
        parser.error(f"{args.checkout}: no src/xdeepserve in it")
    found = measure(args.checkout)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
