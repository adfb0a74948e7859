"""Requests by the blocks of their prompts: public traces, and a small generator of the same kind.

mooncake   Mooncake's traces: a JSON object a line with `timestamp` (ms), `input_length`, `output_length` and
           `hash_ids`, one for each 512 tokens of the prompt
bailian    Qwen-Bailian's anonymised usage traces: the same with `timestamp` in seconds, 16 tokens a block,
           and `chat_id`, `parent_chat_id`, `turn` and `type`, which are not needed here

Equal numbers are equal blocks after equal blocks, in either format.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from xdeepserve.errors import InputError

Format = Literal["mooncake", "bailian"]
BLOCK_TOKENS: dict[Format, int] = {"mooncake": 512, "bailian": 16}
NS: dict[Format, float] = {"mooncake": 1e6, "bailian": 1e9}  # of the unit of timestamps


class TracedRequest(NamedTuple):
    """A request of a trace."""

    at_ns: int
    input_length: int  # tokens, as is the next
    output_length: int
    blocks: tuple[int, ...]


def read_trace(path: Path, form: Format) -> list[TracedRequest]:
    """Every request of a file, in order of time. InputError, which names the line that is none."""
    requests = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    requests.append(_request(f"{path}, line {number}", line, form))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if not requests:
        raise InputError(f"{path}: no requests in it")
    if not any(request.blocks and request.input_length for request in requests):
        raise InputError(f"{path}: no request in it has tokens and hash_ids")
    return sorted(requests, key=lambda request: request.at_ns)


def _request(where: str, line: bytes, form: Format) -> TracedRequest:
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        at, blocks = fields["timestamp"], tuple(fields["hash_ids"])
        lengths = fields["input_length"], fields["output_length"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise InputError(f"{where}: not a request in the format {form}: {error}") from None
    numbers = (*lengths, *blocks)
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in numbers):
        raise InputError(f"{where}: lengths and hash_ids are whole numbers, 0 or more")
    if type(at) not in (int, float) or not 0 <= at < 1e12:
        raise InputError(f"{where}: timestamp is a number, 0 or more, found {at!r}")
    return TracedRequest(round(at * NS[form]), *lengths, blocks)


def generated(seed: int, num_chats: int = 400, block_tokens: int = 512) -> list[TracedRequest]:
    """Conversations: each begins with one of some system prompts, popular ones more often, and every turn has
    all that was said before it. Chats overlap in time."""
    rng = np.random.default_rng(seed)
    system = [tuple(range(1000 * n, 1000 * n + int(rng.integers(1, 12)))) for n in range(20)]
    found, fresh = [], 1_000_000
    for chat in range(num_chats):
        blocks = list(system[min(int(rng.zipf(1.5)) - 1, len(system) - 1)])
        at = int(rng.integers(0, 3_600)) * 10**9
        for _ in range(int(rng.geometric(0.35))):
            num_new = int(rng.integers(1, 8))
            blocks += range(fresh, fresh + num_new)
            fresh += num_new
            length = len(blocks) * block_tokens - int(rng.integers(0, block_tokens))
            found.append(TracedRequest(at + chat, length, int(rng.integers(20, 400)), tuple(blocks)))
            at += int(rng.exponential(60e9))
    return sorted(found, key=lambda request: request.at_ns)


def hits_of_lru(requests: list[TracedRequest], capacity: int) -> Iterator[int]:
    """Blocks of each request's prompt that a cache of `capacity` blocks has, from the first on without a gap,
    if what was not used for longest goes."""
    cache: dict[int, None] = {}
    for request in requests:
        yield _run(request.blocks, cache)
        # The deepest block is the first to go: without those before it, it is of no use.
        for block in reversed(request.blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            del cache[next(iter(cache))]


def hits_of_belady(requests: list[TracedRequest], capacity: int) -> Iterator[int]:
    """What a cache has whose owner knows the future: what is needed again last, or never, goes."""
    uses: dict[int, list[int]] = {}
    for at in range(len(requests) - 1, -1, -1):
        for block in requests[at].blocks:
            uses.setdefault(block, []).append(at)
    cache: dict[int, None] = {}
    never = len(requests)
    for at, request in enumerate(requests):
        yield _run(request.blocks, cache)
        for block in request.blocks:
            while uses[block] and uses[block][-1] <= at:
                uses[block].pop()
            cache[block] = None
        if len(cache) > capacity:
            depth = {block: number for number, block in enumerate(request.blocks)}
            order = sorted(
                cache,
                key=lambda block: (uses[block][-1] if uses[block] else never, depth.get(block, 0), block),
            )
            for block in order[capacity:]:
                del cache[block]


def _run(blocks: tuple[int, ...], cache: dict[int, None]) -> int:
    return next((number for number, block in enumerate(blocks) if block not in cache), len(blocks))
