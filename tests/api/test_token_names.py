"""Names, bytes and offsets of single tokens, checked against the tokenizers library."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from xdeepserve.api.answers.logprobs import (
    BYTE_LEVEL,
    LOWEST_LOGPROB,
    OffsetCounter,
    TokenNamer,
    chat_logprobs,
    completion_logprobs,
)
from xdeepserve.engine.serving.request import PositionLogprobs, TokenLogprob


class Library:
    """The library's tokenizer behind our interface."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self.id_to_token = tokenizer.id_to_token

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, *args: object, **kwargs: object) -> list[int]:
        raise NotImplementedError


def byte_level() -> Library:
    """Every byte is a token, and so are two merges, one of which ends within a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "i"), ("a", "â")]  # "a" and the first byte of "€"
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return Library(tokenizer)


LIBRARY = byte_level()


def test_alphabet_is_the_librarys() -> None:
    assert set(BYTE_LEVEL) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_LEVEL.values()) == list(range(256))


@given(st.text())
def test_bytes_of_tokens_make_up_the_text(text: str) -> None:
    namer = TokenNamer(LIBRARY)
    ids = LIBRARY.encode(text)
    assert b"".join(map(namer.bytes_of, ids)) == text.encode()


@given(st.text(min_size=1))
def test_offsets_point_into_the_text(text: str) -> None:
    namer = TokenNamer(LIBRARY)
    offsets = OffsetCounter(namer, skip_special_tokens=True)
    ids = LIBRARY.encode(text)
    for i, token_id in enumerate(ids):
        complete = b"".join(map(namer.bytes_of, ids[:i])).decode(errors="ignore")
        assert offsets.push(token_id) == len(complete)


def test_names() -> None:
    namer = TokenNamer(LIBRARY)
    hi, fragment, *rest = LIBRARY.encode("hia€")
    assert [namer.name_of(i) for i in (hi, fragment, *rest)] == [
        "hi",
        "bytes:\\x61\\xe2",
        "bytes:\\x82",
        "bytes:\\xac",
    ]
    end = LIBRARY.vocab_size - 1
    assert namer.name_of(end) == "<end>"
    assert namer.is_special(end)
    assert not namer.is_special(hi)
    names = {namer.name_of(i) for i in range(LIBRARY.vocab_size)}
    assert len(names) == LIBRARY.vocab_size


def test_ids_beyond_the_tokenizer() -> None:
    """Models pad their vocabulary; such a token has no text, but still a name of its own."""
    namer = TokenNamer(LIBRARY)
    beyond = LIBRARY.vocab_size + 3
    assert (namer.bytes_of(beyond), namer.name_of(beyond)) == (b"", f"token_id:{beyond}")
    offsets = OffsetCounter(namer, skip_special_tokens=False)
    assert [offsets.push(beyond), offsets.push(beyond)] == [0, 0]


def test_a_replacement_character_in_the_text_is_no_fragment() -> None:
    namer = TokenNamer(LIBRARY)
    ids = LIBRARY.encode("\ufffd")
    assert b"".join(map(namer.bytes_of, ids)).decode() == "\ufffd"


def test_byte_fallback_vocabulary() -> None:
    vocab = {"<unk>": 0, "<0xE2>": 1, "<0x82>": 2, "a": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteFallback()
    namer = TokenNamer(Library(tokenizer))
    assert [namer.bytes_of(i) for i in (1, 2, 3)] == [b"\xe2", b"\x82", b"a"]


@pytest.mark.parametrize("skip", [True, False])
def test_hidden_tokens_take_no_room_unless_shown(skip: bool) -> None:
    end = LIBRARY.vocab_size - 1
    offsets = OffsetCounter(TokenNamer(LIBRARY), skip_special_tokens=skip)
    hi = LIBRARY.encode("hi")[0]
    assert [offsets.push(i) for i in (hi, end, hi)] == [0, 2, 2 if skip else 7]


def test_minus_infinity_can_be_sent() -> None:
    namer = TokenNamer(LIBRARY)
    position = PositionLogprobs(TokenLogprob(0, -math.inf), (TokenLogprob(1, 0.0),))
    lists = completion_logprobs([0], [position], namer, OffsetCounter(namer, True))
    assert lists.token_logprobs == [LOWEST_LOGPROB]
    assert chat_logprobs([position], namer).content[0].logprob == LOWEST_LOGPROB
