"""Experts as services: the bits of every other deployment, and servers that are lost or slow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server.engine_metrics import EngineCollector
from xdeepserve.engine.deploy.expert_services import declustered
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.rules import without_effect
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.dp.events import ClientLost, ServerHeard
from xdeepserve.errors import DeploymentError, FieldError, XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.weights import Recipe

PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5 + i, *range(10, 10 + i % 5)] for i in range(9)]
COPIES = "experts.copies=1"
FIRST_SERVER = 4  # die; there are 4 clients, 4 servers with routed experts, and 2 with the shared one


def served(
    precision: Recipe,
    *settings: str,
    faults: Sequence[Fault] = (),
    seed: int | None = None,
    params: SamplingParams = PARAMS,
    around: Any = nullcontext,
) -> Told:
    overrides = ("max_model_len=64", *settings)
    told = serve(
        History("eaas", overrides, PROMPTS, params, None, faults, clock_seed=seed, precision=precision),
        hears=(ServerHeard, ClientLost),
        around=around,
    )
    assert not told.lost
    return told


def resent(*settings: str, faults: Sequence[Fault]) -> tuple[Told, int]:
    """Results of the requests, and the number of batches that clients have sent again."""
    counts: list[int] = []

    @contextmanager
    def around(llm: LLM) -> Iterator[None]:
        yield
        clients = llm.engine.je.tes[0].plan.wiring.away.clients.values()  # type: ignore[attr-defined]
        counts.extend(client.num_resent for client in clients)

    return served("int8", *settings, faults=faults, around=around), sum(counts)


@cache
def expected(precision: Recipe, num_tokens: int = PARAMS.max_tokens) -> str:
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=3, ignore_eos=True)
    return digest(one_die(PROMPTS, params, precision, max_model_len=64))


# ---- bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "counts"), [("int8", (1, 3, 8)), ("fp32", (2, 5))])
def test_one_to_eight_servers(precision: Recipe, counts: tuple[int, ...]) -> None:
    for count in counts:
        assert served(precision, f"experts.routed_dies={count}").digest == expected(precision)


WAYS: list[tuple[str, ...]] = [
    ("experts.counts=[1,7,3,5]",),
    ("experts.counts=[13,1,2]", COPIES, "attention.dies=3"),
    ("experts.routed_dies=18", COPIES),  # two have copies alone
    ("experts.routed_dies=5", "experts.copies=4"),
    ("attention.microbatches=1",),
    ("attention.microbatches=3", "attention.domains=2", "attention.dies=1"),
    ("mtp=1", COPIES),
    ("mtp=2", "mtp_reuse=true"),
    ("execution.mode=op", "execution.pin_cores=false"),
    ("execution.overlap=true", "mtp=2", COPIES),
    ("services.batch_clients=2", "services.batch_timeout_us=30"),
    ("services.batch_clients=4", "services.batch_timeout_us=400", COPIES),
    ("services.batch_clients=99", "services.batch_timeout_us=0"),
]


@pytest.mark.thin(5)
@pytest.mark.parametrize("settings", WAYS)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_the_same_bits(precision: Recipe, settings: tuple[str, ...]) -> None:
    assert served(precision, *settings).digest == expected(precision)


@pytest.mark.thin(3)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events(seed: int) -> None:
    settings = ("execution.pin_cores=false", f"seed={seed}", "services.batch_clients=3", COPIES)
    lost = Fault(900.0, FIRST_SERVER + seed, "lost")
    assert served("int8", *settings, faults=[lost], seed=seed).digest == expected("int8")


def test_replicas_that_eplb_brings() -> None:
    long = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    slots = ("experts.redundant_slots=1", "experts.balance_interval=0.001")
    found = served("int8", *slots, "mtp=1", params=long)
    assert found.digest == expected("int8", 40)
    assert found.stats.num_reconfigurations > 0


def test_int8_combine() -> None:
    with LLM("tiny-random", "colocated", "int8", overrides=["max_model_len=64", "combine=int8"]) as llm:
        outputs = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
    assert served("int8", "combine=int8", COPIES).digest == outputs != expected("int8")


def test_a_server_that_waits_has_larger_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    place_of = ExpertServerProgram.place_of

    def noted(program: ExpertServerProgram, batch: Any) -> Any:
        batches.append(len({each.client for each in batch}))
        return place_of(program, batch)

    monkeypatch.setattr(ExpertServerProgram, "place_of", noted)
    served("int8", "attention.microbatches=1")
    alone = [*batches]
    batches.clear()
    served(
        "int8",
        "attention.microbatches=1",
        "services.batch_clients=4",
        "services.batch_timeout_us=500",
    )
    together = batches
    assert sum(together) / len(together) > 1.2 * sum(alone) / len(alone)


# ---- servers that are lost, or slow -----------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize(("operation", "step"), [("expert serve", step) for step in (1, 2, 3, 4)])
def test_a_server_is_lost_at_each_step_of_its_own(operation: str, step: int) -> None:
    ways = ("services.heartbeat_ms=0.2", "services.answer_timeout_ms=0.4")
    for number, (die, event) in enumerate(((4, 1), (6, 7), (8, 4)), start=step):
        fault = Fault(die=die, kind="lost", operation=operation, step=step, event=event)
        found = served("int8", COPIES, ways[number % 2], faults=[fault])
        assert found.digest == expected("int8")
        assert [each.server for each in found.of(ServerHeard) if each.is_lost] == [die - FIRST_SERVER]


@pytest.mark.thin(5)
@pytest.mark.parametrize("at_us", [310.0, 345.0, 380.0, 415.0, 450.0, 485.0, 520.0, 555.0, 1000.0, 4000.0])
def test_a_server_is_lost_at_any_time(at_us: float) -> None:
    for die in (5, 9):
        found = served("int8", COPIES, "services.answer_timeout_ms=1", faults=[Fault(at_us, die, "lost")])
        assert found.digest == expected("int8")
        assert found.end_ns < 40_000_000


def test_monitor_and_patience_both_find_a_lost_server() -> None:
    """Each alone, the other being too slow. What was asked of it is asked of others."""
    fault = Fault(die=4, kind="lost", operation="expert serve", step=1, event=9)
    monitor = ("services.heartbeat_ms=0.1", "services.answer_timeout_ms=500")
    patience = ("services.heartbeat_ms=500", "services.answer_timeout_ms=2")
    for way in (monitor, patience):
        found, num_resent = resent(COPIES, *way, faults=[fault])
        assert found.digest == expected("int8")
        assert num_resent > 0
        assert found.end_ns < 30_000_000
        heard = [(each.server, each.is_lost) for each in found.of(ServerHeard)]
        assert heard == ([(0, True)] if way == monitor else [])


def test_a_slow_server_is_left_out_and_comes_back() -> None:
    slow = Fault(700.0, 4, "stalled", for_us=2000.0)
    by_monitor = served("int8", COPIES, "services.heartbeat_ms=0.2", faults=[slow])
    assert [each.is_lost for each in by_monitor.of(ServerHeard)] == [True, False]
    by_patience, num_resent = resent(COPIES, "services.answer_timeout_ms=0.5", faults=[slow])
    assert num_resent > 0
    patient, num_resent = resent(COPIES, faults=[slow])
    assert num_resent == 0
    assert {each.digest for each in (by_monitor, by_patience, patient)} == {expected("int8")}


def test_one_after_the_other_as_long_as_somebody_has_each_expert() -> None:
    lost = [Fault(at_us, die, "lost") for at_us, die in ((500.0, 4), (2500.0, 8), (6000.0, 6))]
    found = served("int8", "experts.copies=2", "mtp=2", "services.heartbeat_ms=0.2", faults=lost)
    assert found.digest == expected("int8")
    assert [each.server for each in found.of(ServerHeard)] == [0, 4, 2]


def test_steps_are_run_again_without_who_is_lost() -> None:
    faults = [
        Fault(600.0, 4, "lost"),
        Fault(2600.0, 5, "glitch", code="aicore-exception"),
        Fault(4700.0, 1, "glitch", code="mte-error"),
    ]
    found = served("int8", COPIES, "services.heartbeat_ms=0.2", faults=faults)
    assert found.digest == expected("int8")
    assert found.stats.num_recoveries["3"] > 0


def test_steps_are_run_again_before_anybody_knows_who_is_lost() -> None:
    faults = [Fault(1000.0, 4, "lost"), Fault(1010.0, 1, "glitch", code="aicore-exception")]
    found = served("int8", COPIES, faults=faults)
    assert found.digest == expected("int8")
    assert found.stats.num_recoveries["3"] > 0
    assert found.end_ns < 100_000_000


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "fault",
    [
        Fault(500.0, 4, "slow", factor=30.0, for_us=4000.0),
        Fault(500.0, 5, "late", by_us=300.0, for_us=4000.0),
        Fault(500.0, 2, "late", by_us=300.0, for_us=4000.0),
        Fault(500.0, 0, "stalled", for_us=3000.0),
        Fault(500.0, link=(1, 6), plane="ub", kind="blocked", for_us=2500.0),
        Fault(500.0, link=(3, 8), plane="ub", kind="slow", factor=50.0, for_us=4000.0),
    ],
    ids=str,
)
def test_whoever_is_slow(fault: Fault) -> None:
    for way in ("services.heartbeat_ms=0.1", "services.answer_timeout_ms=0.3"):
        found = served("int8", COPIES, way, faults=[fault])
        assert found.digest == expected("int8")


@pytest.mark.thin(3)
@pytest.mark.parametrize("seed", range(8))
def test_random_faults_of_servers(seed: int) -> None:
    """Two servers with routed experts and one with the shared one; each expert is on three."""
    rng, faults = random.Random(seed), []
    for die in (*rng.sample([4, 5, 6, 7], 2), rng.choice([8, 9])):
        kind = rng.choice(["lost", "lost", "stalled", "slow", "late"])
        says: dict[str, float] = {} if kind == "lost" else {"for_us": rng.uniform(100, 4000)}
        says |= {"slow": {"factor": 20.0}, "late": {"by_us": 400.0}}.get(kind, {})
        faults.append(Fault(rng.uniform(300, 7000), die, kind, **says))  # type: ignore[arg-type]
    ways = (
        f"services.heartbeat_ms={rng.choice([0.1, 2.0])}",
        f"services.answer_timeout_ms={rng.choice([0.2, 20.0])}",
        f"services.batch_clients={rng.choice([1, 3])}",
    )
    found = served("int8", "experts.copies=2", f"mtp={seed % 2}", *ways, faults=faults, seed=seed)
    assert found.digest == expected("int8")
    assert found.end_ns < 100_000_000


def test_who_asks_hears_which_servers_are_lost() -> None:
    """In `/health`, and in `/metrics`, which say nothing of servers where there are none."""

    def told(deployment: str, *settings: str, faults: Sequence[Fault] = ()) -> tuple[Any, dict[str, float]]:
        overrides = ("max_model_len=64", *settings)
        stats = serve(History(deployment, overrides, PROMPTS, PARAMS, faults=faults)).stats
        metrics = EngineCollector("m", lambda: stats).collect()
        samples = [sample for metric in metrics for sample in metric.samples]
        found = {s.labels["state"]: s.value for s in samples if s.name == "xdeepserve:expert_servers"}
        (te,) = stats.health
        return te, found

    te, found = told("eaas", COPIES, "services.heartbeat_ms=0.2", faults=[Fault(900.0, 5, "lost")])
    assert te.lost_servers == (5 - FIRST_SERVER,)
    assert found == {"healthy": 5, "suspect": 0, "lost": 1}
    te, found = told("colocated")
    assert (te.num_servers, te.lost_servers, found) == (0, (), {})


WAYS_WITHOUT_CLIENTS: list[tuple[tuple[str, ...], tuple[float, ...]]] = [
    ((), (700.0,)),  # by the monitor, while steps run
    (("services.heartbeat_ms=0.1", "services.batch_clients=3", "mtp=1"), (2.0, 700.0, 1500.0)),
    (("services.heartbeat_ms=1000000",), (700.0,)),  # by the heartbeats of DP groups
    (("attention.microbatches=2", "scheduler.dispatch=two-level", COPIES), (400.0, 2500.0)),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("settings", "at_us"), WAYS_WITHOUT_CLIENTS, ids=str)
def test_clients_that_are_lost_cost_neither_requests_nor_bits(
    settings: tuple[str, ...], at_us: tuple[float, ...]
) -> None:
    """Servers release their slots, also servers that come later; other groups go on with what they had."""
    faults = [Fault(each, die, "lost") for die, each in enumerate(at_us)]
    gone: list[ClientLost] = []
    overrides = ["max_model_len=64", *settings]
    with LLM("tiny-random", "eaas", "int8", overrides=overrides, faults=faults) as llm:
        llm.engine.observe(lambda event: gone.append(event) if isinstance(event, ClientLost) else None)
        te = llm.engine.je.tes[0]
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        assert digest(outputs) == expected("int8")
        assert [(each.rank, each.die) for each in gone] == [(rank, rank) for rank in range(len(at_us))]
        assert not llm.engine.lost
        (health,) = llm.engine.health()
        assert health.lost_groups == health.lost_dies == tuple(range(len(at_us)))
        for program in te.expert_programs:
            server = program.server  # type: ignore[attr-defined]
            layout = server.layout
            offline = {n // layout.num_slots for n in range(layout.num_all_slots) if server.state(n) == 3}
            assert offline == set(range(len(at_us)))
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == expected("int8")
        llm.engine.check_integrity()


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("operation", "step"),
    [("expert write", step) for step in (1, 2, 3, 4, 5)] + [("expert read", step) for step in (1, 2, 3, 4)],
)
def test_a_client_is_lost_at_each_step_of_its_own(operation: str, step: int) -> None:
    """Whatever it has left in its slots: in every state of them."""
    ways = ((), ("services.batch_clients=3", "services.batch_timeout_us=30"))
    for number, (die, event) in enumerate(((0, 1), (3, 6)), start=step):
        fault = Fault(die=die, kind="lost", operation=operation, step=step, event=event)
        found = served("int8", "services.heartbeat_ms=0.2", *ways[number % 2], faults=[fault])
        assert found.digest == expected("int8")
        assert [each.die for each in found.of(ClientLost)] == [die]


def test_a_client_and_a_server_are_lost_at_once() -> None:
    faults = [Fault(700.0, die, "lost") for die in (1, FIRST_SERVER + 1)]
    for seed in range(2):
        found = served("int8", COPIES, "services.heartbeat_ms=0.2", faults=faults, seed=seed)
        assert found.digest == expected("int8")


def test_steps_are_run_again_without_a_client_that_is_lost() -> None:
    faults = [Fault(700.0, 0, "lost"), Fault(30_000.0, 2, "glitch", code="dma-error")]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    found = served("int8", "services.heartbeat_ms=0.2", faults=faults, params=params)
    assert (found.digest, found.stats.num_recoveries["3"]) == (expected("int8", 40), 1)


def test_the_last_client_that_is_lost_takes_its_te_and_another_te_comes() -> None:
    """Servers are asked ever more seldom while the silence of a client is what is waited for."""
    overrides = ["max_model_len=64", "recovery.failover=true", COPIES]
    faults = [Fault(700.0 + die, die, "lost") for die in range(4)]
    with LLM("tiny-random", "eaas", overrides=overrides, faults=faults) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        assert [*llm.engine.lost] == ["te"]
        llm.engine.check_integrity()
    assert digest(outputs) == expected("int8")


def test_a_page_of_a_server_is_put_right_with_its_copies() -> None:
    pages = ("weights/layers.1.experts.w13", "slot_expert")
    for die, page in (*((5, page) for page in pages), (0, "services.returned.0"), (2, "log2phy")):
        faults = [Fault(900.0, die, "bad-page", page=page), Fault(1500.0, 7, "lost")]
        found = served("int8", COPIES, "services.heartbeat_ms=0.2", faults=faults)
        assert found.digest == expected("int8")
        assert found.stats.num_recoveries["3"] > 0


def test_time_only_sends_nothing_to_vacant_seats() -> None:
    def virtual_ns(*settings: str) -> tuple[int, int]:
        """Time of the run, and of that in finding which server has an expert."""
        overrides = ["max_model_len=64", *settings]
        with LLM("tiny-random", "eaas", timing_only=True, overrides=overrides, trace=True) as llm:
            llm.generate(PROMPTS[:2], PARAMS)
            spans = llm.engine.plan.pod.trace.spans
            mine = [span for span in spans if (span.name, span.node) == ("Route", 0)]
            return llm.virtual_ns, sum(span.end_ns - span.start_ns for span in mine)

    (some, routing), (none, nothing) = virtual_ns("experts.vacancies=1"), virtual_ns()
    assert nothing == 0
    assert some - none == routing


@pytest.mark.parametrize("settings", [(), (COPIES,)])
def test_what_nobody_has_any_more_is_an_error_that_says_so(settings: tuple[str, ...]) -> None:
    """Without copies one loss is enough; with one copy of each, two are."""
    faults = [Fault(700.0, 4, "lost"), Fault(700.0, 5, "lost")]
    overrides = ["max_model_len=64", "services.heartbeat_ms=0.2", *settings]
    with (
        LLM("tiny-random", "eaas", overrides=overrides, faults=faults) as llm,
        pytest.raises(XDeepServeError) as caught,
    ):
        llm.generate(PROMPTS, PARAMS)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, FieldError):
        error = error.__cause__
    assert error is not None
    assert error.op == "expert read"
    assert str(error.peer).startswith("expert server ")
    assert str(error.rank).startswith("client ")
    assert "a lost die, and no replica of physical experts" in str(error)


# ---- settings ---------------------------------------------------------------------------------------


def test_copies_are_on_other_servers_and_spread() -> None:
    held = declustered([range(4), range(4, 8), range(8, 12), range(12, 16), range(16, 16)], 4, 1)
    assert held == ((6, 9, 12, 15), (0, 3, 10, 13), (1, 4, 7, 14), (2, 5, 8, 11), ())
    sizes = fit(resolve("eaas", ["experts.counts=[1,7,3,5]", "experts.copies=3"]), _config())[0]
    for own, copies in zip(sizes.experts.experts_of, sizes.experts.copies_of, strict=True):
        assert not set(own) & set(copies)
        assert not own or sorted({*own, *copies}) == [*range(16)]


def _config() -> Any:
    return resolve_model("tiny-random").config


REFUSED = [
    (["experts.routed_dies=17"], "experts.routed_dies=17 is more than the model's 16 routed experts"),
    (["experts.counts=[8,8,1]"], "experts.counts must be the routed experts of each of 3 servers"),
    (
        ["experts.counts=[8,8]", "experts.routed_dies=3"],
        "each of 3 servers, 1 or more, 16 together, found [8, 8]",
    ),
    (["experts.counts=[16,0]"], "1 or more, 16 together, found [16, 0]"),
    (["experts.copies=4"], "experts.copies must be between 0 and 3, the number of other servers, found 4"),
    (["experts.copies=1", "experts.redundant_slots=1"], "choose one"),
    (["services.batch_clients=0"], "services.batch_clients must be at least 1, found 0"),
    (["services.lost_heartbeats=0"], "services.lost_heartbeats must be at least 1, found 0"),
    (["services.heartbeat_ms=0"], "services.heartbeat_ms must be more than 0"),
    (["services.batch_timeout_us=-1"], "services.batch_timeout_us must be 0 or"),
    (["services.patience=3"], "unknown setting services.patience"),
    (["exchange=push"], "exchange=push waits for a flag of every die"),
    (["lockstep=true"], "expert services take each client by itself"),
    (["tp=2"], "tp is no setting of eaas, which has attention, experts, services"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_refusals_are_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        fit(resolve("eaas", overrides), _config())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_elsewhere_there_are_no_services() -> None:
    for setting, said in (
        ("services.heartbeat_ms=1", "services is no setting of colocated"),
        ("experts.copies=1", r"experts.copies is for experts that are services \(eaas\)"),
        ("experts.counts=[8,8]", "experts.counts is for experts that are services"),
    ):
        with pytest.raises(DeploymentError, match=said):
            fit(resolve("colocated", [setting]), _config())


def test_settings_that_change_nothing_are_told() -> None:
    overrides = ["dataflow=true", "attention.carrier=urma", "services.answer_timeout_ms=3"]
    overrides.append("services.batch_timeout_us=3")
    assert [key for key, _ in without_effect(resolve("eaas", overrides), overrides)] == [
        override.partition("=")[0] for override in overrides
    ]
