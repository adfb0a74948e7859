"""A failure stays in the link of one prefill and one decode TE; and decode groups that are full are none."""

import asyncio
from typing import Any

import pytest

from tests.engine.links import ARRIVALS, MANY, ONE_EACH, PARAMS, PROMPTS, TWO_BY_TWO, WAYS, count_moves
from tests.engine.remains import check_nothing_is_left, settled
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.distflow.rules import Cause
from xdeepserve.engine.deploy.policies import DECODE
from xdeepserve.engine.dp.events import LinkChanged
from xdeepserve.engine.job.links import PDLink
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import TransferError
from xdeepserve.llm import build_engine, digest
from xdeepserve.model.presets import TinyCheckpoint


@pytest.fixture(scope="module", params=["int8", "fp32"])
def expected(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param, digest(one_die(PROMPTS, PARAMS, request.param))


# ---- faults of one link ------------------------------------------------------------------------------


def lose_words(link: PDLink, kind: Cause) -> list[int]:
    """From now on words of a kind do not arrive on this link. The tags that they were about."""
    lost: list[int] = []
    for endpoint in link.ends.values():
        put = endpoint.inbox.put

        def filtered(message: Any, delay_ns: int = 0, put: Any = put) -> None:
            if message.kind is kind:
                lost.append(message.tag)
            else:
                put(message, delay_ns=delay_ns)

        endpoint.inbox.put = filtered  # type: ignore[method-assign]
    return lost


def break_moves(link: PDLink, num_good: int = 0, hangs: bool = False) -> list[int]:
    """After some good ones, no bytes move on this link: an error at once, or nothing for a long time."""
    move, calls, broken = link.flow.backend.move, 0, list[int]()

    async def breaking(copies: Any, name: str) -> None:
        nonlocal calls
        calls += 1
        if calls <= num_good:
            return await move(copies, name)
        broken.append(calls)
        if hangs:
            await link.flow.pod.clock.sleep(10**15)
            await move(copies, name)
        raise OSError("no carrier")

    link.flow.backend.move = breaking  # type: ignore[method-assign]
    return broken


FAULTS = {
    "want": lambda link: lose_words(link, Cause.WANT),
    "offer": lambda link: lose_words(link, Cause.OFFER),
    "ready": lambda link: lose_words(link, Cause.READY),
    "move": lambda link: break_moves(link),
    "second move": lambda link: break_moves(link, 1),
    "third move": lambda link: break_moves(link, 2),
    "stuck": lambda link: break_moves(link, 1, hangs=True),
    "done": lambda link: lose_words(link, Cause.DONE),
}


async def tokens_of(request: Any) -> list[int]:
    return [t async for delta in request for t in delta.token_ids]


@pytest.mark.thin(5)
@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_link_of_four_changes_no_bit_and_no_other_link(
    tiny: TinyCheckpoint, expected: tuple[str, str], fault: str, transfer: str
) -> None:
    if fault == "ready" and transfer == "request":
        pytest.skip("by request there is no such word")
    precision, wanted = expected
    overrides = [*TWO_BY_TWO, f"transfer={transfer}"]
    with LLM(tiny, "pd", precision, overrides=overrides) as llm:
        counts = {link: count_moves(link) for link in llm.engine.je.links}
        assert digest(llm.generate(*MANY, keep_logits=True)[: len(PROMPTS)]) == wanted
        broken = max(counts, key=lambda link: len(counts[link]))
        others = [link for link in counts if link is not broken]
        hit = FAULTS[fault](broken)
        outputs = llm.generate(*MANY, keep_logits=True, arrivals_ns=ARRIVALS * 2)
        assert digest(outputs[: len(PROMPTS)]) == digest(outputs[len(PROMPTS) :]) == wanted
        assert hit
        llm.run(settled(llm.engine))
        assert broken.error is not None
        assert all(link.error is None for link in others)
        check_nothing_is_left(llm.engine)
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == wanted
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)
        assert llm.engine.is_healthy()


@pytest.mark.thin(7)
@pytest.mark.parametrize("deployment", ["pd", "transformerless"])
@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("fault", ["want", "offer", "move", "third move", "stuck"])
async def test_without_any_link_requests_fail_and_the_pod_does_not(
    tiny: TinyCheckpoint, deployment: str, transfer: str, fault: str
) -> None:
    more = ["prefill.count=2"] if deployment == "transformerless" else TWO_BY_TWO
    overrides = [*(ONE_EACH if deployment == "pd" else ["prefill.dies=1", "max_model_len=128"]), *more]
    engine = build_engine(tiny, deployment, "int8", overrides=[*overrides, f"transfer={transfer}"])
    await engine.start()
    wanted = await tokens_of(engine.submit([4] * 60, PARAMS, "well"))
    moves = [link.flow.backend.move for link in engine.je.links]
    for link in engine.je.links:
        FAULTS[fault](link)
    failed: list[BaseException] = []
    for attempt in range(6):
        is_broken = bool(failed) or fault not in ("third move", "stuck")
        requests = [engine.submit([4] * 60, PARAMS, f"{attempt}-{i}") for i in range(6)]
        results = await asyncio.gather(*map(tokens_of, requests), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        assert all(result == wanted for result in results if result not in failed)
        assert len(failed) == 6 or not is_broken
        for error in failed:
            assert isinstance(error, TransferError)
            assert str(error).startswith("no decode TE can be reached from prefill ")
            assert "decode 0: " in str(error)
            assert "\n" not in str(error)
        await settled(engine)
        check_nothing_is_left(engine)
    assert len(failed) == 6
    assert engine.is_healthy()
    if "move" in fault or fault == "stuck":  # and when the wires are back, so is the service
        for link, move in zip(engine.je.links, moves, strict=True):
            link.flow.backend.move = move  # type: ignore[method-assign]
        assert await tokens_of(engine.submit([4] * 60, PARAMS, "again")) == wanted
        await settled(engine)
        check_nothing_is_left(engine)
    await engine.stop()


# ---- which link is taken -----------------------------------------------------------------------------


async def start(tiny: TinyCheckpoint, overrides: list[str], deployment: str = "pd") -> Engine:
    engine = build_engine(tiny, deployment, "int8", overrides=overrides)
    await engine.start()
    return engine


async def test_a_failed_link_is_tried_again_after_a_while_by_one_sequence(tiny: TinyCheckpoint) -> None:
    engine = await start(tiny, [*ONE_EACH, "decode.count=2", "health.probe_s=0.5"])
    told: list[LinkChanged] = []
    engine.observe(lambda event: told.append(event) if isinstance(event, LinkChanged) else None)
    wanted = await tokens_of(engine.submit([4] * 60, PARAMS, "well"))
    first, second = engine.je.links
    move, broken = first.flow.backend.move, break_moves(first)
    for number in range(4):  # of idle TEs the first one is chosen, if it can be reached
        assert await tokens_of(engine.submit([4] * 60, PARAMS, f"avoids {number}")) == wanted
    assert broken == [1]
    assert first.is_avoided
    clock = engine.plan.pod.clock
    await clock.spawn(clock.sleep(500_000_000))
    assert not first.is_avoided
    requests = [engine.submit([4] * 60, PARAMS, f"tries {number}") for number in range(3)]
    assert await asyncio.gather(*map(tokens_of, requests)) == [wanted] * 3
    assert broken == [1, 2]  # one has tried, the others have not waited for its result
    first.flow.backend.move = move  # type: ignore[method-assign]
    await clock.spawn(clock.sleep(500_000_000))
    used = count_moves(first)
    assert await tokens_of(engine.submit([4] * 60, PARAMS, "finds it well")) == wanted
    assert (len(used), first.error, second.error) == (1, None, None)
    assert [(each.prefill, each.decode, each.is_well) for each in told] == [
        ("prefill 0", "decode 0", False),
        ("prefill 0", "decode 0", True),
    ]
    assert "no carrier" in told[0].said
    await settled(engine)
    check_nothing_is_left(engine)
    await engine.stop()


async def test_a_prefill_te_that_reaches_nobody_gets_no_requests(tiny: TinyCheckpoint) -> None:
    engine = await start(tiny, TWO_BY_TWO)
    prefill, other = engine.je.tes[:2]
    wanted = await tokens_of(engine.submit([4] * 60, PARAMS, "well"))
    for link in engine.je.links:
        if link.tes[0] is prefill:
            break_moves(link)
    with pytest.raises(TransferError, match=r"decode 0: .*no carrier; decode 1: .*no carrier"):
        await tokens_of(engine.submit([4] * 60, PARAMS, "fails"))
    steps = other.step_idx
    for number in range(3):
        assert await tokens_of(engine.submit([4] * 60, PARAMS, str(number))) == wanted
    assert other.step_idx == steps + 3
    await settled(engine)
    check_nothing_is_left(engine)
    await engine.stop()


async def test_who_waits_for_room_beyond_a_failed_link_goes_elsewhere(tiny: TinyCheckpoint) -> None:
    engine = await start(tiny, [*ONE_EACH, "decode.count=2"])
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    wanted = await tokens_of(engine.submit([4] * 60, long, "well"))
    first, second = engine.je.links
    requests = [engine.submit([4] * 60, long, str(number)) for number in range(10)]
    readers = [asyncio.ensure_future(tokens_of(request)) for request in requests]
    shell = first.tes[1].te_shell

    def waiting() -> int:
        return len(shell.arrivals) + len(shell.groups[0].scheduler.places.arriving)

    for _ in range(100_000):
        if waiting() >= 3:
            break
        await asyncio.sleep(0)
    assert waiting() >= 3
    broken = break_moves(first)
    assert await asyncio.gather(*readers) == [wanted] * 10
    assert 1 <= len(broken) <= 2  # there was room for two at once; the others did not try
    assert second.error is None
    await settled(engine)
    check_nothing_is_left(engine)
    await engine.stop()


async def test_a_suspect_decode_te_gets_no_new_requests(tiny: TinyCheckpoint) -> None:
    engine = await start(tiny, [*ONE_EACH, "decode.count=2", "health.suspect_s=1"])
    wanted = await tokens_of(engine.submit([4] * 60, PARAMS, "well"))
    late, other = engine.je.tes[1:]
    [executor] = late.executors
    step = executor.step

    async def slow(plan: Any) -> None:
        await executor.die.clock.sleep(20_000_000_000)
        await step(plan)

    executor.step = slow  # type: ignore[method-assign]
    reader = asyncio.ensure_future(tokens_of(engine.submit([4] * 60, PARAMS, "slow")))
    for _ in range(100_000):
        if late.is_suspect:
            break
        await asyncio.sleep(0)
    assert late.is_suspect
    steps = other.step_idx
    assert await tokens_of(engine.submit([4] * 60, PARAMS, "new")) == wanted
    assert other.step_idx > steps
    executor.step = step  # type: ignore[method-assign]
    assert await reader == wanted
    await settled(engine)
    check_nothing_is_left(engine)
    await engine.stop()


# ---- ends and choices while links fail ---------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("fault", ["want", "third move", "stuck", "done"])
async def test_aborts_while_a_link_fails_free_both_sides(
    tiny: TinyCheckpoint, fault: str, transfer: str
) -> None:
    engine = await start(tiny, [*ONE_EACH, "decode.count=2", f"transfer={transfer}"])
    wanted = await tokens_of(engine.submit([4] * 60, PARAMS, "well"))
    first, second = engine.je.links
    FAULTS[fault](first)
    for turns in range(0, 60, 4):
        requests = [engine.submit([i] * 60, PARAMS, f"{turns}-{i}") for i in range(4)]
        kept = engine.submit([4] * 60, PARAMS, f"kept {turns}")
        for _ in range(turns):
            await asyncio.sleep(0)
        for request in requests:
            request.abort()
        engine.check_integrity()
        assert await tokens_of(kept) == wanted
    await settled(engine)
    check_nothing_is_left(engine)
    assert second.error is None
    await engine.stop()


@pytest.mark.parametrize("transfer", WAYS)
def test_a_request_with_choices_fails_as_a_whole_and_others_do_not(
    tiny: TinyCheckpoint, transfer: str
) -> None:
    three = SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True)
    with LLM(tiny, "pd", overrides=[*ONE_EACH, f"transfer={transfer}"]) as llm:
        wanted = llm.generate([[4] * 60], three)[0]
        [link] = llm.engine.je.links
        move = link.flow.backend.move
        break_moves(link, 1)
        with pytest.raises(TransferError, match="no carrier"):
            llm.generate([[4] * 60], three)
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)
        link.flow.backend.move = move  # type: ignore[method-assign]
        again = llm.generate([[4] * 60], three)[0]
        assert [c.token_ids for c in again.outputs] == [c.token_ids for c in wanted.outputs]
        check_nothing_is_left(llm.engine)


# ---- full is not failed ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", DECODE.rows)
async def test_an_offer_may_wait_for_hours_while_its_decode_group_is_busy(
    tiny: TinyCheckpoint, policy: str
) -> None:
    """One sequence fits at a time, and each step takes 50 seconds."""
    overrides = [*ONE_EACH, "max_model_len=80", "cache.num_blocks=5", f"scheduler.decode={policy}"]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    engine = await start(tiny, overrides)
    wanted = await tokens_of(engine.submit([4] * 40, params, "alone"))
    [executor] = engine.je.tes[1].executors
    step = executor.step

    async def slow(plan: Any) -> None:
        await executor.die.clock.sleep(50_000_000_000)
        await step(plan)

    executor.step = slow  # type: ignore[method-assign]
    requests = [engine.submit([4] * 40, params, str(number)) for number in range(6)]
    assert await asyncio.gather(*map(tokens_of, requests)) == [wanted] * 6
    assert engine.stats().virtual_ns > 2 * 3_600_000_000_000
    assert all(link.error is None for link in engine.je.links)
    await settled(engine)
    check_nothing_is_left(engine)
    await engine.stop()
