"""`xdeepserve replay`: with tokens, whose bits are those of one die; time only; and what is refused."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.platform.tools import LIMITS, MADE, PRICE, small
from xdeepserve.cli import main
from xdeepserve.engine.deploy.policies import ROUTE
from xdeepserve.errors import InputError
from xdeepserve.llm import LLM, digest
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.platform.cluster import (
    Cluster,
    ClusterScale,
    ClusterTE,
    PricedKind,
    fleet_tes,
    priced_kinds,
    read_cluster,
)
from xdeepserve.platform.cluster_replay import ClusterReplay, ClusterServed
from xdeepserve.platform.command import explained
from xdeepserve.platform.exact_replay import engine_of
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import Decision, FleetTE, KVTransfer
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.service_report import (
    Bounds,
    Outcome,
    ServiceReport,
    StoppedReplay,
    TELoad,
    report,
)
from xdeepserve.platform.te_count import least_count
from xdeepserve.platform.token_replay import prompts_of, replayed
from xdeepserve.platform.traces import TracedRequest, at_rate
from xdeepserve.prices import step_price
from xdeepserve.prices.step_price import StepPrice

SMALL = MadeTraffic(requests=14, seconds=0.02, prompt=60, output=5, system=30, block=16, pause=0.01)
TWO = 'model = "tiny"\npolicy = "{}"\n[[te]]\ndies = 2\nmtp = 0\n[[te]]\ndies = 2\nmtp = 0\napart = true\n'


def test_tokens_have_the_bits_of_one_die(tiny: TinyCheckpoint) -> None:
    trace, digests, cached = made(SMALL), set(), []
    for deployment, settings in (
        ("monolithic", []),
        ("pd", ["prefill.count=2", "scheduler.route=cost"]),
        ("moe-attention", []),
    ):
        with LLM(tiny, deployment, overrides=["max_model_len=512", *settings]) as llm:
            outputs, outcomes, names, busy_ns = replayed(llm, trace, SMALL.block)
            assert min(busy_ns) > 0
            digests.add(digest(outputs))
            assert [each.num_prompt for each in outcomes] == [each.input_length for each in trace]
            assert [each.num_output for each in outcomes] == [each.output_length for each in trace]
            assert [round(each.at_ns) for each in outcomes] == [each.at_ns for each in trace]
            assert {each.te for each in outcomes} <= set(range(len(names)))
            cached.append(sum(each.num_cached for each in outcomes))
    assert len(digests) == 1
    assert min(cached) > 0


@pytest.mark.parametrize("num_blocks", [9, 60])
def test_hits_are_no_more_than_the_trace_allows(tiny: TinyCheckpoint, num_blocks: int) -> None:
    """However few blocks there are: what a preempted request finds of its own is no hit."""
    block = 16
    trace = [
        TracedRequest(at * 1000, 21, 60, (100 + at, 200 + at) if at % 3 else (7, 300 + at)) for at in range(9)
    ]
    allowed = [0 if at % 3 or not at else block for at in range(len(trace))]
    with LLM(tiny, overrides=["max_model_len=96", f"cache.num_blocks={num_blocks}"]) as llm:
        outcomes = replayed(llm, trace, block).outcomes
        assert (llm.engine.stats().num_preemptions > 0) == (num_blocks == 9)
    assert all(each.num_cached <= most for each, most in zip(outcomes, allowed, strict=True))


ROLES = """
model = "tiny"
policy = "load"
[[te]]
count = 3
dies = 4
mtp = 0
role = "prefill"
[[te]]
count = 3
dies = 4
mtp = 0
role = "decode"
[roles]
every_s = 0.05
patience_s = 0.2
calm_s = 0.5
while_s = 0.5
"""


def test_tes_of_a_file_change_roles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "roles.toml"
    path.write_text(ROLES)
    long = "made:requests=4000,seconds=1.5,prompt=900,output=2,turns=1,systems=0,spread=0.3,block=16"
    assert main(["replay", long, "--cluster", str(path), "--json", "--slo-tpot", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] == "6 TEs of 4 dies, which change roles"
    assert {"wanted", "drains", "joins"} <= {event["what"] for event in found["scaling"]}
    assert found["num_requests"] == 4000
    assert "that prefill, not 3" in found["scaling"][0]["reason"]


def test_equal_blocks_are_equal_tokens_however_much_they_shrink() -> None:
    trace = made(MadeTraffic(requests=30, prompt=400, block=64, turns=4))
    for shrink in (1, 4, 64):
        prompts, size = prompts_of(trace, 64, shrink, 1000), 64 // shrink
        for one, two in itertools.pairwise(trace):
            pairs = zip(one.blocks, two.blocks, strict=False)
            number = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
            first, second = (prompts[trace.index(each)] for each in (one, two))
            shared = min(number * size, len(first), len(second))
            assert first[:shared] == second[:shared]
        assert [len(each) for each in prompts] == [max(1, each.input_length // shrink) for each in trace]


@pytest.mark.parametrize("policy", ["cost", "deepserve"])
def test_time_only_on_the_tes_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    path = tmp_path / "two.toml"
    path.write_text(TWO.format(policy))
    assert main(["replay", MADE, "--cluster", str(path), "--json", "--explain"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_requests"] == 60
    assert found["policy"] == policy
    assert [te["name"] for te in found["tes"]] == ["both 0", "apart 0"]
    assert sum(te["num_requests"] for te in found["tes"]) == 60
    assert 0 < found["hit_rate"] < 1
    assert len(found["decisions"]) == 60
    assert found["decisions"][0].startswith("request 0 -> ")
    assert main(["replay", MADE, "--cluster", str(path), "--policy", "round-robin", "--first", "10"]) == 0
    text = capsys.readouterr().out
    assert "10 requests in" in text
    assert "both 0                 5" in text


def test_tes_of_a_file_come_and_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaled.toml"
    path.write_text(
        'model = "tiny"\n[[te]]\ndies = 2\nmtp = 0\nmax_num_seqs = 2\n'
        "[scale]\nmost = 4\nevery_s = 0.01\nup_s = 0.02\ncalm_s = 0.05\ndown_s = 0.1\n"
    )
    assert main(["replay", MADE, "--cluster", str(path), "--json", "--explain", "--faster", "10"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_requests"] == 60
    joined = [event for event in found["scaling"] if event["what"] == "joins"]
    assert joined
    assert [te["name"] for te in found["tes"]] == ["both 0", *(event["te"] for event in joined)]
    assert found["cluster"] == "1 to 4 TEs of 2 dies"
    assert main(["replay", MADE, "--cluster", str(path), "--faster", "10"]) == 0
    assert "joins new 0: 0." in capsys.readouterr().out
    assert main(["replay", MADE, "--cluster", str(path), "--json", "--exact", "--faster", "10"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert exact.keys() == found.keys() - {"decisions", "hindsight", "regret"}
    assert exact["cluster"] == found["cluster"]
    joined = [event["te"] for event in exact["scaling"] if event["what"] == "joins"]
    assert joined
    assert [te["name"] for te in exact["tes"]] == ["both 0", *joined]
    assert sum(te["num_requests"] for te in exact["tes"]) == 60


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (ClusterScale(fork=False), "fork=false: the engine's TEs load from one that is there"),
        (ClusterScale(most=25), "most is for 800 dies, and the engine's pod has 768"),
    ],
)
def test_how_the_engine_cannot_scale_is_said(scale: ClusterScale, words: str) -> None:
    with pytest.raises(InputError, match=words):
        engine_of(Cluster((ClusterTE(dies=32),), scale=scale), [], 16, Bounds())


def test_a_pod_says_its_digest(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["replay", "made:requests=3,seconds=0.01,prompt=40,output=4,system=16,block=16", "--json"]
    assert main([*given, "--model", "tiny-random", "--deployment", "colocated", "--faster", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main([*given, "--model", "tiny-random", "--deployment", "monolithic"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == found["digest"]


def served(within: float, ttft_s: float) -> ServiceReport:
    """A report with one request of a thousand that says how long each one waits."""
    figures = {"mean": 1e3 * ttft_s, "p99": 2e3 * ttft_s}
    return ServiceReport(1000, 60, figures, {"mean": 20.0, "p99": 30.5}, 1, within, 0, [], Bounds())


def test_as_few_tes_as_are_enough() -> None:
    cluster = Cluster((ClusterTE(),))
    for least in range(1, 20):
        tried: list[int] = []

        def within(
            sized: Cluster, sought: float, least: int = least, tried: list[int] = tried
        ) -> ServiceReport:
            tried.append(sized.te[0].count)
            return served(min(1.0, tried[-1] / least), 1)

        assert least_count(cluster, within, 1.0).te[0].count == least
        assert len(tried) < 12


@pytest.mark.parametrize(
    "shares",
    [
        [0.03, 0.029, 0.024, 0.3, 0.95],  # fewer of them, where chance decides who is in time
        [0, 0, 0, 0, 0.5, 0.6, 0.92],
        [0.1, 0.5, 0.5, 0.91],
    ],
)
def test_a_step_that_gains_nothing_does_not_end_the_search(shares: list[float]) -> None:
    """Nobody more is in time, but all wait for half as long."""

    def within(sized: Cluster, sought: float) -> ServiceReport:
        count = sized.te[0].count
        return served(shares[min(count.bit_length(), len(shares)) - 1], 1000 / count)

    found = least_count(Cluster((ClusterTE(),)), within, 0.9).te[0].count
    assert found == 2 ** (len(shares) - 1)


def test_a_search_ends_where_more_tes_change_nothing() -> None:
    """With the fewest TEs that serve as well as any number: shares grow up to 8 TEs, waits shrink up to 3."""
    tried: list[int] = []

    def within(sized: Cluster, sought: float) -> ServiceReport:
        tried.append(sized.te[0].count)
        return served(min(0.5, tried[-1] / 16), max(44, 100 / tried[-1]))

    assert least_count(Cluster((ClusterTE(),)), within, 0.9).te[0].count == 8
    assert tried == [1, 2, 4, 8, 16, 32, 6, 7]


def test_a_search_ends_where_a_te_gets_no_request() -> None:
    """The five that get some are as good as any number."""
    tried: list[int] = []

    def within(sized: Cluster, sought: float) -> ServiceReport:
        tried.append(sized.te[0].count)
        used = min(5, tried[-1])
        loads = [TELoad(f"both {n}", int(n < used), 1, 0.0) for n in range(tried[-1])]
        return msgspec.structs.replace(served(0.1 * used, 1), tes=loads)

    assert least_count(Cluster((ClusterTE(),)), within, 0.9).te[0].count == 5
    assert tried == [1, 2, 4, 8, 5]


def test_bounds_that_nothing_keeps_are_no_lower_bound_of_tes() -> None:
    """No request keeps them; requests wait less up to 16 TEs."""

    def within(sized: Cluster, sought: float) -> ServiceReport:
        return served(0, max(10, 160 / sized.te[0].count))

    assert least_count(Cluster((ClusterTE(),)), within, 0.9).te[0].count == 16


class CountedSearch:
    """The search on a small trace, with replays that stop, beside the search with whole ones."""

    def __init__(self, policy: str, faster: float, bounds: Bounds) -> None:
        self.cluster = Cluster((ClusterTE(),), policy=policy)
        kinds = [PricedKind(PRICE, LIMITS, None, KVTransfer())]
        self.replay = ClusterReplay(at_rate(small(), faster), kinds, None, lambda request: 0.0, bounds)
        self.reports: dict[int, ServiceReport] = {}
        self.whole: list[int] = []
        self.stopped: list[int] = []

    def report(self, sized: Cluster, sought: float = 0.0) -> ServiceReport:
        count = sized.te[0].count
        if count not in self.reports:
            self.reports[count] = self.replay.serve(sized, False, lambda done, total: None).report
        return self.reports[count]

    def tried(self, sized: Cluster, sought: float) -> ServiceReport | StoppedReplay:
        found = self.replay.tried(sized, False, lambda done, total: None, sought)
        if isinstance(found, ClusterServed):
            self.whole.append(sized.te[0].count)
            assert found.report == self.report(sized)
            return found.report
        self.stopped.append(sized.te[0].count)
        assert self.report(sized).within <= found.within < sought
        return found


@pytest.mark.parametrize(
    ("policy", "faster", "bounds", "most_whole"),
    [
        ("cost", 20, Bounds(0.1, 1000), 3),  # thirteen TEs keep them
        ("cost", 1, Bounds(0.02, 6), 2),  # none, and a TE gets no request
        ("cost", 20, Bounds(30, 5), 6),  # the same, after a step that seemed to gain nothing
        ("round-robin", 4, Bounds(0.02, 6), 16),  # none, and every TE gets requests
    ],
    ids=["kept", "idle", "doubtful", "plateau"],
)
def test_replays_that_stop_change_no_answer(
    policy: str, faster: float, bounds: Bounds, most_whole: int
) -> None:
    """Nor is any number served whole twice. What stopped could not have kept the bounds."""
    search = CountedSearch(policy, faster, bounds)
    expected = least_count(search.cluster, search.report, 0.9)
    assert least_count(search.cluster, search.tried, 0.9) == expected
    assert len(search.whole) == len(set(search.whole)) <= most_whole
    assert search.stopped


LONG_PROMPT = {"input_length": 6_000, "output_length": 40}


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (["--slo-ttft", "0.01"], "TTFT of 30 requests (100.0 %) is over 0.01 s"),
        (["--slo-tpot", "0.01"], "TPOT of 30 requests (100.0 %) is over 0.01 ms"),
    ],
)
def test_bounds_that_cannot_be_kept_give_the_table_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bounds: list[str], words: str
) -> None:
    """With exit code 0, as by any other replay, and in the JSON object, too."""
    path = tmp_path / "long.jsonl"
    rows = [
        {"timestamp": 100 * n, **LONG_PROMPT, "hash_ids": [*range(12 * n, 12 * n + 12)]} for n in range(30)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    given = ["replay", str(path), *bounds]
    assert main(given) == 0
    told = capsys.readouterr().out
    assert "TTFT ms" in told
    assert "both 0" in told
    assert "90 % were sought within both bounds: no number of TEs has more than 0.0 %" in told
    assert words in told
    assert "30 miss the bound even on an idle TE, a" in told
    would = re.search(r"--slo-ttft ([0-9.]+) --slo-tpot ([0-9.]+) would have ([0-9.]+) %", told)
    assert would is not None
    assert float(would[3]) >= 90
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (missed,) = found["missed"]
    assert (missed["num_late"], missed["num_late_alone"]) == (30, 30)
    assert missed["alone"] > missed["bound"]
    again = [*given[:2], "--slo-ttft", would[1], "--slo-tpot", would[2], "--json"]
    assert main(again) == 0
    assert "missed" not in json.loads(capsys.readouterr().out)


def test_several_policies_are_one_table_with_prices_found_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "two.toml"
    path.write_text(TWO.format("cost"))
    priced: list[int] = []
    price = step_price.priced

    def counted(*args: Any) -> StepPrice:
        priced.append(1)
        return price(*args)

    monkeypatch.setattr("xdeepserve.platform.cluster.priced", counted)
    given = ["replay", MADE, "--cluster", str(path), "--json", "--policy"]
    assert main([*given, "round-robin,cost,round-robin"]) == 0
    together = json.loads(capsys.readouterr().out)["policies"]
    assert [each["policy"] for each in together] == ["round-robin", "cost"]
    assert len(priced) == 2  # of whole TEs, and of the halves of the other kind
    for each in together:
        assert main([*given, each["policy"]]) == 0
        assert {"trace": MADE, **each} == json.loads(capsys.readouterr().out)
    assert main(["replay", MADE, "--cluster", str(path), "--first", "9", "--policy", "all"]) == 0
    text = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(text) if line.startswith("policy "))
    assert [line.split()[0] for line in text[head + 1 :]] == list(ROUTE.rows)
    assert {len(line) for line in text[head:]} == {len(text[head])}


def test_a_report_begins_with_the_first_arrival() -> None:
    outcomes = [Outcome(0, at * 1e9, 1e9, 50e6, (at + 4) * 1e9, 100, 20, 0) for at in (1800, 1806)]
    late = report(outcomes, ["a"], Bounds(), [5e9])
    assert (late.seconds, late.goodput, late.tes[0].busy) == (10, 0.2, 0.5)


def test_a_report_by_hand() -> None:
    outcomes = [
        Outcome(0, 0, 1e9, 50e6, 2e9, 100, 20, 50),
        Outcome(1, 1e9, 4e9, None, 8e9, 100, 1, 0),
        Outcome(1, 2e9, 1e9, 200e6, 10e9, 200, 10, 0),
    ]
    found = report(outcomes, ["a", "b"], Bounds(ttft_s=3, tpot_ms=100), [5e9, 1e9])
    assert found.seconds == 10
    assert found.goodput == pytest.approx(0.1)
    assert found.within == pytest.approx(1 / 3)
    assert found.hit_rate == pytest.approx(50 / 400)
    assert found.ttft_ms["mean"] == 2000
    assert found.tpot_ms["p50"] == 125
    assert [(te.num_requests, te.num_tokens, te.busy) for te in found.tes] == [(1, 20, 0.5), (2, 11, 0.1)]


def test_who_computes_a_prompt_has_its_hits_and_who_ends_it_its_tokens() -> None:
    trace = [TracedRequest(0, 160, 5, tuple(range(10))), TracedRequest(10**9, 160, 5, tuple(range(10)))]
    both = FleetTE("", PRICE, LIMITS)
    fleet = Fleet([both._replace(role="prefill"), both._replace(role="decode"), both])
    fleet.drain(2)
    outcomes = [each.outcome() for each in fleet.run(trace)]
    found = report(outcomes, ["prefill", "decode", "both"], Bounds())
    figures = [(te.num_requests, te.num_tokens, te.hit_rate) for te in found.tes]
    assert figures == [(2, 0, 144 / 320), (2, 10, 0), (0, 0, 0)]
    fleet = Fleet([both])
    alone = report([each.outcome() for each in fleet.run(trace)], ["both"], Bounds())
    assert [(te.num_requests, te.num_tokens, te.hit_rate) for te in alone.tes] == [(2, 10, 144 / 320)]


def test_kinds_that_are_alike_are_priced_once() -> None:
    cluster = Cluster((ClusterTE(count=3, dies=2, mtp=0), ClusterTE(dies=4, mtp=0, apart=True)), model="tiny")
    both, apart = priced_kinds(cluster, 16)
    assert apart.apart is not None
    assert both.price is apart.price is apart.apart[0]
    assert apart.transfer.block_ns > both.transfer.block_ns == 0
    assert [te.name for te in fleet_tes(cluster, [both, apart])] == ["both 0", "both 1", "both 2", "apart 0"]


def test_tes_without_room_are_refused_before_steps_are_priced() -> None:
    told: list[int] = []
    with pytest.raises(InputError, match="deployment 2 dies: no room for KV beside the weights"):
        priced_kinds(Cluster((ClusterTE(dies=2),)), 512, lambda done, total: told.append(done))
    assert not told


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "te is missing: a list of sections"),
        ("te = []", r"line 1: te must list a section \[\[te\]\] at least"),
        (
            "[[te]]\ndies = 9\napart = true",
            "line 2: .*dies must be an even number, as apart=true has two halves, found 9",
        ),
        (
            "[[te]]\ncount = 0",
            r"line 2: \[\[te\]\] number 1: count must be a whole number from 1 to 4,096, found 0",
        ),
        ("[[te]]\n[[te]]\ntp = 5", r"line 3: \[\[te\]\] number 2: tp=5 does not divide 32 dies"),
        ("[[te]]\nmax_num_seqs = 600", "max_num_seqs=600 with 1 drafts each are more rows than .*=1024"),
        (
            'policy = "fastest"\n[[te]]',
            "line 1: policy must be one of .*, sequences or module:function, found 'fastest'",
        ),
        (
            'policy = "no_such:route"\n[[te]]',
            "line 1: policy=no_such:route names no function: No module named 'no_such'",
        ),
        ('policy = ["cost"]\n[[te]]', r"policy must be one of .*, found \[.cost.\]"),
        ("[[te]]\ndice = 3", r"line 2: .*unknown field dice \(did you mean dies\?\)"),
        ('[[te]]\nrole = "prefill"', "there are TEs with role=prefill, and none with role=decode"),
        (
            '[[te]]\nrole = "decode"\napart = true\n[[te]]\nrole = "prefill"',
            r"line 3: \[\[te\]\] number 1: apart=true has both roles",
        ),
        (
            "[[te]]\ncount = 9\n[scale]\nmost = 8\nlow = 2",
            "line 3: scale: .*low <= aim < high.*; line 3: scale: count=9 lies outside",
        ),
        ("[[te]]\n[[te]]\n[scale]", "scale needs TEs of one kind"),
        ("[te", "not valid TOML"),
    ],
)
def test_contradictions_in_a_cluster_are_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=reason) as error:
        read_cluster(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["x.jsonl", "--format", "mooncak"], "unknown trace format 'mooncak' (did you mean mooncake?)"),
        (["none.jsonl"], "none.jsonl: No such file or directory"),
        ([MADE, "--cluster", "none.toml"], "cluster none.toml: No such file"),
        ([MADE, "--cluster", "a.toml", "--deployment", "pd"], "choose one"),
        ([MADE, "--shrink", "2"], "--shrink: only with --deployment D"),
        ([MADE, "--model", "gpt-5", "--precision", "fp32"], "--precision: only with --deployment D"),
        ([MADE, "--model", "gpt-5"], "model 'gpt-5': neither a preset"),
        ([MADE, "--heat", "none.json", "--policy", "llm-d"], "--heat: policy llm-d looks at no heat map"),
        ([MADE, "--format", "mooncak"], "unknown trace format 'mooncak'"),
        ([MADE, "--deployment", "pd", "--policy", "cost"], "belong to --cluster"),
        ([MADE, "--first", "0"], "--first must be at least 1, found 0"),
        ([MADE, "--faster", "0"], "--faster must be above 0, found 0"),
        ([MADE, "--policy", "costs"], "unknown policy 'costs' (did you mean cost?)"),
        ([MADE, "--policy", "load,costs"], "unknown policy 'costs' (did you mean cost?)"),
        ([MADE, "--policy", "all", "--explain"], "--explain shows one policy, found --policy all"),
        (
            ["made:prompt=9000,seed=1", "--deployment", "monolithic"],
            "context 2048; try --shrink",
        ),
    ],
)
def test_what_cannot_be_replayed_is_said_in_a_line(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *options]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(error) == 1
    assert reason in error[0]


@pytest.mark.parametrize(("most", "shown", "more"), [(8, 8, "; 2 more"), (10, 10, "")])
def test_a_decision_has_the_scores_of_the_best_or_of_all(most: int, shown: int, more: str) -> None:
    decided: list[Decision] = []
    fleet = Fleet([FleetTE(f"te {n}", PRICE, LIMITS) for n in range(10)], "load", explain=decided.append)
    fleet.run(made(MadeTraffic(requests=3, seconds=1, prompt=40, output=4, block=LIMITS.block)))
    line = explained(decided[0], fleet.tes, most)
    assert line.startswith("request 0 -> te 0 (te 0: ")
    assert line.count("te ") == 1 + shown
    assert line.endswith(f"{more})")


EXACT = """
model = "tiny"
policy = "{policy}"
{more}
[[te]]
role = "prefill"
count = 2
dies = 2
mtp = 0
max_num_seqs = 8
max_num_batched_tokens = 128
{te}
[te.cache]
block_size = 16
num_blocks = 300
[[te]]
role = "decode"
dies = 2
mtp = 0
max_num_seqs = 8
max_num_batched_tokens = 128
[te.cache]
block_size = 16
num_blocks = 300
"""


def test_a_cluster_is_served_by_the_engine_with_the_same_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "apart.toml"
    path.write_text(EXACT.format(policy="round-robin", more="", te=""))
    given = ["replay", MADE, "--cluster", str(path), "--json", "--first", "20"]
    assert main(given) == 0
    fast = json.loads(capsys.readouterr().out)
    assert main([*given, "--exact"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert fast.keys() == exact.keys()
    for name in ("trace", "model", "cluster", "policy", "num_requests", "bounds"):
        assert fast[name] == exact[name]
    for one, other in zip(fast["tes"], exact["tes"], strict=True):
        assert one.keys() == other.keys()
        assert (one["name"], one["num_requests"]) == (other["name"], other["num_requests"])
        assert one["num_tokens"] == other["num_tokens"]


@pytest.mark.parametrize(
    ("more", "te", "options", "words"),
    [
        ("", "", ["--exact", "--explain"], "--exact has no --explain"),
        ("[roles]", "", ["--exact"], "at the grain of a step alone there is [roles]"),
        ("", 'acceptance = 0.5', ["--exact"], "[[te]] 2: acceptance must be that of the first"),
        ("", "scheduler.max_num_seqs = 4", [], "scheduler.max_num_seqs stands in [[te]] itself"),
        ("", 'scheduler.admission = "decode"', [], "scheduler.admission: TEs at the grain of a step"),
        ("", "o_proj_tp = 3", [], "o_proj_tp"),
    ],
)  # fmt: skip
def test_what_a_cluster_cannot_be_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, te: str, options: list[str], words: str
) -> None:
    path = tmp_path / "apart.toml"
    path.write_text(EXACT.format(policy="cost", more=more, te=te))
    assert main(["replay", MADE, "--cluster", str(path), "--first", "9", *options]) != 0
    told = capsys.readouterr().err
    assert words in told
    assert len(told.strip().splitlines()) == 1
