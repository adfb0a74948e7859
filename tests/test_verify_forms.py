"""Rows of the bit-exactness matrix whose answers are JSON of a schema."""

from __future__ import annotations

import json

import jsonschema
import pytest

from xdeepserve.cli import main
from xdeepserve.engine.deploy.resolve import SELF_SIZING
from xdeepserve.llm import digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.tokenizer import load_tokenizer
from xdeepserve.verify.forms import FORM, is_spelt
from xdeepserve.verify.matrix import cases
from xdeepserve.verify.outputs import reference_outputs, run_case


def test_every_deployment_has_a_row_for_each_number_of_drafts() -> None:
    tiny = resolve_model("tiny")
    assert is_spelt(tiny)
    found = {(case.deployment, case.overrides) for case in cases(tiny.config, subject="structured")}
    wanted = {(name, (f"mtp={mtp}",)) for name in SELF_SIZING for mtp in (0, 1, 2)}
    assert wanted <= found


def test_a_model_without_a_tokenizer_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xdeepserve.verify.matrix.is_spelt", lambda checkpoint: False)
    assert main(["verify", "--structured"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("tiny has no tokenizer, which answers with a form need")


def test_rows_with_a_form_are_apart_from_the_others() -> None:
    """Each of both has one digest for each precision."""
    config = resolve_model("tiny").config
    assert all(case.form for case in cases(config, subject="structured"))
    assert not any(case.form for case in cases(config))


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_reference_draws_through_the_same_masks(drafts: int) -> None:
    tiny = resolve_model("tiny")
    variant = f"JSON, {drafts} drafts"
    [case] = [
        case
        for case in cases(tiny.config, subject="structured")
        if (case.deployment, case.variant) == ("monolithic", variant)
    ]
    outputs = run_case(tiny, "int8", case)[0].outputs
    assert digest(outputs) == digest(reference_outputs(tiny, "int8", outputs, "structured"))
    assert digest(outputs) != digest(reference_outputs(tiny, "int8", outputs))
    tokenizer = load_tokenizer(tiny.directory)
    assert tokenizer is not None
    for output in outputs:
        [answer] = output.outputs
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(tokenizer.decode(answer.token_ids)), json.loads(FORM.json))
    tokenizer.close()
    assert {output.outputs[0].finish_reason for output in outputs} & {"stop"}
