"""Job executors in other processes use one pod: same tokens, same errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tests.engine.remains import check_nothing_is_left, settled
from xdeepserve.api.server.endpoint import ApiEndpoint
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.served_models import MODELS, ServedModels
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.request import AsyncEngine, EngineStats, OutputDelta, RequestHandle
from xdeepserve.errors import (
    InputError,
    OverloadedError,
    ProtocolError,
    RequestError,
    TransferError,
    XDeepServeError,
)
from xdeepserve.jobs import pod_frames, remote_engine
from xdeepserve.jobs.door import pod_door
from xdeepserve.jobs.door.pod_door import PodDoor
from xdeepserve.jobs.door.shared_pod import follow_pod
from xdeepserve.jobs.remote_engine import ReceivedOutput, RemoteEngine
from xdeepserve.llm import build_engine

SECONDS = 30.0
PROMPTS = [[10 + i, 20 + 3 * i, 30, 40 + i] for i in range(4)]
SETTINGS = ["prefill.count=2", "scheduler.route=cost", "scheduler.job_executors=3"]
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


@contextlib.asynccontextmanager
async def shared(engine: Engine, path: Path) -> AsyncIterator[PodDoor]:
    """A started engine behind the door of a pod."""
    door = PodDoor(ServedModels(ApiEndpoint(engine, ServerOptions())), str(path / "pod.sock"))
    async with contextlib.aclosing(door.run()) as running:
        await anext(running)
        yield door


@contextlib.asynccontextmanager
async def pod(path: Path, *settings: str, context: int = 256) -> AsyncIterator[Engine]:
    """A pod that job executors share."""
    engine = build_engine("tiny", "pd", "int8", overrides=[f"max_model_len={context}", *SETTINGS, *settings])
    await engine.start()
    try:
        async with shared(engine, path):
            yield engine
    finally:
        await engine.stop()


async def connected(path: Path, name: str = "je-0") -> RemoteEngine:
    """The engine of a job executor; the caller stops it."""
    engine = await asyncio.to_thread(remote_engine.remote_engine, str(path / "pod.sock"), name, SECONDS)
    await engine.start()
    return engine


@contextlib.asynccontextmanager
async def executor(path: Path, name: str = "je-0") -> AsyncIterator[RemoteEngine]:
    """The engine of a job executor, for a while."""
    engine = await connected(path, name)
    try:
        yield engine
    finally:
        await engine.stop()


async def until(what: Callable[[], Any], name: str) -> None:
    """Wait until something holds."""
    for _ in range(round(SECONDS / 0.01)):
        if what():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"waited {SECONDS:g} s for {name}")


async def whole(handle: RequestHandle) -> list[OutputDelta]:
    async with asyncio.timeout(SECONDS):
        await handle.accepted()
        return [delta async for delta in handle]


def tokens(deltas: list[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def answers(engine: AsyncEngine, params: SamplingParams) -> list[list[OutputDelta]]:
    handles = [engine.submit(prompt, params, f"of-{i}") for i, prompt in enumerate(PROMPTS)]
    return list(await asyncio.gather(*map(whole, handles)))


@pytest.mark.always
async def test_a_job_executor_gives_the_pods_own_answers(tmp_path: Path) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=1.0, seed=5, n=2, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    async with pod(tmp_path) as engine, executor(tmp_path, "je-2") as je:
        own, others = await answers(engine, params), await answers(je, params)
        for mine, theirs in zip(own, others, strict=True):
            for choice in range(2):
                parts = [[each for each in deltas if each.index == choice] for deltas in (mine, theirs)]
                assert tokens(parts[0]) == tokens(parts[1])
                assert text(parts[0]) == text(parts[1])
                assert [each.logprobs for each in parts[0]] == [each.logprobs for each in parts[1]]
                assert parts[0][0].prompt_logprobs == parts[1][0].prompt_logprobs
                assert parts[0][-1].finish_reason == parts[1][-1].finish_reason == "length"
        assert (je.model_name, je.max_model_len, je.vocab_size) == ("tiny", 256, engine.vocab_size)
        assert (je.formats, je.directory) == (engine.formats, engine.directory)
        assert [te.name for te in await je.check_health()] == [te.name for te in engine.health()]
        assert je.is_healthy()
        await settled(engine)
        check_nothing_is_left(engine)


async def test_requests_are_routed_by_the_ledger_of_their_job_executor(tmp_path: Path) -> None:
    async with pod(tmp_path) as engine, executor(tmp_path, "je-2") as je:
        seen: list[int] = []
        for number, ledger in enumerate(engine.je.router.ledgers):

            def note(*given: Any, number: int = number, give: Any = ledger.give) -> None:
                seen.append(number)
                give(*given)

            ledger.give = note  # type: ignore[method-assign]
        await answers(je, SamplingParams(max_tokens=2))
        assert seen == [2] * len(PROMPTS)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], SamplingParams()),
        ([1] * 300, SamplingParams()),
        ([1 << 20], SamplingParams()),
        ([1], SamplingParams(stop_token_ids=(1 << 20,))),
        ([1], SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))),
    ],
)
async def test_refusals_come_over(tmp_path: Path, prompt: list[int], params: SamplingParams) -> None:
    async with pod(tmp_path) as engine, executor(tmp_path) as je:
        with pytest.raises(RequestError) as own:
            engine.submit(prompt, params, "a")
        with pytest.raises(RequestError) as other:
            await whole(je.submit(prompt, params, "a"))
        assert (str(own.value), own.value.param, own.value.code) == (
            str(other.value), other.value.param, other.value.code
        )  # fmt: skip
        if params.structured_outputs is not None:
            with pytest.raises(RequestError, match=r"regex|regular"):
                await asyncio.to_thread(je.prepare, params)
        assert not je.link.requests


async def test_a_pod_without_room_refuses_requests_that_belong_together(tmp_path: Path) -> None:
    async with pod(tmp_path, "scheduler.max_waiting=0") as engine, executor(tmp_path) as je:
        most = sum(group.steps.max_seqs for group in engine.groups)
        je.check_room(most + 1)
        with pytest.raises(RequestError, match=f"at most {most} sequences"):
            await whole(je.submit([1], LONG, "a"))
        je.check_room(1)
        running = je.submit([1], LONG, "b")
        await running.accepted()
        je.check_room(most)
        for name in ("c", "d"):
            with pytest.raises(OverloadedError, match="overloaded"):
                await whole(je.submit([1], LONG, name))
        running.abort()
        await until(lambda: not engine.left().requests, "the end of an aborted request")


async def test_who_leaves_frees_all(tmp_path: Path) -> None:
    async with pod(tmp_path) as engine, executor(tmp_path) as je:
        begun: list[int] = []
        handle = je.submit(PROMPTS[0], LONG, "a", on_scheduled=begun.append)
        async for _ in handle:
            break
        assert begun == [0]
        await until(lambda: not engine.left().requests, "the end of a request that was left")
        waiting = je.submit(PROMPTS[1], LONG, "b")
        await waiting.accepted()
        await until(lambda: je.stats().num_running == 1, "the first step of a request")
        await je.stop()
        assert [each.finish_reason async for each in waiting][-1] == "abort"
        await until(lambda: not engine.left().requests, "the end of a stopped executor's request")
        await settled(engine)
        check_nothing_is_left(engine)


async def test_another_executor_gets_all_output_of_a_lost_one(tmp_path: Path) -> None:
    """In the same pieces, from the first on, though the request has gone on meanwhile."""
    params = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    async with pod(tmp_path) as engine, executor(tmp_path, "je-1") as other:
        async with executor(tmp_path) as je:
            first = []
            async for delta in je.submit(PROMPTS[0], params, "a"):
                first.append(delta)
                if len(first) == 3:
                    break_off(je)
                    break
        again = await whole(other.submit(PROMPTS[0], params, "a"))
        assert again[:3] == first
        assert len(tokens(again)) == 40
        await until(lambda: not engine.left().requests, "the end of a request")
        await settled(engine)
        check_nothing_is_left(engine)


def break_off(je: RemoteEngine) -> None:
    """End the connection as the end of the process would: nothing is said, and nobody comes back."""
    je.link.requests.clear()
    assert je.link.work is not None
    je.link.work.cancel()


async def test_nobody_asks_for_the_request_of_a_lost_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_door, "KEEP_S", 0.05)
    async with pod(tmp_path, context=2048) as engine, executor(tmp_path) as je:
        endless = msgspec.structs.replace(LONG, max_tokens=2000)
        for name in ("a", "b"):
            await je.submit(PROMPTS[0], endless, name).accepted()
        break_off(je)
        await until(lambda: not engine.left().requests, "the end of a lost executor's requests")
        await settled(engine)
        check_nothing_is_left(engine)


async def test_a_request_goes_on_at_the_next_pod(tmp_path: Path) -> None:
    """With the seed that the first one has drawn; no token is given twice."""
    params = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True, logprobs=0)
    async with pod(tmp_path, "seed=1"):
        je = await connected(tmp_path)
        handle, got = je.submit(PROMPTS[0], params, "a"), []
        await handle.accepted()
        seed = handle.frame.params.seed
        stream = aiter(handle)
        got += [await anext(stream) for _ in range(5)]
    async with pod(tmp_path, "seed=2") as engine:
        async with asyncio.timeout(SECONDS):
            got += [delta async for delta in stream]
        same = msgspec.structs.replace(params, seed=seed)
        assert tokens(got) == tokens(await whole(engine.submit(PROMPTS[0], same, "b")))
        assert sum(len(delta.logprobs or ()) for delta in got) == 60
        await je.stop()
        await until(lambda: not engine.left().requests, "the end of a request")


async def test_a_request_that_ends_every_pod_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "MOST_LOST", 1)
    async with pod(tmp_path, context=2048):
        je = await connected(tmp_path)
        handle = je.submit(PROMPTS[0], msgspec.structs.replace(LONG, max_tokens=2000), "a")
        await handle.accepted()
    async with pod(tmp_path, context=2048) as engine:
        await until(lambda: engine.left().requests, "the request at the second pod")
    async with pod(tmp_path, context=2048) as engine:
        with pytest.raises(XDeepServeError, match="2 pods were lost while they had the request"):
            await whole(handle)
        assert not engine.left().requests
        await je.stop()


async def test_a_pod_that_does_not_come_back_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "AWAY_S", 0.3)
    async with pod(tmp_path, context=2048):
        je = await connected(tmp_path)
        handle = je.submit(PROMPTS[0], msgspec.structs.replace(LONG, max_tokens=2000), "a")
        await handle.accepted()
    with pytest.raises(XDeepServeError, match=r"no pod was at .*pod.sock for 0.3 s"):
        await whole(handle)
    assert not je.is_healthy()
    assert "no pod was at" in (je.unhealthy_reason or "")
    with pytest.raises(XDeepServeError, match=r"has not answered within 0.3 s"):
        await je.check_health()
    await je.stop()


async def test_models_come_and_go_with_the_pods(tmp_path: Path) -> None:
    """A model that a job adds to the pod is served by all job executors, as long as it is there."""
    engine = build_engine("tiny", "monolithic", "int8")
    await engine.start()
    models = ServedModels(ApiEndpoint(engine, ServerOptions()))
    guest = build_engine("tiny", "monolithic", "int8", pod=engine.plan.pod)
    guest.model_name = "tuned"
    await guest.start()
    door = PodDoor(models, str(tmp_path / "pod.sock"))
    async with contextlib.aclosing(door.run()) as running:
        await anext(running)
        async with executor(tmp_path) as je:
            app = web.Application()
            app[MODELS] = seen = ServedModels(ApiEndpoint(je, ServerOptions()))
            async with contextlib.aclosing(follow_pod(app)) as following:
                await anext(following)
                models.add("tuned", guest, 1234)
                await until(lambda: seen.names == ["tiny", "tuned"], "the model of the job")
                added = seen.find("tuned")
                assert added.created == 1234
                found = await whole(added.engine.submit(PROMPTS[0], SamplingParams(max_tokens=3), "a"))
                assert len(tokens(found)) == 3
                models.take("tuned")
                await until(lambda: seen.names == ["tiny"], "the end of the model of the job")
    await guest.stop()
    await engine.stop()


def test_nobody_is_at_the_socket(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no pod was ready at .*pod.sock within 0.2 s"):
        remote_engine.remote_engine(str(tmp_path / "pod.sock"), "je-0", 0.2)


async def test_bytes_that_are_no_frame_end_the_connection_alone(tmp_path: Path) -> None:
    async with pod(tmp_path) as engine, executor(tmp_path) as je:
        for data in (b"\xff\xff\xff\xff", b"\0\0\0\3abc", b"\0\0\0\1\x93"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "pod.sock"))
            writer.write(data)
            async with asyncio.timeout(SECONDS):
                await reader.read()
            writer.close()
        assert len(tokens(await whole(je.submit(PROMPTS[0], SamplingParams(max_tokens=3), "a")))) == 3
        assert not engine.left().requests


def test_what_was_received_is_left_out() -> None:
    """However the pod cuts the same output the second time."""
    received = ReceivedOutput()
    first = [OutputDelta(index=0, text=text, token_ids=[n], num_reasoning=1) for n, text in enumerate("abc")]
    assert all(received.rest(delta) is delta for delta in first)
    received.begin_again()
    assert received.rest(OutputDelta(index=0, text="ab", token_ids=[0, 1], num_reasoning=2)) is None
    rest = received.rest(OutputDelta(index=0, text="cde", token_ids=[2, 3, 4], num_reasoning=2))
    assert rest is not None
    assert (rest.text, rest.token_ids, rest.num_reasoning) == ("de", [3, 4], 1)
    last = OutputDelta(index=0, text="", token_ids=[], finish_reason="stop")
    assert received.rest(last) is last


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full"),
        RequestError("bad", param="n", code="c"),
        TransferError("no way"),
        InputError("other"),
    ],
)
def test_errors_come_over_as_what_they_are_answered_as(error: XDeepServeError) -> None:
    data = pod_frames.encoded(pod_frames.failed("a", error))[pod_frames.LENGTH :]
    found = pod_frames.error_of(pod_frames.decoder_of(pod_frames.FromPod).decode(data))
    assert type(found) is (XDeepServeError if type(error) is InputError else type(error))
    assert str(found) == str(error)
    assert getattr(found, "param", None) == getattr(error, "param", None)


def test_frames_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_frames, "MAX_FRAME", 64)
    submit = pod_frames.SubmitFrame(request_id="a", model="tiny", prompt=[1] * 100, params=SamplingParams())
    with pytest.raises(ProtocolError, match=r"a SubmitFrame has .* bytes, 64 at most"):
        pod_frames.encoded(submit)


def test_counters_keep_their_types() -> None:
    stats = EngineStats(num_drafted=(1, 2), rows_per_step={3: 4})
    stats.num_recoveries["3"] += 1
    data = msgspec.msgpack.encode(stats)
    assert pod_frames.decoder_of(EngineStats).decode(data) == stats
    assert stats.num_recoveries["none"] == 0
