"""TEs that come and go while requests run: the tokens of one die, nothing lost, nothing left behind.

`make campaign` runs 500 random lives.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.histories import APART, SMALL, TES
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.events import TEChanged
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.npu_fork import Fork
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.live import Request
from xdeepserve.engine.weight_digests import digests
from xdeepserve.errors import DeploymentError, HardwareError, InputError, RequestError, XDeepServeError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import SCRIBBLE
from xdeepserve.llm import build_engine, digest
from xdeepserve.llm.request_outputs import collected
from xdeepserve.loop import run
from xdeepserve.model.presets import TinyCheckpoint

SLOTS = ("experts.redundant_slots=1", "experts.balance_interval=0.0003", "experts.balance_slices=1")
PODS: list[tuple[str, tuple[str, ...]]] = [
    ("monolithic", ("mtp=1",)),
    ("monolithic", ("execution.overlap=true", "cache.num_blocks=8")),
    ("monolithic", ("cache.num_blocks=8", "cache.num_host_blocks=8", "cache.preemption=swap")),
    ("colocated", ("dies=2",)),
    ("colocated", ("dies=2", "lockstep=true", "mtp=1")),
    ("colocated", ("dies=2", "experts.redundant_slots=1", "experts.balance_interval=0.001")),
    ("pd", TES),
    ("pd", (*TES, "transfer=layer", "execution.decode.overlap=true")),
    ("moe-attention", APART),
    ("moe-attention", (*APART, "dataflow=true")),
    ("transformerless", (*APART, "prefill.dies=2", "prefill.tp=1", "attention.microbatches=1")),
    ("colocated", ("dies=2", "lockstep=true", *SLOTS)),
    ("colocated", ("dies=3", "experts.shared_dies=1", "execution.overlap=true", *SLOTS)),
    ("colocated", ("dies=5", "experts.shared_dies=1", "experts.experts_per_die=5", *SLOTS[1:])),
    ("moe-attention", (*APART, "lockstep=true", "mtp=1", *SLOTS)),
    ("moe-attention", (*APART, "dataflow=true", *SLOTS)),
    ("transformerless", (*APART, "prefill.dies=2", "prefill.tp=1", *SLOTS)),
]


class Asked(msgspec.Struct, frozen=True):
    """A request of a life: when it comes, and when its client goes away, if it does."""

    prompt: list[int]
    params: SamplingParams
    abort_after_ns: int | None


class Life(msgspec.Struct):
    """What came of a life."""

    log: list[str]  # every event with its virtual time, and what became of each change
    asked: dict[str, Asked]
    digests: dict[str, str]  # of tokens and logits, of requests that were not aborted
    virtual_ns: int
    num_amid: int = 0  # TEs that came or went when replicas of experts were about to change


def _asked(rng: random.Random) -> Asked:
    params = SamplingParams(
        max_tokens=rng.randint(1, 12),
        temperature=rng.choice((0.0, 1.0)),
        n=rng.choice((1, 1, 2)),
        seed=rng.randrange(1000),
        ignore_eos=True,
    )
    prompt = [7] * rng.choice((0, 16)) + [rng.randrange(100) for _ in range(rng.randint(1, 12))]
    return Asked(prompt, params, round(10 ** rng.uniform(4, 6.5)) if rng.random() < 0.15 else None)


async def live(engine: Engine, seed: int) -> Life:
    """A life that is a function of `seed` alone: requests, TEs that join, drain, are removed or fail."""
    rng, clock, life = random.Random(seed), engine.plan.pod.clock, Life([], {}, {}, 0)
    requests: dict[str, Request] = {}
    engine.observe(lambda event: life.log.append(f"{clock.now} {event}"))
    roles = ("both",) if len(engine.plan.tes) == 1 else ("prefill", "decode")

    async def change(name: str, what: Callable[[], Awaitable[Any]]) -> None:
        reconfigurations = [te.reconfiguration for te in engine.je.tes if te.reconfiguration is not None]
        is_amid = any(each.phase != "idle" for each in reconfigurations)
        try:
            life.log.append(f"{clock.now} {name}: {await what()}")
            life.num_amid += is_amid
        except (RequestError, DeploymentError) as error:
            life.log.append(f"{clock.now} {name} is refused: {error}")

    async def abort(request: Request, after_ns: int) -> None:
        await clock.sleep(after_ns)
        request.abort()

    def begin(name: str, what: Callable[[], Awaitable[Any]]) -> Any:
        return clock.spawn(change(name, what), name=name)

    async def history() -> None:
        changes = []
        # Experts move after some steps: where they do, there is more time, and more in it.
        length, longest = (16, 6.6) if engine.plan.tes[0].sizes.experts.has_slots else (12, 6)
        for number in range(rng.randint(6, length)):
            await clock.sleep(round(10 ** rng.uniform(4, longest)))
            name = rng.choice([te.sizes.place.name for te in engine.je.tes])
            match rng.choice(("request",) * 4 + ("add", "add", "drain", "remove")):
                case "request":
                    asked, key = _asked(rng), f"request {number}"
                    life.asked[key] = asked
                    requests[key] = engine.submit(asked.prompt, asked.params, key, "sampled")
                    if asked.abort_after_ns is not None:
                        clock.spawn(abort(requests[key], asked.abort_after_ns), name="abort")
                case "add":
                    role = rng.choice(roles)
                    changes.append(begin(f"add {role}", lambda role=role: engine.add_te(role)))
                case "drain":
                    changes.append(begin(f"drain {name}", lambda name=name: engine.drain(name)))
                case "remove":
                    changes.append(begin(f"remove {name}", lambda name=name: engine.remove(name)))
        for each in changes:
            await clock.join(each)

    await engine.start()
    await clock.spawn(history(), name="history")
    for key, request in requests.items():
        if (asked := life.asked[key]).abort_after_ns is None:
            life.digests[key] = digest([await collected(request, None, asked.prompt, asked.params, None)])
    await engine.settle()
    engine.check_integrity()
    life.virtual_ns = clock.now
    await engine.stop()
    return life


def lived(tiny: TinyCheckpoint, seed: int, num_turns: int = 0) -> tuple[Engine, Life]:
    """A pod after its life, which begins after so many turns of the event loop."""
    deployment, overrides = PODS[seed % len(PODS)]
    engine = build_engine(tiny, deployment, "int8", overrides=[*SMALL, *overrides])

    async def main() -> Life:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        return await live(engine, seed)

    return engine, run(main())


def check(tiny: TinyCheckpoint, reference: LLM, seed: int) -> Life:
    """Run a life twice; what came of it."""
    engine, life = lived(tiny, seed)
    for key, found in life.digests.items():
        asked = life.asked[key]
        expected = reference.generate([asked.prompt], asked.params, keep_logits=True)
        assert found == digest(expected), f"seed {seed}, {key}"
    held = {die for te in engine.plan.tes for die, _ in te.all_memories}
    assert set(engine.plan.pod.holders) == held, f"seed {seed}"
    again = lived(tiny, seed, num_turns=seed % 40)[1]
    assert again.log == life.log, f"seed {seed}: other events"
    assert again.virtual_ns == life.virtual_ns
    assert again.num_amid == life.num_amid
    return life


@pytest.fixture(scope="module")
def reference(tiny: TinyCheckpoint) -> Any:
    with LLM(tiny, "monolithic", "int8", overrides=SMALL) as llm:
        yield llm


@pytest.mark.thin(5)
@pytest.mark.parametrize("seed", range(22))
def test_every_request_ends_with_the_bits_of_one_die(tiny: TinyCheckpoint, reference: LLM, seed: int) -> None:
    check(tiny, reference, seed)


@pytest.mark.thin(2)
@pytest.mark.parametrize("seed", [11, 12, 13, 30, 63])
def test_tes_come_and_go_while_experts_move(tiny: TinyCheckpoint, reference: LLM, seed: int) -> None:
    """A life of each kind of pod in which they do."""
    assert check(tiny, reference, seed).num_amid


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 600))
def test_random_lives(tiny: TinyCheckpoint, reference: LLM, seed: int) -> None:
    check(tiny, reference, seed)


# ---- a TE that fails --------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("deployment", "overrides", "role"),
    [
        ("colocated", ("dies=2", "mtp=1"), "both"),
        ("colocated", ("dies=2", "lockstep=true"), "both"),
        ("pd", TES, "decode"),
        ("pd", TES, "prefill"),
        ("pd", (*TES, "transfer=layer"), "decode"),
        ("pd", (*TES, "transfer=layer"), "prefill"),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_others_go_on_with_what_a_failed_te_had(
    tiny: TinyCheckpoint, reference: LLM, deployment: str, overrides: tuple[str, ...], role: Any, seed: int
) -> None:
    rng = random.Random(seed)
    engine = build_engine(tiny, deployment, "int8", overrides=[*SMALL, *overrides])
    clock, asked = engine.plan.pod.clock, [_asked(rng) for _ in range(6)]
    after_ns = round(10 ** rng.uniform(4.5, 6.5))

    async def main() -> list[list[list[int]]]:
        await engine.start()
        first = engine.je.tes.ready(role)[0]
        memory = engine.plan.pod.memory(first.plan.dies[0])
        await engine.add_te(role)
        executor = rng.choice(first.executors)

        async def fail() -> None:
            await clock.sleep(after_ns)
            first.executors[0].reports.put(StepFailed(executor.rank, HardwareError("the die is on fire")))

        requests = [engine.submit(each.prompt, each.params, str(i)) for i, each in enumerate(asked)]
        sequences = [list(request.sequences) for request in requests]
        clock.spawn(fail(), name="fault")
        for request in requests:
            async for _ in request:
                pass
        await engine.settle()
        engine.check_integrity()
        assert engine.is_healthy()
        assert "on fire" in str(engine.lost[first.sizes.place.name])
        assert set(first.plan.dies) <= engine.plan.pod.lost
        assert set(first.plan.dies).isdisjoint(engine.plan.pod.memories.plans)
        assert (np.frombuffer(memory.buffer, np.uint8)[memory.app.base :] == SCRIBBLE).all()
        await engine.stop()
        return [[seq.token_ids[seq.num_prompt :] for seq in each] for each in sequences]

    for each, choices in zip(asked, run(main()), strict=True):
        (expected,) = reference.generate([each.prompt], each.params)
        most = each.params.max_tokens
        assert [tokens[:most] for tokens in choices] == [list(one.token_ids) for one in expected.outputs]


# ---- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deployment", "overrides", "change", "error", "message"),
    [
        ("monolithic", (), lambda e: e.remove("te"), RequestError, "TE te cannot leave: it is the only one"),
        ("pd", TES, lambda e: e.drain("decode 0"), RequestError, "the only one for decode"),
        (
            "monolithic",
            (),
            lambda e: e.drain("te 7"),
            RequestError,
            "there is no TE te 7: this engine has te",
        ),
        ("monolithic", (), lambda e: e.add_te("decode"), DeploymentError, "none of role decode"),
        ("pd", TES, lambda e: e.add_te("both"), DeploymentError, "has prefill and decode TEs, none of role"),
        ("pd", TES, lambda e: e.add_te(["decode"]), DeploymentError, r"none of role \['decode'\]"),
    ],
)
def test_changes_that_cannot_be(
    tiny: TinyCheckpoint, deployment: str, overrides: tuple[str, ...], change: Any, error: Any, message: str
) -> None:
    engine = build_engine(tiny, deployment, "int8", overrides=[*SMALL, *overrides])

    async def main() -> None:
        await engine.start()
        before = dict(engine.plan.pod.holders), [te.sizes.place.name for te in engine.je.tes]
        with pytest.raises(error, match=message):
            await change(engine)
        assert before == (dict(engine.plan.pod.holders), [te.sizes.place.name for te in engine.je.tes])
        await engine.stop()

    run(main())


def test_who_shares_a_pod_names_an_llm() -> None:
    with pytest.raises(InputError, match="beside is the LLM whose pod this one shares, found 'tiny'"):
        LLM("tiny-random", beside="tiny")  # type: ignore[arg-type]


def test_no_more_dies_than_the_pod_has(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=8"])

    async def main() -> None:
        await engine.start()
        pod = engine.plan.pod
        pod.hold(range(8, pod.topology.num_dies - 4), "somebody else")
        with pytest.raises(DeploymentError, match="no 8 free dies side by side: 4 of 768 are free"):
            await engine.add_te()
        await engine.stop()

    run(main())


def test_a_te_that_does_not_fit(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2", "cache.num_host_blocks=4"])

    async def main() -> None:
        await engine.start()
        pod = engine.plan.pod
        host = pod.memory(pod.topology.host(0))
        host.app.alloc("somebody else's", host.app.num_free - 64)
        with pytest.raises(DeploymentError, match="node 768: app area: no room for 'kv of rank 2'"):
            await engine.add_te()
        assert set(pod.holders) == {0, 1}
        assert set(pod.memories.plans) == {0, 1, pod.topology.host(0)}
        assert host.app.num_free == 64
        await engine.stop()

    run(main())


def test_nothing_joins_an_engine_that_does_not_run(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "monolithic", "int8", overrides=SMALL)
    with pytest.raises(XDeepServeError, match="has not been started"):
        run(engine.add_te())


def test_a_te_that_loads_when_the_engine_stops_gives_its_dies_back(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])

    async def main() -> None:
        await engine.start()
        joining = asyncio.ensure_future(engine.add_te(source="storage"))
        while not engine.plan.loadings:
            await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(XDeepServeError, match="no TE of role both can join: the engine has been stopped"):
            await joining
        assert set(engine.plan.pod.holders) == {0, 1}
        assert [te.life for te in engine.je.tes] == ["gone"]
        with pytest.raises(XDeepServeError, match="or has been stopped"):
            await engine.add_te()

    run(main())


def test_a_te_that_drains_leaves_once(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "monolithic", "int8", overrides=SMALL)

    async def main() -> None:
        await engine.start()
        await engine.add_te()
        request = engine.submit([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True), "long")
        draining = asyncio.ensure_future(engine.drain("te"))
        while engine.je.tes[0].life == "ready":
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="TE te cannot leave: it is draining"):
            await engine.remove("te")
        with pytest.raises(RequestError, match="TE te 1 cannot leave: it is the only one"):
            await engine.drain("te 1")
        async for _ in request:
            pass
        await draining
        assert [te.sizes.place.name for te in engine.je.tes] == ["te 1"]
        await engine.stop()

    run(main())


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("more dies", DeploymentError, "the pod has no 2 free dies side by side: 1 of 768 are free"),
        (
            "no room",
            DeploymentError,
            "deployment colocated: node 768: app area: no room for 'kv of rank 2' .*",
        ),
        ("last", RequestError, "TE te cannot leave: it is the only one"),
        ("last while another loads", RequestError, "TE te cannot leave: it is the only one"),
        ("last while another drains", RequestError, "TE te 1 cannot leave: it is the only one"),
    ],
)
def test_nothing_is_lost_by_a_change_that_cannot_be(
    tiny: TinyCheckpoint, reference: LLM, change: str, error: Any, message: str
) -> None:
    """Refused with one line while requests run, which end with their bits; dies and memory are as before."""
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2", "cache.num_host_blocks=4"])
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=5)
    prompts = [[i + 1, 2, 3] for i in range(8)]
    expected = [list(output.outputs[0].token_ids) for output in reference.generate(prompts, params)]

    async def main() -> list[list[int]]:
        await engine.start()
        pod, beside = engine.plan.pod, []
        if change == "last while another drains":
            await engine.add_te()
        requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(prompts)]
        sequences = [request.sequences[0] for request in requests]
        while not all(te.num_sequences for te in engine.je.tes):
            await asyncio.sleep(0)
        if change == "last while another loads":
            beside.append(asyncio.ensure_future(engine.add_te()))
            while not engine.plan.loadings:
                await asyncio.sleep(0)
        elif change == "last while another drains":
            beside.append(asyncio.ensure_future(engine.drain("te")))
            while engine.je.tes[0].life == "ready":
                await asyncio.sleep(0)
        others = range(2, pod.topology.num_dies - 1) if change == "more dies" else range(0)
        pod.hold(others, "somebody else")
        host = pod.memory(pod.topology.host(0)).app
        if change == "no room":
            host.alloc("somebody else's", host.num_free - 64)
        before = dict(pod.holders), set(pod.memories.plans), host.num_free
        last = "te 1" if "drains" in change else "te"
        refused: Awaitable[Any] = engine.remove(last) if "last" in change else engine.add_te()
        with pytest.raises(error, match=f"^{message}$") as caught:
            await refused
        assert "\n" not in str(caught.value)
        if not beside:
            assert before == (dict(pod.holders), set(pod.memories.plans), host.num_free)
        for request in requests:
            async for _ in request:
                pass
        await asyncio.gather(*beside)
        await engine.settle()
        engine.check_integrity()
        assert {die for die, who in pod.holders.items() if who != "somebody else"} == {
            die for te in engine.plan.tes for die in te.every_die
        }
        assert engine.is_healthy()
        await engine.stop()
        return [seq.token_ids[seq.num_prompt :] for seq in sequences]

    assert run(main()) == expected


def test_a_te_joins_while_another_drains(tiny: TinyCheckpoint, reference: LLM) -> None:
    """It is like the one that goes, loads from one that stays, and takes what comes from then on."""
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)
    prompts = [[i + 1, 2, 3] for i in range(6)]
    expected = [list(output.outputs[0].token_ids) for output in reference.generate(prompts, params)]

    async def main() -> list[list[int]]:
        await engine.start()
        await engine.add_te()
        requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(prompts)]
        sequences = [request.sequences[0] for request in requests]
        while not all(te.num_sequences for te in engine.je.tes):
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(engine.drain("te"))
        while engine.je.tes[0].life == "ready":
            await asyncio.sleep(0)
        assert await engine.add_te() == "te 2"
        assert [(te.name, te.life) for te in engine.tes()] == [
            ("te", "draining"),
            ("te 1", "ready"),
            ("te 2", "ready"),
        ]
        await engine.remove("te 1")  # the one that has joined takes over
        for request in requests:
            async for _ in request:
                pass
        await draining
        assert [te.name for te in engine.tes()] == ["te 2"]
        engine.check_integrity()
        await engine.stop()
        return [seq.token_ids[seq.num_prompt :] for seq in sequences]

    assert run(main()) == expected


# ---- how weights come -------------------------------------------------------------------------------


@pytest.mark.parametrize(("deployment", "overrides"), [PODS[3], PODS[5], PODS[8]])
def test_weights_are_the_same_bytes_wherever_they_come_from(
    tiny: TinyCheckpoint, deployment: str, overrides: tuple[str, ...]
) -> None:
    """The nearer the source, the sooner they are there, and can serve a dummy request."""
    engine = build_engine(tiny, deployment, "int8", overrides=[*SMALL, *overrides])
    clock, loaded = engine.plan.pod.clock, []

    def hear(event: Any) -> None:
        if isinstance(event, TEChanged) and event.life == "ready":
            loaded.append(clock.now)

    async def main() -> dict[str, int]:
        await engine.start()
        engine.observe(hear)
        took, found = {}, []
        for source in ("storage", "host", "peer"):
            start = clock.now
            name = await engine.add_te(source=source)  # type: ignore[arg-type]
            took[source] = loaded.pop() - start
            assert clock.now > start + took[source]
            te = next(te for te in engine.plan.tes if te.sizes.place.name == name)
            found.append([digests(mem) for _, mem in te.all_memories])
        assert found == [[digests(mem) for _, mem in engine.plan.tes[0].all_memories]] * 3
        assert engine.plan.loadings == {}
        await engine.stop()
        return took

    took = run(main())
    assert took["storage"] > 20 * took["host"]
    assert took["host"] <= took["peer"] < took["storage"] / 5


def test_what_came_is_compared_with_what_was_sent(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    copy, memories = Fork.copy_to, engine.plan.pod.memories

    async def with_a_flipped_bit(self: Fork, i: int, die: int, pieces: list[Copy], on_bytes: Any) -> None:
        await copy(self, i, die, pieces, on_bytes)
        if die == 3:
            at = pieces[0].dst.plus(7)
            memories.write(at, bytes([memories.read(at, 1)[0] ^ 1]))

    monkeypatch.setattr(Fork, "copy_to", with_a_flipped_bit)

    async def main() -> None:
        await engine.start()
        with pytest.raises(HardwareError, match="die 3: weights from peer came with digest"):
            await engine.add_te(source="peer")
        assert set(engine.plan.pod.holders) == {0, 1}
        await engine.add_te(source="host")
        await engine.stop()

    run(main())


def test_progress_of_a_load(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])
    clock, seen = engine.plan.pod.clock, []

    async def watch() -> None:
        while engine.plan.loadings:
            (loading,) = engine.plan.loadings.values()
            seen.append(loading.done / max(1, loading.total))
            await clock.sleep(200_000)

    async def main() -> None:
        await engine.start()
        joining = asyncio.ensure_future(engine.add_te(source="storage"))
        while not engine.plan.loadings:
            await asyncio.sleep(0)
        clock.spawn(watch(), name="watch")
        await joining
        await engine.stop()

    run(main())
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


@pytest.mark.parametrize(
    ("source", "message"), [("peer", "no TE like it is ready"), ("host", "server 1 has none")]
)
def test_a_source_that_has_no_weights(tiny: TinyCheckpoint, source: Any, message: str) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=[*SMALL, "dies=2"])

    async def main() -> None:
        await engine.start()
        pod = engine.plan.pod
        pod.hold(range(2, 16), "somebody else")  # the next free die is another server's
        if source == "peer":
            engine.je.tes[0].lifetime.now = "draining"
        with pytest.raises(DeploymentError, match=message):
            await engine.add_te(source=source)
        assert {16, 17}.isdisjoint(pod.holders)
        engine.je.tes[0].lifetime.now = "ready"
        await engine.stop()

    run(main())


# ---- several models ---------------------------------------------------------------------------------


def test_two_models_on_one_pod(tiny: TinyCheckpoint) -> None:
    prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    with LLM("tiny", "monolithic", overrides=SMALL) as alone, LLM(tiny, overrides=SMALL) as tiny_alone:
        expected = [
            [o.outputs[0].token_ids for o in llm.generate(prompts, params)] for llm in (tiny_alone, alone)
        ]
    with LLM(tiny, "colocated", overrides=[*SMALL, "dies=4"]) as first:
        with LLM("tiny", "moe-attention", overrides=[*SMALL, *APART], beside=first) as second:
            assert second.engine.plan.pod is first.engine.plan.pod
            held = second.engine.plan.pod.holders
            assert held[0] == "te of tiny-random"
            assert held[4] == "te of tiny"
            with ThreadPoolExecutor(2) as pool:
                made = list(pool.map(lambda llm: llm.generate(prompts, params), (first, second)))
            assert [[o.outputs[0].token_ids for o in outputs] for outputs in made] == expected
            first.engine.plan.pod.hold(range(16, 768), "somebody else")
            with pytest.raises(DeploymentError, match="no 8 free dies side by side: 7 of 768 are free"):
                LLM(tiny, "colocated", overrides=["dies=8"], beside=first)
        assert {die for die in held if die < 16} == {0, 1, 2, 3}
        again = first.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in again] == expected[0]


# ---- a list of TEs ----------------------------------------------------------------------------------

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
dies = 4
[[te]]
role = "both"
dies = 1
"""


def test_tes_of_all_kinds_serve_together(tiny: TinyCheckpoint, reference: LLM, tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text(MIXED)
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
    prompts = [[i + 1, 5, 6, 7 + i] for i in range(12)]
    expected = [output.outputs[0].token_ids for output in reference.generate(prompts, params)]
    with LLM(tiny, str(file), overrides=SMALL) as llm:

        async def change(engine: Engine) -> None:
            await engine.plan.pod.clock.sleep(300_000)
            await engine.add_te("decode")
            await engine.remove("te")
            await engine.remove("decode 0")

        made = llm.generate(prompts, params, meanwhile=change)
        assert [output.outputs[0].token_ids for output in made] == expected
        names = [te.name for te in llm.engine.tes()]
        assert names == ["prefill 0", "decode 1", "te 1", "decode 2"]
        assert all(te.step_idx for te in llm.engine.je.tes if te.sizes.place.name != "decode 2")
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mixed needs a list of TEs, [[te]]"),
        ('[[te]]\nrole = "decode"', "TEs of role prefill need some of role decode, and the other way round"),
        ("[[te]]\ndies = 99", "te[0].dies=99 is more than the model's 16 routed experts"),
        ("[[te]]\n[[te]]\ntp = 3", "te[1].tp must be one of 1, 2, 4, 8, found 3"),
        ("[[te]]\n[decode]\ndies = 2", "decode is no setting of mixed"),
        ('[[te]]\nrole = "cook"', "role"),
        (
            '[[te]]\nhardware = "910b"',
            "te[0].hardware=910b: decode needs the interconnect of",
        ),
        ("[[te]]\nlockstep = true", "lockstep"),
    ],
)
def test_lists_that_cannot_be(tiny: TinyCheckpoint, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text(f'kind = "mixed"\n{text}\n')
    with pytest.raises(DeploymentError, match=re.escape(message)):
        build_engine(tiny, str(file), "int8")


def test_what_is_wrong_in_a_file_is_said_once_whatever_the_overrides(tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text('kind = "mixed"\nte = 3\n')
    with pytest.raises(DeploymentError) as refusal:
        resolve(str(file), SMALL)
    assert str(refusal.value).count("line 2: te must be a list of sections, found 3") == 1


# ---- who looks on -----------------------------------------------------------------------------------


def test_the_life_of_each_te_is_told_and_drawn(
    tiny: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build_engine(tiny, "pd", "int8", overrides=[*SMALL, *TES], trace=True)
    told: list[tuple[str, str]] = []
    engine.observe(
        lambda event: told.append((event.te, event.life)) if isinstance(event, TEChanged) else None
    )

    async def main() -> None:
        await engine.start()
        request = engine.submit([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True), "one")
        await engine.add_te("decode")
        await engine.remove("decode 0")
        async for _ in request:
            pass
        await engine.stop()

    run(main())
    assert told[:2] == [("prefill 0", "ready"), ("decode 0", "ready")]
    assert [life for te, life in told if te == "decode 0"] == ["ready", "draining", "gone"]
    assert [life for te, life in told if te == "decode 1"] == ["loading", "ready", "draining", "gone"]
    names = set(engine.plan.pod.trace.node_names.values())
    assert {"TE-shell of decode 0", "TE-shell of decode 1", "decode 1 die 0"} <= names
    engine.plan.pod.trace.write(tmp_path / "trace.json")
    assert "a listener failed" not in caplog.text  # steps that warm a TE up come before it joins
