"""TEs that come and go as load does, from none, too: the same bits, whatever is lost meanwhile."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.engine.remains import check_nothing_is_left, settled
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.dp.events import Booked, Observed, Prefilled, TEChanged, TEsWanted
from xdeepserve.engine.serving import elastic
from xdeepserve.engine.serving.elastic import StartCosts
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.spec import Param
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

PARAMS = SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True)
PROMPTS = [[7 * i + j for j in range(20 + i)] for i in range(20)]
QUICK = ("scale.every_s=2e-4", "scale.up_s=2e-4", "scale.calm_s=5e-4", "scale.down_s=0.05")
FROM_NONE = (
    *("scale.least=0", "scale.most=4", "scale.warm=1", *QUICK),
    *("scheduler.max_num_seqs=4", "max_model_len=64"),
)
BURST_S = [0.0, *(2 + 1e-4 * i for i in range(18)), 9.0]  # after silence, and a last one after silence
FAST = StartCosts(
    pod=Param(4e-3, "s", "a test"), warm_pod=Param(1e-4, "s", "a test"),
    start=Param(4e-3, "s", "a test"), warm_te=Param(1e-4, "s", "a test"),
    tensors=Param(0.0, "s", "a test"), link=Param(0.0, "s", "a test"), push=Param(0.0, "s", "a test"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def fast_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods and processes start in milliseconds: a tiny model has answered a burst before others are there."""
    monkeypatch.setattr(elastic, "COSTS", FAST)


def in_service(changes: list[TEChanged]) -> list[int]:
    """How many TEs take requests, from the first on, after each change."""
    counts = [1]
    for change in changes:
        counts.append(counts[-1] + (change.life == "ready") - (change.life in ("draining", "lost")))
    return counts


@pytest.mark.parametrize("deployment", ["monolithic", "colocated", "moe-attention"])
def test_a_burst_after_silence_brings_tes_from_none_and_they_go_again(deployment: str) -> None:
    arrivals = tuple(round(1e9 * s) for s in BURST_S)
    sized = {"monolithic": (), "colocated": ("dies=2",), "moe-attention": ("attention.dies=1",)}[deployment]
    history = History(deployment, (*FROM_NONE, *sized), PROMPTS, PARAMS, arrivals_ns=arrivals)
    run = serve(history, hears=(TEChanged, TEsWanted))
    assert run.digest == digest(one_die(PROMPTS, PARAMS, "int8"))
    counts = in_service(run.of(TEChanged))
    assert counts[0] == 1
    assert counts.count(0) >= 2  # before the burst, and after it
    assert max(counts) >= 2
    wanted = [each.num_tes for each in run.of(TEsWanted)]
    assert min(wanted) == 0
    assert all(a != b for a, b in pairwise(wanted))
    metrics = [output.metrics for output in run.outputs]
    first, last = (metrics[number].ttft_ns / 1e9 for number in (1, -1))
    assert FAST.warm_s < first < FAST.warm_s + 0.01  # it was pre-warmed, and so is the one after it
    assert FAST.warm_s < last < FAST.warm_s + 0.01


def served_with_losses(tiny: TinyCheckpoint, deployment: str, settings: Sequence[str], seed: int) -> str:
    """Serve bursts while four dies are lost, check that nothing is left, and return the digest."""
    drawn = random.Random(seed)
    arrivals = sorted(round(1e9 * drawn.choice([0.0, 0.01, 0.5, 0.503, 2.0]) + 1e5 * i) for i in range(20))
    settings = [*settings, "health.suspect_s=0.01", "health.lost_s=0.05", f"scale.warm={seed % 3}"]
    settings += ["recovery.failover=true"] * drawn.randrange(2)
    with LLM(tiny, deployment, overrides=settings) as llm:
        pod = llm.engine.plan.pod

        async def lose() -> None:
            held = sorted(set(pod.holders) - pod.lost)
            if held:
                pod.break_die(drawn.choice(held))

        for _ in range(4):
            pod.clock.at(round(1e9 * drawn.choice([0.0, 0.01, 0.5, 2.0]) + drawn.uniform(0, 1e7)), lose)
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True, arrivals_ns=arrivals)
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)
    return digest(outputs)


@pytest.mark.thin(4)
@pytest.mark.parametrize("seed", range(12))
def test_dies_lost_while_tes_come_and_go_cost_no_bit(tiny: TinyCheckpoint, seed: int) -> None:
    found = served_with_losses(tiny, "monolithic", FROM_NONE, seed)
    assert found == digest(one_die(PROMPTS, PARAMS, "int8"))


LONG = SamplingParams(max_tokens=90, temperature=0.7, seed=3, ignore_eos=True)
# A burst brings "te 1"; at 8 ms it gets a long request, which it still serves when it drains at 18.2 ms and
# when the next burst comes at 30 ms.
TWO_BURSTS = [LONG] + [PARAMS] * 9 + [LONG] + [PARAMS] * 9
TWO_BURSTS_MS = [0.0] * 10 + [8.0] + [30.0] * 9
ONE_OR_TWO = (
    *("scale.most=2", *QUICK[:3], "scale.down_s=0.002", "scheduler.route=sequences"),
    *("scheduler.max_num_seqs=8", "max_model_len=128", "health.suspect_s=0.001", "health.lost_s=0.004"),
)


def two_bursts(tiny: TinyCheckpoint, lost: str | None, lost_ms: float) -> list[Observed]:
    """Serve two bursts with the long requests between them, check every token, and return what happened.

    The die of the TE that is named `lost` is lost at its time.
    """
    events: list[Observed] = []
    with LLM(tiny, "monolithic", overrides=ONE_OR_TWO) as llm:
        pod = llm.engine.plan.pod

        async def lose() -> None:
            (te,) = (te for te in llm.engine.tes() if te.name == lost)
            pod.break_die(te.dies[0])

        if lost is not None:
            pod.clock.at(pod.clock.now + round(1e6 * lost_ms), lose)
        llm.engine.observe(events.append)
        arrivals = [round(1e6 * ms) for ms in TWO_BURSTS_MS]
        outputs = llm.generate(PROMPTS, TWO_BURSTS, keep_logits=True, arrivals_ns=arrivals)
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)
    assert digest(outputs) == digest(one_die(PROMPTS, TWO_BURSTS, "int8"))
    return events


def lives(events: list[Observed], te: str) -> list[str]:
    return [event.life for event in events if isinstance(event, TEChanged) and event.te == te]


def resumed(events: list[Observed]) -> list[tuple[str, ...]]:
    return [event.resumed for event in events if isinstance(event, TEsWanted) and event.resumed]


def test_a_te_that_drains_is_taken_back_when_more_are_wanted(tiny: TinyCheckpoint) -> None:
    events = two_bursts(tiny, None, 0.0)
    assert resumed(events) == [("te 1",)]
    assert lives(events, "te 1")[:4] == ["loading", "ready", "draining", "ready"]
    assert {event.te for event in events if isinstance(event, TEChanged)} == {"te", "te 1"}  # no other came
    (wanted,) = (event for event in events if isinstance(event, TEsWanted) and event.resumed)
    assert wanted.said == "2 TEs are wanted: load of a TE 1.25, above 0.8; te 1 stays"


@pytest.mark.parametrize(
    ("lost", "lost_ms", "stays", "ends"),
    [
        ("te 1", 22.0, [], ["draining", "lost"]),  # while it drains: another one comes
        ("te 1", 30.5, [("te 1",)], ["draining", "ready", "lost"]),  # taken back before the loss is found
        ("te", 25.0, [("te 1",)], ["draining", "ready"]),  # the only one that serves: at once
    ],
)
def test_a_die_lost_before_a_te_is_taken_back_costs_no_bit(
    tiny: TinyCheckpoint, lost: str, lost_ms: float, stays: list[tuple[str, ...]], ends: list[str]
) -> None:
    events = two_bursts(tiny, lost, lost_ms)
    assert resumed(events) == stays
    assert lives(events, "te 1")[2:5][: len(ends)] == ends
    assert lives(events, lost)[-1] == "lost"


# Prompts come faster than one TE computes them, 32 tokens a step: the last request's first token takes 7.8 ms
# where that of the first takes 0.5. Without a bound of TTFT load stays below `high`.
LATE = (
    *("scale.most=2", *QUICK[:3], "scale.down_s=1", "scheduler.route=sequences"),
    *("scheduler.max_num_seqs=32", "scheduler.max_num_batched_tokens=32", "max_model_len=64"),
)


def wanted_by_level(bounds: tuple[str, ...]) -> list[TEsWanted]:
    """Serve prompts that queue, with bounds on the times of requests, and return the AutoScaler's changes."""
    arrivals = tuple(300_000 * number for number in range(len(PROMPTS)))
    history = History("monolithic", (*LATE, *bounds), PROMPTS, PARAMS, arrivals_ns=arrivals)
    run = serve(history, hears=(TEsWanted,))
    assert run.digest == digest(one_die(PROMPTS, PARAMS, "int8"))
    return run.of(TEsWanted)


def test_a_te_comes_for_late_requests_though_load_is_not_high() -> None:
    (wanted,) = wanted_by_level(("scale.tpot_s=0.0004",))
    assert wanted.num_tes == 2
    assert wanted.reason.startswith("requests are late")


def test_a_te_comes_for_prompts_that_would_wait_too_long() -> None:
    (wanted,) = wanted_by_level(("scale.ttft_s=0.002",))
    assert wanted.num_tes == 2
    assert wanted.reason.startswith("load of a TE")


@pytest.mark.parametrize(
    "bounds",
    [
        (),
        ("scale.ttft_s=1", "scale.tpot_s=1"),  # all are in time
        ("scale.ttft_s=0.00001",),  # an idle TE would be as late
        ("scale.ttft_s=0.002", "scale.within=0.0"),  # late requests are permitted
    ],
)
def test_no_te_comes_for_requests_that_it_would_not_help(bounds: tuple[str, ...]) -> None:
    assert not wanted_by_level(bounds)


def test_a_request_that_waited_for_the_first_te_brings_no_second_one(tiny: TinyCheckpoint) -> None:
    """Its first token is late because there was no TE, not because there were too few."""
    wanted: list[int] = []
    settings = [*FROM_NONE[:2], "scale.warm=0", "scale.down_s=0.002", *QUICK[:3], "scale.ttft_s=0.002"]
    with LLM(tiny, "monolithic", overrides=settings) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
        llm.engine.observe(
            lambda event: wanted.append(event.num_tes) if isinstance(event, TEsWanted) else None
        )
        later = 10**8
        for output in llm.generate(PROMPTS[1:3], PARAMS, arrivals_ns=[later, later + 5 * 10**7]):
            assert output.metrics.ttft_ns > 2_000_000
    assert wanted
    assert max(wanted) == 1


# TEs of each role have one die; prompts come every 0.2 ms, and a last one after silence.
APART = (*QUICK[:3], "prefill.dies=1", "decode.dies=1", "scale.down_s=0.01", "max_model_len=128")
APART_NS = (*(200_000 * number for number in range(len(PROMPTS) - 1)), 300_000_000)


def wanted_apart(max_tokens: int, *settings: str) -> dict[str, list[int]]:
    """Serve prompts by TEs of two roles, check every token, and return how many TEs of each were wanted."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=3, ignore_eos=True)
    history = History("pd", (*APART, *settings), PROMPTS, params, arrivals_ns=APART_NS)
    run = serve(history, hears=(TEsWanted,))
    assert run.digest == digest(one_die(PROMPTS, params, "int8"))
    found: dict[str, list[int]] = {"prefill": [], "decode": []}
    for wanted in run.of(TEsWanted):
        found[wanted.role].append(wanted.num_tes)
    return found


def test_prefill_and_decode_follow_their_own_load() -> None:
    few_places = "prefill.max_num_seqs=6", "decode.max_num_seqs=32"
    by_prompts = wanted_apart(2, "scale.most=3", *few_places)
    assert max(by_prompts["prefill"]) == 3
    assert by_prompts["prefill"][-1] == 1
    assert not by_prompts["decode"]
    by_answers = wanted_apart(30, "scale.most=3", "prefill.max_num_seqs=64", "decode.max_num_seqs=6")
    assert max(by_answers["decode"]) == 3
    assert by_answers["decode"][-1] == 1
    assert not by_answers["prefill"]


def test_each_role_has_bounds_of_its_own() -> None:
    few_places = "prefill.max_num_seqs=6", "decode.max_num_seqs=6"
    settings = "scale.most=3", "scale.prefill.most=2", "scale.decode.least=2", "scale.decode.warm=1"
    found = wanted_apart(30, *settings, *few_places)
    assert max(found["prefill"]) == 2
    assert max(found["decode"]) == 3
    assert min(found["decode"]) == 2


@pytest.mark.parametrize(
    ("bound", "role"), [("scale.ttft_s=0.006", "prefill"), ("scale.tpot_s=0.0004", "decode")]
)
def test_the_first_token_is_a_matter_of_prefill_and_others_of_decode(bound: str, role: str) -> None:
    many_places = "prefill.max_num_seqs=64", "decode.max_num_seqs=64", "prefill.max_num_batched_tokens=64"
    assert not any(wanted_apart(8, "scale.most=2", *many_places).values())
    found = wanted_apart(8, "scale.most=2", *many_places, bound)
    assert [each for each in found if found[each]] == [role]


@pytest.mark.thin(4)
@pytest.mark.parametrize("seed", range(12))
def test_dies_lost_while_tes_of_two_roles_come_and_go_cost_no_bit(tiny: TinyCheckpoint, seed: int) -> None:
    drawn = random.Random(f"ways {seed}")
    settings = [*APART, "scale.most=3", "scheduler.max_num_seqs=4"]
    settings += ["transfer=layer"] * drawn.randrange(2) + ["scheduler.admission=decode"] * drawn.randrange(2)
    found = served_with_losses(tiny, "pd", settings, seed)
    assert found == digest(one_die(PROMPTS, PARAMS, "int8"))


# TEs of both kinds from none; without a pre-warmed one of its own decode comes later than prefill.
APART_FROM_NONE = (*FROM_NONE, "prefill.dies=1", "decode.dies=1")
LATE_DECODE = ("scale.decode.warm=0",)


def check_comes_and_goes(run: Told) -> None:
    """TEs of each role: none before the burst, some in it, and none after it."""
    for role in ("prefill", "decode"):
        counts = in_service([change for change in run.of(TEChanged) if change.te.startswith(role)])
        assert counts.count(0) >= 2
        assert max(counts) >= 2
        wanted = [each.num_tes for each in run.of(TEsWanted) if each.role == role]
        assert min(wanted) == 0
        assert all(a != b for a, b in pairwise(wanted))


@pytest.mark.parametrize("late", [(), LATE_DECODE, ("scale.prefill.warm=0",)])
@pytest.mark.parametrize("ways", [(), ("transfer=layer", "scheduler.admission=decode")])
def test_a_burst_after_silence_brings_prefill_and_decode_tes_from_none(
    late: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    arrivals = tuple(round(1e9 * s) for s in BURST_S)
    history = History("pd", (*APART_FROM_NONE, *late, *ways), PROMPTS, PARAMS, arrivals_ns=arrivals)
    run = serve(history, hears=(TEChanged, TEsWanted))
    assert run.digest == digest(one_die(PROMPTS, PARAMS, "int8"))
    check_comes_and_goes(run)
    first_s = FAST.cold_s if late else FAST.warm_s
    for number in (1, -1):
        assert first_s < run.outputs[number].metrics.ttft_ns / 1e9 < first_s + 0.01


def test_prefill_and_decode_tes_come_from_none_where_runs_only_take_time() -> None:
    arrivals = tuple(round(1e9 * s) for s in BURST_S)
    history = History("pd", APART_FROM_NONE, PROMPTS, PARAMS, arrivals_ns=arrivals, is_timing_only=True)
    run = serve(history, hears=(TEChanged, TEsWanted))
    assert [len(output.outputs[0].token_ids) for output in run.outputs] == [PARAMS.max_tokens] * len(PROMPTS)
    check_comes_and_goes(run)


# Decode has nothing to do while a prompt is computed token by token, nor has prefill while decode comes.
@pytest.mark.parametrize(
    "settings", [("prefill.max_num_batched_tokens=1", "prefill.max_num_seqs=1"), LATE_DECODE]
)
def test_a_te_stays_while_a_request_is_on_its_way_to_it(settings: tuple[str, ...]) -> None:
    quick = "scale.most=1", "scale.down_s=0.0005", "scale.every_s=1e-4"
    arrivals, prompts = (0, 10**9), PROMPTS[:2]
    history = History("pd", (*APART_FROM_NONE, *quick, *settings), prompts, PARAMS, arrivals_ns=arrivals)
    run = serve(history, hears=(TEChanged, Prefilled))
    assert run.digest == digest(one_die(prompts, PARAMS, "int8"))
    assert len(run.of(Prefilled)) == len(prompts)
    began = [change for at_ns, change in run.events if at_ns >= 10**9 and isinstance(change, TEChanged)]
    assert sum(change.life == "ready" for change in began) == 2  # one of each kind, once


def test_requests_that_wait_for_the_first_tes_are_admitted_by_decode() -> None:
    arrivals = (0, *(10**9 + 100_000 * number for number in range(len(PROMPTS) - 1)))
    for late in (LATE_DECODE, ("scale.prefill.warm=0",)):
        settings = *APART_FROM_NONE, "scheduler.admission=decode", "scale.most=1", *late
        run = serve(History("pd", settings, PROMPTS, PARAMS, arrivals_ns=arrivals), hears=(Booked,))
        assert run.digest == digest(one_die(PROMPTS, PARAMS, "int8"))
        assert {booked.seq_id for booked in run.of(Booked)} == {*range(len(PROMPTS))}


def test_a_request_that_waited_for_decode_brings_no_second_prefill_te() -> None:
    """Its first token is late because there was no decode TE. An idle prefill TE takes 4 ms for a prompt."""
    settings = *APART, "scale.most=2", "scale.decode.least=0", "scale.ttft_s=0.006"
    arrivals = 0, 10**9, 10**9 + 10**8
    run = serve(History("pd", settings, PROMPTS[:3], PARAMS, arrivals_ns=arrivals), hears=(TEsWanted,))
    assert run.outputs[1].metrics.ttft_ns > 6_000_000
    assert {wanted.role for wanted in run.of(TEsWanted)} == {"decode"}


@pytest.mark.thin(4)
@pytest.mark.parametrize("seed", range(12))
def test_dies_lost_while_tes_of_two_roles_come_from_none_cost_no_bit(tiny: TinyCheckpoint, seed: int) -> None:
    drawn = random.Random(f"from none {seed}")
    settings = [*APART_FROM_NONE, f"scale.down_s={drawn.choice((0.002, 0.05))}"]
    settings += ["transfer=layer"] * drawn.randrange(2) + ["scheduler.admission=decode"] * drawn.randrange(2)
    settings += [LATE_DECODE[0]] * drawn.randrange(2)
    found = served_with_losses(tiny, "pd", settings, seed)
    assert found == digest(one_die(PROMPTS, PARAMS, "int8"))


def test_without_room_for_a_te_requests_that_wait_end_with_the_reason(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny, "monolithic", overrides=[*FROM_NONE, "scale.warm=0"]) as llm:
        first = llm.generate(PROMPTS[:1], PARAMS, keep_logits=True)

        def full(*_: Any) -> None:
            raise DeploymentError("the pod has no 1 free dies side by side")

        monkeypatch.setattr(PodPlan, "add", full)
        later = llm.virtual_ns + 10**11
        with pytest.raises(
            XDeepServeError, match=r"no TE could be brought up for this request.*no 1 free dies"
        ):
            llm.generate(PROMPTS[1:3], PARAMS, arrivals_ns=[later, later])
        monkeypatch.undo()
        again = llm.generate(PROMPTS[:1], PARAMS, keep_logits=True)
        assert digest(again) == digest(first)
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)


def test_an_engine_that_ends_while_tes_are_on_their_way_gives_their_dies_back(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "monolithic", overrides=[*FROM_NONE, "scale.warm=2"]) as llm:
        llm.generate(PROMPTS, PARAMS)
        pod = llm.engine.plan.pod
        warm = {te.name for te in llm.engine.tes() if te.life == "planned"}
        assert warm
        assert warm <= {holder.split(" of ")[0] for holder in pod.holders.values()}
    assert warm.isdisjoint(holder.split(" of ")[0] for holder in pod.holders.values())


@pytest.mark.parametrize(
    ("deployment", "settings", "words"),
    [
        ("transformerless", ["scale.least=1"], "scale is for pd, and for TEs of one kind that do both"),
        ("pd", ["scale.least=1", "prefill.hardware=910b"], "no prefill TE can come on 910b dies"),
        ("pd", ["scale.prefill.least=3", "scale.most=2"], "0 <= least <= most <= 4096, found 3 and 2"),
        (
            "monolithic",
            ["scale.prefill.most=3"],
            "scale.prefill is for pods whose prefill has TEs of its own",
        ),
        ("monolithic", ["scale.least=3", "scale.most=2"], "scale: 0 <= least <= most <= 4096, found 3 and 2"),
        ("monolithic", ["scale.least=0", "scale.most=0"], "scale: most must be at least 1, found 0"),
        ("monolithic", ["scale.warm=-1"], "scale.warm must be 0 or more, found -1"),
        ("monolithic", ["scale.ttft_s=0"], "scale.ttft_s must be more than 0, found 0"),
    ],
)
def test_what_cannot_be_is_refused(deployment: str, settings: list[str], words: str) -> None:
    with pytest.raises(DeploymentError, match=words):
        LLM("tiny-random", deployment, overrides=settings)
