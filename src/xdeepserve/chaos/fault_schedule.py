"""Fault schedules: pods with requests and faults, as data that can be stored and run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.history import TEChange
from xdeepserve.hw.faults import Fault
from xdeepserve.reading import read

PoolState: TypeAlias = Literal["none", "empty", "filled", "crowded"]
SHARED = 20  # tokens with which some prompts begin alike, so that they meet in the prefix cache
LONG = ([7] * 33, [7] * 16 + [*range(30)], [*range(34)])  # what they begin with, to meet in a memory pool


class FaultSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pod with a load and faults. `seed` is the requests' seed: fewer requests are the first of more.

    `pool` says whether the deployment has a memory pool, in a directory of its own, and what is in it. A
    filled pool has the values that the same requests have left before. A crowded pool has those of the first
    half of the requests, and is full of other values that have to be evicted.
    """

    deployment: str
    settings: tuple[str, ...] = ()
    seed: int = 0
    num_requests: int = 1
    clock_seed: int | None = None
    faults: tuple[Fault, ...] = ()
    pool: PoolState = "none"
    servers: tuple[TEChange, ...] = ()  # expert servers that come or leave, if that is possible then

    def __str__(self) -> str:
        parts = [self.deployment, *self.settings, f"{self.num_requests} requests of seed {self.seed}"]
        parts += [] if self.clock_seed is None else [f"clock seed {self.clock_seed}"]
        parts += [] if self.pool == "none" else [f"a pool that is {self.pool}"]
        return ", ".join([*parts, *map(str, self.servers), *map(str, self.faults)])


class Asked(NamedTuple):
    """A request of a client, with its arrival time."""

    prompt: list[int]
    params: SamplingParams
    at_ns: int


def asked(schedule: FaultSchedule) -> list[Asked]:
    """Make the clients' requests of a schedule."""
    found, is_shared = [], schedule.pool != "none" or "cache.peers=true" in schedule.settings
    for number in range(schedule.num_requests):
        rng = random.Random(f"{schedule.seed} {number}")
        found.append(_asked(rng, LONG if is_shared and rng.random() < 0.8 else ()))
    return found


def _asked(rng: random.Random, prefixes: Sequence[list[int]]) -> Asked:
    if prefixes:
        prompt = rng.choice(prefixes) + [rng.randrange(100) for _ in range(rng.randint(1, 8))]
    else:
        prompt = [7] * rng.choice((0, 16, SHARED)) + [rng.randrange(100) for _ in range(rng.randint(2, 14))]
    params = SamplingParams(
        max_tokens=rng.randint(2, 10),
        temperature=rng.choice((0.0, 1.0)),
        n=rng.choice((1, 1, 2)),
        seed=rng.randrange(1000),
        ignore_eos=True,
    )
    return Asked(prompt, params, rng.choice((0, round(10 ** rng.uniform(3, 7)))))


def write_schedule(schedule: FaultSchedule, path: Path) -> None:
    """Write a schedule to a file as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(schedule)) + b"\n")


def read_schedule(path: Path) -> FaultSchedule:
    """Read the schedule in a file. Raises InputError, with a one-line message, if there is none."""
    return read(path, "JSON", "schedule").to(FaultSchedule)
