"""`prompt_cache_key`: the same bits, less to compute, and counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.errors import DeploymentError, RequestError
from xdeepserve.llm import RequestOutput, build_engine, digest
from xdeepserve.model.presets import TinyCheckpoint

TIGHT = ["max_model_len=96", "cache.num_blocks=6", "cache.num_host_blocks=24", "cache.load=always"]


def params(key: str | None, num_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, prompt_cache_key=key)


def talk(llm: LLM, keys: Sequence[str | None], num_turns: int = 3) -> list[RequestOutput]:
    """As many conversations as keys, turn by turn: each prompt is all that was said, and a question."""
    said = [[10 * i + j for j in range(30)] for i in range(len(keys))]
    outputs = []
    for turn in range(num_turns):
        answers = llm.generate(said, [params(key) for key in keys], keep_logits=True)
        for words, answer in zip(said, answers, strict=True):
            words += [*answer.outputs[0].token_ids, 200 + turn]
        outputs += answers
    return outputs


@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [
        ("monolithic", TIGHT),
        ("colocated", ["dies=2", *TIGHT]),
        ("pd", ["prefill.dies=2", "decode.dies=1", *TIGHT]),
        ("monolithic", [*TIGHT, "execution.overlap=true", "cache.max_keys=1"]),
    ],
)
def test_keys_change_no_bit(tiny: TinyCheckpoint, deployment: str, overrides: list[str]) -> None:
    digests = set()
    for keys in ((None, None, None), ("a", "b", "c"), ("a", "a", "a")):
        with LLM(tiny, deployment, overrides=overrides) as llm:
            digests.add(digest(talk(llm, keys)))
            stats = llm.engine.stats()
            llm.engine.check_integrity()
        num_distinct = len(set(keys) - {None})
        assert stats.cache_key_queries == (9 if num_distinct else 0)
        assert 0 <= stats.cache_key_hits < 9
        if num_distinct == 3 and "cache.max_keys=1" not in overrides:
            assert stats.cache_key_hits >= 4  # of the six later turns: some find their blocks evicted
            assert stats.num_cache_keys >= 3
        elif "cache.max_keys=1" in overrides or num_distinct == 1:
            assert stats.num_cache_keys <= len(llm.engine.groups)
    assert len(digests) == 1


def test_a_key_leads_back_to_the_group_that_has_its_prefix_in_host_memory(tiny: TinyCheckpoint) -> None:
    """Without the key, the group that is asked knows only of its HBM, and the first one is as good."""
    found = {}
    for key in (None, "talk"):
        with LLM(tiny, "colocated", overrides=["dies=2", *TIGHT]) as llm:
            other, said = [7] * 40, list(range(60))
            llm.generate([other, said], [params(None), params(key)])  # one goes to each group
            holder = next(g for g in llm.engine.groups if g.rtc.match_by_prefix_token(said).ready)
            llm.generate([[90 + i] * 80 for i in range(2)] * 3, params(None))  # push both out of HBM
            match = holder.rtc.match_by_prefix_token(said)
            assert not match.ready
            assert match.saved
            if holder is llm.engine.groups[0]:
                llm.generate([[3] * 5], params(None))
            [output] = llm.generate([said], params(key))
            assert output.metrics is not None
            found[key] = output.metrics.num_cached_tokens
            assert llm.engine.stats().num_prefetched_blocks == (len(match.saved) if key else 0)
    assert found["talk"] == 48


@pytest.mark.parametrize("key", ["", "k" * 257, 7])
def test_bad_keys_are_refused(key: object) -> None:
    with pytest.raises(RequestError, match="prompt_cache_key must have 1 to 256 characters, found") as caught:
        SamplingParams(prompt_cache_key=key)  # type: ignore[arg-type]
    assert caught.value.param == "prompt_cache_key"


def test_no_room_for_keys_is_refused(tiny: TinyCheckpoint) -> None:
    with pytest.raises(DeploymentError, match=r"cache\.max_keys must be at least 1, found 0"):
        build_engine(tiny, "monolithic", "int8", overrides=["cache.max_keys=0"])
