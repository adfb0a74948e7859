"""Decode admits requests: its blocks are there before anybody computes, and nobody waits with blocks."""

from typing import Any

import pytest

from tests.engine.links import ARRIVALS, ONE_EACH, PARAMS, PROMPTS, TWO_BY_TWO, WAYS
from tests.engine.remains import check_nothing_is_left, settled
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Booked, Event, Observed, Registered, StepEnded, TransferBegan
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

FIRST = "scheduler.admission=decode"
TIGHT = ["max_model_len=128", "cache.num_blocks=8"]


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS))


def record(llm: LLM) -> list[tuple[int, Observed]]:
    """All events from now on, with their times."""
    seen: list[tuple[int, Observed]] = []
    llm.engine.observe(lambda event: seen.append((llm.virtual_ns, event)))
    return seen


@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("shape", [ONE_EACH, [*ONE_EACH, *TIGHT], TWO_BY_TWO], ids=["pair", "tight", "2x2"])
def test_blocks_are_there_before_anybody_computes(
    tiny: TinyCheckpoint, expected: str, shape: list[str], transfer: str
) -> None:
    overrides = [*shape, FIRST, f"transfer={transfer}"]
    with LLM(tiny, "pd", overrides=overrides) as llm:
        seen = record(llm)
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True, arrivals_ns=ARRIVALS)
        assert digest(outputs) == expected
        booked = {event.seq_id: at for at, event in seen if isinstance(event, Booked)}
        assert len(booked) == len(PROMPTS)
        for _, event in seen:
            if isinstance(event, StepEnded) and event.group.te.startswith("prefill"):
                assert all(booked[share.seq_id] <= event.start_ns for share in event.shares)
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)


def waiting_with_blocks(llm: LLM) -> int:
    """Requests that had been prefilled when decode had no room for them."""
    seen = record(llm)
    llm.generate(PROMPTS, SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True))
    began = {e.seq_id: at for at, e in seen if isinstance(e, TransferBegan) and not e.is_source}
    registered = {e.seq_id: at for at, e in seen if isinstance(e, Registered)}
    return sum(began[seq_id] > at for seq_id, at in registered.items())


def test_nobody_waits_for_decode_with_blocks_on_prefill(tiny: TinyCheckpoint) -> None:
    overrides = [*ONE_EACH, "max_model_len=128", "cache.num_blocks=8"]
    with LLM(tiny, "pd", overrides=overrides) as llm:
        assert waiting_with_blocks(llm) > 0
    with LLM(tiny, "pd", overrides=[*overrides, FIRST]) as llm:
        assert waiting_with_blocks(llm) == 0


@pytest.mark.parametrize("transfer", WAYS)
def test_choices_of_one_request(tiny: TinyCheckpoint, transfer: str) -> None:
    """More of them than decode has blocks for: further ones come as they do without reservations."""
    params = SamplingParams(n=5, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    digests = []
    for more in ([], [FIRST]):
        overrides = [*ONE_EACH, *TIGHT, f"transfer={transfer}", *more]
        with LLM(tiny, "pd", overrides=overrides) as llm:
            digests.append(digest(llm.generate([[5] * 60, [9, 9]], params, keep_logits=True)))
            llm.run(settled(llm.engine))
            check_nothing_is_left(llm.engine)
    assert digests[0] == digests[1]


def test_a_request_that_ends_in_prefill_books_nothing(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "pd", overrides=[*ONE_EACH, FIRST]) as llm:
        seen = record(llm)
        llm.generate(PROMPTS, SamplingParams(max_tokens=1, temperature=0.0))
        assert not [event for _, event in seen if isinstance(event, Booked)]
        check_nothing_is_left(llm.engine)


@pytest.mark.parametrize("transfer", WAYS)
def test_requests_are_aborted_at_any_moment(tiny: TinyCheckpoint, transfer: str) -> None:
    """While they wait, are booked, are prefilled, move, decode; those behind them go on."""
    overrides = [*ONE_EACH, *TIGHT, FIRST, f"transfer={transfer}"]
    with LLM(tiny, "pd", overrides=overrides) as llm:

        async def main(after_ns: int) -> None:
            engine, clock = llm.engine, llm.engine.plan.pod.clock
            requests = [engine.submit([n] * 90, PARAMS, str(n)) for n in range(4)]
            await clock.spawn(clock.sleep(after_ns))
            requests[0].abort()
            requests[2].abort()
            for request in (requests[1], requests[3]):
                assert len([t async for delta in request for t in delta.token_ids]) == 8
            await settled(engine)
            check_nothing_is_left(engine)
            assert engine.stats().num_waiting == 0

        for after_ns in range(0, 12_000_000, 600_000):
            llm.run(main(after_ns))


@pytest.mark.thin(3)
@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("te", ["decode 0", "decode 1", "prefill 0"])
@pytest.mark.parametrize("how", ["drain", "remove", "kill"])
def test_tes_that_go(tiny: TinyCheckpoint, expected: str, how: str, te: str, transfer: str) -> None:
    """Those that are booked there come, or go elsewhere; tokens are the same."""
    for at_ns in (1_000_000, 6_000_000):
        overrides = [*TWO_BY_TWO, FIRST, f"transfer={transfer}"]
        with LLM(tiny, "pd", overrides=overrides) as llm:

            async def change(engine: Any, at_ns: int = at_ns) -> None:
                await engine.plan.pod.clock.sleep(at_ns)
                if how == "kill":
                    victim = next(each for each in engine.je.tes if each.sizes.place.name == te)
                    victim.processes[0].cancel()
                else:
                    await getattr(engine, how)(te)

            outputs = llm.generate(PROMPTS * 2, PARAMS, keep_logits=True, meanwhile=change)
            half = len(PROMPTS)
            assert digest(outputs[:half]) == digest(outputs[half:]) == expected
            llm.run(settled(llm.engine))
            check_nothing_is_left(llm.engine)


def test_who_waits_is_counted(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "pd", overrides=[*ONE_EACH, *TIGHT, FIRST]) as llm:
        most: list[int] = []

        def see(event: Event | StepEnded) -> None:
            most.append(llm.engine.stats().num_waiting)

        llm.engine.observe(see)
        llm.generate([[5] * 90] * 6, PARAMS)
        assert max(most) >= 4


def test_a_te_leaves_whose_blocks_were_kept_for_a_request_that_has_ended(tiny: TinyCheckpoint) -> None:
    """Nothing else would tell it that nobody comes any more."""
    with LLM(tiny, "pd", overrides=[*ONE_EACH, "decode.count=2", FIRST]) as llm:
        clock = llm.engine.plan.pod.clock

        async def leave() -> None:
            request = llm.engine.submit([1] * 40, SamplingParams(max_tokens=8), "goes away")
            ((_, te, _),) = llm.engine.je.admission.booked.values()  # type: ignore[attr-defined]
            leaving = clock.spawn(llm.engine.remove(te.sizes.place.name), name="remove")
            await clock.sleep(1000)
            request.abort()
            await clock.join(leaving)
            assert te.life == "gone"

        async def main() -> None:
            await clock.spawn(leave(), name="test")

        llm.run(main())
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)
