"""Typed values out of a JSON object of a checkpoint."""

from __future__ import annotations

import json
import math
from typing import Any

from .config_limits import LIMITS, MAX_END_TOKENS


class Reader:
    """Takes typed values out of a JSON object and collects what is wrong with them."""

    def __init__(self, raw: dict[str, Any], prefix: str = "", problems: list[str] | None = None) -> None:
        self.raw = raw
        self.prefix = prefix
        self.problems: list[str] = [] if problems is None else problems
        self.own: dict[str, str] = {}  # what the family calls keys, by DeepSeek-V3's names

    def key(self, key: str) -> str:
        """What the file calls a key."""
        return self.prefix + self.own.get(key, key)

    def integer(self, key: str, default: int, minimum: int = 1) -> int:
        value, limit = self.raw.get(key, default), LIMITS[key]
        if type(value) is int and minimum <= value <= limit:
            return value
        bound = f"<= {limit}" if type(value) is int and value > limit else f">= {minimum}"
        self.problems.append(f"{self.key(key)} must be an integer {bound}, found {abridged(value)}")
        return default

    def number(self, key: str, default: float, above: float = -math.inf) -> float:
        value, limit = self.raw.get(key, default), LIMITS[key]
        # An integer may be too large for a float: it is compared as it is.
        if type(value) in (int, float) and above < value and -limit <= value <= limit:
            return float(value)
        bound = f" > {above:g}" if math.isfinite(above) else ""
        if type(value) in (int, float) and not -limit <= value <= limit:
            bound = f" between {max(above, -limit):g} and {limit:g}"
        self.problems.append(f"{self.key(key)} must be a number{bound}, found {abridged(value)}")
        return default

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.problems.append(f"{self.key(key)} must be true or false, found {abridged(value)}")
        return default

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        value = self.raw.get(key, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        last = LIMITS["vocab_size"] - 1
        if len(ids) <= MAX_END_TOKENS and all(type(i) is int and 0 <= i <= last for i in ids):
            return tuple(ids)
        self.problems.append(
            f"{self.key(key)} must be a token id up to {last}, a list of {MAX_END_TOKENS} at most "
            f"or null, found {abridged(value)}"
        )
        return ()

    def layer_numbers(self, key: str) -> frozenset[int]:
        value = [] if self.is_null(key) else self.raw.get(key, [])
        if isinstance(value, list) and all(type(layer_idx) is int and layer_idx >= 0 for layer_idx in value):
            return frozenset(value)
        self.problems.append(f"{self.key(key)} must be a list of layer numbers, found {abridged(value)}")
        return frozenset()

    def only(self, key: str, supported: object, default: object) -> None:
        """Refuse any value but the supported one; null counts as absent."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value != supported:
            self.problems.append(
                f"{self.key(key)} {abridged(value)} is not supported (only {abridged(supported)} is)"
            )

    def is_null(self, key: str) -> bool:
        return key in self.raw and self.raw[key] is None


def abridged(value: object) -> str:
    """A value as JSON, not at full length if it is long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= 80 else f"{text[:80]}... ({len(text)} characters)"
