"""Text to token ids and back, by a checkpoint's own `tokenizer.json` and chat template.

The begin-of-text token comes from the chat template, which spells it out; the tokenizer never adds it. So a
chat has it exactly once, and a plain prompt is encoded as it stands. (DeepSeek's `tokenizer.json` adds none
either, whatever `add_bos_token` in its `tokenizer_config.json` says.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from xdeepserve.errors import CheckpointError, RequestError
from xdeepserve.model.chat_template import ChatTemplate, load_chat_templates
from xdeepserve.model.config import read_json_object
from xdeepserve.model.template_process import TemplateProcess

# From so many characters or tokens on, the library's functions for batches are called: unlike the others they
# drop the GIL, so that other threads go on.
MANY = 4096

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Tokenizer of a checkpoint; see `load_tokenizer`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        templates: dict[str, ChatTemplate],
    ) -> None:
        self._backend = backend
        self._templates = templates
        self._process = TemplateProcess()
        self.special_tokens = special_tokens  # "bos_token" -> its text, ..., as chat templates know them
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens known to the tokenizer; a model's own vocab_size may be padded beyond."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Convert text to token ids; special tokens spelt out in the text become their ids.

        `add_special_tokens` also applies the template in `tokenizer.json`, as /tokenize may ask for. Raises
        RequestError for invalid Unicode, and where a regular expression of the file gives up.
        """
        try:
            if len(text) <= MANY and not self.has_regexes:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:  # the library's word for lone surrogates, which stand for bytes that are not UTF-8
            raise RequestError("the text is not valid Unicode", param="prompt") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's own, which no module exports
                raise
            raise RequestError(
                f"the model's tokenizer gave up on the text: {error}", param="prompt"
            ) from None

    @cached_property
    def has_regexes(self) -> bool:
        """Whether `tokenizer.json` brings regular expressions, which may take long over a short text."""
        parts = (self._backend.normalizer, self._backend.pre_tokenizer)
        return any(_has_regex(part) for part in parts if part is not None)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Convert token ids to text; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        ids = list(token_ids)
        if len(ids) <= MANY:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """Decode a single token by itself, special or not."""
        return self.decode([token_id], skip_special_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token, e.g. byte-level "Ġthe"; None if there is none."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's own spelling; special tokens are spelt as they
        look."""
        return self._backend.token_to_id(token)

    def is_decodable(self, token_id: int) -> bool:
        """Whether the tokenizer knows an id at all."""
        return self._backend.id_to_token(token_id) is not None

    def to_json(self) -> str:
        """Return the contents of the tokenizer's `tokenizer.json`."""
        return self._backend.to_str()

    @property
    def template_source(self) -> str:
        """Text of all chat templates, joined."""
        return "\n".join(template.source for template in self._templates.values())

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat templates read, `messages` and `tools` among them."""
        return frozenset().union(*(template.variables for template in self._templates.values()))

    @property
    def template_takes_tools(self) -> bool:
        """Whether a chat template looks at the tools that it is given."""
        return "tools" in self.template_variables

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        is_isolated: bool = False,
        **variables: Any,
    ) -> str:
        """Render a chat as text, by the template "default" or, with tools, "tool_use" if there is one.

        With `continue_final_message` it ends where the last message's content does. With `is_isolated` the
        template runs in a process of its own, within limits of time, memory and length.

        Raises RequestError when there is no template or the template refuses the messages.
        """
        template = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if template is None:
            raise RequestError("this model has no chat template; use a completion instead", param="messages")
        given = {**self.special_tokens, **variables}
        given |= {
            "messages": _marked(messages) if continue_final_message else list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if is_isolated:
            text = self._process.render(template.source, template.origin, given)
        else:
            text = template.render(**given)
        return _up_to_mark(text) if continue_final_message else text

    @property
    def has_chat_template(self) -> bool:
        """Whether a chat can be rendered."""
        return "default" in self._templates

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        is_isolated: bool = False,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Render a chat and encode the text. A text that surely has more tokens than `max_tokens` is refused
        before."""
        text = self.render_chat(
            messages, add_generation_prompt, tools, continue_final_message, is_isolated, **variables
        )
        if max_tokens is not None:
            check_length(self.fewest_tokens(len(text)), max_tokens, "messages")
        return self.encode(text)

    def fewest_tokens(self, num_chars: int) -> int:
        """Return a lower bound for the number of tokens in a text of `num_chars` characters."""
        return -(-num_chars // self._longest_token) if self._longest_token else 0

    @cached_property
    def _longest_token(self) -> int:
        """Number of characters in the longest token; 0 if a token may stand for any number of them."""
        backend = self._backend
        added = backend.get_added_tokens_decoder().values()
        swallows = any(token.lstrip or token.rstrip for token in added)
        if (
            swallows
            or backend.normalizer is not None
            or getattr(backend.model, "unk_token", None) is not None
        ):
            return 0
        return max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)

    def close(self) -> None:
        """End the process for isolated templates. Harmless when repeated."""
        self._process.close()

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def check_length(num_tokens: int, limit: int, param: str) -> None:
    """Check a prompt's length. Raises RequestError if it has at least `num_tokens` and there is room only for
    `limit`."""
    if num_tokens > limit:
        raise RequestError(
            f"the model's context holds {limit} tokens, and the prompt has at least {num_tokens}",
            param=param,
            code="context_length_exceeded",
        )


def _has_regex(part: Normalizer | PreTokenizer | Decoder) -> bool:
    return b'"pattern":{"Regex":' in part.__getstate__()


# Behind the content to be continued: no template writes it, and the space shows whether it strips content.
_MARK = "\ue000continue\ue001 "


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Mark the end of the last message's content, which a text of the template may have anywhere."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise _nothing_to_continue()
    return [*messages[:-1], {**messages[-1], "content": content + _MARK}]


def _up_to_mark(text: str) -> str:
    """Cut the closing part behind the last message's content off a chat's text. A template that strips
    content strips it there, too."""
    start = text.rfind(_MARK.strip())
    if start < 0:
        raise _nothing_to_continue()
    return text[:start] if text.startswith(_MARK, start) else text[:start].rstrip()


def _nothing_to_continue() -> RequestError:
    return RequestError(
        "continue_final_message needs a last message with content that the chat template shows",
        param="continue_final_message",
    )


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Load the tokenizer of a checkpoint directory; None if it has none, and then only token ids can be
    served.

    Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Raises CheckpointError.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        read_json_object(path, path.stat().st_size)  # names the line of what is no JSON
        raise CheckpointError(
            f"{path}: not a tokenizer, with its model and vocabulary, as tokenizers saves it"
        ) from error
    if backend.decoder is not None and _has_regex(backend.decoder):
        raise CheckpointError(
            f"{path}: its decoder has a regular expression, which could hold up every token of every request"
        )
    config_path = directory / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    special_tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special_tokens[name] = text
    return Tokenizer(backend, special_tokens, load_chat_templates(directory, config))


def require_tokenizer(tokenizer: Tokenizer | None, model: str, param: str = "prompt") -> Tokenizer:
    """Return the tokenizer. Raises RequestError, which tells how to do without, if there is none."""
    if tokenizer is None:
        raise RequestError(
            f"model {model} has no tokenizer.json, so it takes token ids, not text",
            param=param,
            code="no_tokenizer",
        )
    return tokenizer


# Text that grows with each token, for streaming.

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 of them can be waiting for the next token.
_MAX_WAITING = 3
# Decoders look at most a few tokens back; half of a full window is dropped at a time.
_WINDOW = 32


class IncrementalDetokenizer:
    """Converts tokens to text incrementally.

    `push` each token, and end with `flush`; all pieces together equal the full decode.

    No character is sent in part: bytes that may become a character with the next token wait. Other bytes are
    sent as U+FFFD, as the full decode has them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the latest tokens; every one of them has text
        self._num_sent = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """Take a token and return the text that became certain with it; often empty."""
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
        """Number of tokens to be decoded again with the next one."""
        return len(self._window)

    def flush(self) -> str:
        """Return the rest of the text, certain or not. The next push starts a new text."""
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
