"""KV by layer: the bits of one die, layers that move during prefill, and what may go wrong meanwhile."""

import asyncio
from typing import Any

import pytest

from tests.engine.remains import check_nothing_is_left, settled
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.events import Event, LastChunkLaunched, LayerEnded, Prefilled, Registered
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.step import SeqResult
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import DeploymentError, TransferError, XDeepServeError
from xdeepserve.llm import build_engine, digest
from xdeepserve.model.presets import TinyCheckpoint

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [10, 11], [5] * 150]
PARAMS = SamplingParams(max_tokens=10, temperature=0.5, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
BY_LAYER = "transfer=layer"
PAIR = ["prefill.dies=1", "decode.dies=1"]
SMALL = [*PAIR, "max_model_len=128", "cache.num_blocks=16", "cache.prefix=false", BY_LAYER]


@pytest.fixture(scope="module", params=["int8", "fp32"])
def expected(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param, digest(one_die(PROMPTS, PARAMS, request.param))


SHAPES = [
    ("pd", PAIR),
    ("pd", [*PAIR, "mtp=1", "fabric=roce"]),
    ("pd", ["prefill.dies=2", "decode.dies=2", "mtp=2", "fabric=vpc"]),
    ("pd", ["prefill.count=2", "prefill.dies=2", "decode.count=2", "decode.dies=1"]),
    ("pd", ["prefill.dies=2", "prefill.tp=2", "decode.dies=3", "mtp=1"]),
    ("pd", ["prefill.dies=4", "prefill.tp=4", "prefill.tp_mode=sp-tp-sp", "decode.dies=2"]),
    ("pd", ["prefill.dies=4", "prefill.tp=4", "decode.dies=2", "decode.tp=2"]),
    ("pd", ["prefill.dies=2", "decode.dies=2", "pipeline.microbatches=2"]),
    ("pd", [*PAIR, "execution.overlap=true", "mtp=2"]),
    ("pd", [*PAIR, "scheduler.max_num_batched_tokens=33", "max_model_len=176", "cache.num_blocks=11"]),
    ("transformerless", ["prefill.dies=2", "mtp=1"]),
    ("transformerless", ["prefill.dies=2", "dataflow=true"]),
    ("transformerless", ["prefill.dies=2", "lockstep=true", "mtp=2"]),
]


@pytest.mark.thin(5)
@pytest.mark.parametrize(("deployment", "overrides"), SHAPES, ids=[str(i) for i in range(len(SHAPES))])
def test_every_shape_has_the_bits_of_one_die(
    tiny: TinyCheckpoint, expected: tuple[str, str], deployment: str, overrides: list[str]
) -> None:
    precision, wanted = expected
    with LLM(tiny, deployment, precision, overrides=[*overrides, BY_LAYER]) as llm:
        early = count_reservations(llm.engine)
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == wanted
        assert early
        check_nothing_is_left(llm.engine)


def count_reservations(engine: Engine) -> list[int]:
    """The numbers of sequences that are offered by layer from now on."""
    found = []
    under_way: set[int] = set()  # last chunks

    def see(event: Event) -> None:
        if isinstance(event, LastChunkLaunched):
            under_way.add(event.seq_id)
        elif isinstance(event, Prefilled):
            under_way.discard(event.seq_id)
        elif isinstance(event, Registered) and event.seq_id in under_way:
            found.append(event.seq_id)

    engine.observe(see)
    return found


async def tokens_of(request: Any) -> list[int]:
    return [t async for delta in request for t in delta.token_ids]


async def start(tiny: TinyCheckpoint, overrides: list[str], deployment: str = "pd") -> Engine:
    engine = build_engine(tiny, deployment, "int8", overrides=overrides)
    await engine.start()
    return engine


def sides(engine: Engine) -> tuple[DPGroup, DPGroup]:
    return engine.je.tes[0].groups[0], engine.je.tes[1].groups[0]


# ---- what it is for ---------------------------------------------------------------------------------


def test_layers_move_while_later_ones_are_computed(tiny: TinyCheckpoint) -> None:
    """One transfer for each layer but the last, each before the next layer has ended; and the last part."""
    with LLM(tiny, "pd", overrides=[*PAIR, "mtp=1", BY_LAYER], trace=True) as llm:
        llm.generate([list(range(100))], SHORT)
        spans = llm.engine.plan.pod.trace.spans
        prefill, decode = (te.sizes.place.first_die for te in llm.engine.je.tes)
        num_layers = llm.engine.plan.config.num_hidden_layers
    moved = [s for s in spans if s.name.startswith("DistFlow") and s.node == decode]
    stages = [s for s in spans if s.node == prefill and s.name == "MLAProlog"][: num_layers + 1]
    assert len(moved) == num_layers + 1
    for layer, move in enumerate(moved[: num_layers - 1]):
        assert stages[layer].start_ns < move.start_ns < stages[layer + 2].start_ns
    (sampled,) = [s for s in spans if s.node == prefill and s.name == "Sample"]
    assert moved[num_layers - 1].start_ns < sampled.end_ns < moved[num_layers].start_ns


@pytest.mark.thin(3)
@pytest.mark.parametrize("fabric", ["ub", "roce", "vpc"])
@pytest.mark.parametrize("mtp", [0, 1, 2])
def test_decode_begins_earlier_on_a_long_prompt(tiny: TinyCheckpoint, fabric: str, mtp: int) -> None:
    gaps = {}
    for transfer in ("request", "layer"):
        overrides = [*PAIR, f"fabric={fabric}", f"mtp={mtp}", f"transfer={transfer}"]
        overrides += ["scheduler.max_num_batched_tokens=2048", "max_model_len=2048"]
        with LLM(tiny, "pd", overrides=overrides) as llm:
            metrics = llm.generate([[3] * 1500], SamplingParams(max_tokens=4, ignore_eos=True))[0].metrics
            assert metrics is not None
            assert metrics.first_token_ns is not None
            assert metrics.last_token_ns is not None
            gaps[transfer] = metrics.last_token_ns - metrics.first_token_ns
            first = metrics.first_token_ns
        gaps[f"{transfer}: first"] = first
    assert gaps["layer"] < gaps["request"]
    assert gaps["layer: first"] == gaps["request: first"]  # prefill itself is not disturbed


async def test_a_layer_leaves_when_all_dies_of_the_group_have_ended_it(tiny: TinyCheckpoint) -> None:
    """Each die of decode pulls from another one of them."""
    engine = await start(tiny, ["prefill.dies=2", "prefill.tp=2", "decode.dies=2", BY_LAYER])
    group, left = engine.je.tes[0].groups[0], list[Event]()
    engine.observe(left.append)
    group.by_layer[7] = [4]
    for layer, expected in ((0, []), (1, []), (0, [0]), (1, [0, 1])):
        group.end_layer(7, layer)
        assert left == [LayerEnded(4, group.id, ended) for ended in expected]
    del group.by_layer[7]
    check_nothing_is_left(engine)
    await engine.stop()


# ---- full, slow and stalled --------------------------------------------------------------------------


async def test_without_room_in_decode_it_goes_by_request_and_prefill_does_not_stall(
    tiny: TinyCheckpoint,
) -> None:
    """Decode has few blocks, since somebody holds the others; prefill goes on all the same."""
    prompts = [[i + 3] * 60 for i in range(3)]
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    wanted = [o.outputs[0].token_ids for o in one_die(prompts, params)]
    engine = await start(tiny, SMALL)
    prefill, decode = sides(engine)
    hold = decode.scheduler.handover.reserve(made_up_sequence(), 12 * 16)
    assert hold is not None
    early = count_reservations(engine)
    requests = [engine.submit(prompt, params, str(i)) for i, prompt in enumerate(prompts)]
    readers = [asyncio.ensure_future(tokens_of(request)) for request in requests]
    for _ in range(10_000):
        if len(prefill.scheduler.handover.sending) == 3:
            break
        await asyncio.sleep(0)
    assert (len(prefill.scheduler.handover.sending), early) == (3, [])
    decode.scheduler.finish_transfer(hold)
    engine.je.tes[1].wake()
    assert [await reader for reader in readers] == wanted
    await settled(engine)
    check_nothing_is_left(engine)
    assert await tokens_of(engine.submit(prompts[0], params, "again")) == wanted[0]
    assert len(early) == 1
    await engine.stop()


def made_up_sequence() -> Sequence:
    return Sequence(
        seq_id=-1,
        choice=0,
        token_ids=[1, 2],
        num_prompt=2,
        max_tokens=6,
        params=SHORT,
        seed=0,
        on_tokens=lambda seq, rows: False,
    )


async def test_a_reservation_overtakes_nobody(tiny: TinyCheckpoint) -> None:
    """While somebody waits for room, or has been preempted, whoever is prefilled comes by request."""
    engine = await start(tiny, SMALL)
    _, decode = sides(engine)
    shell, scheduler = engine.je.tes[1].te_shell, decode.scheduler
    seq = made_up_sequence()
    for queue in (
        scheduler.places.waiting,
        scheduler.places.swapped,
        scheduler.places.arriving,
        shell.arrivals,
    ):
        queue.append(seq)  # type: ignore[attr-defined]
        assert shell.reserve(seq, 2) is None
        queue.pop()  # type: ignore[attr-defined]
    found = shell.reserve(seq, 2)
    assert found is not None
    status = decode.status()
    assert (status.num_sequences, status.num_used_blocks) == (1, 1)
    scheduler.finish_transfer(scheduler.places.ticket_of(seq.seq_id))
    assert shell.reserve(seq, 17 * 16) is None  # more than there is
    await engine.stop()


async def test_what_a_step_writes_is_not_reserved_before_its_end(tiny: TinyCheckpoint) -> None:
    """Not even if the sequence that it is written for has been aborted meanwhile."""
    engine = await start(tiny, SMALL)
    scheduler = sides(engine)[1].scheduler
    aborted, other = made_up_sequence(), made_up_sequence()
    scheduler.add(aborted)
    step = scheduler.schedule()
    [written] = aborted.holding.slots
    scheduler.remove(aborted)
    assert scheduler.handover.reserve(other, 16 * 16) is None
    ticket = scheduler.handover.reserve(other, 15 * 16)
    assert ticket is not None
    assert written not in scheduler.handover.reserved[other.seq_id].slots
    scheduler.finish_step(step, [SeqResult()])
    assert scheduler.rtc.num_available == 1
    scheduler.finish_transfer(ticket)
    check_nothing_is_left(engine)
    await engine.stop()


def delay_steps(engine: Engine, te: int, delay_ns: int) -> None:
    for executor in engine.je.tes[te].executors:
        step, clock = executor.step, executor.die.clock

        async def slow(plan: Any, step: Any = step, clock: Any = clock) -> None:
            await clock.sleep(delay_ns)
            await step(plan)

        executor.step = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("slow", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("delay_ns", [100_000_000, 50_000_000_000])
async def test_slow_and_stalled_sides_lose_nothing(tiny: TinyCheckpoint, slow: int, delay_ns: int) -> None:
    """Also where a step takes longer than the time that DistFlow gives bytes."""
    prompts = [[i + 3] * 60 for i in range(8)]
    wanted = [o.outputs[0].token_ids for o in one_die(prompts, SHORT)]
    engine = await start(tiny, SMALL)
    delay_steps(engine, slow, delay_ns)
    early = count_reservations(engine)
    requests = [engine.submit(prompt, SHORT, str(i)) for i, prompt in enumerate(prompts)]
    readers = [asyncio.ensure_future(tokens_of(request)) for request in requests]
    while not all(reader.done() for reader in readers):
        engine.check_integrity()
        await asyncio.sleep(0)
    assert [reader.result() for reader in readers] == wanted
    assert early
    await settled(engine)
    check_nothing_is_left(engine)
    await engine.stop()


# ---- ends before the end -----------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("deployment", ["pd", "transformerless"])
@pytest.mark.parametrize("ahead", ["execution.overlap=true", "mtp=1"])
async def test_aborts_at_any_moment_free_the_blocks_of_both_sides(
    tiny: TinyCheckpoint, deployment: str, ahead: str
) -> None:
    overrides = ["prefill.dies=1", "max_model_len=256", "cache.num_blocks=16", BY_LAYER, ahead]
    engine = await start(tiny, overrides, deployment)
    alone = await tokens_of(engine.submit([3, 4, 5], PARAMS, "alone"))
    early = count_reservations(engine)
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    found = set()
    for turns in range(0, 90, 5 if deployment == "pd" else 18):
        requests = [engine.submit([i] * 70, long, f"{turns}-{i}") for i in range(5)]
        kept = engine.submit([3, 4, 5], PARAMS, f"kept {turns}")
        for _ in range(turns):
            await asyncio.sleep(0)
        found |= {len(te.groups[0].places.reserved) for te in engine.je.tes[1:]}
        for request in requests:
            request.abort()
        assert await tokens_of(kept) == alone
        engine.check_integrity()
    assert early
    assert found - {0}  # some of them while layers were on their way
    await settled(engine)
    check_nothing_is_left(engine)
    await engine.stop()


@pytest.mark.parametrize("num_moved", [0, 1, 2, 3])
async def test_a_request_cancelled_between_layers_frees_the_blocks_of_both_sides(
    tiny: TinyCheckpoint, num_moved: int
) -> None:
    """What has not been ready by then never moves."""
    engine = await start(tiny, SMALL)
    prefill, decode = sides(engine)
    wanted = await tokens_of(engine.submit([9] * 50, SHORT, "alone"))
    victim = engine.submit([7] * 60, SHORT, "victim")
    [seq] = victim.sequences
    (destinations,) = (endpoint.destinations for endpoint in decode.endpoints)
    (sources,) = (endpoint.sources for endpoint in prefill.endpoints)
    for _ in range(100_000):
        if any(transfer.num_ready == num_moved for transfer in sources.values()):
            break
        await asyncio.sleep(0)
    assert len(decode.places.reserved) == len(sources) == len(destinations) == 1
    assert seq in prefill.scheduler.places.running
    victim.abort()
    assert seq not in prefill.scheduler.places.running
    engine.check_integrity()
    kept = engine.submit([9] * 50, SHORT, "kept")
    assert await tokens_of(kept) == wanted
    await settled(engine)
    check_nothing_is_left(engine)
    await engine.stop()


async def test_a_sequence_that_ends_with_its_first_token_leaves_nothing_in_decode(
    tiny: TinyCheckpoint,
) -> None:
    """It stops at that token, which nobody could know when its layers began to move."""
    engine = await start(tiny, SMALL)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    first, *_ = await tokens_of(engine.submit([9] * 50, greedy, "alone"))
    steps, early = engine.je.tes[1].step_idx, count_reservations(engine)
    params = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=[first])
    assert len(await tokens_of(engine.submit([9] * 50, params, "stops"))) <= 1
    assert len(early) == 1
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    assert await tokens_of(engine.submit([9] * 50, one, "one")) == [first]
    assert len(early) == 1  # that one ends by count
    await settled(engine)
    check_nothing_is_left(engine)
    assert engine.je.tes[1].step_idx == steps
    await engine.stop()


def test_choices_of_one_request_and_shared_prefixes(tiny: TinyCheckpoint) -> None:
    params = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    prompts = [[7] * 50, list(range(70)), [7] * 50]
    wanted = digest(one_die(prompts, params))
    with LLM(tiny, "pd", overrides=[*PAIR, "mtp=2", BY_LAYER]) as llm:
        for _ in range(2):
            assert digest(llm.generate(prompts, params, keep_logits=True)) == wanted
        check_nothing_is_left(llm.engine)


def test_the_same_prompt_many_times_over_a_slow_link(tiny: TinyCheckpoint) -> None:
    """The prefix cache would let a sequence change over to blocks that others have filled, and free its own,
    while they are being read.
    """
    prompts = [list(range(40, 40 + n)) for n in (1, 1, 17, 17, 33, 33, 130)] + [list(range(130))] * 2
    wanted = digest(one_die(prompts, SHORT))
    for dies in (1, 2):
        overrides = ["prefill.dies=1", f"decode.dies={dies}", "fabric=vpc", BY_LAYER]
        with LLM(tiny, "pd", overrides=overrides) as llm:
            assert digest(llm.generate(prompts, SHORT, keep_logits=True)) == wanted
            check_nothing_is_left(llm.engine)


# ---- what fails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("transfer", ["layer", "request"])
async def test_a_die_that_fails_midway_ends_every_request_and_frees_both_sides(
    tiny: TinyCheckpoint, side: int, transfer: str
) -> None:
    """The prefill die burns in its third layer; the decode die in a step, while others' layers arrive."""
    engine = await start(tiny, [*SMALL, f"transfer={transfer}"])
    executor = engine.je.tes[side].executors[0]
    enter, calls = executor.runner.enter, 0

    def burning(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > (2 if side == 0 else 9):
            raise ZeroDivisionError("the die caught fire")
        enter(*args)

    executor.runner.enter = burning  # type: ignore[method-assign]
    requests = [engine.submit([i + 3] * 40, SHORT, str(i)) for i in range(6)]
    for request in requests:
        with pytest.raises(XDeepServeError, match="caught fire"):
            await tokens_of(request)
    assert not engine.is_healthy()
    engine.check_integrity()
    assert engine.stats().kv_cache_usage == 0
    for group in engine.groups:
        assert not any((group.handover.sending, group.handover.reserved, group.places.num_in_transit))
        assert not len(group.dies[0].memory.claims)
    await engine.stop()


@pytest.mark.parametrize("num_moves", [0, 1, 3])
async def test_the_only_link_breaks_midway_and_the_request_ends_with_the_reason(
    tiny: TinyCheckpoint, num_moves: int
) -> None:
    engine = await start(tiny, SMALL)
    (link,) = engine.je.links
    move, calls = link.flow.backend.move, 0

    async def breaking(copies: Any, name: str) -> None:
        nonlocal calls
        calls += 1
        if calls > num_moves:
            raise OSError("no carrier")
        await move(copies, name)

    link.flow.backend.move = breaking  # type: ignore[method-assign]
    with pytest.raises(TransferError, match=r"decode 0: DistFlow 0: .*no carrier"):
        await tokens_of(engine.submit([4] * 60, SHORT, "r"))
    await settled(engine)
    check_nothing_is_left(engine)
    assert engine.is_healthy()
    await engine.stop()


@pytest.mark.parametrize("name", ["monolithic", "colocated", "moe-attention"])
def test_it_is_refused_where_prefill_has_no_te_of_its_own(tiny: TinyCheckpoint, name: str) -> None:
    with pytest.raises(DeploymentError, match="transfer=layer is for pods whose prefill has TEs of its own"):
        fit(resolve(name, [BY_LAYER]), tiny.config)


def test_there_are_two_ways(tiny: TinyCheckpoint) -> None:
    with pytest.raises(DeploymentError, match="transfer=block"):
        resolve("pd", ["transfer=block"])
