"""Contract of the serving layer: a request's parameters, its output, and the engine in between.

The endpoint, the `LLM` facade and the command line speak only these types. Names follow vLLM's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.te.reports import ExpertLoad, TEHealth
from xdeepserve.errors import RequestError, abridged
from xdeepserve.parsing.call_grammar import Function, ParsedCall
from xdeepserve.parsing.tool_formats import ToolFormat


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and the natural logarithm of its probability. `rank` counts from 1, the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


class PositionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at a position: the chosen token's and the likeliest tokens', best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class ToolRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for tool calls enforced by a grammar, instead of leaving them to the model.

    must_call   nothing but calls, at least one
    is_single   one call at most
    """

    functions: tuple[Function, ...]
    must_call: bool = False
    is_single: bool = False


class Parse(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the parts to parse out of a choice's text, and the rules that tool calls must obey. Parsing
    needs a known format of the model (`AsyncEngine.formats`).

    in_reasoning   the prompt ends within a reasoning; that it ends with the tag itself is seen without
    functions      that the model may call, with the schemas that the client gave
    """

    reasoning: bool = False
    in_reasoning: bool = False
    tools: bool = False
    tool_rules: ToolRules | None = None
    functions: tuple[Function, ...] = ()


NOTHING = Parse()


class OutputFormats(msgspec.Struct, frozen=True, kw_only=True):
    """Formats of reasoning and tool calls in a model's text that can be parsed.

    reasoning     the model puts its reasoning between `<think>` and `</think>`
    tools         the format of its tool calls; None: unknown, or not to be parsed
    shows_tools   the chat template tells the model which tools there are
    """

    reasoning: bool = False
    tools: ToolFormat | None = None
    shows_tools: bool = False


class OutputDelta(msgspec.Struct, kw_only=True):
    """Increment of the output of a choice.

    index             the choice, 0..n-1
    text              new text; may be empty while a character or a possible stop string is incomplete;
                      where reasoning or tool calls are parsed, what is neither
    reasoning         new text of the reasoning, where it is parsed
    num_reasoning     how many of the tokens are reasoning, its tags included, where it is parsed
    tool_calls        new tool calls, where they are parsed
    token_ids         new token ids
    logprobs          one entry per token of `token_ids`, when asked for
    finish_reason     "stop" | "length" | "abort" on a choice's last delta, None before
    stop_reason       the stop token or stop string that ended the choice, on its last delta
    prompt_logprobs   one entry per prompt token, the first None; on the request's first delta, when asked for
    at_ns             virtual time at which the DP group handed it out
    metrics           on a choice's last delta, where the engine keeps them
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    reasoning: str = ""
    num_reasoning: int = 0
    tool_calls: list[ParsedCall] = msgspec.field(default_factory=list)
    at_ns: int = 0
    metrics: RequestMetrics | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for metrics. Counters only grow; `kv_cache_usage` is a fraction, 0 to 1."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    kv_block_size: int = 0  # tokens
    num_kv_blocks: int = 0  # of all DP groups, as is the next
    num_host_kv_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # in tokens, as is the next
    prefix_cache_hits: int = 0
    num_promised: int = 0  # tokens of prompts that the prompt tree had as cached at the chosen TE
    num_broken: int = 0  # of these, tokens that were computed after all
    num_cache_keys: int = 0  # kept now, over all DP groups
    cache_key_queries: int = 0  # requests with a key
    cache_key_hits: int = 0  # of these, those whose prompt began with what was kept under it
    num_prefetched_blocks: int = 0  # brought from the host's memory while their request waited
    pool_queries: int = 0  # tokens of prompts that the memory pool was asked for, and not found nearer
    pool_hits: int = 0  # of these, those that came from there
    peer_queries: int = 0  # tokens of prompts that were looked up in other TEs' caches, and not found nearer
    peer_hits: int = 0  # of these, those that came from there
    pool: dict[str, int] = msgspec.field(default_factory=dict)  # what its servers count; empty without one
    pool_usage: dict[str, int] = msgspec.field(default_factory=dict)  # what is in it, by tier
    rows_per_step: dict[int, int] = msgspec.field(default_factory=dict)  # token rows -> steps of DP groups
    num_drafted: tuple[int, ...] = ()  # MTP's drafts, by position in the step
    num_accepted: tuple[int, ...] = ()
    expert_load: tuple[ExpertLoad, ...] = ()  # of each TE and layer whose load is collected (EPLB)
    num_reconfigurations: int = 0  # times that replicas of experts have changed
    num_recoveries: Counter[str] = msgspec.field(default_factory=Counter)  # by stage (xDeepServe 6.2)
    virtual_ns: int = 0  # virtual time since the pod started
    health: tuple[TEHealth, ...] = ()


class ServingTokenizer(Protocol):
    """Text to token ids and back; what serving needs of a model's tokenizer."""

    @property
    def has_regexes(self) -> bool:
        """Whether a short text may take long to tokenise, because of a checkpoint's regular expressions."""

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat templates read."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`. Special tokens of the tokenizer's file are added only on request,
        because a chat's begin-of-text token comes from its template."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token, e.g. byte-level "Ġthe"; None if it has none."""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        is_isolated: bool = False,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a conversation. Raises RequestError if the template refuses it.

        is_isolated  the template is to be stopped where it takes too long or wants too much
        max_tokens   a text that is sure to have more is not tokenised but refused
        """

    def fewest_tokens(self, num_chars: int) -> int:
        """Return a lower bound for the number of tokens in a text of `num_chars` characters."""


class RequestHandle(Protocol):
    """A submitted request: an async iterator of OutputDelta that ends after every choice has finished.

    Leaving or cancelling the iteration early aborts the request and frees its KV blocks at once, and so
    does `abort`, which may be called any number of times, also after the end. A failure of the engine is
    raised by the iteration.
    """

    def __aiter__(self) -> AsyncIterator[OutputDelta]: ...

    def abort(self) -> None: ...

    async def accepted(self) -> None:
        """Wait until the engine has taken the request. Raises as `submit` does: an engine in another process
        refuses later."""


class AsyncEngine(Protocol):
    """Interface of an engine, as an endpoint uses it."""

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> ServingTokenizer | None:
        """Tokenizer of the model; None if the checkpoint has none, so that requests and answers are token ids
        only."""

    @property
    def directory(self) -> Path | None:
        """Directory of the checkpoint's files; None if there is none."""

    @property
    def max_model_len(self) -> int:
        """Largest number of prompt and new tokens together."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def formats(self) -> OutputFormats:
        """Formats known to `submit` for parsing the model's text."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        parse: Parse = NOTHING,
        on_scheduled: Callable[[int], None] | None = None,
    ) -> RequestHandle:
        """Check and enqueue a request. Raises RequestError; all engines share `check_request`.

        `on_scheduled` is called, after `submit` has returned, with each choice that begins to be computed.
        Raises OverloadedError if too many requests wait already.
        """

    def prepare(self, params: SamplingParams, parse: Parse = NOTHING) -> None:
        """Compile a request's grammar in advance, because that may take long. Call it from another thread.

        Raises RequestError for a grammar that cannot be compiled, as `submit` does.
        """

    def check_room(self, num_new: int) -> None:
        """Check the queue for `num_new` more sequences. Raises OverloadedError if they are too many now,
        RequestError if they always are."""

    def stats(self) -> EngineStats: ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Abort all remaining requests and end. Harmless when repeated."""

    def is_healthy(self) -> bool: ...

    @property
    def unhealthy_reason(self) -> str | None:
        """Reason why the engine cannot serve any more; None if it can."""

    async def check_health(self) -> list[TEHealth]:
        """Report the state of every DP group, after probing idle ones."""


def check_request(
    prompt_token_ids: Sequence[int], params: SamplingParams, *, max_model_len: int, vocab_size: int
) -> int:
    """Check a request and return how many tokens each choice may generate: `max_tokens`, or less if the
    context ends.

    Raises RequestError for an empty prompt, a token id that is no integer or outside the vocabulary, a prompt
    that leaves no room for one new token, or more alternatives than the vocabulary has.
    """
    if len(prompt_token_ids) == 0:
        raise RequestError("the prompt is empty: it has no tokens", param="prompt")
    remaining = max_model_len - len(prompt_token_ids)
    if remaining < 1:
        raise RequestError(
            f"the model's context holds {max_model_len} tokens and the prompt has {len(prompt_token_ids)}, "
            "which leaves no room for a new token",
            param="prompt",
            code="context_length_exceeded",
        )
    for name, ids in (
        ("prompt", prompt_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", params.logit_bias),
    ):
        for token_id in ids:
            if type(token_id) is not int:
                raise RequestError(f"a token id must be an integer, found {abridged(token_id)}", param=name)
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token id {abridged(token_id)} is out of range: "
                    f"the vocabulary has ids 0 to {vocab_size - 1}",
                    param=name,
                )
    for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None and wanted > vocab_size:
            raise RequestError(f"{name} is {wanted}, and the vocabulary has {vocab_size} tokens", param=name)
    return remaining if params.max_tokens is None else min(params.max_tokens, remaining)
