"""Requests for experts outside the process, and what one die answers to them."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.llm import digest

PARAMS = SamplingParams(max_tokens=3, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5 + i, *range(10, 10 + i % 5)] for i in range(6)]
PATIENCE_S = 120.0


@cache
def expected(precision: str, deployment: str = "monolithic") -> str:
    if deployment == "monolithic":
        return digest(one_die(PROMPTS, PARAMS, precision, max_model_len=64))
    with LLM("tiny-random", deployment, precision, overrides=["max_model_len=64"]) as llm:
        return digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))


def run(llm: LLM, **how: Any) -> str:
    return digest(llm.generate(PROMPTS, PARAMS, keep_logits=True, **how))


def until(what: Any, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
