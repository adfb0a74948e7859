"""Expert servers that come back, join and leave while requests run: no request ends, and no bit changes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.deploy.expert_services import copies_of
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.dp.events import ServerMoved
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import DeploymentError, LostDieError, RequestError, XDeepServeError
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest
from xdeepserve.model.presets import resolve_model

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5 + i, *range(10, 10 + i % 5)] for i in range(9)]
COPIES, VACANCY, SOON = "experts.copies=1", "experts.vacancies=1", "services.heartbeat_ms=0.2"
FIRST_SERVER = 4  # die; there are 4 clients, 4 servers with routed experts, and 2 with the shared one
LOST = Fault(700.0, FIRST_SERVER + 1, "lost")
Change = Callable[[Engine], Awaitable[None]]


class Lived(NamedTuple):
    digest: str
    moved: list[tuple[int, int, bool]]  # server, epoch, whether it came
    num_resent: int
    num_rollbacks: int
    num_reconfigurations: int
    generations: dict[int, int]  # of servers, at the end
    asked: dict[int, int]  # batches that servers have served since they came
    holders: set[int]


def lived(
    *settings: str,
    change: Change,
    faults: Sequence[Fault] = (),
    precision: str = "int8",
    seed: int | None = None,
    params: SamplingParams = PARAMS,
) -> Lived:
    moved: list[tuple[int, int, bool]] = []
    asked: dict[int, int] = {}

    def hear(event: object) -> None:
        if isinstance(event, ServerMoved):
            moved.append((event.server, event.epoch, event.is_there))
            asked[event.server] = 0

    take = ExpertServerProgram.place_of

    def noted(program: ExpertServerProgram, batch: Any) -> Any:
        asked[program.server.index] = asked.get(program.server.index, 0) + 1
        return take(program, batch)

    overrides = ["max_model_len=64", SOON, *settings]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertServerProgram, "place_of", noted)
        with LLM(
            "tiny-random", "eaas", precision, overrides=overrides, faults=faults, clock_seed=seed
        ) as llm:
            llm.engine.observe(hear)
            outputs = llm.generate(PROMPTS, params, keep_logits=True, meanwhile=change)
            llm.engine.check_integrity()
            assert not llm.engine.lost
            te = llm.engine.je.tes[0]
            clients = te.plan.wiring.away.clients.values()  # type: ignore[attr-defined]
            resent = sum(client.num_resent for client in clients)
            generations = {p.server.index: p.server.generation for p in te.expert_programs}  # type: ignore[attr-defined]
            pod = llm.engine.plan.pod
            assert not pod.holders.keys() & pod.lost - {*te.plan.every_die}
            return Lived(
                *(digest(outputs), moved, resent, te.recovery.count),
                *(llm.engine.stats().num_reconfigurations, generations, asked, set(pod.holders)),
            )


@cache
def expected(precision: str = "int8", num_tokens: int = PARAMS.max_tokens) -> str:
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=3, ignore_eos=True)
    return digest(one_die(PROMPTS, params, precision, max_model_len=64))


def at(*when: tuple[float, str, int | None]) -> Change:
    """Servers come and go, each at its time in us at the earliest, or when the one before has."""

    async def change(engine: Engine) -> None:
        clock = engine.plan.pod.clock
        for at_us, what, server in when:
            await clock.sleep_until(max(clock.now, round(1000 * at_us)))
            if what == "add":
                await engine.add_server(server=server)
            else:
                assert server is not None
                await engine.remove_server("te", server)

    return change


WAYS: list[tuple[str, ...]] = [
    (),
    ("mtp=1",),
    ("mtp=2", "execution.overlap=true"),
    ("services.batch_clients=3", "services.batch_timeout_us=100"),
    ("attention.microbatches=1", "execution.pin_cores=false"),
    ("experts.counts=[1,7,5,3]",),
]


@pytest.mark.thin(5)
@pytest.mark.parametrize("settings", WAYS, ids=str)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_one_comes_back_one_joins_one_leaves(precision: str, settings: tuple[str, ...]) -> None:
    change = at((3000, "add", 1), (3000, "add", None), (3000, "remove", 2), (4500, "add", None))
    found = lived(COPIES, VACANCY, *settings, change=change, faults=[LOST], precision=precision)
    assert found.digest == expected(precision)
    assert found.moved == [(1, 2, True), (4, 2, True), (2, 1, False), (2, 2, True)]
    assert [found.generations[each] for each in (0, 1, 2, 4)] == [1, 2, 2, 1]
    assert all(found.asked[each] > 0 for each in (1, 2, 4)), "those who came are asked"
    assert FIRST_SERVER + 1 not in found.holders, "who is replaced holds no die"


def test_nothing_is_asked_again_when_servers_come_and_go_by_themselves() -> None:
    change = at((900, "add", None), (900, "remove", 0), (900, "add", 0), (900, "remove", 4))
    found = lived(COPIES, VACANCY, change=change)
    assert found.digest == expected()
    assert (found.num_resent, found.num_rollbacks) == (0, 0)
    assert found.moved == [(4, 2, True), (0, 1, False), (0, 2, True), (4, 2, False)]


def test_who_has_come_back_is_counted_on_when_others_are_lost() -> None:
    """Each expert is twice there: two losses are one too many, unless the first has come back."""
    faults = [LOST, Fault(6000.0, FIRST_SERVER, "lost"), Fault(6000.0, FIRST_SERVER + 5, "lost")]
    found = lived(COPIES, change=at((2000, "add", 1), (9000, "add", 0), (9000, "add", 5)), faults=faults)
    assert found.digest == expected()
    assert [server for server, _, _ in found.moved] == [1, 0, 5]


def test_who_takes_the_place_of_a_slow_one_is_asked_alone() -> None:
    slow = Fault(700.0, FIRST_SERVER, "stalled", for_us=9000.0)
    found = lived(COPIES, change=at((2500, "add", 0)), faults=[slow])
    assert found.digest == expected()
    assert found.moved == [(0, 2, True)]
    assert FIRST_SERVER not in found.holders, "its die is free"


@pytest.mark.thin(4)
@pytest.mark.parametrize("seed", range(8))
def test_lives_at_random(seed: int) -> None:
    """Servers are lost, slow, replaced, come and leave while steps are run again; each expert is on three."""
    rng = random.Random(seed)
    slow = Fault(rng.uniform(300, 5000), rng.choice([6, 7]), "stalled", for_us=rng.uniform(100, 3000))
    faults = [
        Fault(rng.uniform(300, 5000), rng.choice([4, 5]), "lost"),
        Fault(rng.uniform(300, 9000), rng.choice([0, 1, 2]), "glitch", code="aicore-exception"),
        slow,
    ]

    async def change(engine: Engine) -> None:
        clock = engine.plan.pod.clock
        for _ in range(8):
            await clock.sleep(round(1000 * rng.uniform(100, 1500)))
            with contextlib.suppress(RequestError, LostDieError):  # somebody is there, nobody, nobody else
                if rng.random() < 0.6:
                    await engine.add_server(server=rng.choice([None, rng.randrange(8)]))
                else:
                    await engine.remove_server("te", rng.randrange(8))

    ways = (
        f"services.answer_timeout_ms={rng.choice([0.3, 20.0])}",
        f"services.batch_clients={rng.choice([1, 3])}",
        f"mtp={seed % 3}",
    )
    found = lived("experts.copies=2", VACANCY, *ways, change=change, faults=faults, seed=seed)
    assert found.digest == expected()


def test_replicas_that_eplb_brings_are_counted_on() -> None:
    """Every server has slots for all experts of others; when these are full one is lost, and comes back."""
    long = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    slots = ("experts.redundant_slots=12", "experts.balance_interval=0.001")
    found = lived(*slots, change=at((60_000, "add", 1)), faults=[Fault(30_000.0, 5, "lost")], params=long)
    assert found.digest == expected("int8", 60)
    assert found.num_resent > 0
    assert found.moved == [(1, 2, True)]


# ---- what is refused, and what does not come ---------------------------------------------------------


async def refused(engine: Engine, work: Awaitable[Any], words: str) -> None:
    with pytest.raises((RequestError, DeploymentError)) as caught:
        await work
    assert str(caught.value) == words


def test_refusals_are_one_line_and_nothing_happens() -> None:
    async def change(engine: Engine) -> None:
        add, remove = engine.add_server, engine.remove_server
        for work, words in (
            (
                add(),
                "TE te has no seat for another expert server: all 6 are taken (experts.vacancies plans for "
                "more)",
            ),
            (add(server=2), "expert server 2 of TE te is there already, on die 6"),
            (add(server=6), "TE te has no expert server 6: it has 6, from 0 on"),
            (add("other"), 'there is no TE "other": this engine has te'),
            (remove("te", 1), "expert server 1 of TE te cannot leave: nobody else has experts 4, 5, 6, 7"),
            (remove("te", 9), "TE te has no expert server 9: it has 6, from 0 on"),
        ):
            await refused(engine, work, words)

    found = lived("experts.shared_dies=2", change=change)
    assert (found.digest, found.moved) == (expected(), [])


def test_two_of_the_same_number_on_their_way() -> None:
    async def change(engine: Engine) -> None:
        clock = engine.plan.pod.clock
        first = clock.spawn(engine.add_server(server=4), name="first")
        await clock.sleep(1000)
        await refused(
            engine, engine.add_server(server=4), "expert server 4 of TE te is on its way already, to die 8"
        )
        await refused(
            engine,
            engine.remove_server("te", 4),
            "expert server 4 of TE te cannot leave: it is on its way there",
        )
        await clock.join(first)

    assert lived(COPIES, VACANCY, change=change).moved == [(4, 2, True)]


def test_there_are_no_expert_servers_elsewhere() -> None:
    with LLM("tiny-random", "colocated", overrides=["max_model_len=64"]) as llm:
        with pytest.raises(RequestError, match="there is no TE with expert servers: this engine has te"):
            llm.add_server()
        with pytest.raises(RequestError, match="TE te has no expert servers: its experts are no services"):
            llm.add_server("te")
    for settings in (["experts.vacancies=-1"], ["experts.vacancies=1", "experts.redundant_slots=1"]):
        with pytest.raises(DeploymentError, match=r"experts\.vacancies"):
            fit(resolve("eaas", settings), resolve_model("tiny-random").config)
    with pytest.raises(DeploymentError, match=r"experts\.vacancies is for experts that are services"):
        fit(resolve("colocated", ["experts.vacancies=1"]), resolve_model("tiny-random").config)


def test_who_is_lost_on_its_way_does_not_come_and_others_do() -> None:
    async def change(engine: Engine) -> None:
        with pytest.raises(XDeepServeError, match="expert server 4 of TE te cannot join: die 8 is lost"):
            await engine.add_server()
        assert 8 not in engine.plan.pod.holders
        report = await engine.add_server()
        assert (report.server, report.die, report.presence) == (4, 11, "there")

    async def lose(engine: Engine) -> None:
        clock = engine.plan.pod.clock
        clock.at(clock.now + 50_000, lambda: _break(engine, 8))
        await change(engine)

    found = lived(COPIES, VACANCY, change=lose)
    assert (found.digest, found.moved) == (expected(), [(4, 2, True)])


async def _break(engine: Engine, die: int) -> None:
    engine.plan.pod.break_die(die)


def test_who_leaves_is_lost_meanwhile() -> None:
    found = lived(
        COPIES, change=at((900, "remove", 1), (5000, "add", None)), faults=[Fault(950.0, 5, "lost")]
    )
    assert found.digest == expected()
    assert found.moved == [(1, 1, False), (1, 2, True)]


def test_who_comes_to_the_seat_of_one_that_leaves_stays() -> None:
    async def change(engine: Engine) -> None:
        clock = engine.plan.pod.clock
        await clock.sleep_until(2_000_000)
        leaving = clock.spawn(engine.remove_server("te", 1), name="leaving")
        await clock.sleep(1)
        await engine.add_server(server=1)
        await clock.join(leaving)

    found = lived(COPIES, change=change, faults=[LOST])
    assert found.digest == expected()
    assert found.moved[-1] == (1, 2, True)


def test_vacant_seats_have_copies_from_as_many_servers() -> None:
    held = copies_of([range(4), range(4, 8), range(8, 8), range(8, 8), range(8, 8)], 2, 1, 2)
    assert held == ((4, 5, 6, 7), (0, 1, 2, 3), (0, 2, 4, 6), (1, 3, 5, 7), ())
    assert copies_of([range(2), range(2, 3), range(3, 3)], 2, 0, 1) == ((), (), (0, 1))
