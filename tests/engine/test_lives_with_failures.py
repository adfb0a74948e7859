"""Random lives in which TEs fail at any moment, also while they drain, are removed, or others load.

Every request ends, with the tokens of one die or an error that says why, and nothing is left behind.

`make campaign` runs 400 of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.engine.histories import APART, SMALL, TES
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.group import Left
from xdeepserve.engine.job.executor import can_serve
from xdeepserve.engine.loading import SOURCES
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.live import Request
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import HardwareError, XDeepServeError
from xdeepserve.llm import build_engine
from xdeepserve.loop import run
from xdeepserve.model.presets import TinyCheckpoint

MIXED = """
kind = "mixed"
[[te]]
role = "prefill"
dies = 2
tp = 2
[[te]]
role = "decode"
dies = 2
count = 2
[[te]]
dies = 2
[[te]]
role = "both"
dies = 1
"""
TWO = ("prefill.count=2", "decode.count=2")
SLOTS = ("experts.redundant_slots=1", "experts.balance_interval=0.0003", "experts.balance_slices=1")
SWAP = ("cache.num_blocks=8", "cache.num_host_blocks=8", "cache.preemption=swap")
PODS: list[tuple[str, tuple[str, ...]]] = [
    ("mixed", ()),
    ("mixed", ("transfer=layer", "cache.num_blocks=6", "mtp=1")),
    ("mixed", ("scheduler.admission=decode", "scheduler.route=cost")),
    ("mixed", (*SWAP, "transfer=layer")),
    ("pd", (*TES, *TWO, "transfer=layer")),
    ("pd", (*TES, *TWO, "cache.num_blocks=6", "scheduler.dispatch=two-level")),
    ("pd", (*TES, *TWO, "transfer_over=send-receive")),
    ("colocated", ("dies=2", "lockstep=true", *SLOTS)),
    ("colocated", ("dies=2", *SWAP)),
    ("moe-attention", (*APART, "dataflow=true", *SLOTS)),
    ("transformerless", (*APART, "prefill.dies=2", "prefill.tp=1", "prefill.count=2", "transfer=layer")),
]
Tokens = dict[str, list[list[int]]]  # of a request's choices
WHYS = ("the die is on fire", "no task executor is left", "no decode TE can be reached", "has been stopped")


class Asked(msgspec.Struct, frozen=True):
    """A request, and how it has ended."""

    prompt: list[int]
    params: SamplingParams
    request: Request
    is_aborted: bool


class Life:
    """A life that is a function of `seed` alone.

    If it is gentle, those that are left can always serve, so that no request may end with an error.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.clock, self.rng = engine, engine.plan.pod.clock, random.Random(seed)
        self.is_gentle = bool(seed % 3)
        self.log: list[str] = []
        self.asked: dict[str, Asked] = {}
        self.changes: list[asyncio.Task[None]] = []
        self.burning: set[TE] = set()
        self.roles = sorted({te.sizes.place.role for te in engine.plan.tes})
        engine.observe(lambda event: self.log.append(f"{self.clock.now} {event}"))

    async def history(self) -> None:
        rng = self.rng
        for number in range(rng.randint(8, 20)):
            await self.clock.sleep(round(10 ** rng.uniform(3, 6.2)))
            if not self.engine.is_healthy():
                return
            match rng.choice(("request",) * 5 + ("add", "add", "drain", "remove", "fail", "fail")):
                case "request":
                    self._ask(f"request {number}")
                case "add":
                    role, source = rng.choice(self.roles), rng.choice(SOURCES[:4])
                    self._begin(f"add {role} {source}", lambda r=role, s=source: self.engine.add_te(r, s))
                    self._fail_later(rng.choice(self.engine.je.tes))
                case "fail":
                    self._fail(rng.choice(self.engine.je.tes))
                case way:
                    te = rng.choice(self.engine.je.tes)
                    if self._may_lose(te):
                        leave = getattr(self.engine, way)
                        self._begin(
                            f"{way} {te.sizes.place.name}", lambda te=te, go=leave: go(te.sizes.place.name)
                        )
                        self._fail_later(rng.choice([te, *self.engine.je.tes]))

    def _ask(self, key: str) -> None:
        rng = self.rng
        params = SamplingParams(
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice((0.0, 1.0)),
            n=rng.choice((1, 1, 2)),
            seed=rng.randrange(1000),
            ignore_eos=True,
        )
        prompt = [7] * rng.choice((0, 16, 20)) + [rng.randrange(100) for _ in range(rng.randint(1, 12))]
        request = self.engine.submit(prompt, params, key)
        is_aborted = rng.random() < 0.2
        self.asked[key] = Asked(prompt, params, request, is_aborted)
        if is_aborted:
            self._after(round(10 ** rng.uniform(3, 6.5)), request.abort)

    def _begin(self, name: str, what: Callable[[], Awaitable[Any]]) -> None:
        async def change() -> None:
            try:
                self.log.append(f"{self.clock.now} {name}: {await what()}")
            except XDeepServeError as error:
                self.log.append(f"{self.clock.now} {name}: {type(error).__name__} {error}")

        self.changes.append(self.clock.spawn(change(), name=name))

    def _may_lose(self, te: TE) -> bool:
        je = self.engine.je
        ready = set(je.tes.ready("both", "prefill", "decode"))
        return not self.is_gentle or can_serve(ready - self.burning - {te})

    def _fail_later(self, te: TE) -> None:
        if self.rng.random() < 0.4:
            self._after(round(10 ** self.rng.uniform(1, 5.5)), lambda: self._fail(te))

    def _fail(self, te: TE) -> None:
        if te.is_running and self._may_lose(te):
            self.burning.add(te)
            self.log.append(f"{self.clock.now} {te.sizes.place.name} fails")
            te.executors[0].reports.put(StepFailed(0, HardwareError("the die is on fire")))

    def _after(self, ns: int, then: Callable[[], None]) -> None:
        async def wait() -> None:
            await self.clock.sleep(ns)
            then()

        self.changes.append(self.clock.spawn(wait(), name="later"))

    # ---- its end ------------------------------------------------------------------------------------

    async def live(self) -> Tokens:
        """What came of those requests that have ended by themselves."""
        await self.engine.start()
        others = asyncio.all_tasks()
        await self.clock.spawn(self.history(), name="history")
        at_rest = asyncio.Event()
        self.clock.when_at_rest(at_rest.set)
        await at_rest.wait()  # nothing can happen any more: what has not ended now, hangs
        assert all(change.done() for change in self.changes), [c for c in self.changes if not c.done()]
        for change in self.changes:
            await change
        tokens, errors = {}, {}
        for key, asked in self.asked.items():
            assert asked.request.is_over, f"{key} hangs"
            try:
                async for _ in asked.request:
                    pass
            except XDeepServeError as error:
                errors[key] = str(error)
                continue
            if not asked.is_aborted:
                most = asked.params.max_tokens  # drafts may have confirmed more
                sequences = asked.request.sequences
                tokens[key] = [seq.token_ids[seq.num_prompt :][:most] for seq in sequences]
        assert not self.is_gentle or not errors, errors
        assert all(any(why in error for why in WHYS) for error in errors.values()), errors
        if self.engine.is_healthy():
            self._check_books()
        await self.engine.stop()
        assert not {task.get_name() for task in asyncio.all_tasks() - others}
        return tokens

    def _check_books(self) -> None:
        engine, pod = self.engine, self.engine.plan.pod
        engine.check_integrity()
        held = {die for te in engine.plan.tes for die in te.every_die}
        assert set(pod.holders) == held
        assert {node for node in pod.memories.plans if pod.topology.is_die(node)} == held
        on_hosts = [
            region for te in engine.plan.tes for _, mem in te.all_memories for region in mem.host_regions
        ]
        plans = [plan for node, plan in pod.memories.plans.items() if not pod.topology.is_die(node)]
        assert sum(len(plan.app.regions) for plan in plans) == len(on_hosts)
        assert engine.left() == Left()
        assert engine.plan.loadings == {}
        for te in engine.je.tes:
            assert te.te_shell.is_empty
            assert (te.num_sequences, te.plan.num_readers) == (0, 0)


def lived(tiny: TinyCheckpoint, mixed: str, seed: int, num_turns: int) -> tuple[Life, Tokens]:
    """A pod after its life, which begins after so many turns of the event loop."""
    deployment, overrides = PODS[seed % len(PODS)]
    path = mixed if deployment == "mixed" else deployment
    clock_seed = seed if seed % 5 == 0 else None
    engine = build_engine(tiny, path, "int8", overrides=[*SMALL, *overrides], clock_seed=clock_seed)
    life = Life(engine, seed)

    async def main() -> Tokens:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        return await life.live()

    return life, run(main())


def check(tiny: TinyCheckpoint, reference: LLM, mixed: str, seed: int) -> None:
    """Run a life twice: the same events, and the tokens of one die."""
    life, tokens = lived(tiny, mixed, seed, 0)
    for key, choices in tokens.items():
        asked = life.asked[key]
        (expected,) = reference.generate([asked.prompt], asked.params)
        assert choices == [list(choice.token_ids) for choice in expected.outputs], f"seed {seed}, {key}"
    again, _ = lived(tiny, mixed, seed, seed % 40)
    assert again.log == life.log, f"seed {seed}: other events"


@pytest.fixture(scope="module")
def reference(tiny: TinyCheckpoint) -> Any:
    with LLM(tiny, "monolithic", "int8", overrides=SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pods") / "mixed.toml"
    path.write_text(MIXED)
    return str(path)


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(33))
def test_every_request_ends_though_tes_fail(
    tiny: TinyCheckpoint, reference: LLM, mixed: str, seed: int
) -> None:
    check(tiny, reference, mixed, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 500))
def test_random_lives_with_failures(tiny: TinyCheckpoint, reference: LLM, mixed: str, seed: int) -> None:
    check(tiny, reference, mixed, seed)
