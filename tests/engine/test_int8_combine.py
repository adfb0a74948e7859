"""`combine=int8`: experts' outputs are INT8 on their way back (xDeepServe 4.7): digests of their own."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.engine.lockstep import GREEDY, PROMPTS
from xdeepserve.comm.exchange.answers import AnswerFormat
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.ways.arithmetic import quantize_rows
from xdeepserve.errors import DeploymentError
from xdeepserve.history import History, serve
from xdeepserve.llm import LLM, build_engine
from xdeepserve.model import kernels as k
from xdeepserve.model.presets import TinyCheckpoint, resolve_model
from xdeepserve.model.reference import Reference, rounded_to_int8
from xdeepserve.verify.outputs import in_the_arithmetic_of


def test_a_row_is_rounded_once_and_as_the_reference_does() -> None:
    rng = np.random.default_rng(1)
    answers = (rng.standard_normal((50, 37)) * 10.0 ** rng.integers(-6, 6, (50, 1))).astype(np.float32)
    answers[7] = 0
    form = AnswerFormat.of(37, True, True)
    rows = form.pack(answers, 64, quantize_rows)
    assert rows.shape == (50, 64)
    assert not rows[:, form.nbytes :].any()
    np.testing.assert_array_equal(form.unpack(rows), rounded_to_int8(answers))
    in_place = answers.copy()
    k.round_to_int8(in_place)
    np.testing.assert_array_equal(in_place, rounded_to_int8(answers))
    # Twice would be another number, so nobody may round what has travelled.
    again = rounded_to_int8(rounded_to_int8(answers))
    np.testing.assert_allclose(again, form.unpack(rows), rtol=1e-5)


def served(deployment: str, *settings: str) -> str:
    overrides = ("max_model_len=64", "combine=int8", *settings)
    return serve(History(deployment, overrides, PROMPTS[:3], GREEDY)).digest


def test_its_logits_are_the_references_and_no_others() -> None:
    tokens = PROMPTS[4]
    with LLM("tiny-random", "colocated", overrides=["dies=3", "combine=int8"]) as llm:
        found = llm.logits(tokens)
    checkpoint = resolve_model("tiny-random")
    expected = Reference(in_the_arithmetic_of("int8-combine", checkpoint), "int8").logits(tokens)
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(expected, Reference(checkpoint, "int8").logits(tokens))


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("deployment", "settings"),
    [
        ("colocated", ("dies=4", "mtp=2")),
        ("colocated", ("dies=4", "exchange=push")),
        ("colocated", ("dies=5", "experts.shared_dies=2", "exchange=push")),
        ("colocated", ("dies=4", "tp=2")),
        ("colocated", ("dies=4", "pipeline.microbatches=2")),
        ("pd", ()),
        ("moe-attention", ("mtp=1",)),
        ("moe-attention", ("exchange=push",)),
        ("moe-attention", ("lockstep=true", "threads=2")),
        ("colocated", ("dies=4", "lockstep=true", "mtp=2")),
        ("colocated", ("dies=4", "lockstep=true", "exchange=push")),
        ("monolithic", ("lockstep=true",)),
        ("moe-attention", ("dataflow=true",)),
        ("transformerless", ()),
    ],
    ids=str,
)
def test_every_deployment_has_one_dies_digest(deployment: str, settings: tuple[str, ...]) -> None:
    assert served(deployment, *settings) == served("monolithic")


def test_what_it_is_not_for_is_refused_in_one_line() -> None:
    with pytest.raises(DeploymentError, match="combine must be one of bf16, int8, found 'fp8'"):
        resolve("colocated", ["combine=fp8"])
    with pytest.raises(DeploymentError, match="combine=int8 is for precision int8; in fp32 nothing that"):
        build_engine("tiny-random", resolve("colocated", ["combine=int8"]), "fp32")


def test_what_takes_time_alone_is_refused_alike() -> None:
    deployment = resolve("colocated", ["combine=int8"])
    with pytest.raises(DeploymentError, match="combine=int8 is for precision int8; in fp32 nothing that"):
        build_engine("deepseek-r1", deployment, "fp32", timing_only=True)


def test_large_models_are_in_lockstep_with_it() -> None:
    large = msgspec.structs.replace(TinyCheckpoint().config, vocab_size=1_000_000)
    assert fit(resolve("colocated", ["combine=int8"]), large)[0].walk.is_lockstep
