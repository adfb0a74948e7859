"""What `LLM.generate` gives: choices of prompts, put together from what a request hands out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.live import Request
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.serving.request import PositionLogprobs
from xdeepserve.errors import XDeepServeError
from xdeepserve.model.tokenizer import Tokenizer


class Logprob(msgspec.Struct, kw_only=True):
    """What the model thought of one token at one position. `rank` counts from 1, the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str | None  # None where the model has no tokenizer


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice of one prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    logprobs: list[dict[int, Logprob]] | None = None  # per token: the chosen one, and the likeliest
    logits: NDArray[np.float32] | None = None  # [tokens, vocab], those that chose each token, if kept
    cumulative_logprob: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """All choices of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first token has none
    finished: bool = True
    metrics: RequestMetrics | None = None  # in virtual time; of n choices: see RequestMetrics.merged


async def collected(
    request: Request,
    prompt: str | None,
    prompt_token_ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
) -> RequestOutput:
    """All that a request gives until it ends. `prompt` is its text, if that is what was given."""
    choices = [
        CompletionOutput(
            index=i,
            text="",
            token_ids=[],
            finish_reason=None,
            logprobs=None if params.logprobs is None else [],
        )
        for i in range(params.n)
    ]
    output = RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=choices,
    )
    records: list[RequestMetrics] = []
    async for delta in request:
        choice = choices[delta.index]
        records += [] if delta.metrics is None else [delta.metrics]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.finish_reason = delta.finish_reason
        if delta.logprobs is not None and choice.logprobs is not None:
            choice.logprobs += [_logprobs(position, tokenizer) for position in delta.logprobs]
            chosen = sum(position.chosen.logprob for position in delta.logprobs)
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + chosen
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = [
                None if position is None else _logprobs(position, tokenizer)
                for position in delta.prompt_logprobs
            ]
    output.metrics = RequestMetrics.merged(records)
    for choice, kept in zip(choices, request.outputs, strict=True):
        choice.stop_reason = kept.stop_reason
        if kept.logits:
            choice.logits = np.stack(kept.logits)
    return output


def _logprobs(position: PositionLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The likeliest tokens by rank, and the one that stands there."""
    return {
        entry.token_id: Logprob(
            logprob=entry.logprob,
            rank=entry.rank,
            decoded_token=None if tokenizer is None else tokenizer.token_text(entry.token_id),
        )
        for entry in (*position.top, position.chosen)
    }


def digest(outputs: Sequence[RequestOutput]) -> str:
    """sha256 over, per choice in order, the int32 token ids and the float32 logits that chose each.

    Little endian. Needs outputs of `generate(..., keep_logits=True)`.
    """
    sha = hashlib.sha256()
    for output in outputs:
        for choice in output.outputs:
            if choice.logits is None or len(choice.logits) != len(choice.token_ids):
                raise XDeepServeError("a digest needs the logits of every token: generate(keep_logits=True)")
            sha.update(np.asarray(choice.token_ids, "<i4").tobytes())
            sha.update(choice.logits.astype("<f4", copy=False).tobytes())
    return f"sha256:{sha.hexdigest()}"
