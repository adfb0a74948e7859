"""A name has one meaning, in classes and in files, and a docstring reads by itself."""

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.sources import SRC, tree_of


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(SRC): tree_of(path) for path in sorted(SRC.rglob("*.py"))}


# Folders whose files are named for what they treat, which has a file of that name elsewhere.
OF_A_SUBJECT = {
    "kernels": "the compiled twins of what the file of that name says in plain words",
    "jit": "how a concept is compiled",
    "corpus": "a file per domain of the training text",
    "bench": "a file per suite of `xdeepserve bench`",
    "cli": "a file per command",
}
# Folders that say what their files are: a file may be called there like one elsewhere.
SAY_WHAT = ("comm/*", "m2n", "engine/run/clock", "engine/run/lockstep/kernels", "engine/ways/*", "model/v4")


def test_a_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    several = {name: where for name, where in places.items() if len(where) > 1}
    assert not several


def test_a_file_name_is_there_once() -> None:
    """Every wing may have a `command.py`. `fused/dispatch.py` needs no longer name: the folder says it."""
    counts = Counter(
        path.name
        for path in trees()
        if path.name not in ("__init__.py", "command.py")
        and not OF_A_SUBJECT.keys() & set(path.parts)
        and not any(path.parent.match(folder) for folder in SAY_WHAT)
    )
    assert {name for name, count in counts.items() if count > 1} == set()


def aliases(tree: ast.Module) -> Iterator[str]:
    """Names of types that a file gives: classes, and what a capital begins and a subscript follows."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            name = ast.unparse(node.targets[0])
            if name[0].isupper() and not name.isupper():
                yield name


# Aliases that several files of a room give to different types, or to the same one: the list may only shrink.
SEVERAL = {
    "api": {"Item"},
    "comm": {"Array", "Float32", "Int32", "Int64", "Piece", "Quantize"},
    "engine": {"Counts", "Dispatch", "Ns", "Place", "Preemption", "Stage"},
    "hw": {"Place"},
    "quant": {"Sequences"},
}


def test_an_alias_has_one_meaning_in_a_room() -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path, tree in trees().items():
        counts[path.parts[0]].update(aliases(tree))
    several = {room: {name for name, count in names.items() if count > 1} for room, names in counts.items()}
    assert {room: names for room, names in several.items() if names} == SEVERAL


# How a docstring begins that reads only after its neighbour's; words that need a noun before them.
LEANING = ("Of ", "The same", "As ", "See ", "Those ", "That of ", "Ditto")
PRONOUNS = {"it", "they", "who", "what", "nobody", "those", "whoever"}


def test_docstrings_stand_by_themselves() -> None:
    leaning = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = (ast.get_docstring(node) or "").partition("\n\n")[0]
                words = re.findall(r"[\w'`.-]+", text.lower())
                is_riddle = (bool(words) and len(words) < 5) or bool(PRONOUNS & set(words[:5]))
                if is_riddle or text.startswith(LEANING):
                    leaning.append(f"{path}: {text}")
    assert not leaning
