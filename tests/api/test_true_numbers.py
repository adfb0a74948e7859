"""Numbers that users read, over histories of all kinds: identities of usage, cached tokens, hits and drafts.

For each request, its cached tokens are no more than its prompt shares with others, and less than the prompt.
Hits are the cached tokens of all requests, and no more than the tokens that were looked up. Tokens of usage,
of the records and of the metrics are those that were delivered.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xdeepserve import LLM, SamplingParams
from xdeepserve.api.answers.generation import Generation
from xdeepserve.api.server.metrics import Metrics
from xdeepserve.engine.serving.record import RequestMetrics

TIGHT = ("max_model_len=96", "cache.num_blocks=9")
PODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tight": ("monolithic", TIGHT),
    "drafts": ("monolithic", ("max_model_len=96", "cache.num_blocks=10", "mtp=2", "execution.overlap=true")),
    "swap": ("monolithic", (*TIGHT, "cache.num_host_blocks=24", "cache.preemption=swap")),
    "host": ("monolithic", (*TIGHT, "cache.num_host_blocks=24", "cache.load=always")),
    "pd": ("pd", (*TIGHT, "mtp=1")),
    "dp": ("colocated", (*TIGHT, "dies=2", "mtp=1")),
    "pool": ("monolithic", (*TIGHT, "ems.block_size=16", "ems.servers=1")),
    "no cache": ("monolithic", (*TIGHT, "cache.prefix=false")),
}


class Asked(NamedTuple):
    """A request of a history: its prompts, its parameters, and after how many tokens the client goes."""

    prompts: list[list[int]]
    params: SamplingParams
    leaves_after: int | None


BASES = [[(17 * base + 5 * i) % 290 + 3 for i in range(40)] for base in range(3)]


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """Draw a request whose prompts may begin like those of others."""
    prompts = [
        BASES[draw(st.integers(0, 2))][: draw(st.integers(0, 40))]
        + draw(st.lists(st.integers(3, 290), min_size=1, max_size=6))
        for _ in range(draw(st.sampled_from([1, 1, 1, 2])))
    ]
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 40)), n=n, seed=draw(st.integers(0, 9)), ignore_eos=True,
        stop_token_ids=draw(st.sampled_from([(), tuple(range(0, 300, 9))])),
        temperature=draw(st.sampled_from([0.0, 1.0])), priority=draw(st.integers(-1, 1)),
        logprobs=draw(st.sampled_from([None, 1])), prompt_logprobs=draw(st.sampled_from([None, None, 1])),
    )  # fmt: skip
    return Asked(prompts, params, draw(st.sampled_from([None, None, None, 0, 1, 7])))


class Counted(NamedTuple):
    """What the client of a request saw: tokens by prompt and choice, usage, and the records at the end."""

    tokens: Counter[tuple[int, int]]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    records: dict[tuple[int, int], RequestMetrics]


async def served(llm: LLM, metrics: Metrics, number: int, ask: Asked) -> Counted:
    """Be the client of a request, as the endpoint is."""
    tokens, records = Counter[tuple[int, int]](), dict[tuple[int, int], RequestMetrics]()
    async with Generation(llm.engine, metrics, ask.prompts, ask.params, f"true-{number}") as generation:
        if ask.leaves_after != 0:
            async for prompt, delta in generation:
                tokens[prompt, delta.index] += len(delta.token_ids)
                if delta.metrics is not None:
                    records[prompt, delta.index] = delta.metrics
                if ask.leaves_after is not None and tokens.total() >= ask.leaves_after:
                    break
        usage = generation.usage()
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    cached = usage.prompt_tokens_details.cached_tokens
    return Counted(tokens, usage.prompt_tokens, usage.completion_tokens, cached, records)


def shared(prompt: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """Count the tokens with which a prompt begins like one of the others; its last token is computed."""
    most = 0
    for other in others:
        pairs = zip(prompt[:-1], other, strict=False)
        most = max(
            most, next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(prompt) - 1, len(other)))
        )
    return most


def value(metrics: Metrics, name: str) -> float:
    """Read a counter as the endpoint renders it."""
    lines = metrics.render().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def check(llm: LLM, asks: Sequence[Asked], before: Sequence[Sequence[int]]) -> None:
    """Serve a history and hold it to the identities; `before` are prompts that were served earlier."""
    metrics, stats = Metrics("tiny-random", llm.engine.stats), llm.engine.stats()

    async def all_of_them() -> list[Counted]:
        found = await asyncio.gather(*(served(llm, metrics, at, ask) for at, ask in enumerate(asks)))
        await llm.engine.settle()
        return found

    results, now = llm.run(all_of_them()), llm.engine.stats()
    prompts = [prompt for ask in asks for prompt in ask.prompts]
    hits = now.prefix_cache_hits - stats.prefix_cache_hits
    queries = now.prefix_cache_queries - stats.prefix_cache_queries
    assert 0 <= hits <= queries <= sum(map(len, prompts))
    assert now.prefix_cache_hits <= now.prefix_cache_queries
    assert now.pool_hits <= now.pool_queries
    at, known = 0, 0
    for ask, result in zip(asks, results, strict=True):
        assert result.prompt_tokens == sum(map(len, ask.prompts))
        assert result.completion_tokens == result.tokens.total()
        cached = Counter[int]()
        for (prompt, choice), record in result.records.items():
            assert record.num_tokens == result.tokens[prompt, choice]
            assert record.num_accepted <= record.num_drafts == sum(record.drafts_by_position)
            assert record.num_tokens <= record.num_steps + record.num_accepted
            cached[prompt] += record.num_cached_tokens
        assert result.cached_tokens == cached.total()
        for index, prompt in enumerate(ask.prompts):
            others = [*before, *prompts[:at], *prompts[at + 1 :]]
            assert cached[index] <= shared(prompt, others) < len(prompt)
            at += 1
        known += cached.total()
        if ask.leaves_after is None:
            assert len(result.records) == len(ask.prompts) * ask.params.n
            merged = RequestMetrics.merged([*result.records.values()])
            assert merged.num_tokens == result.completion_tokens
            assert merged.num_cached_tokens == result.cached_tokens
    if all(ask.leaves_after is None for ask in asks):
        assert hits == known
        looked_up = [
            len(prompt) for ask in asks for prompt in ask.prompts if ask.params.prompt_logprobs is None
        ]
        assert queries in (0, sum(looked_up))
    assert hits >= known
    assert value(metrics, "vllm:generation_tokens_total") == sum(r.completion_tokens for r in results)
    begun = value(metrics, "vllm:prompt_tokens_total")
    answered = [{prompt for prompt, _ in +result.tokens} for result in results]
    least = sum(len(ask.prompts[at]) for ask, each in zip(asks, answered, strict=True) for at in each)
    assert least <= begun <= sum(r.prompt_tokens for r in results)
    if not any(ask.params.prompt_logprobs for ask in asks):
        assert queries in (0, begun)
    ended = sum(len(ask.prompts) * ask.params.n for ask in asks)
    assert value(metrics, "vllm:request_success_total") == ended
    assert value(metrics, "vllm:prefix_cache_hits_total") == now.prefix_cache_hits
    llm.engine.check_integrity()


@pytest.fixture(scope="module", params=PODS)
def pod(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, list[list[int]]]]:
    deployment, overrides = PODS[request.param]
    if request.param == "pool":
        overrides = (*overrides, f"ems.path={tmp_path_factory.mktemp('pool')}")
    with LLM("tiny-random", deployment, overrides=overrides) as llm:
        yield llm, []


HISTORIES = st.lists(asked(), min_size=1, max_size=7)


@settings(max_examples=3, derandomize=True)
@given(asks=HISTORIES)
def test_the_numbers_of_any_history(pod: tuple[LLM, list[list[int]]], asks: list[Asked]) -> None:
    llm, before = pod
    check(llm, asks, before)
    before += [prompt for ask in asks for prompt in ask.prompts]


@pytest.mark.campaign
@settings(max_examples=100)
@given(asks=HISTORIES)
def test_the_numbers_of_many_histories(pod: tuple[LLM, list[list[int]]], asks: list[Asked]) -> None:
    llm, before = pod
    check(llm, asks, before)
    before += [prompt for ask in asks for prompt in ask.prompts]


@pytest.mark.parametrize("name", ["tight", "pd", "drafts"])
def test_what_is_computed_again_was_not_cached(name: str) -> None:
    """Prompts that share nothing, on a cold pod with too few blocks for their answers."""
    deployment, overrides = PODS[name]
    asks = [
        Asked([[3 + at, *((11 * i + 37 * at) % 280 + 3 for i in range(21))]], params, None)
        for at, params in enumerate([SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)] * 6)
    ]
    with LLM("tiny-random", deployment, overrides=overrides) as llm:
        check(llm, asks, [])
        stats = llm.engine.stats()
        assert stats.num_preemptions > 0
        assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (0, 6 * 22)


def test_choices_share_one_prompt() -> None:
    prompt, params = BASES[0], SamplingParams(max_tokens=3, n=5, seed=2, ignore_eos=True)
    with LLM("tiny-random") as llm:
        first, again = (llm.generate([prompt], params)[0].metrics for _ in range(2))
        assert first is not None
        assert again is not None
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
        stats = llm.engine.stats()
        assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (32, 80)
