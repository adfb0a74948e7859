"""Dummy payloads tell a link fault from decode that is saturated, and from a die that is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import TransferError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.model.presets import TinyCheckpoint

PAIR = ("prefill.dies=1", "prefill.tp=1", "decode.dies=2", "max_model_len=64", "checksums=true")
PROMPTS = [[1, 2, 3], [7] * 20]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
OVER = ("dma", "send-receive")
LINK = (0, 2)  # from prefill to a decode die


def fault(kind: str, for_us: float | None = None, at_us: float = 0.0) -> Fault:
    factor = 1e8 if kind == "slow" else None
    return Fault(at_us, link=LINK, plane="ub", kind=kind, for_us=for_us, factor=factor)  # type: ignore[arg-type]


def served(settings: Sequence[str], faults: Sequence[Fault] = ()) -> Told:
    return serve(History("pd", (*PAIR, *settings), PROMPTS, PARAMS, faults=faults))


@pytest.mark.parametrize(
    ("over", "faults", "verdict"),
    [
        *((over, (), "well") for over in OVER),
        ("dma", (fault("slow", 1e6),), "delayed"),
        ("dma", (fault("blocked", 500.0),), "delayed"),
        ("dma", (fault("blocked", 1e9),), "blocked"),
        *((over, (fault("down"),), "blocked") for over in OVER),
        *((over, (Fault(0.0, 2, "lost"),), "lost") for over in OVER),
    ],
)
def test_what_becomes_of_a_dummy_payload(
    tiny: TinyCheckpoint, over: str, faults: tuple[Fault, ...], verdict: str
) -> None:
    seen: list[str] = []

    async def look(engine: Engine) -> None:
        await engine.plan.pod.clock.sleep(10)
        link, _ = engine.je.links
        seen.append(await link.probe(link.tes[0].groups[0]))

    settings = [*PAIR, "decode.count=2", f"transfer_over={over}"]  # so that others go on
    with LLM(tiny, "pd", overrides=settings, faults=faults) as llm:
        llm.generate(PROMPTS, PARAMS, meanwhile=look)
    assert seen == [verdict]


@pytest.mark.parametrize("transfer", ["request", "layer"])
@pytest.mark.parametrize(
    "broken", [fault("flipped"), fault("down", 4_000.0)], ids=["flipped", "down for a while"]
)
def test_what_is_over_is_tried_again(broken: Fault, transfer: str) -> None:
    """There is one link, and a request that it fails goes by it once more, with the same bits."""
    settings = [f"transfer={transfer}"]
    again = served(settings, [broken])
    assert again.digest == served(settings).digest
    assert {te.links for te in again.stats.health} <= {(), ("decode 0: well",), ("prefill 0: well",)}


def test_health_names_the_link(tiny: TinyCheckpoint) -> None:
    """Decode has one die, the one that the link leads to."""
    settings = [*PAIR, "decode.dies=1"]
    down = Fault(0.0, link=(0, 1), plane="ub", kind="down")
    with LLM(tiny, "pd", overrides=settings, faults=[down]) as llm:
        with pytest.raises(TransferError, match="no decode TE can be reached from prefill 0"):
            llm.generate(PROMPTS, PARAMS)
        health = {te.name: te.links for te in llm.engine.health()}
    assert health == {"prefill 0": ("decode 0: blocked",), "decode 0": ("prefill 0: blocked",)}
