"""The numbers of a task executor come in parts: no function takes more than one, few read more than two."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

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
NAMES = {part.__name__ for part in PARTS}
MAX_FIELDS = 12
MAX_READ = 2
# Where a whole TE is taken by a function, or held by a record, and why.
WHOLE = {
    "engine/build.py": "decides where a TE comes to lie, and plans it",
    "engine/die/team.py": "holds the parts, and hands them out",
    "planner/sweep.py": "names the settings of a deployment of one TE of a pod",
}
# Which functions read more parts than two, and why.
SEVERAL = {
    "engine/die/die_memory.py: DieMemory.__init__": "hands the parts to what lies on a die with a DP group",
    "planner/sweep.py: _sizes": "names the settings of a deployment of one TE of a pod",
    "page/pod_look.py: _te_row": "shows a TE on the page, with a number from each part",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Types = dict[str, str]  # of names, or of attributes of a class
Assigned = list[tuple[ast.expr, ast.expr]]


def test_no_part_is_large() -> None:
    fields = {part.__name__: len(msgspec.structs.fields(part)) for part in PARTS}
    assert max(fields.values()) <= MAX_FIELDS, fields
    assert tuple(field.type for field in msgspec.structs.fields(sizes.Sizes)) == PARTS


def users_of(module: str) -> list[str]:
    """Files of the package that import a module or a package, by the text."""
    paths = [path for path in sorted(SRC.rglob("*.py")) if f"from {module}" in path.read_text()]
    return [str(path.relative_to(SRC)) for path in paths]


def named(annotation: ast.expr | None) -> set[str]:
    """Classes that an annotation names."""
    return {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)} if annotation else set()


def arguments(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def test_functions_take_one_part() -> None:
    whole, several = set(), []
    for file in users_of(sizes.__name__):
        for node in ast.walk(tree_of(SRC / file)):
            if isinstance(node, Function):
                taken = [named(argument.annotation) & {"Sizes", *NAMES} for argument in arguments(node)]
            elif isinstance(node, ast.ClassDef):
                taken = [
                    named(each.annotation) & {"Sizes"}
                    for each in node.body
                    if isinstance(each, ast.AnnAssign)
                ]
            else:
                continue
            if any("Sizes" in each for each in taken):
                whole.add(file)
            elif sum(map(bool, taken)) > 1:
                several.append(f"{file}: {node.name}")
    assert several == []
    assert whole == set(WHOLE)


# ---- which parts a function reads -----------------------------------------------------------------------


def one_class(annotation: ast.expr | None) -> str:
    """The class of an annotation such as `Team` or `Team | None`; "" of any other."""
    names = named(annotation) - {"None"}
    plain = isinstance(annotation, ast.Name | ast.BinOp)
    return names.pop() if plain and len(names) == 1 else ""


class Reader:
    """Finds the parts that functions read, by the types of arguments, of attributes and of local names.

    An attribute called `sizes` is a whole TE, unless its class says otherwise.
    """

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._attributes: dict[str, Types] = defaultdict(dict)  # of each class
        self._bases: dict[str, list[str]] = {}
        self._functions = [
            (file, owner, function, list(assignments(function)))
            for file, tree in trees.items()
            for owner, function in self._functions_of(tree)
        ]
        for _ in range(2):  # attributes lead to attributes, as in self.team.sizes.walk
            for _, owner, function, assigned in self._functions:
                names = self._local_names(owner, function, assigned)
                for target, value in assigned:
                    if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                        self._learn(owner, target.attr, self._type_of(value, names))

    def _functions_of(self, tree: ast.Module) -> Iterator[tuple[str, Function]]:
        """Yield functions with the names of their classes, and learn what the classes' bodies say."""
        for node in tree.body:
            if isinstance(node, Function):
                yield "", node
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                self._bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    self._learn(node.name, each.target.id, one_class(each.annotation))
                elif isinstance(each, Function):
                    if any(getattr(decorator, "id", "") == "property" for decorator in each.decorator_list):
                        self._learn(node.name, each.name, one_class(each.returns))
                    yield node.name, each

    def _learn(self, owner: str, attribute: str, kind: str) -> None:
        if owner and kind:
            self._attributes[owner][attribute] = kind

    def _attribute(self, owner: str, name: str) -> str:
        own = self._attributes[owner].get(name, "") if owner in self._attributes else ""
        inherited = (self._attribute(base, name) for base in self._bases.get(owner, ()))
        return own or next(filter(None, inherited), "Sizes" if name == "sizes" else "")

    def _type_of(self, node: ast.expr, names: Types) -> str:
        if isinstance(node, ast.Attribute):
            return self._attribute(self._type_of(node.value, names), node.attr)
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    def _local_names(self, owner: str, function: Function, assigned: Assigned) -> Types:
        names = {argument.arg: one_class(argument.annotation) for argument in arguments(function)}
        names["self"] = owner
        for target, value in assigned:
            if isinstance(target, ast.Name):
                names[target.id] = self._type_of(value, names) or names.get(target.id, "")
        return names

    def read(self) -> Iterator[tuple[str, set[str]]]:
        """Yield each function, with the parts that it reads."""
        for file, owner, function, assigned in self._functions:
            names = self._local_names(owner, function, assigned)
            found = {self._type_of(each, names) for each in ast.walk(function) if isinstance(each, ast.expr)}
            yield f"{file}: {f'{owner}.' * bool(owner)}{function.name}", found & NAMES


def assignments(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Single targets of a function's assignments with their values, in order."""
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


def test_parts_are_found_by_types() -> None:
    tree = ast.parse(
        "class A:\n"
        "    walk: WalkSizes\n"
        "    def __init__(self, team: Team, kv: KVSizes) -> None:\n"
        "        self.team, self.kv = team, kv\n"
        "        self.steps = team.sizes.steps\n"
        "class B(A):\n"
        "    def f(self) -> int:\n"
        "        place = self.team.sizes.place\n"
        "        return self.walk.num_parts + self.kv.num_blocks + self.steps.mtp + place.num_dies\n"
        "def g(b: B) -> int:\n"
        "    return b.steps.mtp + b.groups\n"
    )
    read = dict(Reader({"a.py": tree, "sizes.py": tree_of(Path(sizes.__file__))}).read())
    assert read["a.py: A.__init__"] == {"KVSizes", "StepSizes"}
    assert read["a.py: B.f"] == {"WalkSizes", "KVSizes", "StepSizes", "TEPlace"}
    assert read["a.py: g"] == {"StepSizes"}


def test_functions_read_two_parts_at_most() -> None:
    trees = {file: tree_of(SRC / file) for file in users_of("xdeepserve.engine")}
    several = {name: parts for name, parts in Reader(trees).read() if len(parts) > MAX_READ}
    assert several.keys() == SEVERAL.keys(), several
