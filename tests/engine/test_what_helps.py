"""The error of a lost die names settings, and with each of them requests go on."""

from __future__ import annotations

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.faults import Fault

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
BASE = ["max_model_len=64", "health.suspect_s=0.01", "health.lost_s=0.05"]
PD = ["prefill.dies=2", "decode.dies=2"]


def tokens(deployment: str, settings: list[str], *faults: Fault) -> list[int]:
    with LLM("tiny-random", deployment, "int8", overrides=[*BASE, *settings], faults=list(faults)) as llm:
        (output,) = llm.generate([[1, 2, 3]], PARAMS)
        return list(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("deployment", "settings", "die", "ways"),
    [
        ("monolithic", [], 0, ["recovery.failover=true and recovery.spare_dies=1"]),
        ("colocated", ["dies=4"], 1, ["recovery.failover=true"]),
        ("pd", PD, 3, ["recovery.failover=true", "decode.count=2"]),
        ("pd", PD, 0, ["recovery.failover=true", "prefill.count=2"]),
        ("eaas", [], 5, ["experts.copies=1", "recovery.failover=true"]),
    ],
)
def test_what_is_named_would_have_helped(
    deployment: str, settings: list[str], die: int, ways: list[str]
) -> None:
    fault = Fault(300.0, die, "lost")
    with pytest.raises(XDeepServeError) as caught:
        tokens(deployment, settings, fault)
    _, _, said = str(caught.value).rpartition("; requests would have gone on with ")
    said, _, _ = said.partition("; until then ")
    assert said.split(", or with ") == ways
    expected = tokens(deployment, settings)
    for way in ways:
        assert tokens(deployment, [*settings, *way.split(" and ")], fault) == expected, way


def test_failover_that_finds_no_dies_names_how_many_it_lacks() -> None:
    with pytest.raises(XDeepServeError, match=r"recovery\.spare_dies=1 would do"):
        tokens("colocated", ["dies=1", "recovery.failover=true"], Fault(300.0, 0, "lost"))
