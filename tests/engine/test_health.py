"""Heartbeats in virtual time: who does not answer gets no new work, and who never does is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.pods import overrides
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.deploy.deployment import HealthConfig
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.reports import TEHealth
from xdeepserve.errors import DeadlineError, DeploymentError, HardwareError
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint

SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SECOND = 1_000_000_000
FLOW = overrides((1, 4, 2, 1, 1), "dataflow=true", "scheduler.max_num_seqs=8")  # four DP groups, no barriers


class Pulses:
    """Heartbeats of two groups, and a clock to be set."""

    def __init__(self) -> None:
        self.now = 0
        self.beats = Heartbeats("te", [lambda: 1] * 2, HealthConfig(), lambda: self.now, lambda group: False)

    def states(self) -> list[str]:
        return [self.beats.state(rank) for rank in (0, 1)]


def test_states_follow_from_silence() -> None:
    it = Pulses()
    it.now = 100 * SECOND
    assert it.states() == ["healthy", "healthy"], "nobody has asked"
    it.beats.ask(1, num_answers=2, delay_ns=SECOND)
    for later, state in ((5, "healthy"), (6, "suspect"), (60, "suspect"), (61, "lost")):
        it.now = (100 + later) * SECOND
        assert it.states() == ["healthy", state]
    assert it.beats.deadline_ns == 161 * SECOND
    it.beats.hear(1)
    assert it.states() == ["healthy", "suspect"], "it is there, but its answer took long"
    assert it.beats.is_due(1), "another die owes one"
    it.now += SECOND
    it.beats.hear(1)
    assert it.states() == ["healthy", "healthy"]
    assert it.beats.deadline_ns is None


def test_an_answer_that_comes_after_all_is_forgiven_is_owed_by_nobody() -> None:
    it = Pulses()
    it.beats.ask(0, 1)
    it.beats.forgive()
    it.beats.hear(0)
    it.now = 1000 * SECOND
    assert it.beats.deadline_ns is None
    assert it.states() == ["healthy", "healthy"]


def test_with_nobody_healthy_suspects_get_work_and_the_lost_never() -> None:
    it = Pulses()
    it.beats.ask(0, 1)
    it.now = 10 * SECOND
    it.beats.ask(1, 1)
    assert it.beats.open_ranks == (1,)
    it.now = 20 * SECOND
    assert it.beats.open_ranks == (0, 1)
    it.now = 65 * SECOND
    assert it.beats.open_ranks == (1,)
    assert it.beats.report() == TEHealth(name="te", num_groups=2, suspect_groups=(1,), lost_groups=(0,))


@given(st.lists(st.tuples(st.sampled_from("ahnw"), st.integers(0, 1), st.integers(0, 70)), max_size=40))
def test_who_answers_in_good_time_is_healthy(events: list[tuple[str, int, int]]) -> None:
    it, due, asked = Pulses(), [0, 0], [0, 0]
    for what, rank, seconds in events:
        if what == "w":
            it.now += seconds * SECOND
        elif what == "a":
            asked[rank] = asked[rank] if due[rank] else it.now
            due[rank] += 1
            it.beats.ask(rank, 1)
        elif due[rank] and what == "h":
            is_soon = it.now - asked[rank] < 5 * SECOND
            due[rank], asked[rank] = due[rank] - 1, it.now
            it.beats.hear(rank)
            assert (it.beats.state(rank) == "healthy") == is_soon
        elif what == "n":
            asked[rank] = it.now
            it.beats.notice(rank)
            assert it.beats.state(rank) != "lost"
        for each in (0, 1):
            assert it.beats.silent_ns(each) == (it.now - asked[each] if due[each] else 0)
            assert (it.beats.state(each) == "lost") == (due[each] > 0 and it.now - asked[each] >= 60 * SECOND)


def disturb(engine: Engine, rank: int, delay_ns: Callable[[], int], te: int = 0) -> None:
    """A fault of a die: it takes so long before it obeys any command, steps and probes alike."""
    executor = engine.je.tes[te].executors[rank]
    obey = executor.obey

    async def late(command: msgspec.Struct) -> None:
        await executor.die.clock.sleep(delay_ns())
        await obey(command)

    executor.obey = late  # type: ignore[method-assign]


async def tokens_of(request: Any) -> list[int]:
    return [t async for delta in request for t in delta.token_ids]


async def started(tiny: TinyCheckpoint, deployment: str, *more: str) -> Engine:
    engine = build_engine(tiny, deployment, "int8", overrides=more)
    await engine.start()
    return engine


def rows_of(engine: Engine) -> list[int]:
    """Token rows that each group has computed."""
    steps = [group.scheduler.stats.rows_per_step.items() for group in engine.groups]
    return [sum(rows * count for rows, count in each) for each in steps]


async def test_a_slow_group_gets_no_new_work_until_it_answers_in_good_time(tiny: TinyCheckpoint) -> None:
    engine, delay = await started(tiny, "moe-attention", *FLOW), 10 * SECOND
    disturb(engine, 2, lambda: delay)
    wanted = [await tokens_of(engine.submit([i] * 9, SHORT, f"alone {i}")) for i in range(3)]
    first = [engine.submit([i % 3] * 9, SHORT, f"first {i}") for i in range(4)]  # one for each group
    readers = [asyncio.ensure_future(tokens_of(request)) for request in first]
    while engine.health()[0].suspect_groups != (2,):
        await asyncio.sleep(0)
    before = rows_of(engine)
    second = [engine.submit([i % 3] * 9, SHORT, f"second {i}") for i in range(6)]
    assert [await tokens_of(request) for request in second] == wanted * 2
    after = rows_of(engine)
    assert all(
        later > sooner for rank, (later, sooner) in enumerate(zip(after, before, strict=True)) if rank != 2
    )
    assert [await reader for reader in readers] == [*wanted, wanted[0]], "what it had it has computed"
    delay = 0
    assert engine.health()[0].suspect_groups == (2,), "its last answer took long"
    assert (await engine.check_health())[0].suspect_groups == (), "now that nothing runs it has been asked"
    before = rows_of(engine)
    third = [engine.submit([i % 3] * 9, SHORT, f"third {i}") for i in range(4)]
    assert [await tokens_of(request) for request in third] == [*wanted, wanted[0]]
    assert rows_of(engine)[2] > before[2]
    await engine.stop()
    engine.check_integrity()


async def test_a_slow_group_is_probed_while_others_work(tiny: TinyCheckpoint) -> None:
    engine, slow = await started(tiny, "moe-attention", *FLOW, "max_model_len=1024"), 10 * SECOND
    disturb(engine, 1, lambda: slow)
    for rank in (0, 2, 3):
        disturb(engine, rank, lambda: SECOND // 10)  # so that virtual time passes
    requests = [engine.submit([i] * 9, SHORT, f"first {i}") for i in range(4)]
    assert [len(await tokens_of(request)) for request in requests] == [4] * 4
    assert engine.health()[0].suspect_groups == (1,)
    slow = 0
    long = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    assert len(await tokens_of(engine.submit([5], long, "long"))) == 40
    assert engine.health()[0].suspect_groups == ()
    await engine.stop()


async def test_without_barriers_the_lost_group_alone_is_named(tiny: TinyCheckpoint) -> None:
    engine = await started(tiny, "moe-attention", *FLOW)
    disturb(engine, 3, lambda: 10**15)
    requests = [engine.submit([i] * 9, SHORT, str(i)) for i in range(4)]
    ends = await asyncio.gather(*map(tokens_of, requests), return_exceptions=True)
    [error] = [end for end in ends if isinstance(end, DeadlineError)]
    assert "waits for peer DP group 3, " in str(error)
    assert "an answer within 60 s, seen silence for 60 s (1 of 4 DP groups lost)" in str(error)
    assert engine.health() == [TEHealth(name="te", num_groups=4, lost_groups=(3,), life="lost")]
    await engine.stop()


async def test_behind_a_barrier_those_who_wait_name_the_lost(tiny: TinyCheckpoint) -> None:
    engine = await started(tiny, "colocated", "dies=2")
    disturb(engine, 1, lambda: 10**15)
    with pytest.raises(DeadlineError, match=r"dispatch: .* rank 0 waits for peer \[1\]"):
        await tokens_of(engine.submit([1, 2, 3], SHORT, "a"))
    assert not engine.is_healthy()
    await engine.stop()


async def test_a_slow_pod_serves_all_the_same(tiny: TinyCheckpoint) -> None:
    """Behind a barrier who is slow makes all slow; with no healthy group, requests go to suspect ones."""
    engine = await started(tiny, "colocated", "dies=2", "health.suspect_s=0.3")
    disturb(engine, 0, lambda: SECOND // 2)
    for number in range(3):
        assert len(await tokens_of(engine.submit([1, 2, 3], SHORT, str(number)))) == 4
        assert engine.health()[0].suspect_groups == (0, 1)
    await engine.stop()


async def test_prefill_and_decode_have_health_of_their_own(tiny: TinyCheckpoint) -> None:
    engine = await started(tiny, "pd", "prefill.count=2", "prefill.dies=1", "decode.dies=1")
    disturb(engine, 0, lambda: 8 * SECOND)
    assert len(await tokens_of(engine.submit([1, 2, 3], SHORT, "a"))) == 4
    assert [te.suspect_groups for te in engine.health()] == [(0,), (), ()]
    before = engine.stats().virtual_ns
    for number in range(3):
        assert len(await tokens_of(engine.submit([1, 2, 3], SHORT, str(number)))) == 4
    assert engine.stats().virtual_ns - before < SECOND, "the other prefill TE has them"
    await engine.stop()


async def test_a_te_that_is_well_again_gets_work_again(tiny: TinyCheckpoint) -> None:
    """Nobody asks /health: who gets no work is probed when there is some to give."""
    engine = await started(tiny, "pd", "prefill.count=2", "prefill.dies=1", "decode.dies=1")
    slow = 8 * SECOND
    disturb(engine, 0, lambda: slow)
    disturb(engine, 0, lambda: SECOND // 2, te=1)  # so that virtual time passes
    assert len(await tokens_of(engine.submit([1, 2, 3], SHORT, "a"))) == 4
    slow, before = 0, rows_of(engine)[0]
    for number in range(6):
        both = [engine.submit([i, 2, 3], SHORT, f"{number}.{i}") for i in range(2)]
        assert [len(await tokens_of(request)) for request in both] == [4, 4]
    assert [te.suspect_groups for te in engine.health()] == [(), (), ()]
    assert rows_of(engine)[0] > before
    await engine.stop()


async def test_dies_that_have_shut_down_are_not_asked(tiny: TinyCheckpoint) -> None:
    for turns in range(4):
        engine = await started(tiny, "colocated", "dies=2")
        stopping = asyncio.ensure_future(engine.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(engine.check_health(), 10)
        await stopping


async def test_the_endpoint_asks_dies_that_rest(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2"])
    async with TestClient(TestServer(build_app(engine))) as client:
        before = engine.stats().virtual_ns
        replies = await asyncio.gather(*(client.get("/health") for _ in range(3)))
        assert [reply.status for reply in replies] == [200] * 3
        te = {
            "name": "te",
            "num_groups": 2,
            "shell": "healthy",
            "suspect_groups": [],
            "lost_groups": [],
            "lost_dies": [],
            "life": "ready",
            "reason": None,
            "replaced_by": None,
        }
        te |= {
            "num_rollbacks": 0,
            "recovering": None,
            "num_servers": 0,
            "lost_servers": [],
            "suspect_servers": [],
            "links": [],
        }
        well = {"status": "ok", "num_rollbacks": 0, "tes": [te]}
        assert [await reply.json() for reply in replies] == [well] * 3
        assert 0 < engine.stats().virtual_ns - before < SECOND // 1000
        disturb(engine, 1, lambda: 8 * SECOND)
        body = await (await client.get("/health")).json()
        assert (body["status"], body["tes"][0]["suspect_groups"]) == ("degraded", [1])
        text = await (await client.get("/metrics")).text()
        for state, number in (("healthy", 1), ("suspect", 1), ("lost", 0)):
            labels = f'model_name="tiny-random",state="{state}",te="te"'
            assert f"xdeepserve:dp_groups{{{labels}}} {number}.0" in text
        disturb(engine, 1, lambda: 10**15)
        for path in ("/health", "/health"):
            reply = await client.get(path)
            assert reply.status == 503
            assert "not able to serve: heartbeat: deadline passed" in (await reply.json())["error"]["message"]
        reply = await client.post("/v1/completions", json={"prompt": [1]})
        assert reply.status == 503
        assert "waits for peer DP group 1" in (await reply.json())["error"]["message"]
        assert 'state="lost",te="te"} 1.0' in await (await client.get("/metrics")).text()


async def test_the_endpoint_names_tes_that_load_drain_or_are_lost(tiny: TinyCheckpoint) -> None:
    """Each with its state; only a lost one, whose dies stay away, makes the pod degraded."""
    engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2"])

    async def told(client: Any) -> tuple[str, dict[str, str]]:
        reply = await client.get("/health")
        assert reply.status == 200
        body, text = await reply.json(), await (await client.get("/metrics")).text()
        lives = {te["name"]: te["life"] for te in body["tes"]}
        for name, life in lives.items():
            assert f'xdeepserve:tes{{model_name="tiny-random",state="{life}",te="{name}"}} 1.0' in text
        assert text.count("xdeepserve:tes{") == len(lives)
        return body["status"], lives

    async with TestClient(TestServer(build_app(engine))) as client:
        joining = asyncio.ensure_future(engine.add_te())
        while not engine.plan.loadings:
            await asyncio.sleep(0)
        seen = engine.health()
        assert [(te.name, te.life, te.num_groups) for te in seen] == [
            ("te", "ready", 2),
            ("te 1", "loading", 0),
        ]
        await joining
        assert await told(client) == ("ok", {"te": "ready", "te 1": "ready"})
        endless = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
        request, first = engine.submit([1, 2, 3], endless, "endless"), engine.je.tes[0]
        while not first.num_sequences:
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(engine.drain("te"))
        while first.life == "ready":
            await asyncio.sleep(0)
        assert await told(client) == ("ok", {"te": "draining", "te 1": "ready"})
        request.abort()
        await draining
        assert await told(client) == ("ok", {"te 1": "ready"})
        await engine.add_te()
        failed = engine.je.tes[0]
        failed.executors[0].reports.put(StepFailed(0, HardwareError("the die is on fire")))
        while "te 1" not in engine.lost:
            await asyncio.sleep(0)
        assert await told(client) == ("degraded", {"te 2": "ready", "te 1": "lost"})
        body = await (await client.get("/health")).json()
        lost = {
            "name": "te 1",
            "num_groups": 2,
            "shell": "healthy",
            "suspect_groups": [],
            "lost_groups": [0, 1],
            "lost_dies": [],
            "life": "lost",
            "replaced_by": None,
        }
        lost |= {
            "num_rollbacks": 0,
            "recovering": None,
            "num_servers": 0,
            "lost_servers": [],
            "suspect_servers": [],
            "links": [],
        }
        assert body["tes"][-1] == lost | {"reason": "the die is on fire"}
        text = await (await client.get("/metrics")).text()
        assert 'xdeepserve:dp_groups{model_name="tiny-random",state="lost",te="te 1"} 2.0' in text
        assert len(await tokens_of(engine.submit([1, 2, 3], SHORT, "a"))) == 4


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("health.probe_s=0", "health.probe_s must be at least 0.0001, found 0"),
        ("health.suspect_s=0", "health.suspect_s must be more than 0, found 0"),
        ("health.lost_s=5", "health needs suspect_s < lost_s, found suspect_s=5.0, lost_s=5.0"),
        ("health.suspect_s=nan", "health.suspect_s must be more than 0 and finite, found nan"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(tiny: TinyCheckpoint, setting: str, reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason):
        build_engine(tiny, "monolithic", "int8", overrides=[setting])
