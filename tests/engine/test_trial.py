"""A TE that joins serves a dummy request first; until it has answered it gets no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engine.histories import APART, SMALL, TES
from xdeepserve import SamplingParams
from xdeepserve.engine.dp.events import TEChanged
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import HardwareError, XDeepServeError
from xdeepserve.llm import build_engine
from xdeepserve.loop import run
from xdeepserve.model.presets import TinyCheckpoint


@pytest.mark.parametrize(
    ("deployment", "overrides", "role"),
    [
        ("colocated", ("dies=2",), "both"),
        ("colocated", ("dies=2", "lockstep=true"), "both"),
        ("pd", (*TES, "transfer=layer"), "prefill"),
        ("pd", TES, "decode"),
        ("moe-attention", (*APART, "dataflow=true"), "both"),
    ],
)
def test_nobody_else_is_served_before(
    tiny: TinyCheckpoint, deployment: str, overrides: tuple[str, ...], role: Any
) -> None:
    engine = build_engine(tiny, deployment, "int8", overrides=[*SMALL, *overrides])
    told: list[str] = []

    def see(event: Any) -> None:
        if isinstance(event, TEChanged):
            told.append(event.life)
        else:
            told.append("a request")

    name = f"{'te' if role == 'both' else role} 1"

    async def main() -> None:
        await engine.start()
        engine.observe(see)
        assert await engine.add_te(role) == name
        assert told == ["loading", "trying", "ready"], "the dummy is nobody's request"
        te = next(te for te in engine.je.tes if te.sizes.name == name)
        assert te.step_idx > 0, "it has had one"
        assert te.te_shell.is_empty
        assert te.num_sequences == 0
        engine.check_integrity()
        await engine.stop()

    run(main())


async def until_trying(engine: Engine) -> None:
    lives: list[str] = []
    engine.observe(lambda event: lives.append(event.life) if isinstance(event, TEChanged) else None)
    while "trying" not in lives:
        await asyncio.sleep(0)


@pytest.mark.parametrize("fault", ["die", "stop", "caller"])
def test_one_that_does_not_answer_does_not_join(tiny: TinyCheckpoint, fault: str) -> None:
    """Its dies are free again, but for those that are lost; who is served goes on."""
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])

    async def main() -> None:
        await engine.start()
        others = asyncio.all_tasks()
        request = engine.submit([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True), "long")
        joining = asyncio.ensure_future(engine.add_te())
        await until_trying(engine)
        if fault == "die":
            engine.plan.pod.break_die(3)
            with pytest.raises(XDeepServeError, match=r"dispatch: deadline passed .* rank 0 waits for peer"):
                await joining
        elif fault == "caller":
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining
        else:
            await engine.stop()
            with pytest.raises(XDeepServeError, match="no TE of role both can join"):
                await joining
            return
        async for _ in request:
            pass
        await engine.settle()
        assert engine.is_healthy()
        assert engine.lost == {}
        assert [te.sizes.name for te in engine.je.tes] == ["te"]
        assert set(engine.plan.pod.holders) == {0, 1}
        await engine.add_te()
        await engine.stop()
        assert asyncio.all_tasks() <= others

    run(main())


def test_one_with_another_answer_does_not_join(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])

    async def main() -> None:
        await engine.start()
        await engine.add_te()
        trials = engine._group._trials
        assert trials._token is not None
        trials._token += 1
        with pytest.raises(HardwareError, match="te 2 answers its dummy request with token"):
            await engine.add_te()
        assert set(engine.plan.pod.holders) == {0, 1, 2, 3}
        await engine.stop()

    run(main())
