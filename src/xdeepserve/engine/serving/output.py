"""The output handler turns sampled tokens into text, reasoning, tool calls and an end (xDeepServe 4.2).

Output shortcutting: the DP group that computes a sequence hands its tokens to the sequence's own handler,
whose output goes straight to the queue that the front end reads. Neither the TE-shell nor any other group
sees a token. The paper's handler is a child process of each DP group. Here it travels with the sequence, so
nothing is left behind when a sequence changes its group.
"""

from __future__ import annotations

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.serving.request import OutputDelta, PositionLogprobs, TokenLogprob
from xdeepserve.model.canonical import Array
from xdeepserve.model.tokenizer import IncrementalDetokenizer, Tokenizer
from xdeepserve.parsing.stream_parser import StreamParser


class ChoiceOutput:
    """Follows a choice's output. Text that may become a stop string is held back until this is decided."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        parser: StreamParser | None = None,
    ) -> None:
        self.index, self.params, self.max_tokens = index, params, max_tokens
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, params.skip_special_tokens) if tokenizer is not None else None
        )
        self._parser = parser
        self._counter = parser.reasoning_only() if parser is not None else None
        self._tags = _hidden_tags(parser, params, tokenizer)
        self._held = ""  # certain text that is not sent yet
        self._num_tokens = self._num_steps = 0
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        self._prompt_logprobs: list[PositionLogprobs | None] = [None]
        self._sent_prompt_logprobs = params.prompt_logprobs is None
        self.prompt_logits: list[Array] = []
        self.logits: list[Array] = []  # that chose each token
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the stop token or stop string that ended it

    def push(self, rows: list[SampledToken], now_ns: int = 0) -> OutputDelta | None:
        """Take a step's results at a virtual time; return the increment of output, None if there is none.

        Rows after the one that finishes the choice are dropped, like drafts accepted past the end.
        """
        token_ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        text, num_reasoning = "", 0
        for row in rows:
            if row.is_prompt:
                self._take_prompt_row(row)
                continue
            token_ids.append(row.token_id)
            if row.logprob is not None:
                logprobs.append(position_logprobs(row))
            if row.logits is not None:
                self.logits.append(row.logits)
            new_text = self._take_token(row.token_id)
            num_reasoning += self._is_reasoning(new_text)
            text += new_text
            if self.finish_reason is not None:
                break
        if not token_ids:
            return None
        delta = OutputDelta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_reasoning=num_reasoning,
            at_ns=now_ns,
        )
        self._num_steps += 1
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        self._last_ns = now_ns
        self._parse(delta)
        if not self._sent_prompt_logprobs:
            delta.prompt_logprobs = self._prompt_logprobs
            self._sent_prompt_logprobs = True
        return delta

    def _is_reasoning(self, new_text: str) -> bool:
        """Whether the token behind `new_text` is part of the reasoning, or of its tags."""
        counter = self._counter
        if counter is None or counter.state == "content":
            return False
        was_reasoning = counter.state == "reasoning"
        counter.push(new_text)
        return was_reasoning or counter.state == "reasoning"

    def _parse(self, delta: OutputDelta) -> None:
        """Move reasoning and tool calls out of the delta's text into their own fields."""
        if self._parser is None:
            return
        if delta.finish_reason is None:
            parsed = self._parser.push(delta.text)
        else:
            parsed = self._parser.finish(delta.text, is_cut=delta.finish_reason == "length")
        delta.text, delta.reasoning, delta.tool_calls = parsed.content, parsed.reasoning, parsed.tool_calls

    def metrics(self, seq: Sequence) -> RequestMetrics:
        """Return the record of the choice, whose sequence is `seq`."""
        return RequestMetrics(
            arrival_ns=seq.arrival_ns,
            scheduled_ns=seq.scheduled_ns,
            first_token_ns=self._first_ns,
            last_token_ns=self._last_ns,
            num_tokens=self._num_tokens,
            num_steps=self._num_steps,
            num_cached_tokens=seq.num_cached,
            num_drafts=sum(seq.num_drafts),
            num_accepted=sum(seq.num_accepted),
            drafts_by_position=tuple(seq.num_drafts),
            accepted_by_position=tuple(seq.num_accepted),
            num_preemptions=seq.num_preemptions,
        )

    def _take_prompt_row(self, row: SampledToken) -> None:
        if row.logits is not None:
            self.prompt_logits.append(row.logits)
        if row.logprob is not None and not self._sent_prompt_logprobs:
            self._prompt_logprobs.append(position_logprobs(row))

    def _take_token(self, token_id: int) -> str:
        """Count a token, check whether it ends the choice, and return the text that may be sent."""
        self._num_tokens += 1
        is_end = token_id in self._ends
        if is_end:
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
        # The token that ends a choice is reported, but is no part of its text.
        new_text = ""
        if self._detokenizer is not None and not is_end:
            tag = self._tags.get(token_id)
            new_text = self._detokenizer.push(token_id) if tag is None else self._detokenizer.flush() + tag
        if self.finish_reason is None and self._num_tokens >= self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._detokenizer is not None:
            new_text += self._detokenizer.flush()
        return self._release(new_text)

    def _release(self, new_text: str) -> str:
        """Return the part of the held and new text that may be sent, cut at a stop string."""
        text = self._held + new_text
        stops = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if stops:
            at, stop = min(stops)
            self.finish_reason, self.stop_reason, self._held = "stop", stop, ""
            return text[: at + len(stop)] if self.params.include_stop_str_in_output else text[:at]
        keep = 0 if self.finish_reason is not None else self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @property
    def _stops(self) -> tuple[str, ...]:
        """Stop strings in force: none before `min_tokens`, so earlier text cannot be part of one either."""
        return self.params.stop if self._num_tokens > self.params.min_tokens else ()

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def _hidden_tags(
    parser: StreamParser | None, params: SamplingParams, tokenizer: Tokenizer | None
) -> dict[int, str]:
    """Find the parser's tags among special tokens, which the text would otherwise leave out."""
    if parser is None or tokenizer is None or not params.skip_special_tokens:
        return {}
    ids = {tokenizer.token_to_id(tag): tag for tag in parser.tags}
    return {token_id: tag for token_id, tag in ids.items() if token_id in tokenizer.special_ids}


def position_logprobs(row: SampledToken) -> PositionLogprobs:
    """Return the log probabilities of a single result row."""
    assert row.logprob is not None
    top = tuple(TokenLogprob(token, value, rank + 1) for rank, (token, value) in enumerate(row.top))
    return PositionLogprobs(TokenLogprob(row.token_id, row.logprob, row.rank), top)
