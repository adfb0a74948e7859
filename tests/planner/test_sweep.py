"""`xdeepserve sweep`: what combinations cost, which is the best at each batch and context, and refusals."""

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest

from xdeepserve.cli import main
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import DeploymentError, InputError
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.sweep import (
    BOUNDS,
    Point,
    SweepResult,
    beyond,
    bound_of,
    measure,
    points,
    sized,
    sweep,
)
from xdeepserve.planner.sweep_command import Labels, best_lines
from xdeepserve.prices.step_run import decode_iteration

Capture = pytest.CaptureFixture[str]


def test_a_sweep_has_every_combination(tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "sweep.csv"
    args = ["--model", "tiny-r1", "--deployment", "colocated", "--set", "dies=2,999", "--batch", "2,4"]
    args += ["--context", "256", "--processes", "1"]
    assert main(["sweep", *args, "--csv", str(table)]) == 0
    captured = capsys.readouterr()
    assert sum("/4 " in line and " done ... " not in line for line in captured.err.splitlines()) == 4
    assert "tiny-r1, colocated: context 256\n" in captured.out
    assert captured.out.count("a SuperPod has 768 dies") == 1
    assert "refused: dies=999: " in captured.out
    assert captured.err.count("a SuperPod has 768 dies") == 1
    assert "dies=999, batch 4: refused for the same reason\n" in captured.err
    assert [line.partition(": TPOT")[0] for line in captured.out.splitlines()[-2:]] == [
        "best at batch 2, context 256: dies=2",
        "best at batch 4, context 256: dies=2",
    ]
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [(row["dies"], row["batch"]) for row in rows][:2] == [("2", "2"), ("2", "4")]
    assert float(rows[0]["tpot_ms"]) > 0
    assert "a SuperPod has 768 dies" in rows[2]["refusal"]
    assert rows[0]["dies_in_all"] == "2"


def test_a_point_beyond_what_is_published_says_so(capsys: Capture) -> None:
    """DeepSeek-R1 within the bounds of Table 4 and Table 6 says nothing."""
    within = Point("deepseek-r1", "colocated", ("dies=64",), 4, 1536)
    assert measure(within).beyond == ()
    assert measure(msgspec.structs.replace(within, batch=2, context=1535)).beyond == (
        "requests of a die 2, published 4 to 96 (CM Table 4, XDS 7.1)",
        "positions of a request 1,535, published 1,536 to 4,224 (CM Table 4: prompts, half of answers)",
    )
    assert beyond(hidden=7168, batch=96, context=4224, ranks=320) == ()
    assert len(beyond(hidden=7169, batch=97, context=4225, ranks=321)) == 4
    args = ["sweep", "--model", "tiny", "--deployment", "colocated", "--set", "dies=4", "--context", "256"]
    assert main(args) == 0
    assert "how far off is not known: elements of a token" in capsys.readouterr().out


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
    assert result.bound == f"mostly {bound_of(result.shares)}"
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


@pytest.mark.parametrize("how", [("tp=2",), ("tp=2", "tp_mode=sp-tp-sp"), ("o_proj_tp=2",)], ids=str)
def test_collectives_of_dp_groups_are_exchanges(how: tuple[str, ...]) -> None:
    shares = measure(Point("tiny", "colocated", ("dies=2", *how), 4, 128)).shares
    collectives = {name for name in shares if "-" in name}
    assert collectives
    assert collectives <= {*BOUNDS["exchange"]}


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


def cost(overrides: str, batch: int, context: int, tokens: float, dies: int = 4) -> SweepResult:
    """A result with a throughput that is made up."""
    point = Point("tiny", "colocated", tuple(overrides.split()), batch, context)
    return SweepResult(point, dies=dies, tpot_ms=1.0, tokens_per_s_chip=tokens)


def test_each_batch_and_context_has_its_best() -> None:
    results = [
        cost("mtp=0", 8, 256, 30),
        cost("mtp=0", 8, 512, 10),
        cost("mtp=1", 8, 256, 20),
        cost("mtp=1", 8, 512, 15),
    ]
    assert best_lines(results, Labels([r.point for r in results])) == [
        "best at batch 8, context 256: mtp=0: TPOT 1.00 ms, 30 tokens/s per chip",
        "best at batch 8, context 512: mtp=1: TPOT 1.00 ms, 15 tokens/s per chip",
    ]
    alone = results[:2]  # the settings are the same: which batch or context, then
    (best,) = best_lines(alone, Labels([r.point for r in alone]))
    assert best.startswith("best: context 256: ")
    assert best_lines(results[:1], Labels([results[0].point])) == []


def test_the_best_say_if_their_dies_differ() -> None:
    results = [cost("dies=4", 8, 256, 30), cost("dies=6", 8, 256, 31, dies=6)]
    best, note = best_lines(results, Labels([r.point for r in results]))
    assert best.endswith("31 tokens/s per chip, of 6 dies")
    assert "--dies N" in note


def test_pods_of_other_sizes_are_left_out_by_the_total(capsys: Capture) -> None:
    args = ["sweep", "--model", "tiny", "--set", "attention.dies=2,3", "--set", "attention.domains=2,3"]
    assert main([*args, "--batch", "2,4", "--context", "256", "--processes", "1", "--dies", "11"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines() if line.lstrip()[:1].isdigit()]
    assert rows == ["11"] * 4
    assert "refused: attention.dies=2, attention.domains=2: 9 dies in all, not 11\n" in out
    assert "refused: attention.dies=3, attention.domains=3: 14 dies in all, not 11\n" in out
    assert "of 11 dies" not in out
    assert main([*args, "--dies", "0"]) == 2
    assert "dies must be at least 1, found 0" in capsys.readouterr().err


def test_who_shares_dies_has_no_share_of_others(tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "sweep.csv"
    args = ["sweep", "--model", "tiny", "--deployment", "colocated", "--batch", "16", "--context", "256"]
    both = ["--set", "dies=2", "--set", "pipeline.microbatches=1,2", "--processes", "1"]
    assert main([*args, *both, "--csv", str(table)]) == 0
    captured = capsys.readouterr()
    assert "more than 100 % where two microbatches overlap" in captured.out
    assert "bound by" not in captured.err
    assert "mostly " in captured.err
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert {row["attention_busy_pct"] for row in rows} == {row["experts_busy_pct"] for row in rows} == {""}
    sums = [sum(float(v) for k, v in r.items() if k.endswith("_pct") and v) for r in rows]
    assert sums[0] < 105 < sums[1]
    assert main([*args, "--set", "dies=2", "--processes", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["attention_busy"] is row["experts_busy"] is None
    assert main([*args, "--set", "dies=2", "--processes", "1"]) == 0
    assert "100 %" not in capsys.readouterr().out


FEW = ("scheduler.max_num_seqs=4", "prefill.dies=4")
SMALL_PODS = {  # the papers' pods on a small model, with an own choice where they have none
    "pd": (
        "decode.dies=4",
        "decode.tp=2",
        "decode.tp_mode=sp-tp-sp",
        "combine=int8",
        "experts.redundant_slots=1",
    ),
    "transformerless": ("attention.microbatches=3", "experts.redundant_slots=1", "attention.domains=1"),
    "superpod": ("attention.dies=2", "experts.routed_dies=4", "experts.shared_dies=1", *FEW),
    "production": (
        "prefill.count=1",
        "prefill.experts_per_die=6",
        "decode.dies=8",
        "execution.decode.mode=op",
        *FEW,
    ),
    "cloudmatrix384": ("prefill.count=1", "prefill.tp=4", "decode.dies=20", "decode.shared_dies=2", *FEW),
}


@pytest.mark.parametrize(("deployment", "overrides"), SMALL_PODS.items())
def test_what_decodes_beside_prefill_is_swept_by_the_hint(
    deployment: str, overrides: tuple[str, ...]
) -> None:
    """An iteration of the half that the refusal names takes what it takes in the pod."""
    point = Point("tiny-random", deployment, overrides, 4, 256)
    refusal = measure(point).refusal
    _, _, hint = refusal.partition(f"{deployment} has prefill beside it: what decodes there is --deployment ")
    half, *settings = hint.split(" --set ")
    result = measure(msgspec.structs.replace(point, deployment=half, overrides=tuple(settings)))
    whole = decode_iteration(
        resolve_model("tiny-random"), sized(point), 256, 4, TimingConfig(acceptance=point.acceptance)
    )
    assert result.refusal == ""
    assert result.iteration_ms == pytest.approx(whole.iteration_ns / 1e6)  # its dies are others
    assert result.shares.keys() == {name for name in whole.spent_ns if whole.share(name) >= 0.05}


def test_the_hint_has_no_setting_that_changes_nothing() -> None:
    """Each of them is another setting than its usual one, and one of a decode step."""
    refusal = measure(
        Point("tiny", "pd", ("decode.dies=2", "health.beat_s=2", "transfer=layer"), 2, 256)
    ).refusal
    assert refusal.endswith(" --deployment colocated --set dies=2 --set execution.mode=graph")


def test_expert_services_are_measured_like_others() -> None:
    by_services, by_steps = (measure(Point("tiny", name, (), 2, 256)) for name in ("eaas", "moe-attention"))
    assert not by_services.refusal
    assert 0.5 < by_services.tpot_ms / by_steps.tpot_ms < 2


def test_several_equal_tes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text('kind = "mixed"\n[[te]]\nrole = "both"\ncount = 2\ndies = 2\n')
    assert measure(Point("tiny", str(file), (), 2, 256)).refusal.endswith("two.toml has several TEs")
