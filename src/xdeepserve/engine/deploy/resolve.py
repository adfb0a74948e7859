"""From a preset or a TOML file, with overrides, to a deployment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.roles import DEPLOYMENTS, is_listed
from xdeepserve.engine.deploy.settings import nearest, settings
from xdeepserve.errors import DeploymentError, meant
from xdeepserve.reading import Document, Mistake, Place, mistakes, read, refused, toml_value, unknown_field

# Kinds are fitted to any model; pods of the papers have sizes or hardware of their own.
SELF_SIZING = tuple(kind for kind in DEPLOYMENTS if not is_listed(kind))
OF_PAPERS = ("superpod", "dp288", "production", "cloudmatrix384", "heterogeneous", "megascale")
PRESETS = (*SELF_SIZING, *OF_PAPERS)
# Texts `key=value`, mappings (of sections: nested, or with dotted keys), or one of either. Later ones win.
Overrides: TypeAlias = str | Mapping[str, Any] | Iterable[str | Mapping[str, Any]]


def resolve(name: str | Deployment, overrides: Overrides = ()) -> Deployment:
    """Read the deployment of a preset or a TOML file, with overrides (`scheduler.max_num_seqs=4`).

    Raises DeploymentError with every reason.
    """
    if isinstance(name, Deployment):
        document, raw = None, msgspec.to_builtins(name)
    else:
        document = _read(name)
        raw = document.raw | {"name": Path(name).stem}
    where = f"deployment {raw['name']}" if document is None else document.where
    own = list(_mistakes(raw))  # in the file itself, whatever the overrides
    reasons = []
    for override, key, value in _assignments(overrides):
        if not key:
            reasons.append(_no_assignment(override))
            continue
        trial = _assigned(raw, key, value)
        if found := [each.said("TOML") for each in _mistakes(trial) if each not in own]:
            reasons.append(f"{override}: {'; '.join(found)}")
        else:
            raw = trial
    if document is not None:
        reasons = [document.said(each) for each in own if each in _mistakes(raw)] + reasons
    if reasons:
        raise DeploymentError(refused(where, reasons))
    return msgspec.convert(raw, Deployment)


def _assignments(overrides: Overrides) -> Iterator[tuple[str, str, Any]]:
    """Split each override into text, key (empty if there is none) and value."""
    if isinstance(overrides, str | Mapping):
        overrides = (overrides,)
    elif not isinstance(overrides, Iterable):
        raise DeploymentError(f"overrides are key=value texts or a mapping of settings, found {overrides!r}")
    for each in overrides:
        if isinstance(each, Mapping):
            yield from ((f"{key}={value}", key, value) for key, value in _flat(each))
        else:
            text = each if isinstance(each, str) else repr(each)
            key, equals, value = text.partition("=") if isinstance(each, str) else ("", "", "")
            yield text, key.strip() if equals else "", toml_value(value.strip())


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings into pairs of dotted key and value."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _no_assignment(override: str) -> str:
    """Say how to write an override, and which setting may be meant."""
    own = next((each for each in settings() if each.key == override.strip()), None)
    hint = nearest(override) if own is None else f": {own.key}={own.example}"
    return f"'{override}' is not of the form key=value{hint}"


def _read(name: str) -> Document:
    """Read the TOML table of a preset or a file."""
    if name in PRESETS:
        text = (resources.files(__package__) / "presets" / f"{name}.toml").read_text()
        return Document(text, f"deployment {name}", "TOML")
    path = Path(name)
    if path.suffix != ".toml":
        known = ", ".join(PRESETS)
        raise DeploymentError(
            f"unknown deployment '{name}'{meant(name, PRESETS)}: known are {known}, or a .toml file"
        )
    return read(path, "TOML", "deployment", DeploymentError)


def _assigned(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of `raw` in which the dotted `key` has `value`."""
    head, _, rest = key.partition(".")
    if rest:
        inner = raw.get(head, {})
        value = _assigned(inner if isinstance(inner, dict) else {}, rest, value)
    return raw | {head: value}


def _mistakes(raw: dict[str, Any]) -> Iterator[Mistake]:
    return mistakes(raw, Deployment, "TOML", _unknown)


def _unknown(place: Place, value: Any, known: Sequence[str]) -> Mistake:
    """Describe an unknown setting, with similar known ones.

    For an unknown section, the first setting within it is described.
    """
    if any(isinstance(part, int) for part in place):  # in [[te]]
        return unknown_field(place, value, known)
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        place = (*place, name)
    return Mistake(place, nearest(".".join(map(str, place))), "unknown setting ")
