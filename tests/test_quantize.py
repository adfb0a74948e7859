"""`xdeepserve quantize` from the command line, and the text it calibrates with."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from xdeepserve.cli import main
from xdeepserve.errors import InputError
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.export import write_checkpoint
from xdeepserve.model.presets import PRESET_DIRECTORY, TinyCheckpoint
from xdeepserve.quant import job
from xdeepserve.quant.calibration import MAX_TOKENS, calibration_sequences
from xdeepserve.quant.method import METHODS
from xdeepserve.quant.part import Part


@pytest.mark.always
def test_quantize_then_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "int8"
    assert main(["quantize", "tiny-random", str(out), "--method", "rtn", "--samples", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "rtn"
    assert result["starved_experts"] == 0
    command = ["generate", "--prompt-ids", "5,6,7", "--max-tokens", "5", "--ignore-eos", "--json"]
    digests = []
    for model in ("tiny-random", str(out)):
        for deployment in ("monolithic", "colocated"):
            assert main([*command, "--model", model, "--deployment", deployment]) == 0
            digests.append(json.loads(capsys.readouterr().out)["digest"])
    # Rounding to the nearest is what the int8 recipe does by itself.
    assert len(set(digests)) == 1


def test_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("\n\n".join(f"Paragraph {i} of a small text about {i * i} things." for i in range(40)))
    args = ["quantize", "tiny-random", str(tmp_path / "int8"), "--method", "gptq", "--samples", "1"]
    assert main([*args, "--calibration", str(text)]) == 0
    out = capsys.readouterr().out
    assert "gptq: " in out
    assert "linear layers, 0 of them kept in float" in out
    assert "(more than asked, for the sake of rare experts)" in out
    assert f"written to {tmp_path / 'int8'}" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["nowhere", "{tmp}/out"],
            "neither a preset (tiny, tiny-random, tiny-r1; for what only takes time deepseek-r1, deepseek-v3",
        ),
        (["tiny-random", "{tmp}"], "exists already"),
        (["tiny-random", "."], ".: exists already; choose a new directory"),
        (["tiny-random", ""], ".: exists already; choose a new directory"),
        (["tiny-random", "/"], "/: exists already; choose a new directory"),
        (["tiny-random", "{tmp}/no/where"], "no such directory to write into"),
        (["tiny-random", "{tmp}/out", "--method", "awq"], "unknown method 'awq': known are rtn"),
        (["tiny-random", "{tmp}/out", "--method", "gptq2"], "(did you mean gptq?)"),
        (["deepseek-r1", "{tmp}/out"], "a configuration without weights, so there is nothing to quantise"),
        (["tiny-random", "{tmp}/out", "--samples", "0"], "--samples must be at least 1, found 0"),
        (["tiny-random", "{tmp}/out", "--calibration", "{tmp}/none"], "none: No such file or directory"),
    ],
)
def test_refusals(args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", *(arg.format(tmp=tmp_path) for arg in args)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["quantize", "tiny-random", str(tmp_path / "out"), "--method", "rtn", "--samples", "2"]
    save = Part.save
    saved: list[int] = []

    def save_one(self: Part, number: int, tensors: dict[str, Array]) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(number)
        save(self, number, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Part, "save", save_one)
        assert main(args) == 130
    error = capsys.readouterr().err
    assert "out was not made, and the same command goes on behind the last finished layer" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.part"]
    first = (tmp_path / "out.part" / "layer-00000.safetensors").stat().st_mtime_ns
    assert main(args) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    whole = next((tmp_path / "out").glob("model-00001-of-*"))
    assert whole.stat().st_mtime_ns == first
    assert whole.stat().st_mode == (tmp_path / "out" / "config.json").stat().st_mode


def never(*args: object, **options: object) -> None:
    raise AssertionError("calibrated before everything else was checked")


def test_all_is_checked_before_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["quantize", "tiny-random", str(tmp_path / "out")]

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Part, "save", interrupt)
        assert main([*args, "--method", "rtn"]) == 130
    capsys.readouterr()
    monkeypatch.setattr(job, "expert_load", never)
    assert main([*args, "--method", "gptq"]) == 2
    error = capsys.readouterr().err
    assert (
        "out.part: holds another unfinished job (with another method and another samples); delete it" in error
    )
    shutil.rmtree(tmp_path / "out.part")
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "notes.txt").write_text("mine")
    assert main(args) == 2
    assert "holds another unfinished job (none that this is)" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out.part")

    def deny(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", deny)
        assert main(args) == 2
    assert "out: cannot be written: Permission denied" in capsys.readouterr().err
    assert main(["quantize", str(PRESET_DIRECTORY / "tiny"), str(PRESET_DIRECTORY / "tiny")]) == 2
    assert "exists already, as the model to quantise; choose a new directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_rounding_needs_no_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is read if it is given, to measure the loss on; the weights are the same."""
    text = tmp_path / "text"
    text.write_text("One paragraph, not a long one, which is enough to measure with.\n\nAnd another.")
    args = ["quantize", "tiny-random", "--method", "rtn", "--json"]
    assert main([*args, str(tmp_path / "measured"), "--calibration", str(text)]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["calibration"]["texts"] == 2
    for name in ("expert_load", "Walk"):
        monkeypatch.setattr(job, name, never)
    assert main([*args, str(tmp_path / "rounded")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calibration"] == {"texts": 0, "tokens": 0}
    assert found["linears"] == measured["linears"]
    errors = found["mean_relative_error"]
    assert 0 < errors.pop("weights") < 1e-3
    assert set(errors.values()) == {None}
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.name != job.REPORT_FILE}
        for name in ("measured", "rounded")
    )
    assert one == other
    assert main(["quantize", "tiny-random", "--method", "rtn", str(tmp_path / "again")]) == 0
    assert "without calibration, which rounding to the nearest does not need" in capsys.readouterr().out


def test_a_method_that_needs_text_is_refused_without(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    assert [name for name, method in METHODS.items() if not method.needs_text] == ["rtn"]
    with pytest.raises(InputError, match="gptq needs calibration text"):
        job.quantize_checkpoint(tiny, tmp_path / "out", METHODS["gptq"], None)


def test_a_model_that_is_not_whole_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "source"
    shutil.copytree(PRESET_DIRECTORY / "tiny", directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    assert main(["quantize", str(directory), str(tmp_path / "out")]) == 2
    assert "1 of 577 tensors are missing: model.layers.2.mlp.experts.7.up" in capsys.readouterr().err
    config = (directory / "config.json").read_text().replace("deepseek_v3", "llama")
    (directory / "config.json").write_text(config)
    assert main(["quantize", str(directory), str(tmp_path / "out")]) == 2
    assert 'model_type "llama" is not supported' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_without_a_tokenizer_token_ids_serve(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(tiny, tmp_path / "bare")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / file).unlink()
    bare = open_checkpoint(tmp_path / "bare")
    sequences = calibration_sequences(bare)
    first, second = sequences(0), sequences(1)
    assert first is not None
    assert first != second
    assert sequences(0) == first
    assert max(first) < bare.config.vocab_size
    with pytest.raises(InputError, match="has no tokenizer"):
        calibration_sequences(bare, tmp_path / "text")


def test_own_text_covers_every_domain_and_is_bounded(tiny: TinyCheckpoint) -> None:
    sequences = calibration_sequences(tiny)
    found = [sequences(i) for i in range(20)]
    assert all(ids is not None and 0 < len(ids) <= MAX_TOKENS for ids in found)
    assert len({tuple(ids) for ids in found if ids}) == 20


def test_a_file_ends(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("One.\n\n\n\nTwo.\nStill two.\n")
    sequences = calibration_sequences(tiny, tmp_path / "text")
    assert sequences(0) is not None
    assert sequences(1) is not None
    assert sequences(2) is None
