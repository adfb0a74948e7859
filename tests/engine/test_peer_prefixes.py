"""Prefixes from the caches of other TEs: the same bits, less to compute, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engine.remains import check_nothing_is_left, settled
from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.dp.events import Assigned, PrefixRead
from xdeepserve.engine.job.peer_prefixes import TIMEOUT_NS, PeerPrefixes
from xdeepserve.errors import DeploymentError
from xdeepserve.history import History, TEChange, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

MIXED = """
kind = "mixed"
[[te]]
dies = 2
count = 2
"""
PEERS = ("cache.peers=true", "cache.load=always", "scheduler.route=round-robin", "max_model_len=256")
TWO = ("prefill.count=2", "prefill.dies=1", "decode.dies=1")
PARAMS = SamplingParams(max_tokens=6, temperature=0.7, seed=3, ignore_eos=True)
PREFIX = [5, 6, 7, 8] * 25
PROMPTS = [[*PREFIX, *[i] * 10] for i in range(4)]
SECOND_NS = 10**8  # when the second request comes: the first has been answered
SOON = ("health.suspect_s=0.01", "health.lost_s=0.03")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two TEs that do both prefill and decode."""
    path = tmp_path_factory.mktemp("peers") / "mixed.toml"
    path.write_text(MIXED)
    return str(path)


@contextlib.contextmanager
def nothing_left(llm: LLM) -> Iterator[None]:
    yield
    llm.run(settled(llm.engine))
    check_nothing_is_left(llm.engine)


def served(
    deployment: str,
    *settings: str,
    prompts: Sequence[list[int]] = PROMPTS,
    in_ms: Sequence[int] = (0, 100, 200, 300),
    **more: object,
) -> Told:
    arrivals = [10**6 * at_ms for at_ms in in_ms[: len(prompts)]]
    history = History(deployment, (*PEERS, *settings), prompts, PARAMS, arrivals_ns=arrivals, **more)
    return serve(history, hears=(PrefixRead, Assigned), around=nothing_left)


def cached(told: Told) -> list[int]:
    return [output.metrics.num_cached_tokens for output in told.outputs]


PODS: dict[str, tuple[str, ...]] = {
    "mixed": (),
    "mixed in lockstep": ("lockstep=true",),
    "mixed, mtp": ("mtp=2", "execution.overlap=true"),
    "mixed, pushed": ("exchange=push", "experts.redundant_slots=1"),
    "pd": TWO,
    "pd, two dies of a group": ("prefill.count=2", "prefill.dies=2", "prefill.tp=2", "decode.dies=1"),
    "pd by layer": (*TWO, "transfer=layer", "mtp=1"),
    "pd beside the pod": ("prefill.count=2", "prefill.dies=1", "decode.dies=1", "prefill.hardware=910b"),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", PODS)
def test_a_te_that_has_not_computed_a_prefix_reads_it(name: str, mixed: str) -> None:
    told = served(mixed if name.startswith("mixed") else "pd", *PODS[name])
    assert told.digest == digest(one_die(PROMPTS, PARAMS, "int8"))
    assert cached(told) == [0, 96, 96, 96]
    (read,) = told.of(PrefixRead)
    first, second = (each.te for each in told.of(Assigned)[:2])
    assert (read.source.te, read.group.te, read.num_blocks) == (first, second, 6)
    assert read.nbytes > 6 * 1024
    assert (told.stats.peer_queries, told.stats.peer_hits) == (96 + 96, 96)


@pytest.mark.parametrize("name", ["mixed", "pd"])
def test_in_time_only_runs_the_same_blocks_move(name: str, mixed: str) -> None:
    deployment, settings = (mixed, ()) if name == "mixed" else ("pd", TWO)
    told = served(deployment, *settings, is_timing_only=True)
    assert cached(told) == [0, 96, 96, 96]
    (read,) = told.of(PrefixRead)
    # In the ideal cache that the model is billed for; the tiny model's own has rows of other widths.
    assert read.num_blocks == 6
    assert read.nbytes > 6 * 1024


def test_a_prefill_te_reads_an_answer_where_it_was_decoded() -> None:
    """The second turn of a chat begins with the first and its answer, which no prefill TE has computed."""
    with LLM("tiny-random", "pd", overrides=[*PEERS, "prefill.dies=1", "decode.dies=1"]) as llm:
        reads: list[PrefixRead] = []
        llm.engine.observe(lambda event: reads.append(event) if isinstance(event, PrefixRead) else None)
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        said = PREFIX + llm.generate([PREFIX], params)[0].outputs[0].token_ids
        llm.generate([[1]], params)  # so that the prompt tree knows of it
        outputs = llm.generate([said], params, keep_logits=True)
        assert outputs[0].metrics.num_cached_tokens == 128
        assert [(read.source.te, read.num_blocks) for read in reads] == [("decode 0", 2)]
        assert digest(outputs) == digest(one_die([said], params, "int8"))


def test_a_te_that_comes_reads_what_others_have(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, "colocated", overrides=[*PEERS, "dies=1"]) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
        llm.run(llm.engine.add_te())
        outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
        assert all(output.metrics.num_cached_tokens == 96 for output in outputs)
        assert llm.engine.stats().peer_hits == 96
        assert digest(outputs) == digest(one_die(PROMPTS, PARAMS, "int8"))
        llm.run(llm.engine.drain("te"))
        llm.generate(PROMPTS, PARAMS)
        check_nothing_is_left(llm.engine)


def test_prompts_that_begin_alike_wait_for_one_read(mixed: str) -> None:
    with LLM("tiny-random", mixed, overrides=[*PEERS, "scheduler.route=sequences"]) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
        outputs = llm.generate(PROMPTS * 2, PARAMS, arrivals_ns=[10**9] * 8)
        assert all(output.metrics.num_cached_tokens == 96 for output in outputs)
        assert llm.engine.stats().peer_hits in (96, 192, 288)  # once for each DP group without it
        check_nothing_is_left(llm.engine)


# ---- promises that are not kept -----------------------------------------------------------------------


@pytest.mark.parametrize("num_left", [0, 2])
def test_a_block_that_is_gone_when_it_is_asked_for_is_computed(
    num_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = PeerPrefixes.offer

    def evict(self: PeerPrefixes, read: object) -> None:
        """Evict a prefix but for its first blocks when the question comes, too late for the prompt tree."""
        rtc = self.group.rtc
        slots = [node.slot for node in rtc.match_by_prefix_token(PREFIX).ready]
        rtc.lose({slot for slot in slots[num_left:] if slot is not None}, [])
        offer(self, read)

    monkeypatch.setattr(PeerPrefixes, "offer", evict)
    told = served("pd", *TWO, prompts=PROMPTS[:2])
    assert told.digest == digest(one_die(PROMPTS[:2], PARAMS, "int8"))
    assert cached(told) == [0, 16 * num_left]
    assert told.stats.peer_hits == 16 * num_left
    assert [(read.num_blocks, read.reason) for read in told.of(PrefixRead)] == [(num_left, "")]


def test_a_read_that_does_not_come_names_its_deadline_and_is_not_tried_again_at_once(mixed: str) -> None:
    """The dies of the first TE are cut off from the second's: everything is computed, a deadline later."""
    pairs = [(a, b) for a in (0, 1) for b in (2, 3)]
    faults = [Fault(1.0, link=pair, plane="ub", kind="blocked", for_us=1e12) for pair in pairs]
    prompts, in_ms = [*PROMPTS, PROMPTS[0]], [0, 100, 1110, 1120, 1130]
    told = served(mixed, prompts=prompts, in_ms=in_ms, faults=faults)
    assert told.digest == digest(one_die(prompts, PARAMS, "int8"))
    assert cached(told)[:2] == [0, 0]
    (read,) = told.of(PrefixRead)
    assert read.num_blocks == 0
    for word in ("receive", read.group.te, str(read.source), "bytes of tag", "all by", "some on their way"):
        assert word in read.reason
    assert read.is_loss
    assert read.said.startswith(f"{read.group} computes what {read.source} could not send")
    assert TIMEOUT_NS < told.outputs[1].metrics.ttft_ns < 1.1 * TIMEOUT_NS


# ---- losses in the middle -----------------------------------------------------------------------------


def moments(quiet: Told, number: int) -> tuple[float, random.Random]:
    """An instant [us] between the second request's arrival and a little after the end of its read."""
    drawn = random.Random(number)
    (end_ns,) = (at for at, event in quiet.events if isinstance(event, PrefixRead))
    return drawn.uniform(SECOND_NS, end_ns + 10_000) / 1000, drawn


@pytest.fixture(scope="module")
def quiet(mixed: str) -> Told:
    return served(mixed, *SOON, prompts=PROMPTS[:2])


def judged(mixed: str, *settings: str, **more: object) -> None:
    told = served(mixed, *SOON, *settings, prompts=PROMPTS[:2], **more)
    assert told.digest == digest(one_die(PROMPTS[:2], PARAMS, "int8"))


@pytest.mark.thin(4)
@pytest.mark.parametrize("number", range(20))
def test_a_te_lost_in_the_middle_of_a_read_costs_no_bit(number: int, mixed: str, quiet: Told) -> None:
    at_us, drawn = moments(quiet, number)
    failover = ("recovery.failover=true", "recovery.spare_dies=2") if number % 3 == 0 else ()
    judged(mixed, *failover, faults=[Fault(at_us, drawn.randrange(4), "lost")])


@pytest.mark.thin(4)
@pytest.mark.parametrize("number", range(20))
def test_a_te_that_leaves_in_the_middle_of_a_read_costs_no_bit(number: int, mixed: str, quiet: Told) -> None:
    at_us, drawn = moments(quiet, number)
    what = drawn.choice(("drain", "remove"))
    name = drawn.choice([event.te for event in quiet.of(Assigned)])
    judged(mixed, life=[TEChange(at_us, what, name)])


@pytest.mark.thin(4)
@pytest.mark.parametrize("number", range(20))
def test_pages_and_steps_lost_in_the_middle_of_a_read_cost_no_bit(
    number: int, mixed: str, quiet: Told
) -> None:
    at_us, drawn = moments(quiet, number)
    pages = [Fault(at_us, die, "bad-page", page="kv/1/latent") for die in (0, 2)]
    glitch = Fault(at_us, drawn.randrange(4), "glitch", code="dma-error")
    judged(mixed, faults=[drawn.choice(pages), glitch] if number % 2 else pages)


@pytest.mark.parametrize("number", range(3))
def test_an_aborted_request_leaves_nothing_of_its_read(number: int, mixed: str, quiet: Told) -> None:
    at_us, _ = moments(quiet, number)
    with LLM("tiny-random", mixed, overrides=PEERS) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
        engine, start_ns = llm.engine, llm.virtual_ns

        async def aborted() -> None:
            request = engine.submit(PROMPTS[1], PARAMS, "aborted")

            async def end() -> None:
                request.abort()

            engine.plan.pod.clock.at(start_ns + round(1000 * at_us) - SECOND_NS, end)
            async for _ in request:
                pass

        llm.run(aborted())
        llm.run(settled(engine))
        check_nothing_is_left(engine)


# ---- when it pays -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "comes"), [(32, False), (512, True)])
def test_short_prefixes_are_computed_and_long_ones_read(num_tokens: int, comes: bool) -> None:
    """By the cost model: where hosts are far apart, to ask takes longer than to compute a few tokens."""
    settings = ["cache.peers=true", "scheduler.route=round-robin", "prefill.count=2", "prefill.dies=16"]
    prompts = [[7] * (num_tokens + 1)] * 2
    with LLM("deepseek-r1", "pd", overrides=settings, timing_only=True) as llm:
        assert llm.engine.je.peers is not None
        llm.engine.je.peers.travel_ns = 10**7
        outputs = llm.generate(prompts, PARAMS, arrivals_ns=[0, 10**11])
        assert llm.engine.stats().peer_hits == comes * num_tokens
    first, second = (output.metrics.ttft_ns for output in outputs)
    assert second < first if comes else second == first


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (
            "ems.path=pool",
            "cache.peers=true reads prefixes from other TEs, and ems.path has them all in a pool",
        ),
        ("cache.prefix=false", "cache.peers needs cache.prefix=true"),
    ],
)
def test_what_does_not_go_together_is_refused(setting: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=reason):
        LLM("tiny-random", "colocated", overrides=["cache.peers=true", setting])
