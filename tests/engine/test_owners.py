"""Every process has an owner who hears its error: none is silent, and none hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.owners import TRIED, fail, fails, nothing_unheard, spawns
from xdeepserve.comm.distflow import DistFlow
from xdeepserve.comm.distflow.channels import Channels, channel_layout, plan_channels
from xdeepserve.comm.distflow.endpoint import Endpoint
from xdeepserve.comm.distflow.link_probe import plan_link_probe, probe
from xdeepserve.comm.distflow.send_receive import SendReceiveBackend
from xdeepserve.comm.distflow.transport import Transport
from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.ems.pool_prefixes import PoolPrefixes
from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.die import program
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.job.admission import AdmissionControl
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.job.links import Links
from xdeepserve.engine.job.peer_prefixes import PeerPrefixes
from xdeepserve.engine.serving import joining, te_group
from xdeepserve.engine.serving.control_plane import ControlPlane
from xdeepserve.engine.serving.elastic import Elastic
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.failover import Failover
from xdeepserve.engine.serving.joining import Joining
from xdeepserve.engine.serving.te_group import TEGroup
from xdeepserve.engine.te import te
from xdeepserve.engine.te.masters import Masters
from xdeepserve.engine.te.server_seats import ServerSeats
from xdeepserve.engine.walk.schedule import side_by_side
from xdeepserve.engine.ways.flow.clock import FlowClock
from xdeepserve.errors import HardwareError, XDeepServeError
from xdeepserve.hw import faults, rdma, self_test
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.stream import Stream
from xdeepserve.llm import LLM, build_engine

PAIR = ("prefill.dies=1", "decode.dies=1")
APART = ("attention.domains=1", "attention.dies=2", "experts.routed_dies=2")
CARDS = ("attention.hardware=h20", "experts.hardware=l40s", "attention.microbatches=3")


class Kind(NamedTuple):
    """A kind of process: where it is spawned, the method that it runs, and a pod in which it runs."""

    name: str
    site: str  # file and function that spawns it
    owner: Any  # class or module of the method
    method: str
    deployment: str
    overrides: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    is_timing_only: bool = True
    meanwhile: Callable[[Engine], Awaitable[object]] | None = None


async def finds_a_die_lost(engine: Engine) -> None:
    for tell in engine.plan.pod.memories.on_silence.values():
        tell(0)


async def adds_a_te(engine: Engine) -> None:
    await engine.add_te("both")


async def removes_a_te(engine: Engine) -> None:
    await engine.remove("prefill 1")


GLITCH = (Fault(900.0, 0, "glitch", code="mte-error"),)
LOST = (Fault(900.0, 0, "lost"),)
BLOCKED = (Fault(10.0, link=(768, 772), plane="roce", kind="blocked", for_us=4000.0),)
EPLB = ("dies=4", "experts.redundant_slots=1", "experts.balance_interval=0.001")
SOON = ("health.suspect_s=0.01", "health.lost_s=0.05")
FAILOVER = ("dies=3", *SOON, "recovery.failover=true")
TWO = ("prefill.count=2", "prefill.dies=1", "decode.dies=1", *SOON)
SWAP = ("cache.num_host_blocks=8", "cache.preemption=swap")
TE, BEAT = "engine/te/te.py:TE.start", "engine/serving/control_plane.py:ControlPlane._beat"
EXPERTS, FLOW = "engine/die/experts.py:ExpertProgram", "comm/distflow/endpoint.py:Endpoint"
GROUP, POOL = "engine/serving/te_group.py:TEGroup", "ems/pool_prefixes.py:PoolPrefixes._detach"
ELASTIC, LOOKS = "engine/serving/elastic.py:Elastic._detach", ("scale.every_s=1e-4",)
PLANNED, CARD = "hw/clock.py:Clock._advance", "hw/rdma.py:RDMACard"
KINDS = (
    Kind("die program", TE, Executor, "run", "colocated", ("dies=2",)),
    Kind("step of a die program", TE, Executor, "step", "colocated", ("dies=2",)),
    Kind("loop of a TE", TE, Masters, "advance", "monolithic"),
    Kind("loop of a DP group", TE, Masters, "run", "moe-attention", APART),
    Kind("reports of layers", TE, te, "hear_layers", "pd", (*PAIR, "transfer=layer")),
    Kind(
        "expert die",
        "engine/te/server_keeping.py:ServerKeeping.start_program",
        ExpertProgram,
        "run",
        "moe-attention",
        APART,
    ),
    Kind("stream of an expert die", f"{EXPERTS}._spawn", ExpertProgram, "_compute", "moe-attention", APART),
    Kind(
        *("loads of an expert die", f"{EXPERTS}.loads", ExpertProgram, "_load", "moe-attention"),
        *((*APART, *EPLB[1:]), (), False),
    ),
    Kind(
        *("copies beside steps", "engine/die/program.py:Executor._run_beside"),
        *(program, "again_after_glitches", "monolithic", SWAP),
    ),
    Kind("source of a transfer", f"{FLOW}._detach", Endpoint, "_push", "pd", PAIR),
    Kind("destination of a transfer", f"{FLOW}._detach", Endpoint, "_pull", "pd", PAIR),
    Kind("messages of an endpoint", f"{FLOW}._detach", Endpoint, "_serve", "pd", PAIR),
    Kind("bytes of a transfer", f"{FLOW}._move_in_time", Transport, "move", "pd", PAIR),
    Kind("search for a way", "engine/job/executor.py:JobExecutor.send", JobExecutor, "_find_way", "pd", PAIR),
    Kind("probes of links", PLANNED, JobExecutor, "_probe_links", "pd", (*PAIR, "health.link_probe_s=0.001")),
    Kind(
        *(
            "decode-first admission",
            "engine/job/admission.py:AdmissionControl.look",
            AdmissionControl,
            "_look",
            "pd",
        ),
        (*PAIR, "scheduler.admission=decode"),
    ),
    Kind("beat of the control plane", PLANNED, ControlPlane, "_beat", "monolithic", ("health.beat_s=0.001",)),
    Kind("answers to the control plane", BEAT, ControlPlane, "_hear", "monolithic", ("health.beat_s=0.001",)),
    Kind(
        *("loss of a die", f"{GROUP}._find_lost", TEGroup, "_lose_die", "monolithic", (), (), True),
        finds_a_die_lost,
    ),
    Kind(
        *("failover", "engine/serving/failover.py:Failover.begin", Failover, "_run", "colocated"),
        *(FAILOVER, LOST),
    ),
    Kind(
        *("self-test of a die", "hw/self_test.py:well_dies", self_test, "_test", "colocated"),
        *(FAILOVER, LOST),
    ),
    Kind("end of a lost TE", f"{GROUP}._leave_to_others", te_group, "until_unused", "pd", TWO, LOST),
    Kind(
        *("TE that joins", "engine/serving/joining.py:Joining._begin", Joining, "_join", "colocated"),
        *(("dies=1",), (), True, adds_a_te),
    ),
    Kind("TE that load brings", ELASTIC, Elastic, "_start_te", "monolithic", ("scale.least=2", *LOOKS)),
    Kind("TE that is pre-warmed", ELASTIC, Elastic, "_warm", "monolithic", ("scale.warm=1", *LOOKS)),
    Kind("look of the AutoScaler", PLANNED, Elastic, "_look_again", "monolithic", LOOKS),
    Kind("TE that leaves", f"{GROUP}._leave", te.TE, "leave", "pd", TWO, (), True, removes_a_te),
    Kind(
        *("tokens as they flow", "engine/ways/flow/clock.py:FlowClock.send", FlowClock, "_carry"),
        *("moe-attention", (*APART, "dataflow=true")),
    ),
    Kind("planned fault", PLANNED, faults, "_happen", "monolithic", (), GLITCH),
    Kind("network card", f"{CARD}._wake", rdma.RDMACard, "_transmit", "moe-attention", CARDS, (), False),
    Kind("segment on its way", f"{CARD}._fly", rdma.RDMACard, "_receive", "moe-attention", CARDS, (), False),
    Kind(
        "control of a card",
        f"{CARD}._send_control",
        rdma.RDMACard,
        "_after",
        "moe-attention",
        CARDS,
        (),
        False,
    ),
    Kind(
        "timer of a write",
        f"{CARD}._watch",
        rdma.RDMACard,
        "_time_out",
        "moe-attention",
        CARDS,
        BLOCKED,
        False,
    ),
    Kind(
        *("prefix from another TE", "engine/job/peer_prefixes.py:PeerPrefixes.load", PeerPrefixes, "_ask"),
        *(
            "pd",
            (
                "prefill.count=3",
                "prefill.dies=1",
                "cache.peers=true",
                "cache.load=always",
                "scheduler.route=round-robin",
            ),
        ),
    ),
    Kind("pool finds places", POOL, PoolPrefixes, "_find_places", "monolithic", (), (), False),
    Kind("pool keeps blocks", POOL, PoolPrefixes, "_keep", "monolithic", (), (), False),
    Kind("pool brings blocks", POOL, PoolPrefixes, "_bring", "monolithic", (), (), False),
    Kind(
        *("prefetch of experts", "engine/balance/reconfigure.py:Reconfiguration._begin"),
        *(Reconfiguration, "_fetch", "colocated", EPLB, (), False),
    ),
)
# ---- processes that somebody awaits -----------------------------------------------------------------

Patch = pytest.MonkeyPatch


def pod_of_two() -> Pod:
    """Two dies with some memory each."""
    pod = Pod()
    for die in (0, 1):
        plan = pod.plan(die)
        plan.app.alloc("data", 4096)
        plan_link_probe(plan, 64)
        plan_channels(plan, channel_layout(), 1)
    pod.materialise()
    return pod


def span_of(pod: Pod, die: int) -> Address:
    return Address(die, pod.memory(die).app.regions["data"].offset)


async def started(deployment: str, *overrides: str, **how: Any) -> Engine:
    overrides = ("max_model_len=128", *overrides)
    engine = build_engine("tiny-random", deployment, "int8", overrides=overrides, **how)
    await engine.start()
    return engine


async def a_transfer(patch: Patch) -> None:
    pod = pod_of_two()
    flow = DistFlow(pod)
    flow.link_cluster({"a": [0], "b": [1]})
    patch.setattr(Transport, "move", fails)
    try:
        await flow.transfer([(span_of(pod, 0), 64)], [(span_of(pod, 1), 64)])
    finally:
        flow.close()


async def a_dummy_payload(patch: Patch) -> None:
    pod = pod_of_two()
    backend = DistFlow(pod).backend
    patch.setattr(type(backend), "move", fails)
    await pod.clock.spawn(probe(pod, backend, [(0, 1)], 10**6))


async def a_kernel_that_receives(patch: Patch) -> None:
    pod = pod_of_two()
    patch.setattr(PointToPoint, "receive_pieces", fails)
    backend = SendReceiveBackend(Channels(pod, channel_layout()), 10**9)
    await pod.clock.spawn(backend.move([Copy(span_of(pod, 0), span_of(pod, 1), 64)], "KV"))


async def the_end_of_a_te_that_does_not_join(patch: Patch) -> None:
    engine = await started("colocated", "dies=1")
    patch.setattr(joining, "serve_dummy", fails_by_hardware)
    patch.setattr(joining, "until_unused", fails)
    try:
        await engine.add_te("both")
    finally:
        patch.undo()
        await engine.stop()


async def fails_by_hardware(*_: Any) -> None:
    raise HardwareError("the first of two errors")


async def a_server_that_comes(patch: Patch) -> None:
    engine = await started("eaas", "experts.vacancies=1")
    patch.setattr(ServerSeats, "join", fails)
    try:
        await engine.add_server()
    finally:
        await engine.stop()


async def a_te_that_goes(patch: Patch) -> None:
    engine = await started("pd", *TWO)
    patch.setattr(te.TE, "leave", fails)
    try:
        await engine.remove("prefill 1")
    finally:
        await engine.stop()


async def the_end_of_a_guest(patch: Patch) -> None:
    host = await started("colocated", "dies=1")
    guest = await started("colocated", "dies=1", pod=host.plan.pod)
    patch.setattr(te_group, "until_unused", fails)
    try:
        await guest.stop()
    finally:
        patch.undo()
        await host.stop()


async def a_part_of_a_step(_: Patch) -> None:
    clock = Clock()
    await clock.spawn(side_by_side(clock, [partial(clock.sleep, 10**9), fails]))


async def a_detached_process(_: Patch) -> None:
    clock, heard = Clock(), list[Exception]()
    await clock.detach(fails(), "detached", heard.append)
    raise heard[0]


async def one_of_several(_: Patch) -> None:
    clock = Clock()
    await clock.spawn(clock.gather(clock.sleep(10), fails(), clock.sleep(20)))


async def a_detached_program_of_a_die(_: Patch) -> None:
    heard: list[Exception] = []
    await pod_of_two().dies[0].detach(fails(), "detached", heard.append)
    raise heard[0]


async def a_program_of_a_die(_: Patch) -> None:
    await pod_of_two().dies[0].spawn(fails())


async def a_chunk_of_a_stream(_: Patch) -> None:
    pod = pod_of_two()

    async def kernel() -> None:
        stream = Stream(pod.dies[0].mte, "chunks")
        await stream.copy([Copy(span_of(pod, 0), span_of(pod, 1), 64)], 1, on_stored=fail)
        await stream.drain()

    await pod.dies[0].spawn(kernel())


class Awaited(NamedTuple):
    """A place that spawns what somebody awaits, and a way to fail there, which raises what that one hears."""

    site: str
    owner: str
    tries: Callable[[Patch], Awaitable[None]]


AWAITED = (
    Awaited("comm/distflow/flow.py:DistFlow.transfer", "the caller", a_transfer),
    Awaited("comm/distflow/link_probe.py:_probe_one", "who looks for a way", a_dummy_payload),
    Awaited(
        "comm/distflow/send_receive.py:SendReceiveBackend._send", "the move, at once", a_kernel_that_receives
    ),
    Awaited(
        "engine/serving/joining.py:Joining._join", "who asked for the TE", the_end_of_a_te_that_does_not_join
    ),
    Awaited(f"{GROUP}._in_the_pod", "who asked for a server that comes or goes", a_server_that_comes),
    Awaited(f"{GROUP}.part_with", "who asked for the end of a TE", a_te_that_goes),
    Awaited(f"{GROUP}.settle", "who stops an engine that is a guest on a pod", the_end_of_a_guest),
    Awaited("engine/walk/schedule.py:side_by_side", "the step, which ends its other parts", a_part_of_a_step),
    Awaited("hw/clock.py:Clock.detach", "the owner that each caller of it names", a_detached_process),
    Awaited("hw/clock.py:Clock.gather", "the caller", one_of_several),
    Awaited("hw/die.py:Die.detach", "the owner that each caller of it names", a_detached_program_of_a_die),
    Awaited("hw/die.py:Die.spawn", "each caller of it", a_program_of_a_die),
    Awaited("hw/stream.py:Stream.copy", "the kernel, which raises it at its next word", a_chunk_of_a_stream),
)


@pytest.mark.parametrize("awaited", AWAITED, ids=lambda awaited: awaited.site)
async def test_whoever_awaits_hears_the_error(awaited: Awaited, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes to its owner by name; nothing hangs, and no other error is left unheard."""
    async with nothing_unheard():
        with pytest.raises(ZeroDivisionError, match=TRIED):
            await awaited.tries(monkeypatch)


# ---- detached processes -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_error_is_heard(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error in a process ends all requests that need it, by name, and leaves nothing unheard."""
    overrides = ("max_model_len=128", "cache.num_blocks=8", "scheduler.max_num_seqs=2", *kind.overrides)
    if kind.owner is PoolPrefixes:
        overrides += (f"ems.path={tmp_path}", "ems.block_size=16", "ems.servers=2")

    if kind.owner is JobExecutor:
        monkeypatch.setattr(Links, "choose", lambda *_: None)
    is_again = kind.method in ("_bring", "_ask")
    if not is_again:
        monkeypatch.setattr(kind.owner, kind.method, fails)

    prompts, params = [[index] * 40 for index in range(4)], SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(
        *("tiny-random", kind.deployment, "int8"),
        overrides=overrides,
        timing_only=kind.is_timing_only,
        progress=False,
        faults=kind.faults,
    ) as llm:
        if is_again:  # what is asked for again is in the pool, as it is more than HBM keeps, or on another TE
            llm.generate(prompts, params)
            monkeypatch.setattr(kind.owner, kind.method, fails)
        # Who asked for something hears the error itself.
        is_asked = kind.meanwhile in (adds_a_te, removes_a_te)
        with pytest.raises(ZeroDivisionError if is_asked else XDeepServeError, match=TRIED):
            llm.generate(prompts, params, meanwhile=kind.meanwhile)


@pytest.mark.parametrize("what", ["remove", "remove_server"])
async def test_an_error_is_heard_after_its_asker_has_gone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked for a TE or a server to leave was cancelled; then the engine hears of an error in that."""

    async def fails_late(*_: Any) -> None:
        await engine.plan.pod.clock.sleep(1_000_000)
        raise ZeroDivisionError(TRIED)

    if what == "remove":
        monkeypatch.setattr(te.TE, "leave", fails_late)
        engine = build_engine("tiny-random", "pd", "int8", overrides=[*TWO, "max_model_len=128"])
        await engine.start()
        asked = asyncio.ensure_future(engine.remove("prefill 1"))
    else:
        monkeypatch.setattr(ServerSeats, "leave", fails_late)
        engine = build_engine("tiny-random", "eaas", "int8", overrides=["max_model_len=128"])
        await engine.start()
        asked = asyncio.ensure_future(engine.remove_server("te", 0))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await engine.settle()
    assert engine.unhealthy_reason is not None
    assert TRIED in engine.unhealthy_reason
    await engine.stop()


def test_every_place_that_spawns_is_in_the_tables() -> None:
    """Whoever spawns in another place adds a kind of process, with an error that somebody hears."""
    rooms = ("comm/", "ems/", "engine/", "hw/")
    found = {where for where, _, _ in spawns() if where.startswith(rooms)}
    assert found == {each.site for each in (*KINDS, *AWAITED)}


def test_no_process_is_without_an_owner() -> None:
    """Who spawns keeps the process and awaits it; what nobody awaits is detached, with an owner to hear."""
    dropped = [where for where, call, is_dropped in spawns() if is_dropped and call.func.attr == "spawn"]
    assert dropped == []
    hardware = ("hw/", "engine/ways/flow/clock.py")  # owned by the clock's owner: all engines of the pod
    ownerless = [
        where
        for where, call, _ in spawns()
        if call.func.attr == "detach" and len(call.args) < 3 and not where.startswith(hardware)
    ]
    assert ownerless == []
