"""Define an exercise: a function of the package that the learner writes again from its story and skeleton."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import msgspec

Parts = Callable[[Any, tuple[Any, ...]], Mapping[str, Any]]


class Exercise(msgspec.Struct, frozen=True):
    """An exercise of the course: a function of the package, and what is needed to check the learner's
    version.

    `owner` and `name` say where the package's own function is: a module, perhaps a class in it
    (`module:Class`), and the attribute. `scene` runs a part of the pod that uses the function, and returns
    arrays by name. `parts` takes the function's result and arguments and names the parts to compare, in
    order; `axes` says what an index of each part counts. `changes`: the function works by changing its
    arguments, so that they are parts too, and the package's own function gets deep copies.
    """

    number: int
    slug: str
    title: str
    section: str
    owner: str
    name: str
    where: str  # the operation and its step, as differences name it
    scene: Callable[[], Mapping[str, Any]]
    parts: Parts
    axes: Mapping[str, tuple[str, ...]]
    hints: tuple[str, ...]
    changes: bool = False

    @property
    def stem(self) -> str:
        """Name of the exercise's files in a working folder, without the ending."""
        return f"{self.number:02}_{self.slug}"

    @property
    def solution(self) -> str:
        """Full name of the package's own function, to show to people."""
        return f"{self.owner.replace(':', '.')}.{self.name}"

    @property
    def home(self) -> Any:
        """Module or class of the package's own function."""
        module, _, owner = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, owner) if owner else found

    @property
    def own(self) -> Callable[..., Any]:
        """The package's own function, to compare with."""
        found: Callable[..., Any] = getattr(self.home, self.name)
        return found

    @property
    def story(self) -> str:
        """Text about the purpose of the function, in Markdown."""
        return files("xdeepserve.learn").joinpath("lessons", f"{self.slug}.md").read_text()

    @property
    def skeleton(self) -> str:
        """Source of the skeleton file: the function's signature, and what it promises."""
        return files("xdeepserve.learn").joinpath("lessons", f"{self.slug}.py").read_text()
