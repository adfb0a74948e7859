"""What a client's script prints: one JSON object a line, a feature and what came of it.

Scripts find the server in the environment: `BASE_URL` (http://host:port), `MODEL`, and `TOKENIZER`, a
directory with the model's tokenizer for clients that count tokens themselves.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BASE_URL = os.environ["BASE_URL"]
MODEL = os.environ.get("MODEL", "tiny")
TOKENIZER = os.environ.get("TOKENIZER", "")

# For requests that are left: they take a few seconds, whatever the model says.
LONG = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}

# Sizes that the small model surely fills within its context.
PERSON = {
    "title": "Person",
    "description": "Somebody.",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["glad", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}


def version(package: str) -> None:
    """Say which version of a package is tried."""
    print(json.dumps({"version": f"{package} {importlib.metadata.version(package)}"}), flush=True)


def feature(column: str, name: str) -> Callable[[Callable[[], object]], None]:
    """Run a function at once; it returns nothing where the feature works, or names the client's own fault."""

    def run(check: Callable[[], object]) -> None:
        try:
            fault = check()
        except Exception as error:
            traceback.print_exc()
            line = {"failed": f"{type(error).__name__}: {error}"[:300]}
        else:
            line = {"fault": str(fault)} if fault else {}
        print(json.dumps({"column": column, "feature": name, **line}), flush=True)

    return run


def absent(columns: str, why: str) -> None:
    """Say why the client has nothing for some columns (names with spaces between them)."""
    for column in columns.split():
        print(json.dumps({"column": column, "feature": "none", "absent": why}), flush=True)


def counted(name: str, label: str = "") -> float:
    """Return the sum of a metric of the server, over the lines that have a label."""
    with urllib.request.urlopen(f"{BASE_URL}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [
        float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{") and label in line
    ]
    assert counts, f"the server does not count {name}"
    return sum(counts)


def aborted() -> float:
    """Number of requests that the server has ended because their client hung up."""
    return counted("request_success_total", 'finished_reason="abort"')


async def at_work() -> None:
    """Wait until the server is at work on a request: one that is cancelled earlier never reaches it."""
    for _ in range(600):
        if await asyncio.to_thread(counted, "num_requests_running"):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the server had no request within 30 s")


@contextmanager
def hanging_up() -> Iterator[None]:
    """Check that the server ends the request which the block begins and leaves, within five seconds."""
    before = aborted()
    yield
    end = time.monotonic() + 5
    while aborted() == before:
        assert time.monotonic() < end, "the client hung up, and the server counted no aborted request"
        time.sleep(0.05)


def check_person(found: object) -> None:
    """Of the form PERSON asks for."""
    data = json.loads(found) if isinstance(found, str) else found
    assert isinstance(data, dict), data
    assert set(data) == {"name", "age", "mood"}, data
    assert 0 <= data["age"] <= 120, data
    assert data["mood"] in ("glad", "sad"), data
