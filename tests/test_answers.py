"""Commands answer at once: progress without a terminal, notes, nearest names, summaries, time-only runs."""

import csv
import io
import json
import signal
import time
from pathlib import Path

import numba
import pytest

from tests.model.hf_fixtures import fixtures
from xdeepserve.bench.meanings import MEANINGS
from xdeepserve.bench.report import Row, group_of, print_summary, published
from xdeepserve.bench.sweep import Point, SweepResult, bound_of, measure, points, sweep
from xdeepserve.cli import main, status
from xdeepserve.cli.bench import OPTIONS, SUITES
from xdeepserve.cli.sweep import Labels
from xdeepserve.engine.deploy.no_effect import RULES, without_effect
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.settings import settings
from xdeepserve.errors import DeploymentError, InputError
from xdeepserve.hw.gantt import gantt, in_terminal, steps_of
from xdeepserve.hw.trace import Trace
from xdeepserve.verify.matrix import MatrixRow

Capture = pytest.CaptureFixture[str]
R1 = ["--model", "deepseek-r1", "--deployment", "colocated", "--set", "dies=4"]


# ---- while there is no answer yet -------------------------------------------------------------------


def test_work_says_where_it_stands_without_a_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "EVERY_S", 0.02)
    with status.working("Loading") as waiting:
        waiting.progress(1, 4)
        waiting.kernels += ["gemm", "mla"]
        waiting.is_compiling = True
        time.sleep(0.2)
    assert "Loading: 25 %, compiling kernels, once (2: mla) ... 0 s\n" in capsys.readouterr().err
    with status.working("Loading", is_quiet=True):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_kernels_are_named_while_they_are_compiled() -> None:
    lines = []

    def look(x):
        raise NotImplementedError

    @numba.extending.overload(look)  # while `half` is compiled
    def looking(x):
        lines.append(waiting.line())
        return lambda x: x

    @numba.njit
    def half(x):
        return look(x) / 2

    with status.working("Loading", is_quiet=True) as waiting:
        assert half(3) == 1.5
        lines.append(waiting.line())
    assert "compiling kernels, once (1: half)" in lines[0]
    assert "compiling" not in lines[-1]


def test_rows_are_printed_as_they_end(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    row = MatrixRow("int8", "pd", "prefill by TP of 2", "sha256:0", True)

    def verify(checkpoint, names, report, subject, begins, **_) -> list[MatrixRow]:
        assert subject == "plain"
        report(row, 1, 9)
        assert capsys.readouterr().err == "verify: 1/9 int8 pd, prefill by TP of 2: equal\n"
        return [row]

    monkeypatch.setattr("xdeepserve.verify.matrix.verify", verify)
    assert main(["verify"]) == 0


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
    monkeypatch.setattr(status, "EVERY_S", 0.02)
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


def test_the_row_in_progress_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(checkpoint, names, report, subject, begins, **_) -> list[MatrixRow]:
        begins("int8 colocated, two dies", 1, 9)
        time.sleep(0.2)
        return []

    monkeypatch.setattr("xdeepserve.verify.matrix.verify", verify)
    monkeypatch.setattr(status, "EVERY_S", 0.02)
    main(["verify"])
    assert "verify: 1/9 done, now int8 colocated, two dies ... 0 s\n" in capsys.readouterr().err


def test_the_phases_of_quantisation_are_named(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def quantize(*args, progress, **options) -> None:
        progress("calibrating with 64 texts", 5, 6)
        time.sleep(0.2)
        raise InputError("enough")

    monkeypatch.setattr("xdeepserve.model.quant.job.quantize_checkpoint", quantize)
    monkeypatch.setattr(status, "EVERY_S", 0.02)
    assert main(["quantize", "tiny", str(tmp_path / "out")]) == 2
    said = "Quantising tiny: calibrating with 64 texts, 5 of 6 layers done ... 0 s\n"
    assert said in capsys.readouterr().err


def test_unknown_options_lead_to_the_help_of_their_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["serve", "--drafts", "1"])
    assert refused.value.code == 2
    said = "unrecognized arguments: --drafts 1 (see xdeepserve serve --help)"
    assert capsys.readouterr().err == f"xdeepserve serve: error: {said}\n"


def test_kernels_that_are_compiled_are_named() -> None:
    from numba import njit

    with status.working("Loading", is_quiet=True) as waiting:
        njit(lambda x: x + 1)(1)
    assert len(waiting.kernels) == 1


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
        (["sweep", "--set", "foo=1,2"], "unknown setting foo\n"),
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
]


@pytest.mark.parametrize(("deployment", "override", "reason"), NO_EFFECT)
def test_settings_without_effect_are_named(deployment: str, override: str, reason: str) -> None:
    ((key, why),) = without_effect(resolve(deployment, [override]), [override])
    assert override.startswith(key)
    assert reason in why


def test_settings_with_effect_are_not() -> None:
    for deployment, overrides in (
        ("pd", ["scheduler.decode=round-robin", "fabric=roce"]),
        ("colocated", ["pipeline.microbatches=2", "pipeline.attention_cores=8", "dies=4"]),
        ("colocated", ["cache.num_host_blocks=8", "cache.load=always"]),
        ("colocated", ["experts.redundant_slots=1", "experts.balance_slices=2"]),
        ("monolithic", ["mtp=2", "mtp_reuse=true", "execution.mtp=naive"]),
    ):
        assert without_effect(resolve(deployment, overrides), overrides) == []
    keys = {setting.key for setting in settings()}
    assert all(any(f"{key}.".startswith(f"{name}.") for key in keys) for name in RULES)


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


# ---- sweep ------------------------------------------------------------------------------------------


def test_a_sweep_has_every_combination(tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "sweep.csv"
    args = ["--model", "tiny-r1", "--deployment", "colocated", "--set", "dies=2,999", "--batch", "2,4"]
    args += ["--context", "256", "--processes", "1"]
    assert main(["sweep", *args, "--csv", str(table)]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("sweep: ") == 4
    assert "tiny-r1, colocated: context 256\n" in captured.out
    assert captured.out.count("a SuperPod has 768 dies") == 1
    assert "refused: dies=999, batch 2; dies=999, batch 4: " in captured.out
    assert captured.err.count("a SuperPod has 768 dies") == 1
    assert "dies=999, batch 4: refused for the same reason\n" in captured.err
    assert "most tokens per second of a chip: dies=2, batch 4\n" in captured.out
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [(row["dies"], row["batch"]) for row in rows][:2] == [("2", "2"), ("2", "4")]
    assert float(rows[0]["tpot_ms"]) > 0
    assert "a SuperPod has 768 dies" in rows[2]["refusal"]
    assert rows[0]["dies_in_all"] == "2"


def test_what_a_sweep_says_adds_up() -> None:
    (point,) = points("tiny-r1", "colocated", {"dies": ["2"], "mtp": ["1"]}, [4], [256], acceptance=0.5)
    assert point == Point("tiny-r1", "colocated", ("dies=2", "mtp=1"), 4, 256, 0.5)
    result = measure(point)
    assert not result.refusal
    # 4 requests on each of 2 dies, which are one chip, get 1.5 tokens each from an iteration.
    assert result.tokens_per_s_chip == pytest.approx(1000 * 8 / result.tpot_ms)
    assert result.tpot_ms * 1.5 > result.iteration_ms > result.tpot_ms
    assert 90 < sum(result.shares.values()) < 110
    assert result == measure(point) == next(sweep([point]))
    assert bound_of({"MLA": 30, "MLAProlog": 20, "Experts": 45}) == "attention"
    assert not result.experts_busy
    assert "several TEs" in measure(Point("tiny-r1", "pd", (), 2, 256)).refusal
    large = measure(Point("deepseek-r1", "colocated", ("dies=64",), batch=999))
    assert "KV of the fullest die take" in large.refusal
    assert "give a smaller --batch or --context" in large.refusal
    assert "--batch" not in measure(Point("deepseek-r1", "colocated", ("dies=4",))).refusal
    long = measure(Point("deepseek-r1", "colocated", ("dies=64",), context=200_000))
    assert "163840, found 200064 (the context and 64 new positions): give a smaller --context" in long.refusal
    with pytest.raises(InputError):
        points("tiny-r1", "colocated", {}, [])
    with pytest.raises(InputError, match="acceptance must be from 0 to 1, found 2"):
        points("tiny-r1", "colocated", {}, acceptance=2)
    assert len(points("tiny-r1", "colocated", {"mtp": ["0", "0"]}, [1, 1], [256])) == 1
    with pytest.raises(DeploymentError):
        resolve("colocated", ["no_such=1"])


@pytest.mark.parametrize(("routed", "bound"), [(16, "experts"), (64, "attention")])
def test_who_computes_most_of_the_time_is_the_bound(routed: int, bound: str) -> None:
    settings = (
        "attention.domains=2",
        "attention.dies=12",
        f"experts.routed_dies={routed}",
        "attention.microbatches=2",
    )
    result = measure(Point("deepseek-r1", "moe-attention", settings, 48, 4096))
    assert result.bound == bound
    assert (result.experts_busy > result.attention_busy) == (bound == "experts")
    assert max(result.experts_busy, result.attention_busy) > 80
    # What is not an exchange is computing, so both are shares of the same iteration.
    waits = sum(result.shares.get(name, 0) for name in ("A2E", "E2A"))
    assert result.attention_busy + waits == pytest.approx(100, abs=10)


def test_labels_of_a_plot_and_a_table_have_what_varies() -> None:
    todo = points("tiny-r1", "colocated", {"dies": ["2", "4"], "mtp": ["1"]}, [4, 8], [256])
    labels = Labels(todo)
    assert labels.common == ["mtp=1", "context 256"]
    assert [labels(SweepResult(point)) for point in todo][:2] == ["dies=2, batch 4", "dies=2, batch 8"]
    assert labels(SweepResult(todo[0]), "batch ") == "dies=2"
    assert Labels(todo[:1])(SweepResult(todo[0])) == "as above"


def test_what_a_model_without_weights_would_take(capsys: Capture) -> None:
    sizes = ("attention.domains=2", "attention.dies=15", "experts.routed_dies=32", "experts.shared_dies=2")
    given = [word for each in sizes for word in ("--set", each)]
    assert main(["describe", "--model", "deepseek-r1", "--deployment", "moe-attention", *given]) == 0
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if line.lstrip().startswith("30..61"))
    weights = float(line.split()[5])
    assert 19_000 < weights < 20_000  # MiB: 8 of 256 experts in each of 58 layers, and the MTP layer's
    assert f"the fullest die would use {weights:.2f} of its 65536 MiB" in shown
    assert min(float(word) for word in line.split()[5:]) >= 0
