"""A TE that has loaded serves a dummy request before anybody sends it something (DeepServe 6)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.histories import APART, SMALL, TES
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import TEChanged
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.joining import serve_dummy
from xdeepserve.errors import HardwareError, XDeepServeError
from xdeepserve.hw.clock import Clock
from xdeepserve.llm import build_engine, digest
from xdeepserve.loop import run
from xdeepserve.model.presets import TinyCheckpoint

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PODS: list[tuple[str, tuple[str, ...], Any]] = [
    ("colocated", ("dies=2", "mtp=1"), "both"),
    ("colocated", ("dies=2", "lockstep=true"), "both"),
    ("pd", TES, "prefill"),
    ("pd", (*TES, "execution.decode.overlap=true"), "decode"),
    ("moe-attention", (*APART, "dataflow=true"), "both"),
    ("eaas", ("attention.dies=2", "experts.routed_dies=2"), "both"),
]


@pytest.mark.parametrize(("name", "settings", "role"), PODS, ids=[f"{name} {role}" for name, _, role in PODS])
def test_each_group_has_computed_before_requests_come(
    tiny: TinyCheckpoint, name: str, settings: tuple[str, ...], role: Any
) -> None:
    expected = digest(one_die([[1, 2, 3]] * 6, PARAMS, max_model_len=64))
    with LLM(tiny, name, overrides=[*SMALL, *settings]) as llm:
        added = llm.add_te(role)
        te = next(te for te in llm.engine.je.tes if te.sizes.place.name == added)
        rows = [group.scheduler.stats.rows_per_step for group in te.groups]
        assert [sum(count * num for count, num in each.items()) for each in rows] == [1] * len(te.groups)
        assert not te.num_sequences
        assert digest(llm.generate([[1, 2, 3]] * 6, PARAMS, keep_logits=True)) == expected
        llm.engine.check_integrity()


@pytest.mark.parametrize("how", ["lost", "stalled"])
def test_a_te_that_cannot_serve_it_does_not_join(tiny: TinyCheckpoint, how: str) -> None:
    """Its dies are given back, and the others serve on."""
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    pod, seen = engine.plan.pod, list[list[str]]()

    def hear(event: Any) -> None:
        if isinstance(event, TEChanged) and event == TEChanged("te 1", "ready"):
            seen.extend([[te.name for te in engine.tes()], [te.name for te in engine.health()]])
            if how == "lost":
                pod.break_die(3)
            else:
                pod.dies[3].gate.close(pod.clock.now + 10**13)

    async def main() -> None:
        await engine.start()
        engine.observe(hear)
        with pytest.raises(XDeepServeError):
            await engine.add_te(source="peer")
        assert [te.sizes.place.name for te in engine.je.tes] == ["te"]
        assert seen == [["te", "te 1"]] * 2
        assert {2, 3}.isdisjoint(pod.holders)
        await _answers(engine)
        engine.check_integrity()
        await engine.stop()

    run(main())


def test_what_fails_in_the_moment_of_the_last_answer_is_heard() -> None:
    clock, seqs = Clock(), list[Sequence]()

    async def turn() -> None:
        for seq in seqs:
            seq.on_tokens(seq, [])
        te.on_loss(te, Loss("error", "te 1", (), HardwareError("its loop has ended")))

    te: Any = SimpleNamespace(
        plan=SimpleNamespace(pod=SimpleNamespace(clock=clock)),
        sizes=SimpleNamespace(name="te 1"),
        groups=[
            SimpleNamespace(rank=rank, places=SimpleNamespace(move=lambda seq, _: seqs.append(seq)))
            for rank in range(2)
        ],
        te_shell=SimpleNamespace(adopt=lambda seq, group: None, remove=lambda seq: None),
        wake=lambda: clock.spawn(turn(), name="turn"),
        on_loss=None,
    )

    async def main() -> None:
        with pytest.raises(HardwareError, match="its loop has ended"):
            await clock.spawn(serve_dummy(te, 1000), name="dummy")

    run(main())
    assert len(seqs) == 2
    assert te.on_loss is None


@pytest.mark.parametrize("times", [1, 20])
def test_who_asked_goes_away_during_it(tiny: TinyCheckpoint, times: int) -> None:
    """However often it is cancelled, its dies are given back."""
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    has_started = asyncio.Event()

    def hear(event: Any) -> None:
        if event == TEChanged("te 1", "ready"):
            has_started.set()

    async def main() -> None:
        await engine.start()
        engine.observe(hear)
        adding = asyncio.create_task(engine.add_te(source="peer"))
        await has_started.wait()
        for _ in range(times):
            adding.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await adding
        await _answers(engine)
        assert {2, 3}.isdisjoint(engine.plan.pod.holders)
        assert len(engine.plan.tes) == 1
        engine.check_integrity()
        await engine.stop()

    run(main())


async def _answers(engine: Engine) -> None:
    async for _ in engine.submit([1, 2, 3], PARAMS, "after"):
        pass
    await engine.settle()
