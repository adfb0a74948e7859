"""Another TE in the place of one that was given up: the same bits, on fewer dies or on spare ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.scale_down import largest
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.model.presets import TinyCheckpoint, resolve_model

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=5)
PROMPTS = [[1, 2, 3, 4, 5], [7] * 20, [9, 8], [3]]
APART = ("attention.domains=2", "attention.dies=2", "experts.routed_dies=2", "experts.shared_dies=1")
FAILOVER = ("max_model_len=64", "recovery.failover=true")


def served(name: str, settings: Sequence[str], faults: Sequence[Fault] = ()) -> Told:
    return serve(History(name, (*FAILOVER, *settings), PROMPTS, PARAMS, faults=faults))


def lost(at_us: float, die: int) -> Fault:
    return Fault(at_us, die, "lost")


CASES: list[tuple[str, tuple[str, ...], int, int]] = [  # the die that is lost; how many dies there are then
    ("monolithic", ("recovery.spare_dies=1",), 0, 1),
    ("colocated", ("dies=3",), 1, 2),
    ("colocated", ("dies=3", "recovery.spare_dies=1"), 1, 3),
    ("colocated", ("dies=3", "lockstep=true", "mtp=1"), 2, 2),
    ("colocated", ("dies=4", "tp=2"), 0, 2),
    ("colocated", ("dies=3", "experts.redundant_slots=1"), 0, 2),
    ("pd", ("prefill.count=2", "prefill.dies=1", "prefill.tp=1", "decode.dies=1"), 2, 2),
    ("pd", ("prefill.dies=2", "prefill.tp=1", "decode.dies=2", "transfer=layer"), 3, 3),
    ("pd", ("prefill.dies=2", "prefill.tp=1", "decode.dies=1"), 2, 2),
    ("pd", ("prefill.dies=1", "prefill.tp=1", "decode.dies=2", "scheduler.admission=decode"), 1, 2),
    ("moe-attention", APART, 1, 6),
    ("moe-attention", (*APART, "dataflow=true"), 5, 6),
    ("moe-attention", (*APART, "lockstep=true"), 6, 6),
    ("transformerless", (*APART, "prefill.dies=1", "prefill.tp=1"), 4, 7),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("name", "settings", "die", "num_dies"), CASES)
def test_the_same_bits_from_those_that_are_left(
    name: str, settings: tuple[str, ...], die: int, num_dies: int
) -> None:
    quiet = served(name, settings)
    assert not quiet.lost
    again = served(name, settings, [lost(0.45 * quiet.end_ns / 1000, die)])
    assert again.digest == quiet.digest
    assert again.lost
    dies = [each for te in again.tes for each in te.dies]
    assert die not in dies
    assert len(dies) == len(set(dies)) == num_dies
    assert {te.role for te in again.tes} == {te.role for te in quiet.tes}


def test_a_te_whose_dies_have_no_spare_ones_comes_back_smaller_and_says_where() -> None:
    quiet = served("colocated", ["dies=4"])
    again = served("colocated", ["dies=4"], [lost(0.3 * quiet.end_ns / 1000, 2)])
    (te,) = again.tes
    assert (te.name, te.role, te.life, te.dies) == ("te 1", "both", "ready", (0, 1, 3))
    assert list(again.lost) == ["te"]
    assert (again.stats.num_recoveries["1"], again.stats.num_recoveries["2"]) == (0, 1)


def test_decode_takes_the_dies_of_a_prefill_te() -> None:
    """Of that with the least to do, if there is another one."""
    settings = ["prefill.count=2", "prefill.dies=2", "prefill.tp=2", "decode.dies=1"]
    quiet = served("pd", settings)
    again = served("pd", settings, [lost(0.6 * quiet.end_ns / 1000, 4)])
    assert again.digest == quiet.digest
    assert sorted((te.role, len(te.dies)) for te in again.tes) == [("decode", 1), ("prefill", 2)]
    assert again.stats.num_recoveries["1"] == 0


def test_where_no_te_can_be_replaced_alone_all_are_started_anew() -> None:
    """Decode first; each role gets as many dies as the others can spare."""
    settings = ["prefill.dies=4", "prefill.tp=1", "decode.dies=2"]
    quiet = served("pd", settings)
    both = [lost(0.6 * quiet.end_ns / 1000, die) for die in (4, 5)]
    again = served("pd", settings, both)
    assert again.digest == quiet.digest
    assert [(te.role, te.dies) for te in again.tes] == [("decode", (0, 1)), ("prefill", (2, 3))]
    assert again.stats.num_recoveries["1"] == 1


@pytest.mark.parametrize(
    ("settings", "dies", "why"),
    [
        (
            ["dies=1"],
            [0],
            r"0 dies that are well are not enough for a TE \(recovery.spare_dies=\d would do\): heartbeat: ",
        ),
        (
            ["dies=2"],
            [0, 1],
            r"0 dies that are well are not enough for a TE \(recovery.spare_dies=\d would do\): heartbeat: ",
        ),
        (["dies=1", "recovery.max_restarts=0"], [0], "all TEs have been started anew 0 times"),
    ],
)
def test_without_dies_every_request_ends_and_says_why(settings: list[str], dies: list[int], why: str) -> None:
    with pytest.raises(XDeepServeError, match=why):
        served("colocated", settings, [lost(100.0 + die, die) for die in dies])


@pytest.mark.thin(3)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 1.0, 1.5])
def test_a_die_is_lost_while_the_weights_come(share: float) -> None:
    settings = ["dies=4"]
    quiet = served("colocated", settings)
    at_us = 0.4 * quiet.end_ns / 1000
    once = served("colocated", settings, [lost(at_us, 1)])
    took_us = (once.end_ns - quiet.end_ns) / 1000
    again = served("colocated", settings, [lost(at_us, 1), lost(at_us + share * took_us, 2)])
    assert again.digest == quiet.digest
    assert 1 not in again.tes[0].dies


def test_who_cannot_end_a_test_in_time_is_left_out() -> None:
    """A die that hangs answers nobody, but keeps its memory: it is not well."""
    settings = ["dies=3", "health.lost_s=0.01", "health.suspect_s=0.001", "health.probe_s=0.001"]
    stalled = Fault(300.0, 2, "stalled", for_us=1e9)
    again = served("colocated", settings, [stalled])
    assert again.digest == served("colocated", ["dies=3"]).digest
    assert [te.dies for te in again.tes] == [(0, 1)]


def test_of_two_dies_that_cannot_reach_each_other_one_is_left_out() -> None:
    down = Fault(300.0, None, "down", link=(0, 2), plane="ub")
    again = served("colocated", ["dies=3"], [down])
    assert again.digest == served("colocated", ["dies=3"]).digest
    assert [te.dies for te in again.tes] == [(0, 1)]


def test_what_is_over_by_the_second_time_is_no_reason_to_leave_a_die_out() -> None:
    """A bit that is flipped in what a die reads of another, just then."""
    settings = ["dies=3", "checksums=true"]
    flipped = Fault(400.0, link=(0, 1), plane="ub", kind="flipped")
    again = served("colocated", settings, [lost(300.0, 2), flipped])
    assert again.digest == served("colocated", settings).digest
    assert [te.dies for te in again.tes] == [(0, 1)]


async def look_in(engine: Engine, seen: list[tuple[bool, str | None, int]]) -> None:
    """What an endpoint would say, until the engine is well again."""
    while not engine.lost:
        await engine.plan.pod.clock.sleep(100_000)
    while engine.is_healthy() and not engine.tes():
        stats = engine.stats()
        seen.append((engine.is_healthy(), stats.health[-1].recovering, stats.num_waiting))
        await engine.plan.pod.clock.sleep(100_000)


def test_while_no_te_is_there_requests_wait_and_the_engine_says_why(tiny: TinyCheckpoint) -> None:
    seen: list[tuple[bool, str | None, int]] = []
    settings = [*FAILOVER, "dies=2"]
    with LLM(tiny, "colocated", overrides=settings, faults=[lost(300.0, 0)]) as llm:
        llm.generate(PROMPTS, PARAMS, meanwhile=lambda engine: look_in(engine, seen))
    assert seen
    assert {healthy for healthy, _, _ in seen} == {True}
    assert all(recovering is not None and recovering.startswith("stage 2, ") for _, recovering, _ in seen)
    assert {waiting for _, _, waiting in seen} == {len(PROMPTS)}


@given(st.data())
def test_smaller_tes_hold_every_expert(data: st.DataObject) -> None:
    """Each routed expert has a die; DP groups are whole; as many dies are used as go."""
    config = resolve_model("tiny").config
    name, settings = data.draw(
        st.sampled_from(
            [
                ("colocated", ("dies=7",)),
                ("colocated", ("dies=8", "tp=2")),
                ("colocated", ("dies=4", "o_proj_tp=2")),
                ("moe-attention", ("attention.domains=3", "attention.dies=2", "experts.routed_dies=4")),
            ]
        )
    )
    deployment = resolve(name, settings)
    most = data.draw(st.integers(0, 12))
    sizes = largest(deployment, config, "both", most)
    if sizes is None:
        assert most < max(2 * (name == "moe-attention") + 1, 2 * ("tp=2" in str(settings)))
        return
    assert len(sizes.place.every_die) <= most
    assert (
        sizes.place.num_dies % sizes.groups.tp
        == sizes.place.num_dies % sizes.place.num_domains
        == sizes.place.num_dies % sizes.groups.o_proj_tp
        == 0
    )
    assert [expert for held in sizes.experts.experts_of for expert in held] == list(
        range(config.n_routed_experts)
    )
    smaller = largest(deployment, config, "both", most - 1)
    assert smaller is None or len(smaller.place.every_die) <= len(sizes.place.every_die)
