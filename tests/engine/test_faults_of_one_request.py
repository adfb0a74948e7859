"""What fails for one request ends that request. The pod goes on, and so do the others, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.histories import APART, DEPLOYMENTS, SMALL
from tests.engine.tools import tokens_and_errors
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.die import sampler
from xdeepserve.engine.run.lockstep import heads
from xdeepserve.model import sampling
from xdeepserve.model.presets import TinyCheckpoint

VICTIM = 666
OTHERS = [
    ([1, 2, 3], SamplingParams(max_tokens=9, seed=1, logprobs=2, ignore_eos=True)),
    ([4] * 30, SamplingParams(max_tokens=7, seed=2, n=2, ignore_eos=True)),
    ([5, 6], SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=1, ignore_eos=True)),
]
PROMPT = [7] * 20
PARAMS = SamplingParams(max_tokens=10, seed=VICTIM, n=2, logprobs=1, prompt_logprobs=1, ignore_eos=True)

# Also dies that do not all sample, and microbatches.
SOME = [
    *DEPLOYMENTS,
    ("colocated", ("dies=2", "tp=2", "mtp=1")),
    ("colocated", ("dies=2", "lockstep=true")),
    ("moe-attention", (*APART, "execution.overlap=true")),
]


def failing_sample(how: str, first_position: int) -> Callable[..., None]:
    real = sampler.sample

    def sample(out: np.ndarray, *args: np.ndarray) -> None:
        seed, position = args[5], args[7]
        is_victim = (seed == VICTIM) & (position >= first_position)
        if how == "raises" and is_victim.any():
            raise ZeroDivisionError("the draw failed")
        real(out, *args)
        if how == "has no token":
            out[is_victim] = -1

    return sample


def failing_stage(first_position: int) -> Callable[..., None]:
    """The kernel that draws for all dies in lockstep; a die without a token draws again and finds out why."""
    real = heads.draw_stage

    def stage(tokens: np.ndarray, *args: Any) -> None:
        real(tokens, *args)
        seed, position = args[6], args[8]
        tokens[(seed == VICTIM) & (position >= first_position)] = -1

    return stage


# The first token; one in the middle; or what the model thinks of a token of the prompt.
POSITIONS = (20, 24, 5)
CASES = [
    pytest.param(number, position, marks=() if number % len(POSITIONS) == index else pytest.mark.campaign)
    for number in range(len(SOME))
    for index, position in enumerate(POSITIONS)
]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("number", "first_position"), CASES)
def test_a_row_that_fails_ends_its_request_alone(
    tiny: TinyCheckpoint, number: int, first_position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, overrides = SOME[number]
    how = ("raises", "has no token")[number // 3 % 2]
    asked = [*OTHERS[:2], (PROMPT, PARAMS), OTHERS[2]]
    with LLM(tiny, deployment, overrides=[*SMALL, *overrides]) as llm:
        wanted = tokens_and_errors(llm, asked)
    with LLM(tiny, deployment, overrides=[*SMALL, *overrides]) as llm:
        monkeypatch.setattr(sampler, "sample", failing_sample(how, first_position))
        monkeypatch.setattr(heads, "draw_stage", failing_stage(first_position))
        for _ in range(2):  # the second time from the prefix cache
            found = tokens_and_errors(llm, asked)
            assert [found[i] for i in (0, 1, 3)] == [wanted[i] for i in (0, 1, 3)]
            assert ("the draw failed" if how == "raises" else "no token for position") in found[2]
            assert llm.engine.is_healthy()
            llm.engine.check_integrity()
            assert llm.engine.stats().num_running == llm.engine.stats().num_waiting == 0
        monkeypatch.undo()
        assert tokens_and_errors(llm, asked) == wanted
        llm.engine.check_integrity()


def test_a_number_that_no_die_can_take_ends_its_request_alone(tiny: TinyCheckpoint) -> None:
    """Were it not refused before."""
    params = SamplingParams(max_tokens=4)
    msgspec.structs.force_setattr(params, "top_k", 2**31)
    with LLM(tiny, overrides=SMALL) as llm:
        wanted = tokens_and_errors(llm, OTHERS)
        *found, error = tokens_and_errors(llm, [*OTHERS, ([9], params)])
        assert found == wanted
        assert "OverflowError" in error
        llm.engine.check_integrity()


def test_log_probabilities_that_fail_end_their_request_alone(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sampling.log_probs
    calls = 0

    def log_probs(logits: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise FloatingPointError("no logarithm")
        return real(logits)

    with LLM(tiny, overrides=SMALL) as llm:
        wanted = tokens_and_errors(llm, OTHERS[1:])
        monkeypatch.setattr(sampling, "log_probs", log_probs)
        params = SamplingParams(max_tokens=6, logprobs=1)
        error, *found = tokens_and_errors(llm, [([3], params), OTHERS[1]])
        assert found == wanted[:1]
        assert error == "rank 0: FloatingPointError('no logarithm')"
        llm.engine.check_integrity()


def test_an_output_handler_that_fails_ends_its_request_alone(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny, overrides=SMALL) as llm:
        wanted = tokens_and_errors(llm, OTHERS)
        submit = llm.engine.submit

        def submit_broken(*args: Any, **kwargs: Any) -> Any:
            request = submit(*args, **kwargs)
            if args[0] == PROMPT:

                def push(*args: object) -> None:
                    raise KeyError("no such text")

                request.outputs[1].push = push  # type: ignore[assignment]
            return request

        monkeypatch.setattr(llm.engine, "submit", submit_broken)
        error, *found = tokens_and_errors(llm, [(PROMPT, PARAMS), *OTHERS])
        assert found == wanted
        assert error == "output: KeyError('no such text')"
        llm.engine.check_integrity()
        assert llm.engine.stats().kv_cache_usage == 0
