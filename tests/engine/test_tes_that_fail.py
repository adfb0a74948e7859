"""TEs that fail at an awkward moment: every request still ends with the tokens of one die, and every TE that
leaves is gone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.histories import SMALL
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.job.pd_transfer import PDTransfer, Stage
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import HardwareError
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
    return [transfer for transfer in engine.je._transfers.values() if transfer.stage == stage]


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
            assert engine._requests, "no source was ever late"
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
            assert engine._requests, "no layers were ever on their way"
            await clock.sleep(1000)
        prefill, decode = transfers[0].link.tes
        leaving = clock.spawn(getattr(engine, way)(decode.sizes.name), name=way)
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
            old = engine.je.ready(role)[0]  # type: ignore[arg-type]
            await engine.add_te(role)  # type: ignore[arg-type]
            await engine.remove(old.sizes.name)
        assert list(engine.je.links._links) == engine.je.ready("prefill")
        assert next(iter(engine.je.links._links.values())).keys() == set(engine.je.ready("decode"))
        await engine.stop()

    run(main())
