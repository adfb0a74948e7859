"""Keys that a text of JSON has written in its open objects, none of which may come a second time.

A grammar without context cannot say that two keys differ. Where a schema leaves room for keys of the model's
own, this is said beside the grammar, by the tokens that would end a key which is there already. A key there
has no `\\u` either: it would be another spelling of a property that the schema names.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from xdeepserve.model.canonical import Array

# Letters of escapes, and the characters that they stand for.
_LETTERS, _CHARACTERS = b'ntrbf\\"/', b'\n\t\r\b\f\\"/'
_ESCAPES = {_CHARACTERS[i : i + 1]: _LETTERS[i : i + 1] for i in range(len(_LETTERS))}
_QUOTE, _BACKSLASH, _U = b'"\\u'


class KeyVocabulary:
    """Tokens of a vocabulary by what they do to a key of a JSON object.

    texts  bytes of each token, by id
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        ending: dict[bytes, list[int]] = defaultdict(list)
        within: dict[bytes, list[int]] = defaultdict(list)
        self.always: list[int] = []  # may write one key twice, or begin a key with an escape
        self.with_u: list[int] = []  # write an escape, if a key has begun
        for token_id, text in enumerate(texts):
            first, *more = text.split(b'"')
            if more:
                ending[first].append(token_id)
            for inner in more[:-1]:
                within[inner].append(token_id)
            if len(more) > 2 or (len(more) > (b"\\u" not in text) and b"\\" in text):
                self.always.append(token_id)
            elif b"\\u" in text:
                self.with_u.append(token_id)
        self.ending = dict(ending)  # by what comes before a token's first quotation mark
        self.within = dict(within)  # by what is between two of a token's quotation marks
        self.escaped = [first for first in ending if b"\\" in first]
        self.begins_u = np.array([i for i, text in enumerate(texts) if text.startswith(b"u")], np.int64)


class WrittenKeys:
    """Position in a text that has JSON in it, with the keys of every open object.

    Text around JSON is passed over. A line break within quotation marks is no JSON: the search for an object
    begins anew.
    """

    def __init__(self, vocabulary: KeyVocabulary) -> None:
        self._vocabulary = vocabulary
        self._begin()

    def _begin(self) -> None:
        self._open: list[frozenset[bytes] | None] = []  # of objects their keys, None for a list
        self._is_key = False  # the next string, or the one that has begun
        self._string: bytes | None = None  # what has been written of it, without quotation marks
        self._is_escape = False  # a backslash has been written

    def copy(self) -> WrittenKeys:
        """Make an independent copy of the position."""
        other = WrittenKeys(self._vocabulary)
        other._open, other._is_key = [*self._open], self._is_key
        other._string, other._is_escape = self._string, self._is_escape
        return other

    def take(self, token_id: int) -> bool:
        """Advance by one token. Returns False if it writes a key twice, or a `\\u` in a key."""
        fits = True
        for byte in self._vocabulary.texts[token_id]:
            fits &= self._take(byte)
        return fits

    def _take(self, byte: int) -> bool:
        if self._string is None:
            self._take_mark(byte)
        elif byte < 0x20:
            self._begin()
        elif self._is_escape:
            self._is_escape, self._string = False, self._string + bytes([byte])
            return not (self._is_key and byte == _U)
        elif byte != _QUOTE:
            self._is_escape, self._string = byte == _BACKSLASH, self._string + bytes([byte])
        else:
            string, self._string = self._string, None
            known = self._open[-1]
            if self._is_key and known is not None:
                key = _spelt(string)
                self._open[-1] = known | {key}
                return key not in known
        return True

    def _take_mark(self, byte: int) -> None:
        match chr(byte):
            case '"' if self._open:
                self._string = b""
            case "{":
                self._open.append(frozenset())
                self._is_key = True
            case "[":
                self._open.append(None)
                self._is_key = False
            case "}" | "]" if self._open:
                self._open.pop()
                self._is_key = False
            case ",":
                self._is_key = bool(self._open) and self._open[-1] is not None
            case ":":
                self._is_key = False

    def forbidden(self, allowed: Array) -> Iterator[int | Array]:
        """Name the tokens that must not come next, among those that the grammar allows, bool [vocab]."""
        vocabulary, key = self._vocabulary, self._string if self._is_key else None
        if key is not None and self._is_escape:
            yield vocabulary.begins_u
        for token_id in {*self._suspects(key), *vocabulary.always}:
            if allowed[token_id] and not self.copy().take(token_id):
                yield token_id

    def _suspects(self, key: bytes | None) -> Iterator[int]:
        """Name the tokens that may write a key again, with what has been written of a key, if one has
        begun."""
        vocabulary = self._vocabulary
        for each in self._open:
            for name in each or ():
                yield from vocabulary.within.get(name, ())
        if key is None:
            return
        yield from vocabulary.with_u
        if self._is_escape:
            yield from vocabulary.ending.get(b"", ())
        begun = _spelt(key[:-1] if self._is_escape else key)
        rests = [name[len(begun) :] for name in self._open[-1] or () if name.startswith(begun)]
        if self._is_escape:
            rests = [_ESCAPES[rest[:1]] + rest[1:] for rest in rests if rest[:1] in _ESCAPES]
        for rest in [*rests, *vocabulary.escaped] if rests else ():
            yield from vocabulary.ending.get(rest, ())


def _spelt(string: bytes) -> bytes:
    """Return the text of a string of JSON, without escapes."""
    if b"\\" not in string:
        return string
    try:
        return str(json.loads(f'"{string.decode("latin-1")}"')).encode("latin-1")
    except ValueError:
        return string
