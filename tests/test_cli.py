"""The command line, in its own process: the contract of its JSON, and one clear line for each refusal."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.hf_fixtures import fixtures
from tests.samples import check_all
from xdeepserve.cli import main
from xdeepserve.cli.options import note_tokenizer
from xdeepserve.engine.deploy.settings import settings
from xdeepserve.model.checkpoint import SINGLE_FILE
from xdeepserve.model.presets import PRESET_DIRECTORY, resolve_model
from xdeepserve.model.tokenizer import load_tokenizer
from xdeepserve.verify.matrix import MatrixRow, cases
from xdeepserve.verify.outputs import run_case


def run(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "xdeepserve", *args], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    return done


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must exit with 2 and one line on stderr; that line."""
    try:
        code = main(args)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


def generated(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["generate", "--json", *args]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_generate_json_is_one_object_and_nothing_else() -> None:
    done = run("generate", "--prompt", "Hello", "--prompt-ids", "1,2,3", "--max-tokens", "4", "--json")
    result = json.loads(done.stdout)
    assert list(result) == ["model", "deployment", "precision", "outputs", "digest"]
    assert [list(output) for output in result["outputs"]] == [
        ["prompt_token_ids", "token_ids", "text", "finish_reason"]
    ] * 2
    assert result["outputs"][1]["prompt_token_ids"] == [1, 2, 3]
    assert (result["model"], result["deployment"], result["precision"]) == ("tiny", "monolithic", "int8")
    assert result["digest"].startswith("sha256:")
    progress = re.compile(r"(Loading|Starting|Generating with) tiny")  # where it takes its time
    assert all(progress.match(line) for line in done.stderr.splitlines())


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_one_digest_for_every_pod(capsys: pytest.CaptureFixture[str], precision: str) -> None:
    base = ["--precision", precision, "--prompt-ids", "5,6,7", "--max-tokens", "6", "--temperature", "0.7"]
    ways = [
        [],
        ["--set", "threads=2"],
        ["--mtp", "1"],
        ["--deployment", "colocated", "--set", "dies=1"],
        ["--deployment", "colocated", "--set", "dies=8"],
    ]
    assert len({generated(capsys, *base, *way)["digest"] for way in ways}) == 1


def test_generate_for_people_and_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert main(["generate", "--prompt", "Hi", "--max-tokens", "3", "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "prompt     Hi" in out
    assert "3 tokens in" in out
    assert json.loads(trace.read_text())["traceEvents"]


BAD_GENERATE = [
    (["--prompt", "x", "--model", "/no/such/dir"], "/no/such/dir"),
    (["--prompt", "x", "--deployment", "nowhere"], "unknown deployment 'nowhere'"),
    (["--prompt", "x", "--precision", "fp8"], "fp8"),
    ([], "no prompt"),
    (["--prompt", ""], "empty"),
    (["--prompt", "\udcff"], "Unicode"),
    (["--prompt", "x", "--model", ""], "neither a preset"),
    (["--prompt-ids", ""], "empty"),
    (["--prompt-ids", "1,two"], "1,two"),
    (["--prompt-ids", "99999"], "out of range"),
    (["--prompt-ids", "-1"], "out of range"),
    (["--prompt-ids", ",".join(["1"] * 2048)], "context"),
    (["--prompt", "x", "--max-tokens", "0"], "--max-tokens must"),
    (["--prompt", "x", "--max-tokens", "-3"], "--max-tokens must"),
    (["--prompt", "x", "--temperature", "-1"], "--temperature must"),
    (["--prompt", "x", "--temperature", "nan"], "--temperature must"),
    (["--prompt", "x", "--top-p", "0"], "--top-p must"),
    (["--prompt", "x", "--top-k", "-2"], "--top-k must"),
    (["--prompt", "x", "--mtp", "7"], "mtp"),
    (["--prompt", "x", "--set", "dies"], "key=value"),
    (["--prompt", "x", "--set", "colour=red"], "colour"),
    (["--prompt", "x", "--deployment", "colocated", "--set", "dies=99"], "routed experts"),
    (["--prompt", "x", "--set", "hardware.hbm_mb=1"], "node 0 needs"),
    (["--prompt", "x", "--trace", "/no/such/dir/t.json"], "cannot be written"),
    (["--prompt", "x", "--trace-dies", "-1"], "--trace-dies must be 0 (all) or more, found -1"),
    (["--prompt", "x", "--trace-dies", "some"], "--trace-dies must be a whole number, found 'some'"),
    (["--prompt", "x", "--timeline", "--json"], "--json prints one object, and --timeline draws"),
    (["--prompt", "x", "--wrong"], "--wrong"),
]


@pytest.mark.parametrize(("args", "expected"), BAD_GENERATE, ids=[str(i) for i in range(len(BAD_GENERATE))])
def test_bad_generate(capsys: pytest.CaptureFixture[str], args: list[str], expected: str) -> None:
    assert expected in refused(capsys, "generate", *args)


def test_bad_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["comm"], ["superpod", "--steps"]):
        assert "--trace belongs to bench superpod" in refused(capsys, "bench", *args, "--trace", "t.json")
    assert "command" in refused(capsys)
    assert "frobnicate" in refused(capsys, "frobnicate")
    assert "unknown deployment 'x'" in refused(capsys, "verify", "--deployments", "x")
    assert "unknown deployment" in refused(capsys, "describe", "--deployment", "x")
    assert "port" in refused(capsys, "serve", "--port", "99999")
    for more in (["--port", "8000"], ["--host", "127.0.0.1"]):
        assert "--uds is instead of --host and --port" in refused(capsys, "serve", "--uds", "s", *more)
    assert "attention is no setting of monolithic, which is one die" in refused(
        capsys, "describe", "--set", "attention.dies=2"
    )


def damaged(tmp_path: Path, how: str) -> Path:
    """A small checkpoint, damaged in one way."""
    fixture = next(f for f in fixtures() if f.num_shards == 1)
    directory = fixture.checkpoint_dir(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    weights = directory / SINGLE_FILE
    if how == "no config":
        (directory / "config.json").unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "not json":
        (directory / "config.json").write_text("{")
    elif how == "model type":
        (directory / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    elif how == "shape":
        (directory / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    elif how == "missing":
        more = config["num_hidden_layers"] + 1
        (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": more}))
    return directory


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("no config", "config.json"),
        ("no weights", "without weights: give --timing-only"),
        ("truncated", "safetensors"),
        ("not json", "JSON"),
        ("model type", "llama"),
        ("shape", "model.embed_tokens.weight"),
        ("missing", "missing"),
    ],
)
def test_damaged_checkpoints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str, expected: str
) -> None:
    line = refused(capsys, "generate", "--model", str(damaged(tmp_path, how)), "--prompt-ids", "1")
    assert expected in line


def test_text_for_a_checkpoint_without_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = str(fixtures()[0].checkpoint_dir(tmp_path))
    assert "tokenizer" in refused(capsys, "generate", "--model", directory, "--prompt", "x")
    assert generated(capsys, "--model", directory, "--prompt-ids", "1")["outputs"][0]["text"] == ""


@pytest.mark.always
@pytest.mark.parametrize("how", [["--quick"], pytest.param([], marks=pytest.mark.campaign)])
def test_verify_json_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    assert main(["verify", *how, "--deployments", "monolithic", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bit_exact"] is True
    assert {row["precision"] for row in result["rows"]} == {"fp32", "int8"}
    assert len({row["digest"] for row in result["rows"]}) == 2

    # One wrong bit anywhere must show: let an expert's output be off by one unit in the last place.
    from xdeepserve.step import linear

    gather = linear.k.scatter_rows

    def off_by_one_bit(out, x, index) -> None:
        gather(out, x, index)
        out.view("int32")[0, 0] ^= 1

    monkeypatch.setattr(linear.k, "scatter_rows", off_by_one_bit)
    assert main(["verify", *how, "--deployments", "monolithic", "--precision", "fp32", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bit_exact"] is False


def test_verify_in_a_hurry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows there are; what `verify --quick` finds, the documents' tests look at."""
    (case, *_) = cases(resolve_model("tiny-random").config)
    served = run_case(resolve_model("tiny-random"), "int8", case)
    monkeypatch.setattr("xdeepserve.verify.matrix.run_case", lambda *_: served)
    args = [
        "verify",
        "--quick",
        "--precision",
        "int8",
        "--deployments",
        "monolithic,pd",
        "colocated",
        "--json",
    ]
    assert main([*args, "--model", "tiny-random"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["precision"], row["deployment"]) for row in result["rows"]] == [
        ("int8", name) for name in ("reference", "monolithic", "colocated", "pd")
    ]
    assert "combine=int8 is for int8" in refused(capsys, "verify", "--int8-combine", "--precision", "fp32")


def test_what_clients_cannot_ask_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(PRESET_DIRECTORY / "tiny")
    assert tokenizer is not None
    args = argparse.Namespace(command="serve", model="m")
    note_tokenizer(args, tokenizer)
    assert capsys.readouterr().err == ""
    note_tokenizer(args, None)
    assert "m has no tokenizer.json" in capsys.readouterr().err
    shutil.copy(PRESET_DIRECTORY / "tiny" / "tokenizer.json", tmp_path)
    note_tokenizer(args, load_tokenizer(tmp_path))
    assert "m has no chat template" in capsys.readouterr().err


def test_verify_tells_which_deployments_a_model_has_no_rows_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "xdeepserve.verify.matrix.verify", lambda *_, **__: [MatrixRow("int8", "pd", "x", "sha256:0", True)]
    )
    assert main(["verify", "--deployments", "all"]) == 0
    reason = "not for this model: experts.routed_dies=256 is more than the model's 32 routed experts"
    reason += "; set experts.routed_dies=32, or take a model with 256 or more"
    assert f"\nsuperpod: {reason}\n" in capsys.readouterr().out
    assert main(["verify", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["left_out"] == [{"deployment": "superpod", "reason": reason}]
    assert main(["verify", "--deployments", "pd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == []


def test_verify_fails_for_a_row_that_has_not_shown_what_it_promises(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = MatrixRow("int8", "pd", "x", "sha256:0", True, "1 of 2 reconfigurations")
    monkeypatch.setattr("xdeepserve.verify.matrix.verify", lambda *_, **__: [row])
    assert main(["verify", "--deployments", "pd"]) == 1
    assert "\nnot shown: int8 pd, x: equal, but 1 of 2 reconfigurations\n" in capsys.readouterr().out
    assert main(["verify", "--deployments", "pd", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"][0]["missing"] == "1 of 2 reconfigurations"


def test_describe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "--deployment", "colocated", "--set", "dies=4"]) == 0
    out = capsys.readouterr().out
    assert "DP4 + EP4" in out
    assert "24..31" in out
    assert main(["describe", "--deployment", "colocated", "--set", "tp=4"]) == 0
    out = capsys.readouterr().out
    assert "DP2 x TP4 + EP8" in out
    assert "6..7" in out  # heads


def test_describe_tells_of_vacant_seats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "--deployment", "eaas", "--set", "experts.vacancies=1"]) == 0
    out = capsys.readouterr().out
    assert "4 attention dies, 4 dies of routed experts, 1 of the shared one" in out
    assert "vacancies   die 8 is kept for an expert server that may join" in out
    assert "copies" not in out


def test_what_does_not_fit_is_said_where_time_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "--model", "deepseek-r1"]) == 0
    assert "for 1 die; " in (out := capsys.readouterr().out)
    assert out.endswith("time only; it does not fit\n")
    timed = [
        "generate",
        "--model",
        "deepseek-r1",
        "--timing-only",
        "--prompt-ids",
        "1,2",
        "--max-tokens",
        "2",
    ]
    assert main(timed) == 0
    said = (
        "note: weights and KV of the fullest die take 630.4 GiB, and it has 64: this takes the time of dies"
    )
    assert capsys.readouterr().err.count(said) == 1
    assert main([*timed, "--deployment", "colocated", "--set", "dies=64"]) == 0
    assert "note: " not in capsys.readouterr().err


def test_a_model_without_weights_is_offered_where_it_has_a_use(capsys: pytest.CaptureFixture[str]) -> None:
    for command, offers in (("generate", True), ("describe", True), ("serve", False)):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert ("deepseek-r1" in capsys.readouterr().out) == offers


def test_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    everything = capsys.readouterr().out
    assert all(setting.key in everything for setting in settings())
    assert main(["settings", "cache.preemption"]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == "cache.preemption"
    assert words[-3:] == ["[recompute|swap;", "default", "recompute]"]
    assert main(["settings", "execution.decode"]) == 0
    assert len(re.findall(r"^  execution\.decode\.", capsys.readouterr().out, re.MULTILINE)) == 6
    assert "unknown setting cash.load; the nearest are cache.load" in refused(capsys, "settings", "cash.load")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["generat", "--prompt", "x"], "did you mean generate?"),
        (["bench", "superpodd"], "did you mean superpod?"),
        (["generate", "--prompt", "x", "--precision", "int9"], "did you mean int8?"),
    ],
)
def test_misspelt_choices(capsys: pytest.CaptureFixture[str], args: list[str], expected: str) -> None:
    assert expected in refused(capsys, *args)


@pytest.mark.parametrize("line", ["import xdeepserve", "from xdeepserve.cli import main; main(['settings'])"])
def test_what_needs_no_model_is_light(line: str) -> None:
    code = f"import sys; {line}; assert not {{'numba', 'numpy', 'aiohttp'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.always
def test_demo() -> None:
    out = run("demo").stdout
    assert "bit-exact: yes" in out
    for promised in ("47 + 49 = 96", "53 - 26 = 27", "        return x * 14", '{"city": "Paris", "day":'):
        assert promised in out
    check_all("xdeepserve demo", out)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--top-p", "0.5", "--seed", "3"],
            "no effect at temperature 0, where nothing is drawn: --top-p, --seed",
        ),
        (["--trace-dies", "3"], "no effect without --trace or --timeline: --trace-dies"),
        ([], ""),
        (["--temperature", "1", "--seed", "3"], ""),
    ],
)
def test_options_without_effect_are_noted(
    capsys: pytest.CaptureFixture[str], args: list[str], expected: str
) -> None:
    command = [
        "generate",
        "--model",
        "tiny-random",
        "--prompt-ids",
        "5,6,7",
        "--max-tokens",
        "2",
        "--ignore-eos",
    ]
    assert main([*command, *args]) == 0
    noted = [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
    assert len(noted) == bool(expected)
    assert all(expected in line for line in noted)
