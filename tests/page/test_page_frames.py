"""What a page is told: frames by their schema, only what is new, and never more than somebody can take."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import jsonschema
import msgspec
import pytest

from tests.page.conftest import Serve
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import InputError
from xdeepserve.llm import LLM, build_engine
from xdeepserve.loop import run
from xdeepserve.page import watch as watching
from xdeepserve.page.page_record import PageRecord, RunRecord
from xdeepserve.page.parts import FORMAT, NAME, PARTS, DieRow, GroupsPart, LoadPart, PodPart, StepPart
from xdeepserve.page.step_look import MAX_SPANS, shown_dies
from xdeepserve.page.watch import Frames, PodWatch

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


def decoded(frame: bytes) -> dict[str, msgspec.Struct]:
    """The parts of a frame, each as its type: so each is checked."""
    parts = msgspec.json.decode(frame)["parts"]
    return {name: msgspec.convert(part, PARTS[name]) for name, part in parts.items()}


async def complete(engine: Engine, name: str, params: SamplingParams = PARAMS) -> list[int]:
    return [token async for delta in engine.submit([5, 6, 7], params, name) for token in delta.token_ids]


def record(tmp_path: Path, deployment: str, *overrides: str, timing_only: bool = False) -> list[bytes]:
    with LLM("tiny", deployment, "int8", overrides=overrides, timing_only=timing_only) as llm:
        file = RunRecord(llm.engine, PageRecord(tmp_path / "record.jsonl"))
        llm.generate([[5, 6, 7], [8, 9]], PARAMS)
        file.end()
        assert not llm.engine.plan.pod.trace.is_on
        assert not llm.engine.plan.pod.trace.spans
    return (tmp_path / "record.jsonl").read_bytes().splitlines()


@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("monolithic", ()),
        ("colocated", ("dies=4",)),
        ("colocated", ("dies=4", "lockstep=true")),
        ("transformerless", ()),
        ("moe-attention", ("lockstep=true",)),
        ("eaas", ()),
    ],
)
def test_a_run_is_told_whole(tmp_path: Path, deployment: str, overrides: tuple[str, ...]) -> None:
    hello, *frames = record(tmp_path, deployment, *overrides)
    assert msgspec.json.decode(hello) == {"software": "0.1.0", "format": NAME, "version": FORMAT}
    told: dict[str, msgspec.Struct] = {}
    for frame in frames:
        told |= decoded(frame)
    assert {*PARTS} - {"pool"} == {*told}
    pod, step, load, groups = told["pod"], told["step"], told["load"], told["groups"]
    assert isinstance(pod, PodPart)
    assert isinstance(step, StepPart)
    assert isinstance(load, LoadPart)
    assert isinstance(groups, GroupsPart)
    assert len(load.busy) == len(pod.dies)
    assert max(load.busy) > 0
    assert len(groups.used) == sum(te.num_groups for te in pod.tes)
    assert step.end_ns > step.start_ns
    assert {"MLA", "Gate", "Experts"} <= {*step.names}
    for span in step.spans:
        assert 0 <= span.start_ns < step.end_ns - step.start_ns
        assert span.num_ns > 0
    held = {expert for row in pod.dies for expert in range(row.first_expert, row.last_expert + 1)}
    heat = told["heat"]
    assert heat.layers == [1, 2, 3]  # type: ignore[attr-defined]
    if pod.runs == "tasks":
        assert {*heat.columns} <= held  # type: ignore[attr-defined]
        rows = [sum(values) for values in heat.values]  # type: ignore[attr-defined]
        assert min(rows) == max(rows) > 0  # of a decode step: as many experts for each row in each layer
        assert rows[0] % pod.top_k == 0


def test_a_record_on_a_full_disk_costs_no_token(tmp_path: Path) -> None:
    with LLM("tiny", "monolithic", "int8") as llm:
        expected = llm.generate([[5, 6, 7]], LONG)[0].outputs[0].token_ids
        file = RunRecord(llm.engine, PageRecord(Path("/dev/full")))
        assert llm.generate([[5, 6, 7]], LONG)[0].outputs[0].token_ids == expected
        with pytest.raises(InputError, match=r"^--record /dev/full: No space left on device: the record"):
            file.end()


def test_equal_runs_make_equal_records(tmp_path: Path) -> None:
    first, second = (record(tmp_path, "colocated", "dies=2") for _ in range(2))
    assert first == second
    assert len(first) > 10


def test_time_only_runs_are_told_by_dies(tmp_path: Path) -> None:
    _, *frames = record(tmp_path, "moe-attention", timing_only=True)
    told: dict[str, msgspec.Struct] = {}
    for frame in frames:
        told |= decoded(frame)
    assert told["pod"].runs == "time only"  # type: ignore[attr-defined]
    assert told["heat"].unit == "us"  # type: ignore[attr-defined]


def test_who_watches_changes_no_bit_and_no_nanosecond(tmp_path: Path) -> None:
    def run_of(is_watched: bool) -> tuple[list[int], int]:
        with LLM("tiny", "transformerless", "int8") as llm:
            file = RunRecord(llm.engine, PageRecord(tmp_path / "r")) if is_watched else None
            (output,) = llm.generate([[5, 6, 7]], PARAMS)
            if file is not None:
                file.end()
            return output.outputs[0].token_ids, llm.virtual_ns

    assert run_of(True) == run_of(False)


def test_a_frame_has_only_what_is_new() -> None:
    frames, same = Frames(), GroupsPart([1], [0], [0], [0], [0], [0])
    assert frames.take({"groups": same, "pool": None}) > 0
    assert frames.take({"groups": same}) == 0
    assert frames.number == 1
    frames.take({"groups": same, "load": LoadPart([1], [2])})
    assert [*msgspec.json.decode(frames.since(1))["parts"]] == ["load"]
    assert [*msgspec.json.decode(frames.since(0))["parts"]] == ["groups", "load"]
    assert msgspec.json.decode(frames.since(2)) == {"frame": 2, "parts": {}}


def test_shown_dies_are_of_all_roles_and_fit() -> None:
    dies = [DieRow(die, 0, "attention" if die < 480 else "experts", 0, -1, -1, -1) for die in range(768)]
    shown = shown_dies(dies, dict.fromkeys(range(768), 50))
    assert len(shown) * 50 <= MAX_SPANS
    assert sum(die < 480 for die in shown) == len(shown) / 2
    assert shown_dies(dies, {3: 10 * MAX_SPANS}) == [3]  # one, however much it has
    assert shown_dies(dies, {}) == []


def test_nobody_looks_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = build_engine("tiny", "monolithic", "int8")
        await engine.start()
        watch = PodWatch(engine)
        before = engine.observers
        frames = watch.frames()
        first = decoded(await anext(frames))
        assert {"pod", "now", "groups"} <= {*first}
        assert len(engine.observers) == len(before) + 2
        tokens = await complete(engine, "watched")
        told: dict[str, msgspec.Struct] = {}
        while "step" not in told or "requests" not in told:
            told |= decoded(await anext(frames))
            await complete(engine, f"another {len(told)} {engine.plan.pod.clock.now}")
        await frames.aclose()
        assert (watch.num_watchers, engine.observers) == (0, before)
        assert not engine.plan.pod.trace.is_on
        assert await complete(engine, "alone") == tokens
        assert not engine.plan.pod.trace.spans
        # And again, for the next one.
        frames = watch.frames()
        assert "pod" in decoded(await anext(frames))
        await frames.aclose()
        await engine.stop()

    run(main())


def test_what_ends_unseen_is_not_shown_as_if_it_went_on() -> None:
    async def main() -> None:
        engine = build_engine("tiny", "monolithic", "int8")
        await engine.start()
        watch = PodWatch(engine)
        told: dict[str, msgspec.Struct] = {}
        frames = watch.frames()
        await anext(frames)
        running = asyncio.create_task(complete(engine, "left alone", LONG))
        while not (rows := getattr(told.get("requests"), "rows", [])):
            told |= decoded(await anext(frames))
        assert rows[0].state != "ended"
        await frames.aclose()
        await running
        frames = watch.frames()
        first = decoded(await anext(frames))
        assert not [row for row in first["requests"].rows if row.state != "ended"]
        await frames.aclose()
        await engine.stop()

    run(main())


def test_an_error_of_looking_ends_the_watchers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: Engine) -> None:
        raise RuntimeError("looking has failed")

    async def main() -> None:
        engine = build_engine("tiny", "monolithic", "int8")
        await engine.start()
        frames = PodWatch(engine).frames()
        await anext(frames)
        monkeypatch.setattr(watching, "groups_part", fail)
        with pytest.raises(RuntimeError, match="looking has failed"):
            async for _ in frames:
                pass
        assert len(await complete(engine, "after")) == 12
        await engine.stop()

    run(main())


async def test_watchers_that_never_read_and_fifty_pages_cost_nobody_anything(serve: Serve) -> None:
    async with serve("monolithic") as (address, engine), aiohttp.ClientSession() as session:
        body = {"prompt": [5, 6, 7], "max_tokens": 24, "temperature": 0.0, "return_token_ids": True}

        async def ask() -> list[int]:
            async with session.post(f"{address}v1/completions", json=body) as answer:
                return (await answer.json())["choices"][0]["token_ids"]

        expected, num_others = await ask(), len(engine.observers)
        deaf = await session.get(f"{address}page/frames")  # what comes is never read
        pages = [await session.get(f"{address}page/frames") for _ in range(50)]
        assert [await ask() for _ in range(4)] == [expected] * 4
        for page in pages:
            data = b""
            async with asyncio.timeout(60):
                while b"event: frame" not in data or not data.endswith(b"\n\n"):
                    data += await page.content.readany()
            assert data.startswith(b"event: hello\ndata: {")
            page.close()
        deaf.close()
        assert await ask() == expected
        async with asyncio.timeout(60):
            while engine.plan.pod.trace.is_on or len(engine.observers) > num_others:
                await asyncio.sleep(0.05)


async def test_the_schema_of_the_documents_is_that_of_the_frames(serve: Serve) -> None:
    """Others draw by the schema that msgspec tells of these types: what is sent is of it."""
    schemas, components = msgspec.json.schema_components(PARTS.values(), ref_template="#/$defs/{name}")
    async with serve("colocated", "dies=2") as (address, _), aiohttp.ClientSession() as session:
        async with session.get(f"{address}page/frames") as answer:
            assert answer.content_type == "text/event-stream"
            lines = [await answer.content.readline() for _ in range(5)]
        frame = msgspec.json.decode(lines[4].removeprefix(b"data: "))
    by_name = dict(zip(PARTS, schemas, strict=True))
    for name, part in frame["parts"].items():
        jsonschema.validate(part, {**by_name[name], "$defs": components})
