"""The numbers of a task executor come in parts, and no function takes more than one of them."""

from __future__ import annotations

import ast

import msgspec

from tests.sources import SRC, tree_of
from xdeepserve.engine.deploy import sizes
from xdeepserve.engine.deploy.sizes import (
    ExpertSizes,
    GroupSizes,
    KVSizes,
    StepSizes,
    TEPlace,
    TESettings,
    WalkSizes,
)

PARTS = (TEPlace, GroupSizes, KVSizes, StepSizes, WalkSizes, ExpertSizes, TESettings)
MAX_FIELDS = 12
# Who takes a whole TE, and why.
WHOLE = {
    "engine/build.py": "decides where a TE comes to lie, and plans it",
}


def test_no_part_is_large() -> None:
    fields = {part.__name__: len(msgspec.structs.fields(part)) for part in PARTS}
    assert max(fields.values()) <= MAX_FIELDS, fields
    assert tuple(field.type for field in msgspec.structs.fields(sizes.Sizes)) == PARTS


def test_functions_take_one_part() -> None:
    names = {part.__name__ for part in PARTS}
    whole, several = set(), []
    for path in sorted(SRC.rglob("*.py")):
        tree = tree_of(path)
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == sizes.__name__
            for alias in node.names
        }
        if not imported:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            taken = [
                {each.id for each in ast.walk(argument.annotation) if isinstance(each, ast.Name)} & imported
                for argument in arguments
                if argument.annotation is not None
            ]
            if any("Sizes" in each for each in taken):
                whole.add(str(path.relative_to(SRC)))
            elif sum(bool(each & names) for each in taken) > 1:
                several.append(f"{path.relative_to(SRC)}: {node.name}")
    assert several == []
    assert whole == set(WHOLE)
