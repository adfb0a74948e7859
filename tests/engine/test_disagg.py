"""Disaggregated deployments: the bits of one die, back-pressure, aborts at every step, lost expert dies."""

import asyncio

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import DeadlineError, XDeepServeError
from xdeepserve.llm import build_engine, digest
from xdeepserve.model.presets import TinyCheckpoint

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [10, 11], [5] * 150]
PARAMS = SamplingParams(max_tokens=10, temperature=0.5, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny: TinyCheckpoint) -> str:
    with LLM(tiny) as llm:
        return digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))


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
        assert {span.node for span in moved} == {decode.sizes.first_die}
        assert len(moved) == len(PROMPTS)


def test_a_full_decode_side_makes_prefill_wait_and_loses_nothing(tiny: TinyCheckpoint) -> None:
    """One sequence fits decode at a time: prefilled ones keep their blocks until it is their turn."""
    overrides = ["prefill.dies=1", "decode.dies=1", "max_model_len=112", "cache.num_blocks=7"]
    prompts = [[i] * 60 for i in range(12)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(tiny) as roomy:
        wanted = [o.outputs[0].token_ids for o in roomy.generate(prompts, params)]
    with LLM(tiny, "pd", overrides=overrides) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == wanted
        llm.engine.check_integrity()
        assert llm.engine.stats().kv_cache_usage == 0


@pytest.mark.parametrize("deployment", ["pd", "transformerless"])
async def test_aborts_at_any_moment_free_the_blocks_of_both_sides(
    tiny: TinyCheckpoint, deployment: str
) -> None:
    overrides = ["prefill.dies=1", "max_model_len=256", "cache.num_blocks=16"]
    engine = build_engine(tiny, deployment, "int8", overrides=overrides)
    await engine.start()
    alone = [t async for d in engine.submit([3, 4, 5], PARAMS, "alone") for t in d.token_ids]
    for turns in range(0, 60, 3):
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
    assert all(not group.scheduler.sending for group in engine.groups)
    await engine.stop()


LONG_ISH = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


async def settled(engine: Engine) -> None:
    """Let transfers that an abort has overtaken come to their end."""
    for _ in range(2000):
        if engine.stats().kv_cache_usage == 0:
            return
        await asyncio.sleep(0)


async def test_a_lost_expert_die_ends_every_request_with_the_reason(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "moe-attention", "int8", overrides=[])
    await engine.start()

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("the die caught fire")

    engine.je.tes[0].expert_programs[1]._experts = broken  # type: ignore[method-assign]
    with pytest.raises(XDeepServeError, match="caught fire"):
        async for _ in engine.submit([1, 2, 3], PARAMS, "r"):
            pass
    assert not engine.is_healthy()
    await engine.stop()


async def test_a_silent_expert_die_is_named_at_a_deadline(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "moe-attention", "int8", overrides=[])
    await engine.start()
    program = engine.je.tes[0].expert_programs[2]

    async def silent(*_: object) -> None:
        await program.mem.doorbell.reaches(program.die, 10**9)

    program._experts = silent  # type: ignore[method-assign]
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
