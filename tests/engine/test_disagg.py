"""Disaggregated deployments: the bits of one die, back-pressure, aborts at every step, lost expert dies."""

import asyncio
from typing import Any

import pytest

from tests.engine.remains import settled
from tests.engine.tools import delay_steps, tokens_of
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.distflow.rules import State
from xdeepserve.engine.dp.events import Event, Prefilled
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.step import PlannedStep
from xdeepserve.engine.messages import CopyBlocks
from xdeepserve.engine.plans import BlockCopy, StepPlan
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import DeadlineError, XDeepServeError
from xdeepserve.llm import build_engine, digest
from xdeepserve.model.presets import TinyCheckpoint

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [10, 11], [5] * 150]
PARAMS = SamplingParams(max_tokens=10, temperature=0.5, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS))


SHAPES = [
    ("pd", ["prefill.dies=1", "decode.dies=1"]),
    ("pd", ["prefill.count=2", "prefill.dies=2", "decode.count=2", "decode.dies=1"]),
    ("pd", ["prefill.dies=2", "decode.dies=2", "mtp=1", "fabric=roce"]),
    ("pd", ["prefill.dies=1", "decode.dies=1", "fabric=vpc"]),
    ("pd", ["prefill.dies=1", "decode.dies=1", "max_model_len=176", "cache.num_blocks=11"]),
    ("moe-attention", ["attention.domains=1", "attention.dies=1", "experts.routed_dies=1"]),
    ("moe-attention", ["attention.domains=2", "attention.dies=1", "experts.routed_dies=5"]),
    ("moe-attention", ["attention.domains=4", "attention.dies=3", "experts.routed_dies=2", "mtp=1"]),
    ("moe-attention", ["attention.domains=1", "attention.dies=5", "attention.microbatches=1"]),
    ("moe-attention", ["attention.microbatches=4", "scheduler.max_num_batched_tokens=33", "mtp=1"]),
    ("moe-attention", ["experts.routed_dies=3", "experts.shared_dies=3"]),
    ("transformerless", ["prefill.dies=2", "mtp=1"]),
]


@pytest.mark.thin(5)
@pytest.mark.parametrize(("deployment", "overrides"), SHAPES, ids=[str(i) for i in range(len(SHAPES))])
def test_every_shape_has_the_bits_of_one_die(
    tiny: TinyCheckpoint, expected: str, deployment: str, overrides: list[str]
) -> None:
    with LLM(tiny, deployment, overrides=overrides) as llm:
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == expected
        assert all(te.step_idx > 0 for te in llm.engine.je.tes[:1])
        llm.engine.check_integrity()
        assert llm.engine.stats().kv_cache_usage == 0


def test_kv_crosses_as_bytes_and_prefill_only_prefills(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "pd", overrides=["prefill.dies=1", "decode.dies=1"], trace=True) as llm:
        llm.generate(PROMPTS, PARAMS)
        prefill, decode = llm.engine.je.tes
        assert prefill.step_idx < 5
        assert decode.step_idx >= 9
        moved = [s for s in llm.engine.plan.pod.trace.spans if s.name.startswith("DistFlow")]
        assert {span.node for span in moved} == {decode.sizes.place.first_die}
        assert len(moved) == len(PROMPTS)


def test_a_full_decode_side_makes_prefill_wait_and_loses_nothing(tiny: TinyCheckpoint) -> None:
    """One sequence fits decode at a time: prefilled ones keep their blocks until it is their turn."""
    overrides = ["prefill.dies=1", "decode.dies=1", "max_model_len=112", "cache.num_blocks=7"]
    prompts = [[i] * 60 for i in range(12)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    wanted = [o.outputs[0].token_ids for o in one_die(prompts, params)]
    with LLM(tiny, "pd", overrides=overrides) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == wanted
        llm.engine.check_integrity()
        assert llm.engine.stats().kv_cache_usage == 0


@pytest.mark.parametrize(("deployment", "first"), [("pd", 0), ("transformerless", 3)])
async def test_aborts_at_any_moment_free_the_blocks_of_both_sides(
    tiny: TinyCheckpoint, deployment: str, first: int
) -> None:
    overrides = ["prefill.dies=1", "max_model_len=256", "cache.num_blocks=16"]
    engine = build_engine(tiny, deployment, "int8", overrides=overrides)
    await engine.start()
    alone = [t async for d in engine.submit([3, 4, 5], PARAMS, "alone") for t in d.token_ids]
    for turns in range(first, 60, 10):
        requests = [engine.submit([i] * 70, LONG_ISH, f"{turns}-{i}") for i in range(5)]
        kept = engine.submit([3, 4, 5], PARAMS, f"kept {turns}")
        for _ in range(turns):
            await asyncio.sleep(0)
        for request in requests:
            request.abort()
        assert [t async for d in kept for t in d.token_ids] == alone
        engine.check_integrity()
    await settled(engine)
    assert engine.stats().kv_cache_usage == 0
    assert all(not group.scheduler.handover.sending for group in engine.groups)
    await engine.stop()


LONG_ISH = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


async def test_a_lost_expert_die_ends_every_request_with_the_reason(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "moe-attention", "int8", overrides=[])
    await engine.start()

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("the die caught fire")

    [*engine.je.tes[0].expert_programs][1].run_experts = broken  # type: ignore[method-assign]
    with pytest.raises(XDeepServeError, match="caught fire"):
        async for _ in engine.submit([1, 2, 3], PARAMS, "r"):
            pass
    assert not engine.is_healthy()
    await engine.stop()


async def test_a_silent_expert_die_is_named_at_a_deadline(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "moe-attention", "int8", overrides=[])
    await engine.start()
    program = [*engine.je.tes[0].expert_programs][2]

    async def silent(*_: object) -> None:
        await program.mem.doorbell.reaches(program.die, 10**9)

    program.run_experts = silent  # type: ignore[method-assign]
    with pytest.raises(DeadlineError) as caught:
        async for _ in engine.submit(list(range(40)), PARAMS, "r"):
            pass
    assert caught.value.op in ("E2A", "E2A'")
    assert "event ID" in caught.value.field
    await engine.stop()


def test_an_idle_disaggregated_pod_wakes_again(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "transformerless", overrides=["prefill.dies=1"]) as llm:
        first = llm.generate([[1, 2]], PARAMS)
        again = llm.generate([[1, 2]], PARAMS)
        assert first[0].outputs[0].token_ids == again[0].outputs[0].token_ids


# ---- slow, stalled and full decode; cancelled at each of the eight steps ---------------------------------

SMALL_PD = ["prefill.dies=1", "decode.dies=1", "max_model_len=128", "cache.num_blocks=16"]
SHORT = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


async def test_a_slow_decode_makes_prefill_wait_with_bounded_memory(tiny: TinyCheckpoint) -> None:
    """Prefilled requests keep their blocks until decode takes them; with none left, nobody is admitted."""
    prompts = [[i + 3] * 60 for i in range(20)]
    wanted = [o.outputs[0].token_ids for o in one_die(prompts, SHORT)]
    engine = build_engine(tiny, "pd", "int8", overrides=[*SMALL_PD, "cache.prefix=false"])
    await engine.start()
    delay_steps(engine, 1, lambda step: 100_000_000)
    prefill, decode = (te.groups[0] for te in engine.je.tes)
    requests = [engine.submit(prompt, SHORT, str(i)) for i, prompt in enumerate(prompts)]
    readers = [asyncio.ensure_future(tokens_of(request)) for request in requests]
    most_kept = most_used = 0
    while not all(reader.done() for reader in readers):
        kept = [len(holding.slots) for holding in prefill.scheduler.handover.sending.values()]
        most_kept = max(most_kept, sum(kept))
        most_used = max(most_used, decode.rtc.num_blocks - decode.rtc.num_available)
        engine.check_integrity()
        await asyncio.sleep(0)
    assert [reader.result() for reader in readers] == wanted
    # A prompt takes four blocks: prefill was full of requests that decode had no room for.
    assert most_kept == prefill.rtc.num_blocks == 16
    assert most_used <= decode.rtc.num_blocks
    await settled(engine)
    assert engine.stats().kv_cache_usage == 0
    await engine.stop()


async def test_a_decode_that_stalls_for_a_while_goes_on_where_it_was(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "pd", "int8", overrides=SMALL_PD)
    await engine.start()
    wanted = await tokens_of(engine.submit([5] * 40, SHORT, "alone"))
    first = engine.je.tes[1].step_idx
    delay_steps(engine, 1, lambda step: 50_000_000_000 if step == first + 2 else 0)
    requests = [engine.submit([5] * 40, SHORT, str(i)) for i in range(6)]
    assert [await tokens_of(request) for request in requests] == [wanted] * 6
    assert engine.stats().virtual_ns > 50_000_000_000
    await settled(engine)
    assert engine.stats().kv_cache_usage == 0
    await engine.stop()


@pytest.mark.thin(3)
@pytest.mark.parametrize("te", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("deployment", "more"),
    [
        ("pd", ("prefill.dies=2", "decode.dies=2")),
        ("pd", ("prefill.dies=2", "prefill.tp=2", "decode.dies=1")),
        ("transformerless", ("attention.domains=2", "attention.dies=2")),
        ("transformerless", ("attention.dies=2", "lockstep=true")),
        ("transformerless", ("attention.dies=2", "dataflow=true")),
    ],
)
async def test_one_die_that_stalls_holds_up_the_others_and_nothing_is_lost(
    tiny: TinyCheckpoint, deployment: str, more: tuple[str, ...], te: int
) -> None:
    """As long as it is not lost: exchanges wait for it."""
    wanted = [o.outputs[0].token_ids for o in one_die([[i + 3] * 40 for i in range(4)], SHORT)]
    engine = build_engine(tiny, deployment, "int8", overrides=[*more, "max_model_len=128"])
    await engine.start()
    delay_steps(engine, te, lambda step: 40_000_000_000 if step == 1 else 0, num_dies=1)
    requests = [engine.submit([i + 3] * 40, SHORT, str(i)) for i in range(4)]
    assert await asyncio.gather(*map(tokens_of, requests)) == wanted
    again = [engine.submit([i + 3] * 40, SHORT, f"again {i}") for i in range(4)]
    assert await asyncio.gather(*map(tokens_of, again)) == wanted
    assert engine.stats().virtual_ns > 40_000_000_000
    await settled(engine)
    assert engine.stats().kv_cache_usage == 0
    await engine.stop()


async def test_copies_on_write_are_made_before_transfers_that_may_overwrite_their_source(
    tiny: TinyCheckpoint,
) -> None:
    engine = build_engine(tiny, "monolithic", "int8", overrides=["cache.num_host_blocks=8"])
    await engine.start()
    [group] = engine.je.tes[0].groups
    sent: list[Any] = []
    group.put = lambda command, delay_ns=0: sent.append(command)  # type: ignore[method-assign]
    write, load = BlockCopy("hbm", 1, "hbm", 0), BlockCopy("host", 1, "hbm", 1)
    group.scheduler.schedule = lambda: PlannedStep(copies=[write], transfers=[(9, [load])])  # type: ignore[method-assign]
    group.plan(0)
    group.launch(0)
    copies = [command for command in sent if isinstance(command, CopyBlocks)]
    assert copies == [CopyBlocks(ticket=None, copies=[write]), CopyBlocks(ticket=9, copies=[load])]
    assert isinstance(sent[-1], StepPlan)
    await engine.stop()


async def test_a_decode_that_stalls_for_good_is_named_at_a_deadline(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "pd", "int8", overrides=SMALL_PD)
    await engine.start()
    delay_steps(engine, 1, lambda step: 10**15)
    requests = [engine.submit([i + 3] * 40, SHORT, str(i)) for i in range(6)]
    for request in requests:
        with pytest.raises(DeadlineError, match="inbox of decode 0"):
            await tokens_of(request)
    assert not engine.is_healthy()
    await engine.stop()


def step_of(engine: Engine, seq: Sequence) -> int:
    """Which of the eight steps a sequence is at; 0: it has left."""
    prefill, decode = engine.je.tes
    [first], [second] = prefill.groups, decode.groups
    if any(seq in seqs for seqs in prefill.te_shell.pending):
        return 1  # assigned to a TE, whose shell has not dealt it out
    if seq in first.scheduler.places.waiting or seq in first.scheduler.places.running:
        return 2
    if seq in decode.te_shell.arrivals:
        return 4  # 3 has registered it, and 4 sent it to decode, at the same instant
    if seq in second.scheduler.places.arriving:
        return 5
    if seq in second.places.tickets.values():
        transfers = second.endpoints[0].destinations
        states = [transfer.state for (_, tag), transfer in transfers.items() if tag == seq.seq_id]
        return {State.WANTED: 6, State.MOVING: 7}.get(states[0], 8) if states else 8
    return 8 if seq in second.scheduler.places.running else 0


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6, 7, 8])
async def test_a_request_cancelled_at_a_step_frees_the_blocks_of_both_sides(
    tiny: TinyCheckpoint, step: int
) -> None:
    """Nothing of it stays on either side, and the others' tokens are what they are without it."""
    # With the other policy a request may have to wait in the queue of its group, too.
    policy = "round-robin" if step == 5 else "kv"
    overrides = [*SMALL_PD, "cache.prefix=false", f"scheduler.decode={policy}"]
    engine = build_engine(tiny, "pd", "int8", overrides=overrides)
    await engine.start()
    wanted = await tokens_of(engine.submit([9] * 50, SHORT, "alone"))
    prefill, decode = engine.je.tes
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    others = []
    if step in (4, 5):  # a full decode side lets it wait there
        others = [engine.submit([9] * 50, SHORT, f"other {i}") for i in range(8)]
    victim = engine.submit([7] * 60, long, "victim")
    [seq] = victim.sequences
    registered: list[int] = []
    if step == 3:  # the registration itself: the abort comes with it, before the job executor goes on
        act = engine.je.tell.act

        def abort_at(event: Event) -> None:
            act(event)
            if isinstance(event, Prefilled) and event.seq_id == seq.seq_id:
                registered.append(len(prefill.groups[0].scheduler.handover.sending[seq.seq_id].slots))
                victim.abort()

        engine.je.tell.act = abort_at
    readers = [asyncio.ensure_future(tokens_of(request)) for request in others]
    if step == 3:
        while not registered:
            await asyncio.sleep(0)
        assert registered == [4]
    else:
        for _ in range(100_000):
            if step_of(engine, seq) == step:
                break
            await asyncio.sleep(0)
        assert step_of(engine, seq) == step
        victim.abort()
    engine.check_integrity()
    # From step 6 on its blocks are being written: they are free when both sides have learnt of the end.
    assert step_of(engine, seq) in ((0, 6, 7, 8) if step >= 6 else (0,))
    kept = engine.submit([9] * 50, SHORT, "kept")
    assert await tokens_of(kept) == wanted
    assert [await reader for reader in readers] == [wanted] * len(others)
    await settled(engine)
    for te in (prefill, decode):
        [group] = te.groups
        assert group.rtc.usage == 0
        assert not group.scheduler.handover.sending
        assert all(endpoint.num_open == 0 for endpoint in group.endpoints)
    assert not engine.je.transfers
    engine.check_integrity()
    await engine.stop()
