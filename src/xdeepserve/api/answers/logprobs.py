"""Log probabilities as OpenAI's two endpoints spell them: tokens as text and bytes, with offsets.

A token need not be whole characters. Where it is not, its text is written "bytes:\\xe2\\x82", as OpenAI
does, so that two different fragments never share a name (vLLM writes U+FFFD for both).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from xdeepserve.api.answers.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from xdeepserve.engine.serving.request import PositionLogprobs, ServingTokenizer, TokenLogprob

# JSON has no minus infinity; vLLM writes this instead, and clients know it.
LOWEST_LOGPROB = -9999.0

_BYTE_FALLBACK = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_level_alphabet() -> dict[str, int]:
    """Map characters of byte-level BPE vocabularies to bytes: GPT-2's printable stand-ins for the 256
    bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | stand_ins


BYTE_LEVEL = _byte_level_alphabet()


class TokenNamer:
    """Names single tokens by text and bytes, with a cache.

    A token without text has no bytes, and is named "token_id:7". Such tokens exist without a tokenizer, or
    where the model's vocabulary is padded beyond the tokenizer's.
    """

    def __init__(self, tokenizer: ServingTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._is_special: dict[int, bool] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's own bytes; possibly a fragment of a character."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._spell(token_id)
        return self._bytes[token_id]

    def name_of(self, token_id: int) -> str:
        raw = self.bytes_of(token_id)
        try:
            return raw.decode() or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_special(self, token_id: int) -> bool:
        """Whether text decoded without special tokens leaves this token out."""
        if token_id not in self._is_special:
            self._is_special[token_id] = (
                self._tokenizer is not None
                and self.bytes_of(token_id) != b""
                and self._tokenizer.decode([token_id], skip_special_tokens=True) == ""
            )
        return self._is_special[token_id]

    def _spell(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" not in text:
            return text.encode()
        spelling = self._tokenizer.id_to_token(token_id) or ""
        fallback = _BYTE_FALLBACK.match(spelling)
        if fallback:
            return bytes.fromhex(fallback[1])
        if spelling and all(char in BYTE_LEVEL for char in spelling):
            return bytes(BYTE_LEVEL[char] for char in spelling)
        return text.encode()


class IdNamer(TokenNamer):
    """Names every token by id, as `return_tokens_as_token_ids` asks."""

    def name_of(self, token_id: int) -> str:
        return f"token_id:{token_id}"


class OffsetCounter:
    """Counts where each token begins in its choice's text, in characters, across the chunks of a stream."""

    def __init__(self, namer: TokenNamer, skip_special_tokens: bool) -> None:
        self._namer = namer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def push(self, token_id: int, is_echoed: bool = False) -> int:
        """Return the token's offset. A fragment has the offset of the character that it is part of.

        Skipped special tokens take no room, but an echoed prompt is shown whole.
        """
        offset = self._num_chars
        if is_echoed or not (self._skip_special_tokens and self._namer.is_special(token_id)):
            self._num_chars += len(self._decoder.decode(self._namer.bytes_of(token_id)))
        return offset


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[PositionLogprobs | None],
    namer: TokenNamer,
    offsets: OffsetCounter,
    num_echoed: int = 0,
) -> CompletionLogprobs:
    """Make the parallel lists of /v1/completions. The chosen token is always among the alternatives, so a
    position holds up to one more than were asked for. The first `num_echoed` tokens are the prompt's."""
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for i, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
        result.text_offset.append(offsets.push(token_id, is_echoed=i < num_echoed))
        result.tokens.append(namer.name_of(token_id))
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_finite(position.chosen.logprob))
        top: dict[str, float] = {}
        for each in (*position.top, position.chosen):
            top.setdefault(namer.name_of(each.token_id), _finite(each.logprob))
        result.top_logprobs.append(top)
    return result


def chat_logprobs(positions: Iterable[PositionLogprobs], namer: TokenNamer) -> ChatLogprobs:
    """Make the objects of /v1/chat/completions, with exactly as many alternatives as were asked for."""

    def entry(each: TokenLogprob) -> TopLogprob:
        raw = namer.bytes_of(each.token_id)
        return TopLogprob(token=namer.name_of(each.token_id), logprob=_finite(each.logprob), bytes=list(raw))

    content = []
    for position in positions:
        own = entry(position.chosen)
        top = [entry(each) for each in position.top]
        content.append(
            ChatTokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)
        )
    return ChatLogprobs(content=content)


def prompt_scores(
    positions: Iterable[PositionLogprobs | None], num_top: int, namer: TokenNamer
) -> PromptLogprobs:
    """Make vLLM's objects for `prompt_logprobs`: `num_top` alternatives a token, and always the token
    itself."""

    def entry(each: TokenLogprob) -> PromptLogprob:
        name = namer.name_of(each.token_id)
        return PromptLogprob(logprob=_finite(each.logprob), rank=each.rank, decoded_token=name)

    def entries(position: PositionLogprobs) -> dict[str, PromptLogprob]:
        return {str(each.token_id): entry(each) for each in (position.chosen, *position.top[:num_top])}

    return [None if position is None else entries(position) for position in positions]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
