"""Generated traffic: a seeded generator with adjustable arrivals, lengths and prefixes.

People talk in chats. A chat begins with a system prompt, popular ones more often, and each turn contains
everything said before. Defaults have the means commonly given for Mooncake's first trace (prompts of 7,590
tokens, answers of 182; the published conversation trace has 12,035 and 343). Nothing else is fitted to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from xdeepserve.errors import InputError, meant
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.reading import mistakes, toml_value

PREFIX = "made:"  # of what stands for a trace on the command line


class MadeTraffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The statistics of generated requests.

    requests, seconds  how many, and in which time their chats begin
    burst              coefficient of variation of the gaps between chats: 1 is Poisson, 0 a metronome
    swing              of the rate over the time, a sine: 0.5 is half as many more at its height
    prompt, output     mean tokens
    spread             of both: sigma of the logarithm
    turns              of a chat, on average
    pause              seconds between its turns, on average
    systems            different system prompts; 0: none
    system             tokens of one, on average
    habit              sigma of the logarithm of the mean answer to each system prompt; 0: all alike
    block              tokens of a block
    """

    requests: int = 1000
    seconds: float = 300.0
    burst: float = 1.0
    swing: float = 0.0
    prompt: int = 7590
    output: int = 182
    spread: float = 1.0
    turns: float = 3.0
    pause: float = 40.0
    systems: int = 20
    system: int = 1500
    habit: float = 0.0
    block: int = 512
    seed: int = 0

    def check(self) -> None:
        """Raise InputError with every setting out of range."""
        bounds = {
            "requests": (1, 10_000_000), "seconds": (1e-3, 1e7), "burst": (0, 20), "swing": (0, 1),
            "prompt": (1, 1_000_000), "output": (1, 1_000_000), "spread": (0, 3), "turns": (1, 1000),
            "pause": (0, 1e5), "systems": (0, 10_000), "system": (0, 1_000_000), "block": (1, 4096),
            "habit": (0, 3), "seed": (0, 2**63),
        }  # fmt: skip
        wrong = [
            f"{name} must lie in [{low:g}, {high:g}], found {getattr(self, name)}"
            for name, (low, high) in bounds.items()
            if not low <= getattr(self, name) <= high
        ]
        if self.habit and not self.systems:
            wrong.append(f"habit={self.habit:g} is one of system prompts, and systems=0")
        if wrong:
            raise InputError(f"{PREFIX} {'; '.join(wrong)}")


def parsed(text: str) -> MadeTraffic:
    """Read settings like 'made:requests=200,prompt=64'. Raises InputError for an unknown setting."""
    given: dict[str, Any] = {}
    for part in filter(None, text.removeprefix(PREFIX).split(",")):
        key, equals, value = part.partition("=")
        if key not in MadeTraffic.__struct_fields__ or not equals:
            names = ", ".join(MadeTraffic.__struct_fields__)
            hint = meant(key, MadeTraffic.__struct_fields__)
            raise InputError(f"{PREFIX} '{part}' is no setting{hint}: KEY=VALUE with KEY one of {names}")
        if key in given:
            raise InputError(f"{PREFIX} {key} is given twice")
        given[key] = toml_value(value)
    if wrong := [each.said("TOML") for each in mistakes(given, MadeTraffic, "TOML")]:
        raise InputError(f"{PREFIX} {'; '.join(wrong)}")
    traffic = msgspec.convert(given, MadeTraffic)
    traffic.check()
    return traffic


def made(traffic: MadeTraffic) -> list[TracedRequest]:
    """Generate the requests, in order of time: a function of the statistics and the seed."""
    rng = np.random.default_rng(traffic.seed)
    chats = _turns(rng, traffic)
    num = traffic.requests
    begins = _arrivals(rng, traffic, len(chats))
    pauses = rng.exponential(traffic.pause, num) if traffic.pause else np.zeros(num)
    fresh = _lengths(rng, traffic.prompt, traffic.spread, num)
    outputs = _lengths(rng, traffic.output, traffic.spread, num)
    which, system = _systems(rng, traffic, len(chats))
    if traffic.habit:
        outputs = np.maximum(1, outputs * _habits(traffic)[np.repeat(which, chats)]).astype(np.int64)
    said = _said(chats, [system[each] for each in which], fresh, outputs, traffic.prompt)
    found, block, turn = [], traffic.block, 0
    next_id = 1 + sum(-(-length // block) for length in system)
    first_id = np.cumsum([1, *(-(-length // block) for length in system)]).tolist()
    for begin, num_turns, number in zip(begins, chats, which, strict=True):
        shared = system[number] // block  # whole blocks of the system prompt
        ids = list(range(first_id[number], first_id[number] + shared))
        at = begin
        for _ in range(num_turns):
            length = said[turn]
            whole = length // block
            num_new = max(0, whole - len(ids))
            ids += range(next_id, next_id + num_new)
            next_id += num_new
            last = (next_id,) if length % block else ()  # a block that is not full is nobody else's
            next_id += 1
            found.append(TracedRequest(round(1e9 * at), length, int(outputs[turn]), (*ids[:whole], *last)))
            at += float(pauses[turn])
            turn += 1
    return sorted(found, key=lambda request: request.at_ns)


def _turns(rng: np.random.Generator, traffic: MadeTraffic) -> list[int]:
    """Draw the number of turns of each chat, for as many chats as needed."""
    chats, left = [], traffic.requests
    while left:
        chats.append(min(left, int(rng.geometric(1 / traffic.turns))))
        left -= chats[-1]
    return chats


def _arrivals(rng: np.random.Generator, traffic: MadeTraffic, count: int) -> list[float]:
    """Draw the starts of all chats, in seconds: gaps of a gamma distribution, on a time scale that runs as
    fast as the rate."""
    gaps = np.ones(count) if not traffic.burst else rng.gamma(traffic.burst**-2, size=count)
    share = np.cumsum(gaps) / gaps.sum()
    clock = np.linspace(0, 1, 4097)
    # The integral of 1 + swing sin(2 pi t - pi/2), from which a time is found for each share of the chats.
    passed = clock - traffic.swing * np.sin(2 * np.pi * clock) / (2 * np.pi)
    times: list[float] = (traffic.seconds * np.interp(share, passed, clock)).tolist()
    return times


def _lengths(rng: np.random.Generator, mean: float, spread: float, count: int) -> np.ndarray:
    """Draw lengths in tokens, log-normal, with about this mean; at least 1."""
    drawn = np.exp(rng.normal(-(spread**2) / 2, spread, count)) * mean
    return np.maximum(1, drawn.round()).astype(np.int64)


def _systems(rng: np.random.Generator, traffic: MadeTraffic, num_chats: int) -> tuple[list[int], list[int]]:
    """Draw each chat's system prompt, by Zipf's law, and the length of each system prompt."""
    if not traffic.systems:
        return [0] * num_chats, [0]
    popularity = 1 / np.arange(1, traffic.systems + 1)
    which = rng.choice(traffic.systems, num_chats, p=popularity / popularity.sum())
    lengths = rng.uniform(0.2, 1.8, traffic.systems) * traffic.system
    return which.tolist(), lengths.astype(int).tolist()


def _habits(traffic: MadeTraffic) -> np.ndarray:
    """Draw the factor of answers' lengths for each system prompt. A generator of its own leaves the rest of
    the trace unchanged."""
    rng = np.random.default_rng([traffic.seed, 1])
    return np.exp(rng.normal(-(traffic.habit**2) / 2, traffic.habit, traffic.systems))


def _said(
    chats: Sequence[int], system: Sequence[int], fresh: np.ndarray, outputs: np.ndarray, mean: int
) -> list[int]:
    """Compute the tokens of each turn's prompt: the system prompt, all questions so far, all answers before.

    Questions are scaled until prompts have their mean, or come as near to it as the other settings allow.
    """
    starts = np.cumsum([0, *chats[:-1]])
    turn_start = np.repeat(starts, chats)
    total, answered = np.cumsum(fresh), np.cumsum(outputs)
    asked = total - (total - fresh)[turn_start]
    fixed = np.repeat(np.asarray(system), chats) + (answered - outputs) - (answered - outputs)[turn_start]
    scale = max(0.0, (mean - fixed.mean()) / asked.mean())
    lengths: list[int] = np.maximum(1, fixed + (asked * scale).round()).astype(int).tolist()
    return lengths
