"""Outputs of `LLM.generate`: choices of prompts, assembled from the deltas of requests."""

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

MOST_NAMED = 4  # prompts in an error's message


class Logprob(msgspec.Struct, kw_only=True):
    """Log probability of a token at a position. `rank` counts from 1, the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str | None  # None where the model has no tokenizer


class CompletionOutput(msgspec.Struct, kw_only=True):
    """A single choice for a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "abort"; "error" if the request's `error` ended it
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    logprobs: list[dict[int, Logprob]] | None = None  # per token: the chosen one, and the likeliest
    logits: NDArray[np.float32] | None = None  # [tokens, vocab], those that chose each token, if kept
    cumulative_logprob: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """All choices for a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first token has none
    finished: bool = True
    metrics: RequestMetrics | None = None  # in virtual time; of n choices: see RequestMetrics.merged
    error: XDeepServeError | None = None  # why it has not finished

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.outputs)


async def collected(
    request: Request,
    prompt: str | None,
    prompt_token_ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
) -> RequestOutput:
    """Collect the output of a request until its end. `prompt` is the text, if a text was given.

    A request that ends with an error gets the error as its `error`, and keeps the tokens generated before.
    """
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
    try:
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
    except XDeepServeError as error:
        output.error, output.finished = error, False
        for choice, kept, seq in zip(choices, request.outputs, request.sequences, strict=True):
            if choice.finish_reason is None:
                choice.finish_reason = "error"
                records.append(kept.metrics(seq))
    output.metrics = RequestMetrics.merged(records)
    for choice, kept in zip(choices, request.outputs, strict=True):
        choice.stop_reason = kept.stop_reason
        if kept.logits:
            choice.logits = np.stack(kept.logits)
    return output


def unfinished(outputs: Sequence[RequestOutput]) -> XDeepServeError:
    """Make an error for unfinished outputs: the first of their errors, with a summary, and with the outputs
    attached."""
    first = next(output.error for output in outputs if output.error is not None)
    cut = [(number, output.num_tokens) for number, output in enumerate(outputs) if not output.finished]
    if len(outputs) == 1:
        there = [f"the answer had {_tokens(cut[0][1])}"]
    else:
        there = [f"{len(outputs) - len(cut)} of {len(outputs)} prompts were complete"]
        there += [f"prompt {number} got {_tokens(count)}" for number, count in cut[:MOST_NAMED]]
    if len(cut) > MOST_NAMED:
        there.append(f"{len(cut) - MOST_NAMED} others got {_tokens(sum(n for _, n in cut[MOST_NAMED:]))}")
    # The engine's own error may end other requests, too: it stays as it is.
    error = type(first).__new__(type(first), f"{first}; until then {', '.join(there)}")
    error.__dict__ |= first.__dict__
    error.outputs, error.__cause__ = outputs, first
    return error


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def _logprobs(position: PositionLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Convert a position's log probabilities: the likeliest tokens by rank, and the chosen one."""
    return {
        entry.token_id: Logprob(
            logprob=entry.logprob,
            rank=entry.rank,
            decoded_token=None if tokenizer is None else tokenizer.token_text(entry.token_id),
        )
        for entry in (*position.top, position.chosen)
    }


def digest(outputs: Sequence[RequestOutput]) -> str:
    """Compute the sha256 over the int32 token ids and the float32 logits of each choice, in order.

    Numbers are little endian. Needs outputs of `generate(..., keep_logits=True)`.
    """
    sha = hashlib.sha256()
    for output in outputs:
        for choice in output.outputs:
            if choice.logits is None or len(choice.logits) != len(choice.token_ids):
                raise XDeepServeError("a digest needs the logits of every token: generate(keep_logits=True)")
            sha.update(np.asarray(choice.token_ids, "<i4").tobytes())
            sha.update(choice.logits.astype("<f4", copy=False).tobytes())
    return f"sha256:{sha.hexdigest()}"
