"""Frames of a page with 768 dies that are all at work, made up: whoever ran, they cost as much to draw."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from xdeepserve.page.parts import (
    DieRow,
    GroupsPart,
    HeatPart,
    LoadPart,
    NowPart,
    PageHello,
    Part,
    PodPart,
    SpanRow,
    StepPart,
    TERow,
    TrafficPart,
)

NUM_ATTENTION, NUM_EXPERTS, NUM_LAYERS = 480, 288, 61
DIES = range(NUM_ATTENTION + NUM_EXPERTS)


def superpod_record(num_frames: int) -> str:
    """A record whose every frame has a step of its own."""
    rng = random.Random(26)
    lines = [msgspec.json.encode(PageHello("test"))]
    for number in range(1, num_frames + 1):
        parts = {"pod": _pod()} if number == 1 else {}
        lines.append(msgspec.json.encode({"frame": number, "parts": parts | dict(_parts(number, rng))}))
    return b"\n".join(lines).decode() + "\n"


def _pod() -> PodPart:
    te = TERow("decode 0", "decode", NUM_ATTENTION, 3, 2, 32, 16, 96)
    attention = [DieRow(die, 0, "attention", die // 160, die, -1, -1) for die in DIES[:NUM_ATTENTION]]
    experts = [DieRow(NUM_ATTENTION + i, 0, "experts", -1, -1, i, i) for i in range(NUM_EXPERTS)]
    return PodPart(
        *("deepseek-r1", "superpod", "int8", NUM_LAYERS, 256, 8, 48, 48, 8, 2, "tasks", True),
        tes=[te],
        dies=attention + experts,
        no_kill=None,
        breaks=[],
    )


def _parts(number: int, rng: random.Random) -> Iterator[tuple[str, Part]]:
    yield "now", NowPart(number * 50_000_000, NUM_ATTENTION, 3, number, ["ready"], [], [])
    yield "groups", GroupsPart(*([rng.randrange(16) for _ in DIES[:NUM_ATTENTION]] for _ in range(6)))
    yield "load", LoadPart(*([rng.randrange(1000) for _ in DIES] for _ in range(2)))
    heat = [[rng.randrange(400) for _ in range(NUM_EXPERTS)] for _ in range(3, NUM_LAYERS)]
    yield "heat", HeatPart("us", [*range(3, NUM_LAYERS)], [*DIES[NUM_ATTENTION:]], heat)
    pairs = [(rng.choice(DIES), rng.choice(DIES), 10**6 - i, "UB") for i in range(400)]
    yield "traffic", TrafficPart(pairs, 400, sum(pair[2] for pair in pairs))
    spans = [
        SpanRow(die, lane, 0, start * 20_000, 9_000, 3, start % 2, die // 160, lane % 2, -1)
        for die in (*DIES[:NUM_ATTENTION:40], *DIES[NUM_ATTENTION::24])
        for lane in range(2)
        for start in range(30)
    ]
    yield (
        "step",
        StepPart(
            *("decode 0", 0, number, 0, 600_000, 96, 24, len(DIES), 3, 6, ["AIC", "XCCL"], ["MLA"]), spans
        ),
    )
