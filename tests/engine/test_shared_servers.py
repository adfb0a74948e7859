"""Task executors (TEs) that share expert servers: equal bits, whichever of them comes, goes or is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.services.rules import SlotState
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.events import ServerHeard, ServerMoved, StepEnded
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import DeploymentError, RequestError
from xdeepserve.history import History, TEChange, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.weights import Recipe

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5 + i, *range(10, 10 + i % 5)] for i in range(9)]
TWO, COPIES = "attention.count=2", "experts.copies=1"
SOON = ("services.heartbeat_ms=0.2", "health.suspect_s=0.01", "health.lost_s=0.02")
KEEPER, SERVERS, OTHER = range(4), range(4, 10), range(10, 14)  # dies of te, of its servers, and of te 1


class Shown(NamedTuple):
    """What is left of TEs and servers when all requests have been answered."""

    tes: dict[str, bool]  # and whether they keep the servers
    seats: dict[int, tuple[str, int]]  # presence and epoch
    offline: set[int]  # clients that servers do not serve
    held: set[int]  # dies of the pod that are somebody's


def ends(
    *settings: str, precision: Recipe = "int8", seed: int | None = None, **more: Any
) -> tuple[Told, Shown]:
    shown: list[Shown] = []

    @contextmanager
    def around(llm: LLM) -> Iterator[None]:
        yield
        tes = llm.engine.je.tes
        seats = {each.server: (each.presence, each.epoch) for each in llm.engine.servers()}
        keeps = {te.plan.name: te.members.keeps for te in tes}
        shown.append(Shown(keeps, seats, offline(tes[0]), set(llm.engine.plan.pod.holders)))

    overrides = ("max_model_len=64", COPIES, *SOON, *settings)
    history = History("eaas", overrides, PROMPTS, PARAMS, clock_seed=seed, precision=precision, **more)
    told = serve(history, around=around, hears=(ServerHeard, ServerMoved))
    assert told.digest == expected(precision)
    return told, shown[0]


def offline(te: TE) -> set[int]:
    """Clients that no server serves; all servers that are there agree on them."""
    found = []
    for each in te.members.servers:
        if te.members.presence(each.seat).name == "THERE":
            server = each.program.server  # type: ignore[union-attr]
            slots = range(server.layout.num_all_slots)
            found.append(
                {n // server.layout.num_slots for n in slots if server.state(n) == SlotState.OFFLINE}
            )
    assert all(each == found[0] for each in found)
    return found[0]


def lost(dies: Sequence[int], at_us: float = 1500.0) -> list[Fault]:
    return [Fault(at_us, die, "lost") for die in dies]


def in_server(die: int, code: Any) -> Fault:
    """An error code of a server's die, when it writes the answers of a batch."""
    return Fault(die=die, kind="glitch", code=code, operation="expert serve", step=1, event=5)


@cache
def expected(precision: Recipe = "int8") -> str:
    return digest(one_die(PROMPTS, PARAMS, precision, max_model_len=64))


WAYS: list[tuple[str, ...]] = [
    (TWO,),
    ("attention.count=3", "mtp=1"),
    (TWO, "experts.counts=[1,7,5,3]", "attention.microbatches=1", "execution.pin_cores=false"),
    (TWO, "services.batch_clients=6", "services.batch_timeout_us=200"),
    (TWO, "execution.overlap=true", "mtp=2", "attention.domains=1", "attention.dies=1"),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("settings", WAYS, ids=str)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_the_same_bits(precision: Recipe, settings: tuple[str, ...]) -> None:
    told, shown = ends(*settings, precision=precision)
    assert len(shown.tes) == int(settings[0][-1])
    assert list(shown.tes.values()).count(True) == 1
    assert not shown.offline
    assert {te.num_sequences for te in told.tes} == {0}
    assert len({te.name for te in told.tes}) == len(told.tes)


@pytest.mark.thin(2)
@pytest.mark.parametrize("dies", [KEEPER, OTHER], ids=["keeper", "other"])
@pytest.mark.parametrize("settings", [(), ("services.batch_clients=6", "mtp=1")], ids=str)
def test_requests_go_on_when_one_te_is_lost(dies: range, settings: tuple[str, ...]) -> None:
    """All servers release its slots, and the other TE keeps them; one server is lost, and replaced."""
    name, survivor, numbers = ("te", "te 1", range(4)) if dies is KEEPER else ("te 1", "te", range(4, 8))
    faults = [*lost(dies), *lost([SERVERS[1]], 900.0)]
    life = [TEChange(12_000.0, "add server", survivor, 1)]
    told, shown = ends(TWO, *settings, faults=faults, life=life)
    assert set(told.lost) == {name}
    assert shown.tes == {survivor: True}
    assert shown.offline == set(numbers)
    assert shown.seats[1] == ("there", 2)
    assert not shown.held & {*dies, SERVERS[1]}, "dies that are lost are nobody's"


def test_a_te_comes_in_the_place_of_one_that_is_lost_and_one_more_brings_servers() -> None:
    life = [TEChange(22_000.0, "add", "both"), TEChange(22_000.0, "add", "both")]
    told, shown = ends(TWO, faults=lost(KEEPER), life=life)
    assert set(told.lost) == {"te"}
    assert shown.tes == {"te 1": True, "te 2": False, "te 3": True}
    assert not shown.offline
    assert [te.dies[4:] for te in told.tes] == [(*SERVERS,), (), (*range(22, 28),)]


def test_tes_that_come_after_all_were_lost_share_smaller_servers() -> None:
    """The TE that failover brings has room for one client alone, and the next one is like it."""
    settings = "recovery.failover=true", "recovery.spare_dies=5"
    told, shown = ends(TWO, *settings, faults=lost([*KEEPER, *OTHER], 700.0))
    assert shown.tes == {"te 2": True, "te 3": False}
    assert {len(te.dies) for te in told.tes} == {1 + 3, 1}
    assert not shown.offline


@pytest.mark.thin(2)
@pytest.mark.parametrize("what", ["drain", "remove"])
@pytest.mark.parametrize("name", ["te", "te 1"])
def test_a_te_leaves_and_another_comes_meanwhile(name: str, what: Any) -> None:
    life = [
        TEChange(600.0, what, name),
        TEChange(600.0, "add", "both"),
        TEChange(700.0, "remove server", None, 2),
    ]
    told, shown = ends(TWO, life=life)
    assert not told.lost
    assert {"te", "te 1"} - {name} < shown.tes.keys()
    assert list(shown.tes.values()).count(True) == 1
    assert shown.seats[2][0] == "absent"
    assert not shown.offline


@pytest.mark.parametrize("who", ["keeper", "other", "server"])
def test_steps_are_run_again_by_one_te_alone(who: str) -> None:
    dies = {"keeper": KEEPER[1], "other": OTHER[1]}
    at_once = Fault(1500.0, dies.get(who, 0), "glitch", code="dma-error")
    told, _ = ends(TWO, faults=[in_server(SERVERS[2], "dma-error") if who == "server" else at_once])
    rollbacks = [health.num_rollbacks for health in told.stats.health]
    assert rollbacks == ([0, 1] if who == "other" else [1, 0])


def test_servers_that_are_called_back_for_long_are_not_lost() -> None:
    """The keeper restores a page for milliseconds, and the other TE's steps go on meanwhile."""
    told, shown = ends(TWO, faults=[Fault(9.0, KEEPER[3], "bad-page", page=22)])
    assert not told.of(ServerHeard)
    assert {presence for presence, _ in shown.seats.values()} == {"there"}


def test_a_server_that_may_be_broken_serves_nobody_any_more() -> None:
    """Its keeper is lost by it, and the TE that keeps the servers then asks those with copies."""
    told, shown = ends(TWO, faults=[in_server(SERVERS[1], "unspecified")])
    assert set(told.lost) == {"te"}
    assert shown.seats[1] == ("lost", 1)


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(12))
def test_lives_at_random(seed: int) -> None:
    """A TE or none is lost, a server or none; dies report errors; servers come and go."""
    rng = random.Random(f"shared servers {seed}")
    faults = lost(rng.choice(((), KEEPER, OTHER)), rng.uniform(50, 5000))
    faults += lost(rng.sample(SERVERS[:4], rng.randint(0, 1)), rng.uniform(50, 5000))
    taken = {fault.die for fault in faults}
    for die in rng.sample(range(14), 3):
        if die not in taken:
            faults.append(Fault(rng.uniform(50, 5000), die, "glitch", code="dma-error"))
    life = [TEChange(rng.uniform(6000, 9000), "remove server", None, 4)] * rng.randint(0, 1)
    settings = f"mtp={seed % 2}", f"services.batch_clients={rng.choice([1, 5])}", "experts.copies=2"
    told, shown = ends(TWO, *settings, faults=faults, life=life, seed=rng.choice((None, seed)))
    assert len(told.lost) <= 1
    assert list(shown.tes.values()) in ([True], [True, False])


def test_time_alone_takes_as_long_as_with_bytes() -> None:
    def end_ns(is_timing_only: bool, *faults: Fault) -> int:
        settings = ("max_model_len=64", TWO, COPIES)
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return serve(
            History("eaas", settings, PROMPTS, params, faults=faults, is_timing_only=is_timing_only)
        ).end_ns

    assert end_ns(True) == pytest.approx(end_ns(False), rel=0.03)
    glitch = Fault(1500.0, KEEPER[0], "glitch", code="dma-error")
    assert end_ns(True, glitch) == pytest.approx(end_ns(False, glitch), rel=0.05)


def test_one_of_64_servers_is_hardly_missed() -> None:
    """From its loss to the last token, throughput drops by less than 2 % (EaaS 5.4)."""
    settings = (
        *("max_model_len=64", "attention.dies=1", "experts.routed_dies=62", "experts.shared_dies=2"),
        *(TWO, COPIES, "services.heartbeat_ms=0.2"),
    )
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    history = History("eaas", settings, [[5 + i, 7, 9] for i in range(8)], params, model="tiny")
    without = serve(history, hears=(StepEnded,))
    half_ns = sorted(without.token_times)[len(without.token_times) // 2]
    fault = Fault(half_ns / 1e3, 2 + 5, "lost")
    told = serve(msgspec.structs.replace(history, faults=(fault,)), hears=(StepEnded, ServerHeard))
    assert told.digest == without.digest
    (heard_ns,) = (at for at, event in told.events if isinstance(event, ServerHeard))
    assert heard_ns - half_ns < 1_000_000
    took = [max(each.token_times) - half_ns for each in (without, told)]
    assert 1 - took[0] / took[1] < 0.02


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([TWO, "experts.redundant_slots=1"], "attention.count=2 TEs have the same servers"),
        (
            [TWO, "experts.transport=shm"],
            "with experts.transport=shm there is one TE, found attention.count=2",
        ),
        (["attention.count=0"], "attention.count must be at least 1"),
    ],
)
def test_refusals_are_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(DeploymentError, match=said):
        fit(resolve("eaas", overrides), resolve_model("tiny-random").config)


def test_only_services_are_shared() -> None:
    with pytest.raises(DeploymentError, match=r"attention.count is for experts that are services"):
        fit(resolve("moe-attention", [TWO]), resolve_model("tiny-random").config)


def test_each_te_names_the_servers_that_it_shares() -> None:
    with LLM("tiny-random", "eaas", overrides=["max_model_len=64", TWO, COPIES]) as llm:
        assert [report.te for report in llm.engine.servers()] == ["te"] * 6
        llm.remove_server("te 1", 0)
        assert llm.add_server("te 1").server == 0
        with pytest.raises(RequestError, match="no seat for another expert server: all 6 are taken"):
            llm.add_server("te 1")
