"""`xdeepserve plan` and `bench plan --deployment`: a file that runs, and refusals in one line."""

from pathlib import Path

import pytest

from xdeepserve.cli import main
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.layouts import LargestBatch, PodLayout, sized
from xdeepserve.planner.sweep import Point, measure
from xdeepserve.platform.command import requests_of
from xdeepserve.prices.profile import Demand, PodProfile

TINY = ["plan", "--model", "tiny", "--slo-ms", "2", "--dies", "4", "--prompt", "40", "--output", "24"]


def test_a_plan_is_printed_written_checked_and_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    assert main([*TINY, "-o", str(file)]) == 0
    out = capsys.readouterr().out
    for promised in (
        "next bound",
        "why:",
        "(7) T_iter",
        "(8)",
        "if, with this layout kept:",
        "SLO 20 % shorter",
    ):
        assert promised in out
    check, takes = out.split("to check it: xdeepserve ")[1].rstrip().split("\n")
    assert "a minute or more" in takes
    assert takes.endswith("--context 52: the prompt (40) and half of the answer (24)")
    assert main(check.split()) == 0
    assert "bound of 5 %: kept" in capsys.readouterr().out
    args = ["--model", "tiny", "--deployment", str(file), "--prompt", "Once", "--max-tokens", "2"]
    assert main(["generate", *args]) == 0


def test_one_die_is_no_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    assert main([*TINY[:4], "50", "--dies", "1", *TINY[7:], "-o", str(file)]) == 0
    assert "tiny on 1 die, prompts of 40" in capsys.readouterr().out
    assert "planned for tiny on 1 die, " in file.read_text()
    assert main([*TINY[:4], "0.001", "--dies", "1", *TINY[7:]]) == 2
    assert "on 1 die takes" in capsys.readouterr().err


def test_a_die_alone_is_colocated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY[:4], "50", "--dies", "1", *TINY[7:], "--kind", "colocated"]) == 0
    assert "\nmonolithic 1 " in capsys.readouterr().out


def test_devices_are_compared_and_every_row_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--model", "dbrx", "--slo-ms", "150", "--hardware", "h20,l40s"]
    assert main([*args, "--extrapolate"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "E x" in line and "ms" in line and "%" not in line]
    assert len(rows) == 4
    assert all(row.endswith("extrapolated") for row in rows)
    assert "(1) T_a" in out
    assert "price of 1 is assumed" not in out
    assert main(args) == 2
    assert "--extrapolate plans all the same" in capsys.readouterr().err


def test_what_leaves_no_plan_is_said_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "dbrx", "--slo-ms", "14.6", "--hardware", "h20", "--extrapolate"]) == 0
    why = "no plan: a request on each attention node takes 13.54 ms"
    assert f"SLO 20 % shorter         {why}" in capsys.readouterr().out


def test_devices_that_are_only_compared_have_no_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--hardware", "h20", "--extrapolate", "--kind", "pd"]
    assert main(["plan", "--model", "dbrx", "--slo-ms", "150", *asked]) == 2
    assert "--kind pd: devices are compared with attention and experts apart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "tiny", "--slo-ms", "2", "--dies", "0"], "found 0; try 1"),
        (["--model", "tiny", "--slo-ms", "2", "--dies", "769"], "found 769; try 768"),
        (["--model", "tiny"], "plan needs a latency bound: --tpot-ms 50, or --slo-ms 48"),
        (
            ["--model", "tiny", "--slo-ms", "2", "--tpot-ms", "9"],
            "--slo-ms 2 and --tpot-ms 9 are two bounds of one time (TPOT = T_iter + 2 ms): give one",
        ),
        (["--model", "tiny", "--tpot-ms", "2"], "--tpot-ms must be a number above 2, the scheduler's gap"),
        (["--model", "tiny", "--tpot-ms", "inf"], "--tpot-ms must be a number above 2"),
        (["--model", "tiny", "--tpot-ms", "2.1", "--dies", "4"], "--tpot-ms 2.5"),
        (["--model", "tiny", "--slo-ms", "2", "--hardware", "h100"], "h800 is the same chip with slower"),
        (["--model", "tiny", "--slo-ms", "2", "--hardware", "H200"], "h800 is the same chip with less"),
        (["--model", "tiny", "--slo-ms", "2", "--hardware", "a100"], "a800 is the same chip with slower"),
        (["--model", "tiny", "--slo-ms", "2", "--hardware", "b200"], "h800 is of the generation before"),
        (["--model", "tiny", "--slo-ms", "0"], "--slo-ms must be a number above 0"),
        (["--model", "tiny", "--slo-ms", "nan"], "--slo-ms must be a number above 0"),
        (["--model", "tiny", "--slo-ms", "0.1", "--dies", "4"], "--slo-ms"),
        (
            ["--model", "tiny", "--slo-ms", "2", "--prompt", "0"],
            "--prompt must be at least 1, found 0; try 1",
        ),
        (["--model", "tiny", "--slo-ms", "2", "--prompt", "9000"], "try --prompt 1889"),
        (["--model", "tiny", "--slo-ms", "2", "--hardware", "h21"], "did you mean h20?"),
        (["--model", "dbrx", "--slo-ms", "2", "--dies", "16"], "would do"),
        (["--model", "tiny", "--slo-ms", "2", "--kind", "colocate"], "did you mean colocated?"),
        (["--model", "tiny", "--slo-ms", "2", "--kind", "pd"], "--extrapolate plans all the same"),
        (
            ["--model", "tiny", "--slo-ms", "2", "--hardware", "h20", "--dies", "8"],
            "nothing was timed",
        ),
        (["--model", "tiny", "--slo-ms", "2", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "tiny", "--slo-ms", "2", "--trace", "made:seed=1", "--prompt", "5"], "leave --prompt"),
        (
            ["--model", "deepseek-r1", "--slo-ms", "50", "--hardware", "h20", "--dies", "2", "--extrapolate"],
            "experts apart take 3 dies or more",
        ),
        (["--model", "deepseek-r1", "--slo-ms", "50", "--dies", "4"], "the least is 32"),
        (["--model", "tiny", "--slo-ms", "2", "--hardware", ""], "unknown hardware ''"),
        (["--model", "tiny", "--slo-ms", "2", "--trace", "made:seed=1"], "request of --trace has"),
        (["--model", "tiny", "--slo-ms", "2", "--output", "5000"], "try --output 1477"),
        (
            ["--model", "tiny", "--slo-ms", "5", "--dies", "1", "--kind", "pd", "--extrapolate"],
            "no pd has 1 die, some for prompts: more dies would do, or monolithic",
        ),
        (["--model", "tiny", "--slo-ms", "2", "--prompt", "5000", "--output", "5000"], "--output 1024"),
        (["--model", "tiny", "--slo-ms", "2", "--format", "azure"], "there is no --trace"),
        (["--model", "tiny", "--slo-ms", "2", "--kind", ""], "--kind '': there are colocated"),
        (
            ["--model=tiny", "--slo-ms=50", "--hardware=910b,cm384", "--kind=colocated", "--dies=8"],
            "--kind colocated is of cm384 alone, without 910b",
        ),
        (
            ["--model", "dbrx", "--slo-ms", "50", "--hardware", "h20", "--extrapolate", "--prompt", "60000"],
            "dbrx has 32768 positions; try --prompt 32609",
        ),
        (
            ["--model", "dbrx", "--slo-ms", "1", "--hardware", "h20", "--extrapolate"],
            "an iteration of one request for each attention node takes 13.54 ms; --slo-ms 13.6 would do",
        ),
        (["--model", "tiny", "--slo-ms", "2", "-o", "nowhere/plan.toml"], "there is no folder nowhere"),
        (["--model", "tiny", "--slo-ms", "2", "-o", "plan.yaml"], "a deployment is a .toml file"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *args]) == 2
    error = capsys.readouterr().err
    (refusal,) = [line for line in error.splitlines() if not line.startswith("plan: ")]  # or of progress
    assert message in refusal


def _block(out: str, title: str) -> str:
    """The lines under a title, as one."""
    return " ".join(out.split(f"{title}:\n")[1].split("\n\n")[0].split())


def _number(text: str, before: str) -> float:
    """The last number in front of these words."""
    return float(text.split(f" {before}")[0].split()[-1].replace(",", "").lstrip("("))


def test_tpot_bounds_an_iteration_and_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    by_iteration = capsys.readouterr().out
    assert main([*TINY[:3], "--tpot-ms", "4", *TINY[5:]]) == 0
    by_tpot = capsys.readouterr().out
    assert "T_iter <= 2 ms (TPOT <= 4 ms: the scheduler's gap is 2 ms)" in by_iteration
    assert "TPOT <= 4 ms (T_iter <= 2 ms: the scheduler's gap is 2 ms)" in by_tpot
    assert by_tpot.splitlines()[1:] == by_iteration.splitlines()[1:]


def test_decode_is_counted_alone_with_the_prefill_that_it_would_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--dies", "288", "--slo-ms", "50", "--prompt", "2000", "--output", "1"]
    assert main(["plan", "--model", "deepseek-r1", *asked]) == 0
    best = _block(capsys.readouterr().out, "the best")
    tokens = _number(best, "tokens/s,")
    assert "287 devices (143.5 chips of two dies): 216 cm384 for attention, 64 cm384 for routed" in best
    assert _number(best, "a device") == pytest.approx(tokens / 287, abs=1)
    assert "attention 23.1 of 64.0, routed experts 9.5 of 64.0, the shared expert 2.4 of 64.0" in best
    assert f"decode only: it needs {tokens:,.0f} requests/s x 2000 prompt tokens" in best
    need = _number(best, "prompt tokens/s of prefill")
    assert need == pytest.approx(2000 * tokens, rel=1e-4)
    rate = _number(best, "prompt tokens/s a die, in TEs of 32")
    assert 500 < rate < 5000
    assert _number(best, "dies more would") == pytest.approx(need / rate, rel=0.001)


def test_a_plan_with_prefill_says_how_much_of_decode_it_feeds(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--model", "tiny", "--dies", "8", "--slo-ms", "2", "--kind", "pd", "--extrapolate"]
    assert main([*args, "--prompt", "1000", "--output", "4"]) == 0
    best = _block(capsys.readouterr().out, "the best")
    assert "decode only" not in best
    need, does = _number(best, "prompt tokens/s of prefill"), _number(best, "(predicted, not")
    assert _number(best, "%: ") == pytest.approx(100 * does / need, rel=0.01)
    assert _number(best, "tokens/s in all") == pytest.approx(_number(best, "tokens/s, ") * does / need, 0.01)


def test_devices_are_counted_and_their_unit_of_cost_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--slo-ms", "150", "--hardware", "h20,l40s", "--extrapolate"]
    assert main(["plan", "--model", "dbrx", *asked]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "E x" in line).split()
    attention, experts = int(row[0]) * int(row[2]), 16 * int(row[6])
    best = _block(out, "the best")
    assert (
        f"{attention + experts} devices: {attention} {row[3]} for attention, {experts} {row[7]} for" in best
    )
    price = {"h20": 1.85, "l40s": 1.08}
    cost = attention * price[row[3]] + experts * price[row[7]]
    assert f"all cost {cost:g}" in best
    assert _number(best, "for a price of 1") == pytest.approx(_number(best, "tokens/s, ") / cost, abs=1)
    assert "cost: a price of 1 is that of an L20 (MegaScale-Infer, Table 3): " in out
    assert "of 89.4" in best
    assert "of prefill, which no device of this plan does" in best


def test_a_batch_that_is_too_small_is_no_plan_and_says_why() -> None:
    assert "not one request fits" in LargestBatch(0, "memory", 67).refusal(9e6)
    assert "one request takes 9.00 ms" in LargestBatch(0, "SLO", 67).refusal(9e6)
    said = LargestBatch(40, "SLO", 67).refusal(9e6)
    assert said.startswith("SLO leaves 40 requests in a microbatch, and with fewer than 67")


@pytest.mark.parametrize(
    "args",
    [
        ["comm", "--deployment", "colocated"],
        ["plan", "--context", "3"],
        ["plan", "--deployment", "colocated", "--context", "0"],
    ],
)
def test_options_of_bench_plan_belong_together(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_throughput_is_that_of_sweep_and_words_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    out = capsys.readouterr().out
    head, row = out.splitlines()[2:4]
    assert head.split()[3:7] == ["T_iter", "TPOT", "tok/s", "tok/s/chip"]
    t_iter, tpot = (float(part) for part in row.replace(" ms", "").split()[-5:-3])
    assert tpot == pytest.approx(t_iter + 2)
    for promised in ("T_a, attention", "T_e,", "T_c,", "b_a", "b_e", "scheduler's gap of 2 ms", "m is 1"):
        assert promised in out
    assert "(1) to (8): equations of MegaScale-Infer" in out


def test_tokens_per_second_are_those_that_sweep_measures() -> None:
    profile = PodProfile(resolve_model("tiny"), Demand(200, 112))
    layout = PodLayout(kind="colocated", dies=4)
    plan = sized(profile, layout, 2e6, False)
    assert plan is not None
    point = Point("tiny", "colocated", ("dies=4",), plan.requests, profile.demand.context)
    assert 2 * plan.throughput / 4 == pytest.approx(measure(point).tokens_per_s_chip, rel=0.05)


def test_a_trace_says_how_long_requests_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = "made:seed=1,requests=50,prompt=60,output=20,spread=0.5,turns=1,systems=1,system=16,block=16"
    file = tmp_path / "plan.toml"
    assert main([*TINY[:7], "--trace", trace, "-o", str(file)]) == 0
    out = capsys.readouterr().out
    requests = requests_of(trace, None, "plan").requests
    mean = round(sum(each.input_length for each in requests) / len(requests))
    longest = max(each.input_length + each.output_length for each in requests)
    assert f"prompts of {mean}, " in out
    assert f"max_model_len = {longest}" in file.read_text()
    args = ["--model", "tiny", "--deployment", str(file), "--prompt", "Once", "--max-tokens", "2"]
    assert main(["generate", *args]) == 0


def test_devices_are_planned_into_a_file_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    more = ["--hardware", "h20,l40s", "--extrapolate", "-o", str(file)]
    assert main([*TINY[:4], "3", *TINY[5:], *more]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("moe-attention")]
    assert rows
    assert all("devices that nobody has timed" in row for row in rows)
    assert 'hardware = "l40s"' in file.read_text() or 'hardware = "h20"' in file.read_text()
    assert main(out.split("to check it: xdeepserve ")[1].splitlines()[0].split()) == 0
    assert "bound of 5 %: kept" in capsys.readouterr().out


def test_refusals_name_the_model_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "deepseek-v3", "--dies", "7", "--slo-ms", "50"]) == 2
    assert "model deepseek-v3 does not fit on 7 dies" in capsys.readouterr().err
