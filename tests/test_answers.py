"""Commands answer at once: progress without a terminal, notes, nearest names, summaries, time-only runs."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.model.hf_fixtures import fixtures
from xdeepserve import progress
from xdeepserve.bench.command import OPTIONS, SUITES
from xdeepserve.bench.meanings import MEANINGS
from xdeepserve.bench.report import Row, group_of, print_summary, published
from xdeepserve.cli import main
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.rules import (
    EXCLUDED,
    LOCKSTEP,
    ONLY,
    TIMING_ONLY,
    WITH_TOKENS,
    WITHOUT_EFFECT,
    without_effect,
)
from xdeepserve.engine.deploy.settings import settings
from xdeepserve.errors import InputError
from xdeepserve.hw.gantt import gantt, in_terminal, steps_of
from xdeepserve.hw.trace import Trace
from xdeepserve.verify.matrix import MatrixRow

Capture = pytest.CaptureFixture[str]
R1 = ["--model", "deepseek-r1", "--deployment", "colocated", "--set", "dies=4"]


# ---- while there is no answer yet -------------------------------------------------------------------


@pytest.fixture
def is_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown at once."""
    monkeypatch.setattr(progress, "AFTER_S", 0.02)
    monkeypatch.setattr(progress, "EVERY_S", 0.02)


def test_rows_are_printed_as_they_end(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    row = MatrixRow("int8", "pd", "prefill by TP of 2", "sha256:0", True)

    def verify(checkpoint, names, report, subject, begins, **_) -> list[MatrixRow]:
        assert subject == "plain"
        report(row, 1, 9)
        assert capsys.readouterr().err == "verify: 1/9 int8 pd, prefill by TP of 2: equal\n"
        return [row]

    monkeypatch.setattr("xdeepserve.verify.matrix.verify", verify)
    assert main(["verify"]) == 0


@pytest.mark.usefixtures("is_hasty")
def test_an_interrupted_matrix_says_so_at_once_and_shows_its_rows(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = MatrixRow("int8", "pd", "prefill by TP of 2", "sha256:0", True)

    def verify(checkpoint, names, report, subject, begins, **_) -> list[MatrixRow]:
        begins("int8 pd, prefill by TP of 2", 0, 9)
        report(row, 1, 9)
        begins("int8 colocated, two dies", 1, 9)
        time.sleep(0.1)
        capsys.readouterr()
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            assert "verify: interrupted: ends with what runs now" in capsys.readouterr().err
        return []

    monkeypatch.setattr("xdeepserve.verify.matrix.verify", verify)
    before = signal.getsignal(signal.SIGINT)
    assert main(["verify"]) == 130
    out = capsys.readouterr().out
    assert "interrupted after 1 rows, of which 0 differ" in out
    assert "prefill by TP of 2" in out
    assert "bit-exact: " not in out
    assert main(["verify", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["bit_exact"] is None
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_before_there_is_anything_is_said_too(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("xdeepserve.model.presets.resolve_model", interrupted)
    assert main(["verify"]) == 130
    assert capsys.readouterr().err == "xdeepserve verify: interrupted\n"


def test_every_command_answers_an_interrupt_at_once(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("xdeepserve.model.presets.resolve_model", interrupted)
    assert main(["generate", "--prompt", "hi"]) == 130
    assert capsys.readouterr().err.startswith("xdeepserve generate: interrupted: ends with what runs now")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("is_hasty")
def test_the_row_in_progress_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(checkpoint, names, report, subject, begins, **_) -> list[MatrixRow]:
        begins("int8 colocated, two dies", 1, 9)
        time.sleep(0.2)
        return []

    monkeypatch.setattr("xdeepserve.verify.matrix.verify", verify)
    main(["verify"])
    assert "verify: 1/9 done, now int8 colocated, two dies ... 0 s\n" in capsys.readouterr().err


@pytest.mark.usefixtures("is_hasty")
def test_the_phases_of_quantisation_are_named(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def quantize(*args, progress, **options) -> None:
        progress("calibrating with 64 texts", 5, 6)
        time.sleep(0.2)
        raise InputError("enough")

    monkeypatch.setattr("xdeepserve.quant.job.quantize_checkpoint", quantize)
    assert main(["quantize", "tiny", str(tmp_path / "out")]) == 2
    said = "Quantising tiny: calibrating with 64 texts, 5 of 6 layers done ... 0 s\n"
    assert said in capsys.readouterr().err


def test_unknown_options_lead_to_the_help_of_their_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["serve", "--drafts", "1"])
    assert refused.value.code == 2
    said = "unknown option --drafts (did you mean --faults?) (see xdeepserve serve --help)"
    assert capsys.readouterr().err == f"xdeepserve serve: error: {said}\n"


# ---- names and settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["describe", "--deployment", "colocatd"], "did you mean colocated?"),
        (["describe", "--model", "deepseek-r2"], "did you mean deepseek-r1?"),
        (["verify", "--deployments", "transformless"], "did you mean transformerless?"),
        (["generate", "--prompt", "x", "--model", "deepseek-r1"], "give --timing-only"),
        (["generate", "--prompt", "x", "--timing-only", "--json"], "choose one"),
        (["generate", "--model", "deepseek-r1", "--timing-only", "--prompt", "hi"], "give --prompt-ids"),
        (["serve", "--model", "deepseek-r1", "--port", "0"], "xdeepserve generate --timing-only"),
        (["sweep", "--set", "dies"], "not of the form"),
        (["sweep", "--set", "dies=1", "--set", "dies=2"], "given twice"),
        (["sweep", "--set", "foo=1,2"], "unknown setting foo; xdeepserve settings lists all\n"),
        (["sweep", "--set", "dies=2", "--set", "block_size=1,2"], "the nearest are cache.block_size"),
        (["sweep", "--batch", "0"], "batch must be 1 or more"),
        (["sweep", "--processes", "0"], "--processes must be at least 1"),
    ],
)
def test_refusals_say_what_to_do(capsys: Capture, args: list[str], expected: str) -> None:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1


NO_EFFECT = [
    ("colocated", "scheduler.decode=round-robin", "has no prefill"),
    ("monolithic", "fabric=roce", "has no prefill"),
    ("colocated", "experts.balance_slices=2", "redundant_slots"),
    ("colocated", "pipeline.attention_cores=8", "pipeline.microbatches=2"),
    ("colocated", "cache.load=always", "num_host_blocks"),
    ("colocated", "execution.mtp=naive", "no drafts"),
    ("colocated", "mtp_reuse=true", "second draft"),
    ("colocated", "tp_mode=sp-tp-sp", "set tp"),
    ("colocated", "health.link_probe_s=1", "links from prefill to decode"),
    ("colocated", "cache.peers=true", "one TE"),
    ("monolithic", "scheduler.route=cost", "one TE"),
    ("colocated", "scheduler.job_executors=2", "one TE"),
    ("colocated", "recovery.spare_dies=2", "recovery.failover"),
    ("eaas", "services.process_timeout_ms=50", "no processes"),
]
WITHOUT = [  # with a setting that leaves another one without effect
    ("pd", "scheduler.decode=round-robin", "scheduler.status_period=0.001", "no KV load"),
    ("colocated", "cache.prefix=false", "cache.eviction=lfu", "keeps no blocks"),
    (
        "colocated",
        "experts.redundant_slots=1,experts.balance_interval=0",
        "experts.cold_tokens=3",
        "counts no",
    ),
]


@pytest.mark.parametrize(("deployment", "given", "override", "reason"), WITHOUT)
def test_settings_that_another_leaves_without_effect_are_named(
    deployment: str, given: str, override: str, reason: str
) -> None:
    overrides = [*given.split(","), override]
    ((key, why),) = without_effect(resolve(deployment, overrides), overrides)
    assert override.startswith(key)
    assert reason in why


def test_cores_of_microbatches_that_overlap_by_engines_are_named() -> None:
    """In `transformerless` only prefill has such microbatches, and by default it overlaps by engines."""
    given = ["pipeline.microbatches=2", "pipeline.adaptive=true"]
    ((key, why),) = without_effect(resolve("transformerless", given), given)
    assert (key, "overlap by engines" in why) == ("pipeline.adaptive", True)
    assert without_effect(resolve("pd", given), given) == []


@pytest.mark.parametrize(("deployment", "override", "reason"), NO_EFFECT)
def test_settings_without_effect_are_named(deployment: str, override: str, reason: str) -> None:
    ((key, why),) = without_effect(resolve(deployment, [override]), [override])
    assert override.startswith(key)
    assert reason in why


def test_settings_with_effect_are_not() -> None:
    for deployment, overrides in (
        ("pd", ["scheduler.decode=round-robin", "fabric=roce"]),
        ("pd", ["scheduler.route=cost", "health.link_probe_s=1", "cache.peers=true"]),
        ("colocated", ["scale.most=2", "scheduler.route=cost", "cache.peers=true"]),
        ("colocated", ["pipeline.microbatches=2", "pipeline.attention_cores=8", "dies=4"]),
        ("colocated", ["cache.num_host_blocks=8", "cache.load=always"]),
        ("colocated", ["experts.redundant_slots=1", "experts.balance_slices=2"]),
        ("monolithic", ["mtp=2", "mtp_reuse=true", "execution.mtp=naive"]),
    ):
        assert without_effect(resolve(deployment, overrides), overrides) == []


def test_rules_are_about_settings() -> None:
    keys = [setting.key for setting in settings()]
    tables = (EXCLUDED, LOCKSTEP, TIMING_ONLY, WITH_TOKENS, WITHOUT_EFFECT)
    named = [name for table in tables for rule in table for name in rule.keys]
    for name in [*named, *(row.key for row in ONLY)]:
        assert any(f"{key}.".startswith(f"{name}.") for key in keys), name


def test_a_note_does_not_stop_a_command(capsys: Capture) -> None:
    assert main(["describe", "--deployment", "colocated", "--set", "scheduler.decode=round-robin"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("xdeepserve describe: note: scheduler.decode has no effect here: ")
    assert "DP" in captured.out


def test_generate_says_that_it_rounds(capsys: Capture, tmp_path: Path) -> None:
    directory = str(fixtures()[0].checkpoint_dir(tmp_path))
    assert main(["generate", "--model", directory, "--prompt-ids", "1", "--max-tokens", "1"]) == 0
    assert "is not in INT8: its weights are rounded" in capsys.readouterr().err
    assert main(["generate", "--model", directory, "--prompt-ids", "1", "--precision", "fp32"]) == 0
    assert "rounded" not in capsys.readouterr().err


# ---- models without weights -------------------------------------------------------------------------


def test_a_configuration_is_described_and_timed(capsys: Capture) -> None:
    assert main(["describe", *R1]) == 0
    assert "61 layers" in capsys.readouterr().out
    assert main(["generate", *R1, "--timing-only", "--prompt-ids", "1,2,3", "--max-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert "request 0: 3 prompt tokens, 4 new, TTFT " in out
    assert "TPOT" in out


@pytest.mark.parametrize(
    "command", [["describe"], ["generate", "--timing-only", "--prompt-ids", "1,2,3", "--max-tokens", "2"]]
)
def test_what_takes_time_alone_says_which_precision_is_priced(command: list[str], capsys: Capture) -> None:
    note = "note: --precision fp32 has no effect here: time alone is priced in INT8\n"
    for precision, count in (("fp32", 1), ("int8", 0)):
        assert main([*command, *R1, "--precision", precision]) == 0
        assert capsys.readouterr().err.count(note) == count


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["describe", "--deployment", "colocated"], "experts"),
        (["plan", "--slo-ms", "60", "--dies", "8"], "tok/s"),
        (
            ["sweep", "--deployment", "colocated", "--set", "dies=2,4", "--context", "64", "--batch", "2"],
            "dies=4",
        ),
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_a_config_json_alone_is_enough_to_plan(
    command: list[str], shown: str, is_file: bool, tmp_path: Path, capsys: Capture
) -> None:
    config = fixtures()[0].config | {"quantization_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = tmp_path / "config.json" if is_file else tmp_path
    assert main([*command, "--model", str(model)]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_what_computes_says_that_a_config_has_no_weights(
    command: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fixtures()[0].config))
    ids = ["--prompt-ids", "1"] if command == "generate" else []
    assert main([command, "--model", str(tmp_path), *ids]) == 2
    assert "a configuration without weights" in capsys.readouterr().err


# ---- timelines --------------------------------------------------------------------------------------


def drawn() -> Trace:
    """A die that works on two microbatches and waits."""
    trace = Trace()
    trace.name_node(0, "die 0", 0)
    trace.span(0, "AIC", "Embed", 1000, 1000)
    trace.span(0, "AIC", "MLA", 1000, 41_000, {"microbatch": 0})
    trace.span(0, "AIC", "MLA", 41_000, 81_000, {"microbatch": 1})
    trace.span(0, "XCCL", "A2E 5", 41_000, 81_000, {"microbatch": 0, "waits": True})
    return trace


def test_a_timeline_tells_microbatches_and_waiting() -> None:
    trace = drawn()
    ((start, end),) = steps_of(trace)
    head, computing, waiting = in_terminal(trace, start, end, width=100, colour=False)
    assert "1.0 us" in head
    assert "81.0 us" in head
    first, second = computing.count("0") - 1, computing.count("1")  # the die's number is one of them
    assert first == second > 30
    assert waiting.endswith("··")
    assert all(len(line) <= 100 for line in (head, computing, waiting))
    coloured = in_terminal(trace, start, end, width=100)
    assert "\x1b[38;5;33m█" in coloured[1]
    assert [row.label for row in gantt(trace, start, end)] == ["AIC", "exchange"]


def test_generate_draws_its_last_step(capsys: Capture) -> None:
    args = ["--deployment", "moe-attention", "--prompt", "Once", "--prompt", "Twice", "--max-tokens", "2"]
    assert main(["generate", *args, "--timeline"]) == 0
    drawn, texts = capsys.readouterr().out.split("\n\n", 1)
    title, *lines = drawn.splitlines()
    assert title == "the last step, in virtual time:"
    assert texts.startswith("prompt     Once\n")
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("domain 0 / attention die 0  AIC ") for line in lines)
    assert "0, 1: microbatches" in lines[-1]


def test_a_trace_has_steps_counters_and_says_what_it_leaves_out(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.json"
    args = ["--deployment", "colocated", "--prompt", "Once upon a time", "--max-tokens", "3"]
    assert main(["generate", *args, "--set", "dies=4", "--trace", str(path), "--trace-dies", "2"]) == 0
    assert "2 of 4 dies shown" in capsys.readouterr().err
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event for event in events if event.get("cat") == "steps"]
    assert [step["name"].split(",")[0] for step in steps] == ["prefill", "decode", "decode"]
    assert steps[1]["args"]["decode rows"] == 1
    kernels = [event for event in events if event.get("cat") == "AIC" and event["name"] == "MLAProlog"]
    assert {event["args"]["rows"] for event in kernels} >= {1}
    copies = [event for event in events if event.get("cat") == "MTE2"]
    assert any(event["args"]["bytes"] > 0 for event in copies)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"batch (sequences)", "KV blocks in use", "queue (sequences)"}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name for name in names if "2 of 4 dies shown" in name] == ["job executor (2 of 4 dies shown)"]
    assert any(event["args"].get("waits") for event in events if event["ph"] == "X")


# ---- benches ----------------------------------------------------------------------------------------


def test_every_suite_has_a_help_of_its_own(capsys: Capture) -> None:
    for name, suite in SUITES.items():
        with pytest.raises(SystemExit) as done:
            main(["bench", name, "--help"])
        assert not done.value.code
        text = capsys.readouterr().out
        assert {option for option in OPTIONS if f"--{option}" in text} == {*suite.options}


def test_choices_stand_beside_what_a_paper_says() -> None:
    for name in (
        "pull/dispatch",
        "push/dispatch",
        "carrier/urma",
        "engine/prefill/two-level/p99_ttft",
        "engine/decode/status_period=1s/kv_spread",
        "engine/pd/gain/send-receive_over_dma/layer",
    ):
        assert re.search(r"(xDeepServe|CloudMatrix) \d\.\d", MEANINGS[group_of(name)])


def test_the_summary_has_a_sentence_for_each_group(capsys: Capture) -> None:
    print_summary(
        [
            Row("cm.t6/dispatch/ep=8", 116, "us", "calibrated"),
            Row("cm.t6/dispatch/ep=16", 144.1, "us", "predicted"),
            Row("xds.p2p.small", 21, "us", "predicted"),
        ]
    )
    out = capsys.readouterr().out
    assert "cm.t6: 2 rows, off the published by 5.0 % on average, 10.0 % at most" in out
    assert MEANINGS["cm.t6"] in out
    assert "21.00 us" in out
    assert {group_of(name) for name in published()} <= MEANINGS.keys()
    assert group_of("engine/pd/gain/ub/handoff") == "engine/pd"
