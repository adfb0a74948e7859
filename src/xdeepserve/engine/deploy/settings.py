"""All settings of a deployment, read from its structs: for `--help`, `xdeepserve settings` and errors.

Nothing here imports NumPy: a help text takes no longer than Python itself.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Container, Iterator, Sequence
from difflib import SequenceMatcher
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment, Limits
from xdeepserve.errors import InputError

MARGIN, WIDTH = 36, 110  # columns of keys, and of a line


class Setting(NamedTuple):
    """Setting of a deployment, changed by `--set key=value`: key, type, default and meaning."""

    key: str
    type: str  # int, float, bool or the names that it may have, `a|b|c`
    default: Any  # None: there is no value until one is given
    meaning: str
    bounds: Limits | None = None  # of a number

    @property
    def example(self) -> str:
        """The default as `--set` takes it; without a default, the type in capitals."""
        return self.type.upper() if self.default is None else str(self.default).lower()

    @property
    def kind(self) -> str:
        """The type, with the bounds of a number."""
        return self.type if self.bounds is None else f"{self.type}, {self.bounds}"

    @property
    def names(self) -> list[str]:
        """Allowed names of a setting with a fixed choice; empty for other types."""
        return self.type.split("|") if "|" in self.type else []


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Return every setting, in the order of the structs."""
    return tuple(_settings(Deployment, ""))


def given(d: Deployment) -> Iterator[tuple[Setting, Any]]:
    """Yield each setting of a deployment with its value; those of sections that it leaves out are missing.

    Settings of a list `[[te]]` are called `te[0].count` and so on.
    """
    yield from _given(d, settings())
    for at, entry in enumerate(d.te or ()):
        own = [each._replace(key=f"te[{at}].{each.key}") for each in _settings(type(entry), "")]
        yield from ((each, getattr(entry, each.key.partition(".")[2])) for each in own)


def _given(d: Deployment, all_settings: Sequence[Setting]) -> Iterator[tuple[Setting, Any]]:
    for setting in all_settings:
        *path, name = setting.key.split(".")
        section: Any = d
        for each in path:
            section = None if section is None else getattr(section, each)
        if section is not None:
            yield setting, getattr(section, name)


def _settings(struct: type[msgspec.Struct], prefix: str) -> Iterator[Setting]:
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint, key = hints[field.name], prefix + field.name
        section = next((each for each in (hint, *get_args(hint)) if _is_struct(each)), None)
        if section is not None:
            yield from _settings(section, f"{key}.")
        elif get_origin(hint) is Annotated:
            meaning = get_args(hint)[-1]
            has_factory = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if has_factory else field.default
            names = "|".join(_names(hint))
            yield Setting(key, names, None if field.required else default, meaning, _bounds(hint))


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _names(hint: Any) -> list[str]:
    """Name the allowed values of a type: those of a Literal or of a table of policies, or the type's own."""
    if get_origin(hint) in (Union, UnionType):
        return [name for each in get_args(hint) if each is not type(None) for name in _names(each)]
    if get_origin(hint) is Annotated:
        metas = [each for each in get_args(hint) if isinstance(each, msgspec.Meta) and each.extra]
        return [*metas[0].extra["names"]] if metas and metas[0].extra else _names(get_args(hint)[0])
    return list(get_args(hint)) if get_origin(hint) is Literal else [hint.__name__]


def _bounds(hint: Any) -> Limits | None:
    """Return the bounds of a number, which may stand within `Annotated[... | None]`; None if it has none."""
    if isinstance(hint, Limits):
        return hint
    return next((found for each in get_args(hint) if (found := _bounds(each)) is not None), None)


LIKE = 1.2  # of 2: less like than that is noise


def nearest(key: str) -> str:
    """Return the hint for an unknown setting: the known keys most like it, if any is similar."""

    def likeness(known: str) -> float:
        name = known.rpartition(".")[2]
        # Who names no section means none: a short one is no nearer than a long one.
        pairs = (key, known if "." in key else name), (key.rpartition(".")[2], name)
        return sum(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    known = sorted((each.key for each in settings()), key=likeness, reverse=True)
    is_like = likeness(known[0]) >= LIKE
    return f"; the nearest are {', '.join(known[:3])}" if is_like else "; xdeepserve settings lists all"


def instead(section: str, value: Any, known: Container[str]) -> str:
    """Return the hint for a setting that a deployment does not have: keys of its own that fit.

    These keys are in the sections `known` and have the same names as the settings that `value` sets.
    """
    names = [section]
    if isinstance(value, msgspec.Struct):
        fields, usual = value.__struct_fields__, type(value)()
        names = [name for name in fields if getattr(value, name) != getattr(usual, name)] or list(fields)
    own: dict[str, list[str]] = {}
    for each in settings():
        head, name = each.key.partition(".")[0], each.key.rpartition(".")[2]
        if head in known and name in names and each.key.count(".") < 2:
            own.setdefault(name, []).append(each.key)
    theirs = [section if name == section else f"{section}.{name}" for name in own]
    pairs = (f"for {key} it has {' and '.join(keys)}" for key, keys in zip(theirs, own.values(), strict=True))
    return f"; {', '.join(pairs)}" if own else ""


def help_text(key: str | None = None) -> str:
    """Describe a setting, all settings of a section, or all of them; equal ones in several sections come
    once.

    InputError, with the nearest keys, if there is no such setting.
    """
    alike: dict[tuple[str, ...], list[Setting]] = {}
    for each in settings():
        if key is None or f"{each.key}.".startswith(f"{key}."):
            same = each.key.rpartition(".")[2], each.type, str(each.default), each.meaning
            alike.setdefault(same, []).append(each)
    if not alike:
        raise InputError(f"unknown setting {key}{nearest(key or '')}")
    return "\n".join(line for found in alike.values() for line in _lines(found))


def _lines(alike: Sequence[Setting]) -> list[str]:
    """Format settings with equal meaning, type and default: their keys first."""
    kind, default, meaning = alike[0].kind, alike[0].default, alike[0].meaning
    if len(kind) > WIDTH - MARGIN - len("[; default ]"):
        kind = kind.replace("|", " | ")  # names too long for a line
    keys = ", ".join(each.key for each in alike)
    text = f"{meaning} [{kind}]" if default is None else f"{meaning} [{kind}; default {str(default).lower()}]"
    first, *rest = textwrap.wrap(text, WIDTH - MARGIN, break_on_hyphens=False)
    left = f"  {keys}"
    head = [f"{left:<{MARGIN}}{first}"] if len(left) + 1 < MARGIN else [left, " " * MARGIN + first]
    return head + [" " * MARGIN + line for line in rest]
