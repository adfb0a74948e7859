"""Defaults of sampling that a checkpoint brings in `generation_config.json`, taken as vLLM takes them."""

from __future__ import annotations

import json
import logging
from typing import Any

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.request import AsyncEngine
from xdeepserve.errors import RequestError, abridged

FILE = "generation_config.json"
TAKEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

log = logging.getLogger("xdeepserve.api")


def checkpoint_defaults(engine: AsyncEngine) -> dict[str, Any]:
    """Read the sampling defaults of an engine's checkpoint; a line of the log names them. Empty without a
    file, or where its values are those of every request."""
    path = engine.plan.checkpoint.directory / FILE if isinstance(engine, Engine) else None
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
    """Return the fields that change a request's defaults. Values out of range are left out, with a line of
    the log."""
    usual, taken = SamplingParams(), dict[str, Any]()
    for name in TAKEN:
        value: Any = found.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name == "top_k" and float(value).is_integer():
            value = int(value)
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            log.warning("%s: %s %s is not taken: %s", FILE, name, abridged(value), error)
            continue
        if value != getattr(usual, name):
            taken[name] = value
    return taken
