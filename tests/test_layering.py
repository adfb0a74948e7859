"""Imports run downward only, and from the house to no wing: rules for every room are in tools/house.py."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import SRC, TESTS, tree_of
from tools import house
from xdeepserve import wings

PROTOCOLS = {  # folders of comm, and which others each may use; the files beside them use none, but TABLES
    "p2p": set(),
    "exchange": set(),
    "trampoline": {"exchange", "fused"},
    "fused": {"exchange"},
    "collectives": set(),
    "services": {"exchange"},  # the rows of requests and answers are those of dispatch and combine
    "distflow": {"p2p"},  # XDS 5.1, step 6: "we use the point-to-point send/receive APIs described in 3.1"
}
TABLES = {"cost.py": {"exchange", "fused"}}  # a file beside the folders, with a row for each of these
ONLY_IN = {
    "aiohttp": {"api", "jobs", "page"},  # the doors of these wings
    "ray": {"remote"},
    "asyncio": {"hw", "comm", "engine", "api", "llm", "cli", "golden", "loop", *house.WINGS},
}


@functools.cache
def imported(path: Path, root: Path = SRC) -> frozenset[str]:
    """Absolute dotted names of everything that a file of a package imports, however deep in the file."""
    package = [root.name, *path.relative_to(root).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(names)


FILES = sorted(SRC.rglob("*.py"))


def room_of(path: Path) -> str:
    """The package that a file of `src/xdeepserve` is in, or its own name."""
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else path.stem


def test_every_room_has_a_rule() -> None:
    rooms = {room_of(path) for path in FILES} - {"__init__", "__main__"}
    assert rooms == {*house.HOUSE, *house.WINGS}


def forbidden(path: Path) -> Iterator[str]:
    """What a file imports and may not."""
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    is_free = room in house.WINGS and house.is_above(path)
    for name in imported(path):
        head, *rest = name.split(".")
        is_other = head == "xdeepserve" and bool(rest) and rest[0] != room and not is_free
        if is_other and rest[0] not in house.allowed(room) | {"__version__"}:
            yield name
        if room not in ONLY_IN.get(head, {room}):
            yield head


def test_imports_run_downward() -> None:
    wrong = {str(path.relative_to(SRC)): sorted(forbidden(path)) for path in FILES}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_the_house_imports_no_wing() -> None:
    arrows = set()
    for path in FILES:
        used = {name.split(".")[1] for name in imported(path) if name.startswith("xdeepserve.")}
        arrows |= {(room_of(path), wing) for wing in used & {*house.WINGS}}
    assert {arrow for arrow in arrows if arrow[0] in house.HOUSE} == set()


@pytest.mark.parametrize("name", wings.PARTS)
def test_what_wings_bring_is_there(name: str) -> None:
    assert callable(wings.part(name))


def test_commands_of_wings_are_there() -> None:
    for name in wings.COMMANDS:
        command = wings.command(name)
        assert callable(command.add_options)
        assert callable(command.run)


def test_doors_of_wings_are_there() -> None:
    for door in wings.endpoint():
        assert door.ROUTES
        assert callable(door.furnish)


def test_names_of_wings_are_resolved_nowhere_else() -> None:
    """`importlib` in a file of the house would be a second table."""
    others = {path for path in FILES if "importlib.import_module" in path.read_text()}
    assert {room_of(path) for path in others} & {*house.HOUSE} <= {"wings", "jit"}


def test_the_picture_is_the_rule() -> None:
    page = house.PAGE.read_text()
    assert house.drawn(page) == page, "run python -m tools.house"


ENGINE = (  # its rooms and files, from the bottom: each may use those before it
    "deploy", "numbers", "plans", "messages", "lanes", "recovery", "walk", "die", "ways", "run", "balance",
    "dp", "te", "npu_fork", "loading", "weight_digests", "build",
    "description", "job", "serving",
)  # fmt: skip


def engine_imports() -> dict[str, set[str]]:
    """For each room of `engine`, and each file that lies in none, which others it imports."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        parts = path.relative_to(SRC).parts
        if parts[0] != "engine" or parts[1] == "__init__.py":
            continue
        room = found.setdefault(parts[1].removesuffix(".py"), set())
        room |= {name.split(".")[2] for name in imported(path) if name.startswith("xdeepserve.engine.")}
    return {room: others - {room} for room, others in found.items()}


def test_rooms_of_the_engine_import_downward() -> None:
    imports = engine_imports()
    assert imports.keys() == {*ENGINE}
    for room, others in imports.items():
        above = others - {*ENGINE[: ENGINE.index(room)]}
        assert not above, f"engine/{room} may not import engine's {', '.join(sorted(above))}"


KNOWN = ("hw", "model", "errors", "reading", "parsing")  # to deployments


def test_deployments_know_hardware_models_and_formats_alone() -> None:
    for path in (SRC / "engine" / "deploy").rglob("*.py"):
        for name in imported(path):
            head, *rest = name.split(".")
            inside = (
                rest[:2] in (["engine", "deploy"], ["comm", "exchange_choices"]) or "".join(rest[:1]) in KNOWN
            )
            assert head != "xdeepserve" or inside, f"{path} may not import {name}"


COMM = sorted((SRC / "comm").rglob("*.py"))


def test_protocols_stand_apart() -> None:
    folders = {path.parent.name for path in COMM if path.parent != SRC / "comm"}
    assert folders == {*PROTOCOLS}, "each folder of comm has a row in PROTOCOLS"
    for path in COMM:
        folder = path.parent.name
        allowed = (
            PROTOCOLS[folder] | {folder} if path.parent != SRC / "comm" else TABLES.get(path.name, set())
        )
        for name in imported(path):
            head, comm, protocol = [*name.split("."), "", ""][:3]
            if (head, comm) == ("xdeepserve", "comm") and protocol in PROTOCOLS:
                assert protocol in allowed, f"{path} may not import {name}"


TEST_FILES = sorted(TESTS.rglob("*.py"))


def test_no_test_imports_a_test() -> None:
    for path in TEST_FILES:
        for name in imported(path, TESTS):
            head, *rest = name.split(".")
            tests = [part for part in rest if part.startswith("test_")]
            assert head != "tests" or not tests, f"{path} may not import {name}: see tools.py"


NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, in spite of the underscore
PRIVATE: dict[str, tuple[set[str], str]] = {  # names that a file of tests may use, and why
    "api/test_api_openai_client.py": ({"_request_id"}, "openai documents it under this name"),
    "model/test_amx.py": ({"_copy_bytes"}, "a part of a kernel: with another name all products compile anew"),
    "model/test_cpus.py": (
        {"_cache", "_cache_file", "_load_index", "_save_data", "_save_index", "_source_stamp"},
        "Numba's caches have these names, and no others",
    ),
    "test_mistakes.py": ({"_actions", "_option_string_actions"}, "argparse tells its options nowhere else"),
}


def own_names(tree: ast.Module) -> set[str]:
    """Functions and classes of a file, and attributes that its classes give themselves."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    for owner in ast.walk(tree):
        for node in ast.walk(owner) if isinstance(owner, ast.ClassDef) else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file with a private name of somebody else: as an attribute, an import or for setattr."""
    tree = tree_of(path)
    known = NAMED_TUPLE | own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("getattr", "setattr", "delattr")
        ):
            texts = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            found = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        else:
            continue
        for name in found:
            if name.startswith("_") and not name.startswith("__") and name not in known:
                yield node.lineno, name


def test_tests_use_public_names() -> None:
    """What is private may change without a change of tests."""
    for path in TEST_FILES:
        allowed, _ = PRIVATE.get(str(path.relative_to(TESTS)), (set(), ""))
        found = list(private_names(path))
        used = [(line, name) for line, name in found if name not in allowed]
        assert not used, f"{path} uses private names {used}: a public probe or function tells the same"
        assert allowed <= {name for _, name in found}, f"{path} does not need {allowed} any more"


def test_few_private_names_are_allowed() -> None:
    assert len(PRIVATE) <= 10


# ---- circles of files -----------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    """Dotted name of the module in a file, without `xdeepserve`; a package's own file is the package."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def module_graph() -> dict[str, set[str]]:
    """For each module the modules that it imports, under TYPE_CHECKING and inside functions included."""
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        names = {name.removeprefix("xdeepserve.") for name in imported(path)}
        # `from package import name` is of the module `package.name` if there is one, else of `package`.
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (found & modules.keys()) - {module}
    return graph


def circles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules, of two or more, of which each imports each by some way (Kosaraju's two walks)."""
    importers: dict[str, set[str]] = {module: set() for module in graph}
    for module, others in graph.items():
        for other in others:
            importers[other].add(module)

    def walk(start: str, edges: dict[str, set[str]], seen: set[str]) -> list[str]:
        seen.add(start)
        left = [(start, iter(edges[start]))]
        order = []
        while left:
            module, others = left[-1]
            other = next((each for each in others if each not in seen), None)
            if other is None:
                order.append(module)
                left.pop()
            else:
                seen.add(other)
                left.append((other, iter(edges[other])))
        return order

    seen: set[str] = set()
    finished = [module for start in sorted(graph) if start not in seen for module in walk(start, graph, seen)]
    seen, circles = set(), []
    for start in reversed(finished):
        if start not in seen:
            circle = set(walk(start, importers, seen))
            if len(circle) > 1:
                circles.append(circle)
    return circles


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(map(sorted, circles_of(graph))) == [["a", "b", "c"], ["d", "e"]]


def test_there_is_no_circle_of_files() -> None:
    """Objects that hold each other belong in one file, or let go: a Protocol between them heals nothing."""
    assert [sorted(circle) for circle in circles_of(module_graph())] == []
