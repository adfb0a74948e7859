"""From a preset or a TOML file, with overrides, to a deployment."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.settings import nearest, settings
from xdeepserve.errors import DeploymentError, meant

PRESETS = ("monolithic", "colocated", "pd", "moe-attention", "transformerless", "eaas", "superpod")
# Fitted to any model; the superpod has its own sizes.
SELF_SIZING = tuple(name for name in PRESETS if name != "superpod")
UNKNOWN = "Object contains unknown field `"  # what msgspec says
# Texts `key=value`, mappings (of sections: nested, or with dotted keys), or one of either. Later ones win.
Overrides: TypeAlias = str | Mapping[str, Any] | Iterable[str | Mapping[str, Any]]


def resolve(name: str | Deployment, overrides: Overrides = ()) -> Deployment:
    """The deployment of a preset name or a TOML file, with overrides (`scheduler.max_num_seqs=4`).

    Raises DeploymentError with every reason.
    """
    if isinstance(name, Deployment):
        raw, title = msgspec.to_builtins(name), name.name
    else:
        raw, title = _read(name)
    reasons, wrong = [], _decode_error(raw, title)  # in the file itself, whatever the overrides
    for override, key, value in _assignments(overrides):
        if not key:
            reasons.append(f"{override} is not of the form key=value")
            continue
        trial = _assigned(raw, key, value)
        error = _decode_error(trial, title)
        if error and error != wrong:
            reasons.append(f"{override}: {error}")
        else:
            raw = trial
    error = _decode_error(raw, title)
    if error:
        reasons.insert(0, error)
    if reasons:
        raise DeploymentError(f"deployment {title}: " + "; ".join(reasons))
    return msgspec.convert(raw | {"name": title}, Deployment)


def _read(name: str) -> tuple[dict[str, Any], str]:
    """The TOML table of a preset or a file, and its title."""
    if name in PRESETS:
        text = (resources.files(__package__) / "presets" / f"{name}.toml").read_text()
        return tomllib.loads(text), name
    path = Path(name)
    if path.suffix != ".toml":
        known = ", ".join(PRESETS)
        raise DeploymentError(
            f"unknown deployment '{name}'{meant(name, PRESETS)}: known are {known}, or a .toml file"
        )
    try:
        return tomllib.loads(path.read_text()), path.stem
    except OSError as error:
        raise DeploymentError(f"deployment {path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeploymentError(f"deployment {path}: not valid TOML: {error}") from None


def _assignments(overrides: Overrides) -> Iterator[tuple[str, str, Any]]:
    """Every override as it is written, with its key (empty if it has none) and its value."""
    if isinstance(overrides, str | Mapping):
        overrides = (overrides,)
    elif not isinstance(overrides, Iterable):
        raise DeploymentError(f"overrides are key=value texts or a mapping of settings, found {overrides!r}")
    for each in overrides:
        if isinstance(each, Mapping):
            yield from ((f"{key}={value}", key, value) for key, value in _flat(each))
        else:
            key, equals, text = each.partition("=") if isinstance(each, str) else ("", "", "")
            is_one = bool(equals and key)
            yield (each, key.strip(), _parse_value(text.strip())) if is_one else (repr(each), "", None)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a mapping in which sections are mappings."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _parse_value(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assigned(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of `raw` in which the dotted `key` has `value`."""
    head, _, rest = key.partition(".")
    if rest:
        inner = raw.get(head, {})
        value = _assigned(inner if isinstance(inner, dict) else {}, rest, value)
    return raw | {head: value}


def _decode_error(raw: dict[str, Any], title: str) -> str | None:
    try:
        msgspec.convert(raw | {"name": title}, Deployment)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        key = place.removesuffix("`")
        if text.startswith(UNKNOWN):
            key = _unknown(raw, key, text.removeprefix(UNKNOWN).removesuffix("`"))
            return f"unknown setting {key}{nearest(key)}"
        names = sorted(name for setting in settings() if setting.key == key for name in setting.names)
        if not names:
            return str(error)
        return f"{key} must be one of {', '.join(names)}, found {_value(raw, key)!r}"
    return None


def _value(raw: Any, key: str) -> Any:
    for part in filter(None, key.split(".")):
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def _unknown(raw: dict[str, Any], section: str, name: str) -> str:
    """The key of what is unknown in a section; with what is to be set in it, if it is meant as one, too."""
    found, key = (_value(raw, section) or {}).get(name), f"{section}.{name}".removeprefix(".")
    while isinstance(found, dict) and found:
        name, found = next(iter(found.items()))
        key += f".{name}"
    return key
