"""Text that grows with each token, for streaming."""

from __future__ import annotations

from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 of them can be waiting for the next token.
_MAX_WAITING = 3
# Decoders look at most a few tokens back; half of a full window is dropped at a time.
_WINDOW = 32


class IncrementalDetokenizer:
    """`push` each token, send what it returns, and end with `flush`: together they equal the full decode.

    No character is sent in part: bytes that may become a character with the next token wait. Bytes that
    cannot are sent as U+FFFD, as the full decode has them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the latest tokens; every one of them has text
        self._num_sent = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often empty."""
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window, self._skip_special_tokens)
        num_waiting = min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_WAITING)
        delta = text[self._num_sent : len(text) - num_waiting]
        self._num_sent += len(delta)
        self._shrink(text)
        return delta

    @property
    def num_kept(self) -> int:
        """Tokens that are decoded again with the next one."""
        return len(self._window)

    def flush(self) -> str:
        """The rest, certain or not. The next push starts a new text."""
        rest = self._tokenizer.decode(self._window, self._skip_special_tokens)[self._num_sent :]
        self._window, self._num_sent = [], 0
        return rest

    def _is_silent(self, token_id: int) -> bool:
        skipped = self._skip_special_tokens and token_id in self._tokenizer.special_ids
        return skipped or not self._tokenizer.is_decodable(token_id)

    def _shrink(self, text: str) -> None:
        """Forget old tokens, but only where the rest decodes to the same text without them."""
        if len(self._window) < _WINDOW:
            return
        kept = self._window[_WINDOW // 2 :]
        kept_text = self._tokenizer.decode(kept, self._skip_special_tokens)
        num_dropped = len(text) - len(kept_text)
        if text.endswith(kept_text) and num_dropped <= self._num_sent:
            self._window = kept
            self._num_sent -= num_dropped
