"""Dies that fail, and engines that stop, while TEs come and go: who waits is told, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.engine.histories import APART, SMALL
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.loading import load_ns
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.weight_digests import digests
from xdeepserve.errors import CheckpointError, HardwareError, LostDieError, XDeepServeError
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import build_engine
from xdeepserve.loop import run
from xdeepserve.model.export import write_checkpoint
from xdeepserve.model.presets import TinyCheckpoint

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
TWO_DIES = (*SMALL, "dies=2")


@pytest.mark.parametrize(("way", "leavers"), [("drain", ["te"]), ("remove", ["te", "te 1"])])
def test_an_engine_stops_while_tes_leave(tiny: TinyCheckpoint, way: str, leavers: list[str]) -> None:
    """They go, the others end, and no task is left."""
    engine = build_engine(tiny, "colocated", "int8", overrides=TWO_DIES)

    async def main() -> None:
        await engine.start()
        for _ in range(2):
            await engine.add_te()
        for number in range(6):
            engine.submit([1, 2, 3], PARAMS, str(number))
        while not all(te.num_sequences for te in engine.je.tes):
            await asyncio.sleep(0)
        leaving = [asyncio.ensure_future(getattr(engine, way)(name)) for name in leavers]
        await asyncio.sleep(0)
        assert [te.life for te in engine.je.tes].count("draining") == len(leavers)
        await engine.stop()
        await asyncio.wait_for(asyncio.gather(*leaving), 10)
        assert {te.life for te in engine.je.tes} == {"gone"}
        assert not {te.sizes.place.name for te in engine.je.tes}.intersection(leavers)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


@pytest.mark.parametrize("source", ["peer", "host", "storage", "auto"])
def test_a_die_fails_while_its_weights_are_on_their_way(tiny: TinyCheckpoint, source: Any) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=TWO_DIES)
    pod = engine.plan.pod

    async def change() -> None:
        joining = pod.clock.spawn(engine.add_te(source=source), name="add")
        await pod.clock.sleep(2000)
        assert engine.plan.loadings
        pod.break_die(3)
        with pytest.raises(LostDieError, match=r"^die 3 of te 1 is lost: its memory does not"):
            await pod.clock.join(joining)

    async def main() -> None:
        await engine.start()
        await pod.clock.spawn(change(), name="change")
        assert set(pod.holders) == {0, 1}
        assert engine.is_healthy()
        await engine.add_te(source=source)
        assert set(pod.holders) == {0, 1, 4, 5}
        await engine.stop()

    run(main())


@pytest.mark.parametrize("source", ["peer", "auto"])
def test_a_peer_does_not_answer_while_another_loads_from_it(tiny: TinyCheckpoint, source: Any) -> None:
    """Then the next source is asked, if there may be one."""
    engine = build_engine(tiny, "colocated", "int8", overrides=TWO_DIES)
    pod = engine.plan.pod

    async def change() -> None:
        pod.break_die(3)  # of the only one that is ready
        if source == "auto":
            await engine.add_te(source=source)
        else:
            with pytest.raises(HardwareError, match="from a peer: those that were ready are lost"):
                await engine.add_te(source=source)

    async def main() -> None:
        await engine.start()
        await engine.add_te()
        request = engine.submit([1, 2, 3], PARAMS, "long")
        engine.je.tes[0].drain(moves_out=False)
        await pod.clock.spawn(change(), name="change")
        assert "die 3" in str(engine.lost["te 1"])
        assert [te.life for te in engine.je.tes] == ["draining", "ready"][: 1 + (source == "auto")]
        request.abort()
        await engine.stop()

    run(main())


@pytest.mark.parametrize("lost", ["source", "target"])
def test_a_die_is_lost_at_some_tenth_of_a_fork(tiny: TinyCheckpoint, lost: str) -> None:
    """Another peer gives the weights, or the load ends with a line; no token changes. Each third tenth."""
    (expected,) = one_die([[1, 2, 3]], PARAMS, max_model_len=64)

    async def change(engine: Engine, tenth: int) -> str:
        clock, pod = engine.plan.pod.clock, engine.plan.pod
        lasts = load_ns(engine.plan.tes[0], "peer")
        joining = clock.spawn(engine.add_te(source="peer"), name="add")
        while not engine.plan.loadings:
            await clock.sleep(1)
        (load,) = engine.plan.loadings.values()
        await clock.sleep(lasts * tenth // 10)
        assert engine.plan.loadings, "it has not ended"
        pod.break_die(engine.plan.tes[0].dies[1] if lost == "source" else load.te.dies[1])
        if lost == "target":
            with pytest.raises(LostDieError, match=r"^die 5 of te 2 is lost: its memory does not"):
                await clock.join(joining)
            return ""
        await clock.join(joining)
        return joining.result()

    async def main(engine: Engine, tenth: int) -> list[list[int]]:
        await engine.start()
        await engine.add_te()
        requests = [engine.submit([1, 2, 3], PARAMS, str(number)) for number in range(4)]
        sequences = [request.sequences[0] for request in requests]
        name = await engine.plan.pod.clock.spawn(change(engine, tenth), name="change")
        requests += [engine.submit([1, 2, 3], PARAMS, str(number)) for number in range(4, 8)]
        sequences += [request.sequences[0] for request in requests[4:]]
        for request in requests:
            async for _ in request:
                pass
        await engine.settle()
        engine.check_integrity()
        assert engine.is_healthy()
        ready = [te.sizes.place.name for te in engine.je.tes if te.life == "ready"]
        assert ready == (["te 1", name] if lost == "source" else ["te", "te 1"])
        found = [digests(mem) for _, mem in engine.plan.tes[-1].all_memories]
        assert found == [digests(mem) for _, mem in engine.plan.tes[-2].all_memories]
        await engine.stop()
        return [seq.token_ids[seq.num_prompt :] for seq in sequences]

    for tenth in range(lost == "target", 10, 3):
        engine = build_engine(tiny, "colocated", "int8", overrides=TWO_DIES)
        assert run(main(engine, tenth)) == [list(expected.outputs[0].token_ids)] * 8


def test_the_last_te_leaves_a_guest_whose_others_have_failed(tiny: TinyCheckpoint) -> None:
    """The guest has failed then; its dies are given back once."""
    with LLM(tiny, overrides=SMALL) as first:
        pod = first.engine.plan.pod
        guest = LLM(tiny, "colocated", overrides=TWO_DIES, beside=first)
        guest.add_te()

        async def meanwhile(engine: Engine) -> None:
            while not engine.je.tes[0].num_sequences:
                await pod.clock.sleep(1000)
            leaving = pod.clock.spawn(engine.drain("te"), name="drain")
            await pod.clock.sleep(1000)
            fire = StepFailed(0, HardwareError("the die is on fire"))
            engine.je.tes[1].executors[0].reports.put(fire)
            await pod.clock.join(leaving)

        guest.generate([[1, 2, 3]], PARAMS, meanwhile=meanwhile)
        with pytest.raises(XDeepServeError, match="on fire"):
            guest.generate([[1, 2, 3]], PARAMS)
        first.add_te()
        assert set(pod.holders) == {0, 1}  # a die that the guest had
        guest.close()
        assert set(pod.holders) == {0, 1}
        assert pod.lost == {3, 4}
        first.generate([[1, 2, 3]] * 4, PARAMS)
        assert [te.life for te in first.engine.je.tes] == ["ready", "ready"]


@pytest.mark.parametrize(("kind", "for_us", "dies"), [("lost", None, (6, 7)), ("stalled", 400, (4, 5))])
def test_a_die_that_nobody_has_fails(
    tiny: TinyCheckpoint, kind: Any, for_us: float | None, dies: tuple[int, ...]
) -> None:
    """Nobody gets it any more, if it is lost."""
    settings = (*SMALL, "prefill.dies=2", "decode.count=2", "decode.dies=2")
    with LLM(tiny, "pd", overrides=settings, faults=[Fault(1000, 5, kind, for_us)]) as llm:
        pod = llm.engine.plan.pod
        llm.remove("decode 1")

        async def meanwhile(engine: Engine) -> None:
            await pod.clock.sleep(2_000_000)

        llm.generate([[1, 2, 3]], PARAMS, meanwhile=meanwhile)
        assert pod.lost == ({5} if kind == "lost" else set())
        llm.add_te("decode")
        assert llm.engine.tes()[-1].dies == dies
        llm.generate([[1, 2, 3]] * 6, PARAMS)
        assert not llm.engine.lost


def test_a_checkpoint_is_cut_while_it_serves(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Nobody joins from there any more; a peer has the weights."""
    write_checkpoint(tiny, tmp_path / "model", "f32")
    with LLM(tmp_path / "model", "colocated", overrides=TWO_DIES) as llm:
        (path,) = (tmp_path / "model").glob("*.safetensors")
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=r"^.*safetensors: cut from \d+ to \d+ bytes"):
            llm.add_te(source="storage")
        assert set(llm.engine.plan.pod.holders) == {0, 1}
        llm.add_te(source="peer")
        llm.generate([[1, 2, 3]] * 6, PARAMS)


def test_a_guest_that_is_closed_says_so(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, overrides=SMALL) as first:
        with LLM(tiny, overrides=SMALL, beside=first) as guest:
            pass
        for ask in (lambda: guest.generate([[1, 2, 3]], PARAMS), lambda: guest.drain("te"), guest.add_te):
            with pytest.raises(XDeepServeError, match="this LLM is closed"):
                ask()
        with pytest.raises(XDeepServeError, match="this LLM is closed"):
            LLM(tiny, overrides=SMALL, beside=guest)
        first.generate([[1, 2, 3]], PARAMS)


@pytest.mark.parametrize("way", ["drain", "remove"])
def test_a_te_leaves_whose_die_has_failed_unseen(tiny: TinyCheckpoint, way: str) -> None:
    """It has no work that would find out: it is gone, and the die is nobody's."""
    with LLM(tiny, "colocated", overrides=TWO_DIES) as llm:
        pod = llm.engine.plan.pod
        llm.add_te()

        async def fail(engine: Engine) -> None:
            pod.break_die(3)

        llm.generate([[1, 2, 3]], PARAMS, meanwhile=fail)
        getattr(llm, way)("te 1")
        assert [te.name for te in llm.engine.tes()] == ["te"]
        assert set(pod.holders) == set(pod.memories.plans) & set(range(768)) == {0, 1}
        llm.add_te()
        assert set(pod.holders) == {0, 1, 4, 5}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("eaas", ("attention.dies=2", "experts.routed_dies=2")),
        ("moe-attention", APART),
        ("moe-attention", (*APART, "dataflow=true")),
        ("moe-attention", (*APART, "lockstep=true")),
    ],
)
def test_kernels_of_experts_that_end_before_they_begin_leave_nothing(
    tiny: TinyCheckpoint, name: str, settings: tuple[str, ...]
) -> None:
    async def end_at_once(engine: Engine) -> None:
        for program in engine.je.tes[0].expert_programs:
            for stream in program.start_streams():
                stream.cancel()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with LLM(tiny, name, overrides=[*SMALL, *settings]) as llm:
            llm.generate([[1, 2, 3]], PARAMS, meanwhile=end_at_once)
        gc.collect()
    assert not [str(each.message) for each in seen]
