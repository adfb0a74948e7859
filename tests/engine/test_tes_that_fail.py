"""TEs that fail at an awkward moment: every request still ends with the tokens of one die, and every TE that
leaves is gone."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.histories import SMALL
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine import loading
from xdeepserve.engine.dp.events import TEChanged
from xdeepserve.engine.job.pd_transfer import PDTransfer, Stage
from xdeepserve.engine.loading import read_weights
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import HardwareError, RequestError, XDeepServeError
from xdeepserve.llm import build_engine
from xdeepserve.loop import run
from xdeepserve.model.presets import TinyCheckpoint

PAIRS = (*SMALL, "prefill.dies=1", "decode.dies=1")
PROMPTS = [[i + 1] * 20 for i in range(6)]


@pytest.fixture(scope="module")
def reference(tiny: TinyCheckpoint) -> Any:
    with LLM(tiny, "monolithic", "int8", overrides=SMALL) as llm:
        yield llm


def _burn(te: TE) -> None:
    te.executors[0].reports.put(StepFailed(0, HardwareError("the die is on fire")))


def _transfers(engine: Engine, stage: Stage) -> list[PDTransfer]:
    return [transfer for transfer in engine.je.transfers.values() if transfer.stage == stage]


@pytest.mark.parametrize("transfer", ["request", "layer"])
def test_a_decode_te_fails_before_its_source_has_read_the_completion(
    tiny: TinyCheckpoint, reference: LLM, transfer: str
) -> None:
    """A sequence that runs there already goes on elsewhere, and its prefill TE has its blocks back."""
    engine = build_engine(tiny, "pd", "int8", overrides=[*PAIRS, "decode.count=2", f"transfer={transfer}"])
    clock, params = engine.plan.pod.clock, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)

    def unread() -> list[TE]:
        """Decode TEs where a sequence runs whose source still takes it for moving."""
        moving = _transfers(engine, "moving")
        return [t.link.tes[1] for t in moving if t.offered_to and t.seq in t.offered_to.places.running]

    async def fail() -> None:
        while not unread():
            assert engine.left().requests, "no source was ever late"
            await clock.sleep(1000)
        _burn(unread()[0])

    async def main() -> list[list[int]]:
        await engine.start()
        requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(PROMPTS)]
        sequences = [request.sequences[0] for request in requests]
        await clock.spawn(fail(), name="fault")
        for request in requests:
            async for _ in request:
                pass
        await engine.settle()
        engine.check_integrity()
        assert engine.is_healthy()
        assert len(engine.lost) == 1
        await engine.stop()
        return [seq.token_ids[seq.num_prompt :] for seq in sequences]

    expected = [list(output.outputs[0].token_ids) for output in reference.generate(PROMPTS, params)]
    assert run(main()) == expected


@pytest.mark.parametrize("way", ["drain", "remove"])
def test_a_decode_te_leaves_while_the_one_that_sends_it_layers_fails(tiny: TinyCheckpoint, way: str) -> None:
    counts = ("prefill.count=2", "decode.count=2", "transfer=layer")
    engine = build_engine(tiny, "pd", "int8", overrides=[*PAIRS, *counts])
    clock, params = engine.plan.pod.clock, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)

    async def change() -> None:
        while not (transfers := _transfers(engine, "by layer")):
            assert engine.left().requests, "no layers were ever on their way"
            await clock.sleep(1000)
        prefill, decode = transfers[0].link.tes
        leaving = clock.spawn(getattr(engine, way)(decode.sizes.place.name), name=way)
        await clock.sleep(2000)
        _burn(prefill)
        await clock.join(leaving)
        assert decode.life == "gone"

    async def main() -> None:
        await engine.start()
        requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(PROMPTS)]
        changing = clock.spawn(change(), name="change")
        for request in requests:
            async for _ in request:
                pass
        await engine.settle()
        assert changing.done(), f"{way} never ends"
        await changing
        engine.check_integrity()
        await engine.stop()

    run(main())


def test_links_keep_nothing_of_a_te_that_has_left(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "pd", "int8", overrides=PAIRS)

    async def main() -> None:
        await engine.start()
        for role in ("prefill", "decode", "prefill"):
            old = engine.je.tes.ready(role)[0]  # type: ignore[arg-type]
            await engine.add_te(role)  # type: ignore[arg-type]
            await engine.remove(old.sizes.place.name)
        assert list(engine.je.links.by_prefill) == engine.je.tes.ready("prefill")
        assert next(iter(engine.je.links.by_prefill.values())).keys() == set(engine.je.tes.ready("decode"))
        await engine.stop()

    run(main())


# ---- who goes on ------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """A pod with one TE for prefill, one for decode, and one that does both."""
    path = tmp_path / "mixed.toml"
    tes = ['role = "prefill"\ndies = 1\n', 'role = "decode"\ndies = 1\n', "dies = 1\n"]
    path.write_text('kind = "mixed"\n' + "".join(f"[[te]]\n{te}" for te in tes))
    return str(path)


@pytest.mark.thin(3)
@pytest.mark.parametrize("what", ["fails", "drain", "remove"])
@pytest.mark.parametrize("name", ["prefill 0", "decode 0", "te"])
@pytest.mark.parametrize("after_ns", [0, 100_000, 1_000_000])
def test_prefill_with_decode_and_one_that_does_both_stand_in_for_each_other(
    tiny: TinyCheckpoint, reference: LLM, mixed: str, name: str, what: str, after_ns: int
) -> None:
    engine = build_engine(tiny, mixed, "int8", overrides=[*SMALL])
    clock, params = engine.plan.pod.clock, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)

    async def change() -> None:
        await clock.sleep(after_ns)
        if what == "fails":
            _burn(next(te for te in engine.je.tes if te.sizes.place.name == name))
        else:
            await getattr(engine, what)(name)

    async def main() -> list[list[int]]:
        await engine.start()
        requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(PROMPTS)]
        sequences = [request.sequences[0] for request in requests]
        changing = clock.spawn(change(), name="change")
        for request in requests:
            async for _ in request:
                pass
        await engine.settle()
        await changing
        again = engine.submit(PROMPTS[0], params, "after it")
        sequences += again.sequences
        async for _ in again:
            pass
        await engine.settle()
        engine.check_integrity()
        assert engine.is_healthy()
        assert name not in [te.name for te in engine.tes()]
        left = engine.je.tes.ready("both") or engine.je.tes.ready("prefill")
        with pytest.raises(RequestError, match="cannot leave"):
            await engine.remove(left[0].sizes.place.name)
        await engine.stop()
        return [seq.token_ids[seq.num_prompt :] for seq in sequences]

    expected = [list(output.outputs[0].token_ids) for output in reference.generate(PROMPTS, params)]
    assert run(main()) == [*expected, expected[0]]


def test_who_drains_ends_what_it_has_though_the_others_fail(tiny: TinyCheckpoint, reference: LLM) -> None:
    """Then nothing is left that could serve, and the engine says why."""
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    clock, params = engine.plan.pod.clock, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)

    async def fail() -> None:
        await clock.sleep(10)
        _burn(engine.je.tes.ready("both")[0])

    async def main() -> list[list[int]]:
        await engine.start()
        requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(PROMPTS[:2])]
        sequences = [request.sequences[0] for request in requests]
        await engine.add_te()
        draining = clock.spawn(engine.drain("te"), name="drain")
        clock.spawn(fail(), name="fault")
        while not engine.lost:
            await asyncio.sleep(0)
        late = engine.submit(PROMPTS[0], msgspec.structs.replace(params, n=2), "too late")
        with pytest.raises(XDeepServeError, match="no task executor is left"):
            async for _ in late:
                pass
        for request in requests:
            async for _ in request:
                pass
        await draining
        with pytest.raises(XDeepServeError, match="the die is on fire"):
            engine.submit(PROMPTS[0], params, "later still")
        assert not engine.is_healthy()
        engine.stats()
        await engine.stop()
        return [seq.token_ids[seq.num_prompt :] for seq in sequences]

    expected = [list(output.outputs[0].token_ids) for output in reference.generate(PROMPTS[:2], params)]
    assert run(main()) == expected


def test_of_two_that_are_asked_to_leave_at_once_one_stays(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])

    async def main() -> None:
        await engine.start()
        await engine.add_te()
        ends = await asyncio.gather(*(engine.remove(te) for te in ("te", "te 1")), return_exceptions=True)
        assert ends[0] is None
        assert str(ends[1]) == "TE te 1 cannot leave: it is the only one"
        assert [te.name for te in engine.tes()] == ["te 1"]
        await engine.stop()

    run(main())


def test_the_last_te_of_a_role_can_be_replaced(tiny: TinyCheckpoint, mixed: str) -> None:
    engine = build_engine(tiny, mixed, "int8", overrides=SMALL)

    async def main() -> None:
        await engine.start()
        await engine.remove("decode 0")
        assert await engine.add_te("decode") == "decode 1"
        await engine.remove("te")
        assert await engine.add_te("both") == "te 1"
        assert [te.life for te in engine.tes()] == ["ready"] * 3
        await engine.stop()

    run(main())


# ---- what is under way when the engine fails --------------------------------------------------------


@pytest.mark.parametrize("source", ["host", "peer", "storage"])
def test_nobody_joins_an_engine_that_fails_meanwhile(tiny: TinyCheckpoint, source: Any) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    told: list[tuple[str, str]] = []
    engine.observe(
        lambda event: told.append((event.te, event.life)) if isinstance(event, TEChanged) else None
    )

    async def main() -> None:
        await engine.start()
        joining = asyncio.ensure_future(engine.add_te(source=source))
        while not engine.plan.loadings:
            await asyncio.sleep(0)
        _burn(engine.je.tes[0])
        with pytest.raises(XDeepServeError, match="can join: the engine has failed: the die is on fire"):
            await joining
        assert [te.name for te in engine.tes()] == ["te"]
        assert {2, 3}.isdisjoint(engine.plan.pod.holders)
        assert [life for te, life in told if te == "te 1"] == ["loading", "gone"]
        await engine.stop()

    run(main())


def test_who_leaves_when_the_engine_fails_hears_why(tiny: TinyCheckpoint) -> None:
    """A decode TE drains; the only prefill TE fails, so that nothing can serve."""
    engine = build_engine(tiny, "pd", "int8", overrides=[*PAIRS, "decode.count=2"])
    clock, params = engine.plan.pod.clock, SamplingParams(max_tokens=40, ignore_eos=True)

    async def change() -> None:
        decode = engine.je.tes.ready("decode")
        while not all(te.num_sequences for te in decode):
            await clock.sleep(1000)
        leaving = clock.spawn(engine.drain("decode 0"), name="drain")
        await clock.sleep(1000)
        _burn(engine.je.tes.ready("prefill")[0])
        with pytest.raises(XDeepServeError, match="TE decode 0 was lost before it had left: the engine has"):
            await clock.join(leaving)

    async def main() -> None:
        await engine.start()
        requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(PROMPTS)]
        await clock.spawn(change(), name="change")
        for request in requests:
            with pytest.raises(XDeepServeError, match="the die is on fire"):
                async for _ in request:
                    pass
        await engine.stop()

    run(main())


@pytest.mark.parametrize("way", ["drain", "remove"])
def test_who_is_lost_on_its_way_out_has_not_left(tiny: TinyCheckpoint, way: str) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    clock, params = engine.plan.pod.clock, SamplingParams(max_tokens=30, ignore_eos=True)

    async def change() -> None:
        te = engine.je.tes[0]
        while not te.num_sequences:
            await clock.sleep(1000)
        leaving = clock.spawn(getattr(engine, way)("te"), name=way)
        await clock.sleep(10)
        _burn(te)
        with pytest.raises(XDeepServeError, match="TE te was lost before it had left: the die is on fire"):
            await clock.join(leaving)

    async def main() -> None:
        await engine.start()
        await engine.add_te()
        await engine.settle()
        requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(PROMPTS)]
        await clock.spawn(change(), name="change")
        for request in requests:
            async for _ in request:
                pass
        await engine.settle()
        engine.check_integrity()
        await engine.stop()

    run(main())


@pytest.mark.parametrize("source", ["storage", "peer"])
@pytest.mark.parametrize("after_ns", [0, 3000])
def test_a_load_ends_with_whoever_asked_for_it(tiny: TinyCheckpoint, source: Any, after_ns: int) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    clock = engine.plan.pod.clock

    async def change() -> None:
        asking = clock.spawn(engine.add_te(source=source), name="who asks")
        await clock.sleep(after_ns)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await clock.join(asking)

    async def main() -> None:
        await engine.start()
        before = asyncio.all_tasks()
        await clock.spawn(change(), name="change")
        await engine.stop()
        assert engine.plan.loadings == {}
        assert set(engine.plan.pod.holders) == {0, 1}
        assert not asyncio.all_tasks() - before

    run(main())


# ---- dies and memory that are lost ------------------------------------------------------------------


def test_memory_of_lost_tes_is_free_again(tiny: TinyCheckpoint) -> None:
    """That of their hosts as well; their dies are never given out again."""
    host_blocks = ("cache.num_blocks=8", "cache.num_host_blocks=8")
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2", *host_blocks])
    pod = engine.plan.pod

    async def main() -> None:
        await engine.start()
        host = pod.memories.plans[pod.topology.host(0)].app
        nbytes, num_free = pod.memories.nbytes, host.num_free
        for number in range(3):
            await engine.add_te()
            _burn(engine.je.tes[0])
            while len(engine.lost) == number:
                await asyncio.sleep(0)
            await engine.settle()
            assert pod.lost == set(range(2 * number + 2))
            assert set(pod.holders) == {2 * number + 2, 2 * number + 3}
            assert (pod.memories.nbytes, host.num_free) == (nbytes, num_free)
        await engine.stop()

    run(main())


@pytest.mark.parametrize("is_busy", [False, True])
def test_dies_of_a_guest_that_has_failed_are_not_given_out_again(tiny: TinyCheckpoint, is_busy: bool) -> None:
    with LLM(tiny, overrides=SMALL) as first:
        pod = first.engine.plan.pod
        guest = LLM(tiny, "pd", overrides=PAIRS, beside=first)

        async def fail() -> None:
            requests = [guest.engine.submit([1, 2, 3], SamplingParams(), "one")] if is_busy else []
            _burn(guest.engine.je.tes[0])
            for request in requests:
                with pytest.raises(XDeepServeError, match="the die is on fire"):
                    async for _ in request:
                        pass
            while guest.engine.is_healthy():
                await asyncio.sleep(0)

        guest.run(fail())
        guest.close()
        assert pod.lost == {1}
        assert set(pod.holders) == {0}
        first.add_te()
        first.add_te()
        assert set(pod.holders) == {0, 2, 3}


def test_a_guest_whose_load_fails_gives_its_dies_back(tiny: TinyCheckpoint) -> None:
    def look(done: int, total: int) -> None:
        raise ValueError("who looks on stumbles")

    with LLM(tiny, overrides=SMALL) as first:
        pod = first.engine.plan.pod
        with pytest.raises(ValueError, match="stumbles"):
            LLM(tiny, "pd", overrides=PAIRS, beside=first, progress=look)
        assert set(pod.holders) == set(pod.memories.plans) == {0}


# ---- loads whose source is lost ---------------------------------------------------------------------


@pytest.fixture
def two_shapes(tmp_path: Path) -> str:
    """A pod with two TEs, of which neither has what the other has."""
    path = tmp_path / "shapes.toml"
    path.write_text('kind = "mixed"\n[[te]]\ndies = 2\n[[te]]\ndies = 1\n')
    return str(path)


@pytest.mark.parametrize(("source", "num_peers"), [("auto", 1), ("auto", 2), ("peer", 1), ("peer", 2)])
def test_a_peer_fails_while_another_loads_from_it(
    tiny: TinyCheckpoint, two_shapes: str, source: Any, num_peers: int
) -> None:
    """Another peer takes its place; without one, the next source, if that may be."""
    engine = build_engine(tiny, two_shapes, "int8", overrides=SMALL)
    clock = engine.plan.pod.clock

    async def change() -> str:
        joining = clock.spawn(engine.add_te("both", source), name="add")
        await clock.sleep(2000)
        (load,) = engine.plan.loadings.values()
        assert load.source == "peer"
        _burn(engine.je.tes[0])
        try:
            await clock.join(joining)
        finally:
            came_from = load.source
        return came_from

    async def main() -> None:
        await engine.start()
        for _ in range(num_peers - 1):
            await engine.add_te()
        if (source, num_peers) == ("peer", 1):
            with pytest.raises(
                HardwareError, match="cannot load from a peer: those that were ready are lost"
            ):
                await clock.spawn(change(), name="change")
        else:
            came_from = await clock.spawn(change(), name="change")
            assert came_from == ("host" if num_peers == 1 else "peer")
            joined = engine.plan.tes[-1]
            assert joined.sizes.place.num_dies == 2
        await engine.settle()
        assert list(engine.lost) == ["te"]
        assert set(engine.plan.pod.holders) == {die for te in engine.plan.tes for die in te.every_die}
        await engine.stop()

    run(main())


def test_what_storage_gives_is_compared_though_no_peer_is_ready(
    tiny: TinyCheckpoint, two_shapes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(tiny, two_shapes, "int8", overrides=SMALL)

    def with_a_flipped_bit(tes: Any) -> Any:
        yield from read_weights(tes)
        next(iter(tes[0].memories[1].weights().values())).reshape(-1).view(np.uint8)[7] ^= 1

    async def main() -> None:
        await engine.start()
        await engine.remove("te")
        monkeypatch.setattr(loading, "read_weights", with_a_flipped_bit)
        with pytest.raises(HardwareError, match="weights from storage came with digest"):
            await engine.add_te(source="storage")
        monkeypatch.undo()
        assert await engine.add_te(source="storage") == "te 3"
        await engine.stop()

    run(main())


def test_a_te_that_loads_cannot_leave(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    clock = engine.plan.pod.clock

    async def change() -> None:
        joining = clock.spawn(engine.add_te(source="storage"), name="add")
        await clock.sleep(1000)
        for leave in (engine.drain, engine.remove):
            with pytest.raises(RequestError, match="TE te 1 cannot leave: it is loading"):
                await leave("te 1")
        await clock.join(joining)

    async def main() -> None:
        await engine.start()
        await clock.spawn(change(), name="change")
        with pytest.raises(RequestError, match="source must be one of auto, storage, host, peer, pool"):
            await engine.add_te(source="moon")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="found null"):
            await engine.add_te(source=None)  # type: ignore[arg-type]
        await engine.stop()

    run(main())


# ---- guests whose pod ends --------------------------------------------------------------------------


def test_what_a_guest_is_at_ends_with_its_pod(tiny: TinyCheckpoint) -> None:
    first = LLM(tiny, overrides=SMALL)
    guest, idle = (LLM(tiny, overrides=SMALL, beside=first) for _ in range(2))
    params, ends = SamplingParams(max_tokens=60, ignore_eos=True), []
    began = threading.Event()

    async def meanwhile(engine: Engine) -> None:
        began.set()

    def work() -> None:
        try:
            guest.generate([[1, 2, 3]] * 200, params, meanwhile=meanwhile)
        except XDeepServeError as error:
            ends.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert began.wait(60)
    first.close()
    thread.join(60)
    [end] = ends
    assert end.startswith("the LLM whose pod this one shares has been closed; until then 0 of 200 prompts")
    for each in (guest, idle):
        with pytest.raises(XDeepServeError, match="this LLM is closed"):
            each.generate([[1, 2, 3]], params)
        each.close()


@pytest.mark.parametrize(("given", "param"), [({"clock_seed": 1}, "clock_seed"), ({"trace": True}, "trace")])
def test_what_belongs_to_the_pod_is_no_guests_to_say(
    tiny: TinyCheckpoint, given: dict[str, Any], param: str
) -> None:
    with LLM(tiny, overrides=SMALL) as first:
        with pytest.raises(RequestError, match="belong to a pod") as refusal:
            LLM(tiny, overrides=SMALL, beside=first, **given)
        assert refusal.value.param == param
        assert set(first.engine.plan.pod.holders) == {0}
