"""`evaluate`: figures that can be checked by hand, and a table."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from xdeepserve.cli import main
from xdeepserve.corpus import chat, sample
from xdeepserve.errors import InputError
from xdeepserve.evals.run import Subject, evaluate
from xdeepserve.evals.samples import SEED, examined, held_out, of_file
from xdeepserve.evals.table import print_table, rows
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.reference import Reference
from xdeepserve.model.tokenizer import load_tokenizer


def test_perplexity_is_the_references() -> None:
    checkpoint = resolve_model("tiny")
    (result,) = evaluate([Subject("fp32", checkpoint, "fp32")], held_out(["code"], 2))
    tokenizer = load_tokenizer(checkpoint.directory)
    assert tokenizer is not None
    losses = []
    reference = Reference(checkpoint, "fp32")
    for one in (sample("code", "held-out", SEED, i) for i in range(2)):
        prompt, answer = tokenizer.encode(one.prompt), tokenizer.encode(one.answer)
        logits = reference.logits([*prompt, *answer])[len(prompt) - 1 : -1].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        losses += (-log_p[np.arange(len(answer)), answer]).tolist()
    assert result.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-9)
    assert result.domains[0].num_tokens == len(losses)
    assert result.agreement is None


def test_a_subject_agrees_with_itself_and_the_table_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = resolve_model("tiny")
    subjects = [Subject("first", checkpoint, "int8"), Subject("second", checkpoint, "int8")]
    first, second = evaluate(subjects, held_out(["arithmetic", "tools"], 3))
    assert second.agreement == 1.0
    assert second.perplexity == first.perplexity
    assert [d.score for d in second.domains] == [d.score for d in first.domains]
    table = dict(rows([first, second]))
    assert table["top-1 agreement, all domains"] == ["-", "100.0 %"]
    assert set(table) >= {"arithmetic: right answers", "tools: valid JSON", "tools: MTP acceptance"}
    tools = first.domains[1].tokens_per_step
    assert tools is not None
    assert tools["one layer, used twice"] < tools["two layers"] <= 3
    assert tools["one layer"] <= 2
    assert table["tools: tokens per step, two layers"] == [f"{tools['two layers']:.3f}"] * 2
    print_table("tiny", [first, second])
    assert "arithmetic: right answers" in capsys.readouterr().out


def test_models_without_mtp_or_skill_are_measured_all_the_same() -> None:
    (result,) = evaluate([Subject("random", resolve_model("tiny-random"), "int8")], held_out(["recall"], 1))
    assert result.perplexity > 100
    assert result.domains[0].score == 0


def test_stories_are_asked_for_by_their_first_words() -> None:
    for i in range(20):
        one, whole = examined("stories", i), sample("stories", "held-out", SEED, i)
        assert one.prompt + one.answer == whole.prompt + whole.answer
        assert len(one.prompt.removeprefix(chat.BEGIN)) > 8


def test_refusals() -> None:
    subject = Subject("int8", resolve_model("tiny-random"), "int8")
    with pytest.raises(InputError, match="unknown domain poems: known are stories"):
        held_out(["poems"])
    with pytest.raises(InputError, match="samples must be at least 1"):
        held_out(num_samples=0)
    short = resolve_model("tiny")
    short.config = msgspec.structs.replace(short.config, max_position_embeddings=64)
    with pytest.raises(
        InputError, match=r"short: the longest sample has \d+ tokens, but the context holds 64 here"
    ):
        evaluate([Subject("short", short, "int8")], held_out(["stories"], 3))
    with pytest.raises(
        InputError, match="tiny has another tokenizer than tiny-random: their tokens cannot be"
    ):
        evaluate([subject, Subject("other", resolve_model("tiny"), "int8")], held_out(num_samples=1))


def test_methods_are_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "xdeepserve.quant.calibration.calibration_sequences",
        lambda checkpoint: lambda i: [(7 * i + j * j) % 300 for j in range(12)],
    )
    args = ["eval", "--model", "tiny-random", "--samples", "1", "--domains", "code", "--precision", "int8"]
    assert main([*args, "--methods", "rtn", "--json"]) == 0
    plain, rtn = json.loads(capsys.readouterr().out)["results"]
    assert rtn["title"] == "int8 rtn"
    assert rtn["agreement"] == 1.0
    assert rtn["perplexity"] == plain["perplexity"]
    assert plain["errors"] is None
    assert 0 < rtn["errors"]["weights"] < rtn["errors"]["both"] < rtn["errors"]["original"] < 1e-2
    assert main([*args, "--outliers", "128", "--json"]) == 0
    (spoiled,) = json.loads(capsys.readouterr().out)["results"]
    assert spoiled["perplexity"] != plain["perplexity"]
    assert main([*args, "--methods", "awq"]) == 2
    assert "unknown method 'awq'" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--samples", "1", "--domains", "code", "--precision", "int8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["samples"], len(result["results"])) == ("tiny", 1, 1)
    assert main(["eval", "--precision", "fp16"]) == 2
    assert "unknown precision 'fp16'" in capsys.readouterr().err


def test_own_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    long = " ".join(f"word{i}" for i in range(130))
    text.write_text(
        f"One two three.\n\nThe cat sat on the mat and slept.\n\n{long}\n\nNot any more of it here."
    )
    first, second, third = of_file(text, 3)
    assert (first.domain, first.prompt, first.answer) == (
        "notes.txt",
        "The cat sat on",
        " the mat and slept.",
    )
    assert second.prompt + second.answer + " " + third.prompt + third.answer == long
    args = ["eval", "--text", str(text), "--samples", "2"]
    assert main([*args, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["domains"][0]["num_samples"] for result in results] == [2, 2]
    assert results[1]["agreement"] > 0.5
    assert main([*args, "--precision", "int8"]) == 0
    out = capsys.readouterr().out
    assert "tiny on 2 samples of notes.txt" in out
    assert "right answers" not in out
    text.write_text("Too short.")
    for file, expected in ((text, "no paragraph has more than 4 words"), (tmp_path, "Is a directory")):
        assert main(["eval", "--text", str(file)]) == 2
        assert f"--text {file}: {expected}" in capsys.readouterr().err
