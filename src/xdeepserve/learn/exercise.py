"""What an exercise is: one function of the package, told, taken out and to be written again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import msgspec

Parts = Callable[[Any, tuple[Any, ...]], Mapping[str, Any]]


class Exercise(msgspec.Struct, frozen=True):
    """One of the course.

    `owner` and `name` are where the package's own function is: a module, perhaps a class in it
    (`module:Class`), and the attribute. `scene` runs a part of the pod in which it works, and returns arrays
    by name. `parts` names what the function returns, given that and its arguments, in the order in which it
    is compared; `axes` says what an index of each part counts. `changes`: the function works by what it
    changes, so that its arguments are parts, too, and the package's own gets deep copies.
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
        """What its files in a working folder are called, without the ending."""
        return f"{self.number:02}_{self.slug}"

    @property
    def solution(self) -> str:
        """Where the package's own function is, for people."""
        return f"{self.owner.replace(':', '.')}.{self.name}"

    @property
    def home(self) -> Any:
        """The module or class that has the function."""
        module, _, owner = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, owner) if owner else found

    @property
    def own(self) -> Callable[..., Any]:
        """The package's own function."""
        found: Callable[..., Any] = getattr(self.home, self.name)
        return found

    @property
    def story(self) -> str:
        """What the function is for, in Markdown."""
        return files("xdeepserve.learn").joinpath("lessons", f"{self.slug}.md").read_text()

    @property
    def skeleton(self) -> str:
        """Its signature, and what it promises."""
        return files("xdeepserve.learn").joinpath("lessons", f"{self.slug}.py").read_text()
