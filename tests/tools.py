"""Tools of all tests: what one die answers, which every other deployment must answer, too."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve import LLM, SamplingParams
from xdeepserve.llm import RequestOutput

_ANSWERS: dict[bytes, list[RequestOutput]] = {}


def one_die(
    prompts: Sequence[str] | Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    precision: str = "int8",
    model: str = "tiny-random",
    **settings: int | str,
) -> list[RequestOutput]:
    """Return the outputs of one die in a monolithic deployment, with their logits.

    They are computed once in a process: the tests of many deployments compare themselves with the same
    requests. `settings` are those of the deployment whose names have no dot.
    """
    key = msgspec.json.encode([prompts, params, precision, model, settings])
    if key not in _ANSWERS:
        with LLM(model, "monolithic", precision, overrides=settings) as llm:
            _ANSWERS[key] = llm.generate(prompts, params, keep_logits=True)
            llm.engine.check_integrity()
    return _ANSWERS[key]
