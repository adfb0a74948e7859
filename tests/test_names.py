"""A name has one meaning, in classes and in files, and a docstring reads by itself."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "xdeepserve"
FILES = sorted(SRC.rglob("*.py"))
TREES = {path.relative_to(SRC): ast.parse(path.read_text()) for path in FILES}

# Folders whose files are named for what they treat, which has a file of that name elsewhere.
OF_A_SUBJECT = {
    "kernels": "the compiled twins of what the file of that name says in plain words",
    "jit": "how a concept is compiled",
    "corpus": "a file per domain of the training text",
    "bench": "a file per suite of `xdeepserve bench`",
    "cli": "a file per command",
}
# Files that each protocol of comm has, by its folder; and one beside the folders for what they share.
OF_A_PROTOCOL = {"layout.py", "rules.py", "handle.py", "cost.py", "twin.py", "endpoint.py"}


def test_a_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    several = {name: where for name, where in places.items() if len(where) > 1}
    assert not several


def test_a_file_name_is_there_once() -> None:
    """Every wing may have a `command.py`."""
    counts = Counter(
        path.name
        for path in TREES
        if path.name not in ("__init__.py", "command.py")
        and not OF_A_SUBJECT.keys() & set(path.parts)
        and not (path.parts[0] in ("comm", "m2n") and path.name in OF_A_PROTOCOL)
    )
    assert {name for name, count in counts.items() if count > 1} == set()


# How a docstring begins that reads only after its neighbour's.
LEANING = ("Of ", "The same", "As ", "See ", "Those ", "That of ", "Ditto")
OTHERS = {"engine", "step"}  # where such docstrings are still to be rewritten
ROOMS = sorted({path.parts[0] for path in TREES} - OTHERS)


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_stand_by_themselves(room: str) -> None:
    leaning = []
    for path, tree in TREES.items():
        for node in ast.walk(tree) if path.parts[0] == room else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node) or ""
                if docstring.startswith(LEANING):
                    leaning.append(f"{path}: {docstring.splitlines()[0]}")
    assert not leaning
