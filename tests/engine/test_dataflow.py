"""Tokens that flow: no barriers, the same bits, and nobody waits for a straggler whose tokens it has not."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.engine.pods import SHAPES, overrides
from xdeepserve.comm.channel import Outbox
from xdeepserve.comm.trampoline.token_flow import Arrival, FlowExpertSide
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.dp.events import Given
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.te.host import Host
from xdeepserve.engine.ways.flow.real import FlowEnd
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pod import Pod
from xdeepserve.llm import LLM, build_engine, digest
from xdeepserve.model.weights import Recipe

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPTS = [[5 + i, *range(10, 10 + i % 5)] for i in range(9)]
LATE = "execution.pin_cores=false"


def run(precision: Recipe, shape: tuple[int, ...], *more: str, clock_seed: int | None = None) -> Told:
    history = History("moe-attention", overrides(shape, *more), PROMPTS, GREEDY, precision=precision)
    return serve(replace(history, clock_seed=clock_seed))


once = cache(run)  # for tests that change nothing in the program


@pytest.mark.thin(3)
@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize(("number", "shape"), [*enumerate(SHAPES)])
def test_same_bits_as_with_barriers(precision: Recipe, number: int, shape: tuple[int, ...]) -> None:
    """With two of the three numbers of drafts for each shape."""
    expected = once(precision, shape).digest
    for mtp in {0, 1, 2} - {number % 3}:
        assert once(precision, shape, "dataflow=true", f"mtp={mtp}").digest == expected


@pytest.mark.thin(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_groups_that_plan_ahead(shape: tuple[int, ...]) -> None:
    """Each hides its host's gap behind its step; the bits are the same."""
    graph, ahead = "execution.mode=graph", "execution.overlap=true"
    synchronous = once("int8", shape, graph, ahead)
    assert once("int8", shape, "dataflow=true", ahead, LATE, "mtp=2").digest == synchronous.digest
    waiting = once("int8", shape, "dataflow=true", graph)
    flowing = once("int8", shape, "dataflow=true", graph, ahead)
    assert flowing.digest == synchronous.digest
    assert flowing.end_ns < 0.7 * waiting.end_ns
    assert flowing.end_ns < 1.02 * synchronous.end_ns


@pytest.mark.thin(2)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_events(seed: int) -> None:
    found = once("int8", SHAPES[4], "dataflow=true", LATE, f"seed={seed}", clock_seed=seed)
    assert found.digest == once("int8", SHAPES[4]).digest


def test_stragglers_hold_up_themselves_alone() -> None:
    shape = (2, 4, 4, 1, 2)
    synchronous, flowing = once("int8", shape, LATE), once("int8", shape, LATE, "dataflow=true")
    assert flowing.end_ns < 0.8 * synchronous.end_ns
    waits, alone = (
        sum(output.metrics.last_token_ns or 0 for output in told.outputs if output.metrics is not None)
        for told in (synchronous, flowing)
    )
    assert alone < 0.7 * waits


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("shape", "late_rank"),
    [
        ((2, 2, 4, 1, 2), 0),
        ((2, 2, 4, 1, 2), 3),
        ((1, 3, 2, 1, 1), 2),
        ((1, 5, 1, 1, 3), 0),
        ((4, 2, 5, 3, 1), 7),
    ],
)
def test_a_host_that_is_late_holds_up_its_own_group_alone(
    shape: tuple[int, ...], late_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One DP group's launches come 5 ms late: without barriers the others' TPOT stays what it was, to 1 %."""
    late_ns, launches_ns = 0, Host.launches_ns

    def launch(host: Host, step: int) -> list[int]:
        delays = launches_ns(host, step)
        delays[late_rank] += late_ns
        return delays

    monkeypatch.setattr(Host, "launches_ns", launch)
    num_groups = shape[0] * shape[1]
    prompts = [[5 + i, 7, 9] for i in range(num_groups)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def tpots() -> list[float]:
        """Each DP group's, in ms."""
        settings = overrides(shape, "execution.mode=graph", "dataflow=true")
        told = serve(History("moe-attention", settings, prompts, params), hears=(Given,))
        groups = {event.seq_id: event.group.rank for event in told.of(Given)}
        assert sorted(groups.values()) == [*range(num_groups)]
        found = [0.0] * len(prompts)
        for seq_id, output in enumerate(told.outputs):
            assert output.metrics is not None
            found[groups[seq_id]] = (output.metrics.tpot_ns or 0) / 1e6
        return found

    flowing = tpots()
    late_ns = 5_000_000
    for rank, (before, after) in enumerate(zip(flowing, tpots(), strict=True)):
        if rank == late_rank:
            assert after > before + 4.5
        else:
            assert after == pytest.approx(before, rel=0.01)


def test_a_te_whose_groups_wait_for_blocks_watches_again_when_they_go_on() -> None:
    """All groups rest while a prefix comes from the host's memory; then steps take longer than the silence
    after which a TE is lost."""
    shape = (1, 2, 2, 1, 1)
    little = ("cache.num_blocks=4", "cache.num_host_blocks=64", "cache.load=always", "health.probe_s=0.005")
    settings = overrides(shape, "dataflow=true", *little, "health.suspect_s=0.01", "health.lost_s=0.02")
    long = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    prompt = [7 + i % 5 for i in range(34)]
    with LLM("tiny-random", "moe-attention", "int8", overrides=settings) as llm:
        first = llm.generate([prompt], long)
        for _ in range(2):
            llm.generate([[20 + i] * 60 for i in range(6)], SamplingParams(max_tokens=4, ignore_eos=True))
        begun_ns = llm.virtual_ns
        again = llm.generate([prompt], long)
        assert again[0].metrics is not None
        assert again[0].metrics.num_cached_tokens >= 32
        assert llm.virtual_ns - begun_ns > 20_000_000
        assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids


def test_a_die_that_hangs_after_all_rested_is_noticed() -> None:
    settings = overrides((1, 2, 2, 1, 1), "dataflow=true", "health.suspect_s=0.01", "health.lost_s=0.02")
    with LLM("tiny-random", "moe-attention", "int8", overrides=settings) as llm:
        llm.generate(PROMPTS[:2], GREEDY)
        executor = llm.engine.je.tes[0].executors[1]

        async def hang(command: object) -> None:
            await executor.die.clock.sleep(10**12)

        executor.obey = hang  # type: ignore[method-assign, assignment]
        with pytest.raises(XDeepServeError, match=r"heartbeat: .*DP group 1"):
            llm.generate(PROMPTS[:2], GREEDY)


def test_disaggregated_prefill_feeds_the_flow() -> None:
    digests = set()
    for more in ([], ["dataflow=true"], ["dataflow=true", "cache.num_blocks=9", "max_model_len=140"]):
        with LLM("tiny-random", "transformerless", "int8", overrides=["max_model_len=64", *more]) as llm:
            digests.add(digest(llm.generate(PROMPTS, GREEDY, keep_logits=True)))
            llm.engine.check_integrity()
    assert len(digests) == 1


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("int8", "flow/payload"),
        ("int8", "flow/scale"),
        ("int8", "flow/answers"),
        ("fp32", "flow/payload"),
        ("fp32", "flow/answers"),
    ],
)
def test_what_experts_take_and_make_is_bytes_of_their_die(
    precision: Recipe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit flipped there, before the experts run or before their answers are sent, changes the digest."""
    expected = once(precision, SHAPES[0], "dataflow=true").digest
    experts = ExpertProgram.run_experts

    def spoil(program: ExpertProgram) -> None:
        program.die.memory.buffer[program.mem.workspace.address(name).offset + 2] ^= 1 << 6

    async def late(self: ExpertProgram, *args: Any) -> None:
        if name != "flow/answers":
            spoil(self)
        await experts(self, *args)
        if name == "flow/answers":
            spoil(self)

    monkeypatch.setattr(ExpertProgram, "run_experts", late)
    assert run(precision, SHAPES[0], "dataflow=true").digest != expected


def test_answers_go_round_a_buffer_and_none_is_overwritten_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, answer = ExpertMemory.answers, FlowExpertSide.answer
    rounds = [0]

    def counted(self: ExpertMemory, rows: int) -> Any:
        before = self.next_answer
        out = answers(self, rows)
        rounds[0] += self.next_answer <= before
        return out

    async def late(self: FlowExpertSide, arrival: Any, out: Any) -> None:
        kept = out.tobytes()
        await self.die.clock.sleep(50_000)  # much is made meanwhile
        assert out.tobytes() == kept
        await answer(self, arrival, out)

    monkeypatch.setattr(ExpertMemory, "answers", counted)
    monkeypatch.setattr(FlowExpertSide, "answer", late)
    shape = (3, 2, 2, 1, 2)
    few = ("scheduler.max_num_batched_tokens=4", "scheduler.max_num_seqs=4")
    assert run("int8", shape, "dataflow=true", *few).digest == run("int8", shape).digest
    assert rounds[0] > 3


class Side:
    """Side of an expert die to which attention dies post `rows`, one exchange after another."""

    def __init__(self, clock: Clock, posts: list[tuple[int, int, int]]) -> None:
        self.clock, self.posts, self.lanes, self.called = clock, posts, ("", ""), ""

    def reset(self) -> None:
        self.posts = []

    async def arrivals(self) -> list[int]:
        if not self.posts:
            await self.clock.sleep(1_000_000_000)
        return [attention for attention, _, _ in self.posts]

    async def take(self, attention: int) -> Any:
        _, event, rows = self.posts.pop(0)
        return Arrival(attention, event, np.zeros(rows))  # type: ignore[arg-type]


def test_a_batch_is_of_one_layer_and_fits_and_a_rollback_empties_the_queues() -> None:
    pod = Pod()
    pod.plan(0)
    pod.materialise()
    posts = [(0, 2, 3), (1, 1, 1), (2, 2, 3), (3, 4, 2)]  # events 2 and 4 are of one layer of two

    async def main() -> None:
        side: Any = Side(pod.clock, posts[:])
        end = FlowEnd(pod.dies[0], [side], [], 1, 4, [1, 3])
        receive = dict(end.streams())["A2E receive 0"]

        async def batches(count: int) -> list[list[int]]:
            receiving = pod.clock.spawn(receive(), name="receive")
            await pod.clock.sleep(1)
            found = [[each.clients[0] for each in await end.next_batch(6)] for _ in range(count)]
            receiving.cancel()
            return found

        assert await batches(1) == [[0, 2]]  # the third of this layer has no room beside them
        side.posts = [(3, 6, 1)]
        assert await batches(2) == [[1], [3, 3]]
        side.posts = [(0, 1, 1), (1, 2, 1)]
        assert await batches(1) == [[0]]
        end.register()
        side.posts = [(2, 1, 1)]
        assert await batches(1) == [[2]]

    async def run_main() -> None:
        await pod.clock.spawn(main(), name="test")

    asyncio.run(run_main())


def test_an_expert_die_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = FlowExpertSide.answer

    async def silent(self: FlowExpertSide, *args: object) -> None:
        if self.rank != 1:
            await answer(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(FlowExpertSide, "answer", silent)
    with (
        LLM("tiny-random", "moe-attention", "int8", overrides=overrides(SHAPES[0], "dataflow=true")) as llm,
        pytest.raises(XDeepServeError, match=r"E2A: .* rank expert \d waits for peer \[expert 1\]"),
    ):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("op", ["A2E", "A2E'"])
def test_too_many_rows_are_refused_by_the_expert_die(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    post = Outbox.post

    async def boastful(self: Outbox, event_id: int, counts: Any, means: Any, name: str, *more: Any) -> None:
        await post(self, event_id, counts + 1000 * name.startswith(f"{op} 4"), means, name, *more)

    monkeypatch.setattr(Outbox, "post", boastful)
    with (
        LLM("tiny-random", "moe-attention", "int8", overrides=overrides(SHAPES[0], "dataflow=true")) as llm,
        pytest.raises(XDeepServeError, match=f"{op}: expert . has no room for the 10"),
    ):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("deployment", "settings", "reason"),
    [
        ("colocated", ["dataflow=true"], "dataflow is for pods with dies for experts alone"),
        ("moe-attention", ["dataflow=true", "lockstep=true"], "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(deployment: str, settings: list[str], reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason):
        build_engine("tiny-random", resolve(deployment, settings), "int8")


@pytest.mark.campaign
def test_a_whole_superpod() -> None:
    """480 dies with attention and 288 with experts, each a task with bytes of its own."""
    size = ["attention.domains=3", "attention.dies=160", "experts.routed_dies=256", "experts.shared_dies=32"]
    small = ["max_model_len=32", "cache.num_blocks=4"]
    rows = ["scheduler.max_num_seqs=2", "scheduler.max_num_batched_tokens=8"]
    prompts, params = PROMPTS * 3, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    digests = []
    for deployment, more in (("moe-attention", [*size, *rows, "dataflow=true"]), ("monolithic", [])):
        with LLM("tiny-r1", deployment, "int8", overrides=[*small, *more]) as llm:
            outputs = llm.generate(prompts, params, keep_logits=True)
            llm.engine.check_integrity()
            digests.append(digest(outputs))
            if more:
                assert len(llm.engine.groups) == 480
                assert len(llm.engine.plan.pod.dies) == 768
    assert digests[0] == digests[1]
