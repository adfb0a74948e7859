"""Defaults of sampling that a checkpoint brings in `generation_config.json`, taken as vLLM takes them."""

from __future__ import annotations

import json
import logging
from typing import Any

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.request import AsyncEngine
from xdeepserve.errors import RequestError, abridged

FILE = "generation_config.json"
TAKEN = {  # by the file's name: the request's
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
MAX_TEMPERATURE = 2.0  # OpenAI's; in Python there is room for more

log = logging.getLogger("xdeepserve.api")


def checkpoint_defaults(engine: AsyncEngine) -> dict[str, Any]:
    """Read the sampling defaults of an engine's checkpoint; a line of the log names them. Empty without a
    file, or where its values are those of every request."""
    path = None if engine.directory is None else engine.directory / FILE
    if path is None or not path.is_file():
        return {}
    taken = sampling_defaults(json.loads(path.read_bytes()))  # the checkpoint was loaded: it is an object
    if taken:
        told = ", ".join(f"{name} {value}" for name, value in taken.items())
        log.info(
            "sampling defaults of %s: %s, where a request does not say (--generation-config vllm: none)",
            path,
            told,
        )
    return taken


def sampling_defaults(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that change a request's defaults. Values that a request could not have are left out,
    with a line of the log."""
    usual, taken = SamplingParams(max_tokens=None), dict[str, Any]()
    for key, name in TAKEN.items():
        value: Any = found.get(key)
        if value is None:
            continue
        try:
            value = _checked(name, value)
        except RequestError as error:
            reason = str(error).replace(name, key)
            log.warning("%s: %s %s is not taken: %s", FILE, key, abridged(value), reason)
            continue
        if value != getattr(usual, name):
            taken[name] = value
    return taken


def _checked(name: str, value: Any) -> int | float:
    """Return a value that a request could have for a field. Raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, found {abridged(value)}")
    if name in ("top_k", "max_tokens") and float(value).is_integer():
        value = int(value)
    if name == "temperature" and not 0 <= value <= MAX_TEMPERATURE:
        raise RequestError(f"{name} must be between 0 and {MAX_TEMPERATURE:g}, found {abridged(value)}")
    SamplingParams(**{name: value})
    return value
