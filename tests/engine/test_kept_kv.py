"""What is computed again after a loss: the table "What is kept" of `docs/faults.md`, counted in tokens."""

import functools
from collections import Counter
from typing import NamedTuple

import pytest

from tests.tools import one_die
from xdeepserve import SamplingParams
from xdeepserve.engine.dp.events import GroupId, KVKept, StepEnded
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest

PROMPTS = [[7 * i + j for j in range(8 + i)] for i in range(8)]
PARAMS = SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True)
SOON = ("health.suspect_s=0.01", "health.lost_s=0.05")
FAILOVER = ("recovery.failover=true", *SOON)
PAIR = ("prefill.dies=1", "prefill.tp=1", "decode.dies=2", "fabric=ub")


class Case(NamedTuple):
    """A die that is lost or glitches at some share of the quiet run's time.

    `again` has the TEs and DP groups whose sequences are computed again, from their tokens; those of other
    groups keep their KV.
    """

    deployment: str
    settings: tuple[str, ...]
    die: int
    again: frozenset[tuple[str, int]]
    kind: str = "lost"


def every(te: str, num_groups: int) -> frozenset[tuple[str, int]]:
    return frozenset((te, rank) for rank in range(num_groups))


CASES = (
    Case("colocated", ("dies=4",), 1, frozenset(), "glitch"),
    Case("colocated", ("dies=4", "experts.redundant_slots=4", *FAILOVER), 1, every("te", 4)),
    Case("pd", (*PAIR, "decode.redundant_slots=4", *FAILOVER), 2, every("decode 0", 2)),
    Case("pd", (*PAIR, "decode.count=2", *SOON), 2, every("decode 0", 2)),
    Case("eaas", ("experts.copies=1",), 5, frozenset()),
    Case("eaas", ("services.heartbeat_ms=0.2",), 1, frozenset({("te", 1)})),
)


def told(case: Case, *faults: Fault) -> Told:
    settings = ("max_model_len=64", "cache.prefix=false", *case.settings)
    return serve(History(case.deployment, settings, PROMPTS, PARAMS, faults=faults), hears=(StepEnded,))


def computed(run: Told) -> tuple[Counter[int], dict[int, list[GroupId]]]:
    """Count the tokens of each sequence that steps have computed; and list the groups where, in order."""
    num_tokens, places = Counter[int](), dict[int, list[GroupId]]()
    for step in run.of(StepEnded):
        for share in step.shares:
            num_tokens[share.seq_id] += share.num_tokens
            where = places.setdefault(share.seq_id, [])
            if not where or where[-1] != step.group:
                where.append(step.group)
    return num_tokens, places


@functools.cache
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS, "int8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.deployment}-{case.kind}-{case.die}")
def test_only_sequences_of_groups_that_are_gone_are_computed_again(case: Case) -> None:
    quiet = told(case)
    at_us = 0.6 * quiet.end_ns / 1000
    code = {"code": "mte-error"} if case.kind == "glitch" else {}
    run = told(case, Fault(at_us, case.die, case.kind, **code))
    assert run.digest == quiet.digest == expected()
    once, (num_tokens, places) = computed(quiet)[0], computed(run)
    kept = {seq_id for seq_id in once if num_tokens[seq_id] == once[seq_id]}
    assert all(len(places[seq_id]) <= 1 + (case.deployment == "pd") for seq_id in kept)
    hit = {seq_id for seq_id, where in places.items() if any((w.te, w.rank) in case.again for w in where)}
    assert hit == once.keys() - kept
    assert bool(hit) == bool(case.again)


BLOCK = 16  # tokens
LONG = [[7 * i + j for j in range(40 + 5 * i)] for i in range(8)]


class InPlace(NamedTuple):
    """A die that is lost, of the DP group `gone` of a TE; and `dies`, those of the TE in its place."""

    deployment: str
    settings: tuple[str, ...]
    die: int
    gone: tuple[str, int]
    dies: tuple[int, ...]


APART = ("attention.domains=1", "attention.dies=4", "experts.routed_dies=4", "experts.shared_dies=1")
PLACES = (
    InPlace("colocated", ("dies=4",), 1, ("te", 1), (0, 2, 3)),
    InPlace("colocated", ("dies=4", "lockstep=true", "mtp=1"), 1, ("te", 1), (0, 2, 3)),
    InPlace("colocated", ("dies=4", "mtp=2", "recovery.spare_dies=1"), 3, ("te", 3), (0, 1, 2, 4)),
    InPlace("colocated", ("dies=8", "tp=2", "mtp=1"), 2, ("te", 1), (0, 1, 4, 5, 6, 7)),
    InPlace("colocated", ("dies=3", "execution.overlap=true"), 0, ("te", 0), (1, 2)),
    InPlace("pd", (*PAIR[:2], "decode.dies=3", "fabric=ub"), 2, ("decode 0", 1), (1, 3)),
    InPlace("pd", (*PAIR[:2], "decode.dies=3", "transfer=layer"), 1, ("decode 0", 0), (2, 3)),
    InPlace("moe-attention", APART, 2, ("te", 2), (0, 1, 3, 4, 5, 6, 7, 8)),
)


@pytest.mark.thin(3)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.deployment}-{place.dies}")
def test_the_te_in_place_of_a_lost_one_goes_on_from_the_kv_of_well_dies(place: InPlace) -> None:
    """A sequence whose dies are well computes at most a block of tokens again, and those under way."""
    given = ("max_model_len=128", *FAILOVER, *place.settings)

    def served(*faults: Fault) -> Told:
        history = History(place.deployment, given, LONG, PARAMS, faults=faults)
        return serve(history, hears=(StepEnded, KVKept))

    quiet = served()
    run = served(Fault(0.6 * quiet.end_ns / 1000, place.die, "lost"))
    assert run.digest == quiet.digest == digest(one_die(LONG, PARAMS, "int8"))
    assert place.dies in [te.dies for te in run.tes]
    (kept,) = run.of(KVKept)
    once, (num_tokens, places) = computed(quiet)[0], computed(run)
    again = {seq_id: num_tokens[seq_id] - once[seq_id] for seq_id in once}
    at_well_dies = [seq_id for seq_id in once if place.gone not in [(w.te, w.rank) for w in places[seq_id]]]
    assert kept.num_blocks >= sum(len(LONG[seq_id]) // BLOCK for seq_id in at_well_dies) > 0
    assert all(0 <= again[seq_id] <= BLOCK + 3 for seq_id in at_well_dies)
    assert all(again[seq_id] > len(LONG[seq_id]) - BLOCK for seq_id in once.keys() - {*at_well_dies})
