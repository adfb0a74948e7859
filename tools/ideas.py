"""Write `docs/ideas.md`: every class of the source that is no plain record, a line each.

    python -m tools.ideas                 write the page
    python -m tools.ideas --check         fail if the page is stale
    python -m tools.ideas --at COMMIT     print the numbers of another commit, beside those of today
    python -m tools.ideas --between A B   print which ideas died from commit A to commit B, and which are new

The source is only parsed, never imported, so that any commit can be read.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ideas.md"

DEEP = ("comm", "engine")  # packages whose sub-packages are rooms, too
RECORDS = {"NamedTuple", "Struct", "TypedDict", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
BUILD = {"__init__", "__new__", "__post_init__", "__init_subclass__"}
BUILDERS = {"classmethod", "staticmethod"}
CHECKS = ("check", "_check")
CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"),
    *("put", "remove", "send", "set", "setdefault", "update", "write"),
}

BEFORE = "7b126c34"  # the last commit before ideas were counted
COUNTS_BEFORE = {
    ".": 4,
    "api": 28,
    "bench": 7,
    "chaos": 3,
    "cli": 5,
    "comm": 9,
    "comm/collectives": 3,
    "comm/distflow": 13,
    "comm/exchange": 2,
    "comm/fused": 3,
    "comm/m2n": 9,
    "comm/outside": 8,
    "comm/p2p": 8,
    "comm/services": 7,
    "comm/trampoline": 8,
    "ems": 11,
    "engine": 8,
    "engine/balance": 4,
    "engine/deploy": 1,
    "engine/die": 25,
    "engine/dp": 21,
    "engine/job": 13,
    "engine/outside": 5,
    "engine/recovery": 4,
    "engine/run": 10,
    "engine/run/clock": 25,
    "engine/run/lockstep": 17,
    "engine/serving": 15,
    "engine/te": 19,
    "engine/walk": 13,
    "evals": 1,
    "golden": 1,
    "hw": 42,
    "jit": 6,
    "jobs": 5,
    "learn": 2,
    "llm": 1,
    "model": 39,
    "page": 8,
    "placing": 3,
    "planner": 2,
    "platform": 12,
    "step": 7,
}
HEAD = """# Ideas

For maintainers: what a reader of the code must hold in mind. An idea is a class that is no plain record.

A class is a plain record if it is an exception, an enum, a `TypedDict`, a `NamedTuple`, a dataclass or a
msgspec `Struct`, or derives from one, and each of its methods builds it, checks it or only asks:

- A method builds if it is `__init__`, `__new__`, `__post_init__`, a class method or a static method.
- A method checks if its name begins with `check` or `_check`.
- A method only asks if it is not `async` and writes to nothing but its own local names: it assigns to no
  attribute or item of anything else, drops no call's value, and calls no `append`, `pop`, `update` and the
  like of anything else.

Every other class is an idea, each `Protocol` among them. Classes inside classes and functions count.
`python -m tools.ideas` makes this page; with `--between A B` it prints which ideas died between two commits,
and which are new.

A room is a package of `src/xdeepserve`, and in `comm` and `engine` each package inside it. The number of a
room leaves out the rooms inside it; `.` is the files that are in no room.
"""


class Class(NamedTuple):
    """A class of the source, with its file, relative to the package."""

    file: str
    name: str  # with those around it: Outer.Inner
    node: ast.ClassDef

    @property
    def room(self) -> str:
        """The package that the class counts for, or `.` for files of the top level."""
        folders = PurePosixPath(self.file).parts[:-1]
        return "/".join(folders if folders and folders[0] in DEEP else folders[:1]) or "."

    @property
    def line(self) -> str:
        """The first line of the docstring."""
        return (ast.get_docstring(self.node) or "").partition("\n")[0]


Table = dict[str, list[Class]]  # by the room


def classes(source: Path) -> list[Class]:
    """All classes below a folder, in order of files and lines."""
    found: list[Class] = []

    def look(node: ast.AST, file: str, around: str) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef):
                found.append(Class(file, around + each.name, each))
                look(each, file, f"{around}{each.name}.")
            elif not isinstance(each, ast.expr):
                look(each, file, around)

    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "class " in text:  # parsing takes nearly all the time
            look(ast.parse(text), path.relative_to(source).as_posix(), "")
    return found


def ideas(source: Path) -> Table:
    """The classes that are no plain records, by the room."""
    found = classes(source)
    by_name: dict[str, list[Class]] = {}
    for each in found:
        by_name.setdefault(each.node.name, []).append(each)

    def holds_data(one: Class) -> bool:
        """Whether a class is of a kind that may be a record, itself or through a base."""
        if any(last_name(each) == "dataclass" for each in one.node.decorator_list):
            return True
        for name in map(last_name, one.node.bases):
            if name in RECORDS or name.endswith(("Error", "Exception")):
                return True
            bases = [each for each in by_name.get(name, []) if each is not one]
            near = [each for each in bases if each.file == one.file] or bases
            if any(map(holds_data, near)):
                return True
        return False

    rooms: Table = {}
    for each in found:
        if not (holds_data(each) and all(map(only_asks, methods(each.node)))):
            rooms.setdefault(each.room, []).append(each)
    return dict(sorted(rooms.items()))


def last_name(node: ast.expr) -> str:
    """The last name of a decorator or base: `c` of `a.b.c`, `a.b.c(...)` and `a.b.c[...]`."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


Method = ast.FunctionDef | ast.AsyncFunctionDef


def methods(node: ast.ClassDef) -> Iterator[Method]:
    """Methods of a class that neither build nor check it."""
    for each in node.body:
        if not isinstance(each, Method) or each.name in BUILD or each.name.startswith(CHECKS):
            continue
        if not BUILDERS & {last_name(decorator) for decorator in each.decorator_list}:
            yield each


def only_asks(method: Method) -> bool:
    """Whether a method writes to nothing but its own local names."""
    nodes = list(ast.walk(method))
    arguments = {each.arg for each in nodes if isinstance(each, ast.arg)}
    local = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}

    def is_local(node: ast.expr) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in local - arguments

    def changes(node: ast.AST) -> bool:
        if isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.Global, ast.Nonlocal)):
            return True
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return not isinstance(node.ctx, ast.Load) and not is_local(node)
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Call) and not is_local(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in CHANGES and not is_local(node.func)
        return False

    return not any(map(changes, nodes))


def counts(table: Table) -> dict[str, int]:
    return {room: len(found) for room, found in table.items()}


def rows(before: dict[str, int], now: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Each room's name and numbers, then the sums."""
    for room in sorted(before | now):
        yield room, before.get(room, 0), now.get(room, 0)
    yield "sum", sum(before.values()), sum(now.values())


def page(table: Table) -> str:
    """The numbers of all rooms, then a table for each of them."""
    lines = [HEAD, f"| room | at {BEFORE} | now |", "|---|---|---|"]
    lines += [f"| {room} | {old} | {new} |" for room, old, new in rows(COUNTS_BEFORE, counts(table))]
    for room, found in table.items():
        lines += ["", f"## {room}", "", "| idea | file | what it is |", "|---|---|---|"]
        for each in found:
            said = each.line.replace("|", "\\|")
            lines.append(f"| {each.name} | {PurePosixPath(each.file).relative_to(room)} | {said} |")
    return "\n".join([*lines, ""])


def at(commit: str) -> Table:
    """The ideas of a commit. Raises SystemExit for a commit that git does not have."""
    made = subprocess.run(
        ["git", "-C", ROOT, "archive", commit, "src/xdeepserve"], capture_output=True, check=False
    )
    if made.returncode:
        raise SystemExit(f"{commit}: {made.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return ideas(Path(folder) / "src" / "xdeepserve")


def between(old: Table, new: Table) -> Iterator[str]:
    """Lines of what died, what is new and what moved, a paragraph for each room."""
    rooms_of: list[dict[str, Counter[str]]] = []
    for table in (old, new):
        rooms_of.append({})
        for room, found in table.items():
            for each in found:
                rooms_of[-1].setdefault(each.name, Counter())[room] += 1
    said: dict[str, dict[str, list[str]]] = {}
    for name in sorted(rooms_of[0].keys() | rooms_of[1].keys()):
        was, is_now = (each.get(name, Counter()) for each in rooms_of)
        gone, come = sorted((was - is_now).elements()), sorted((is_now - was).elements())
        for source, target in zip(gone, come, strict=False):
            said.setdefault(target, {}).setdefault("moved", []).append(f"{name} (from {source})")
        for room in gone[len(come) :]:
            said.setdefault(room, {}).setdefault("died", []).append(name)
        for room in come[len(gone) :]:
            said.setdefault(room, {}).setdefault("new", []).append(name)
    for room, before, now in rows(counts(old), counts(new)):
        if room in said or room == "sum":
            yield f"{room}: {before} -> {now}"
        for what in ("died", "new", "moved"):
            if names := said.get(room, {}).get(what):
                yield f"    {what}: {', '.join(names)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ideas", description="Classes that are no records.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="fail if docs/ideas.md is stale")
    what.add_argument("--at", metavar="COMMIT", help="print the numbers of a commit, beside those of today")
    what.add_argument("--between", nargs=2, metavar=("A", "B"), help="print what died and what is new")
    args = parser.parse_args(arguments)
    gc.disable()  # walking syntax trees for garbage would take as long as making them
    if args.between:
        print("\n".join(between(*map(at, args.between))))
        return 0
    now = ideas(ROOT / "src" / "xdeepserve")
    if args.at:
        print(f"{args.at[:8]:>8}  {'now':>5}")
        for room, old, new in rows(counts(at(args.at)), counts(now)):
            print(f"{old:8}  {new:5}  {room}")
    elif not args.check:
        PAGE.write_text(page(now), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page(now):
        print("docs/ideas.md is stale: run python -m tools.ideas", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
