"""Text that arrives in pieces, and the questions that a grammar may ask about it.

A grammar is a generator: it yields when its next decision needs text that has not arrived. Every question
here waits until more text cannot change its answer. So no decision depends on how the text was cut into
pieces, and a whole text is parsed by the same steps as a stream.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]

SPACE = re.compile(r"\s*")


class CutOff(Exception):
    """The text was cut by a length limit, within a call."""


class Marks:
    """Literal texts that a grammar looks for, all at once."""

    def __init__(self, marks: Iterable[str]) -> None:
        known = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._heads = {mark[:length] for mark in known for length in range(len(mark))}
        self._longest = len(known[0]) - 1 if known else 0
        self._any = re.compile("|".join(map(re.escape, known)) or "(?!)")
        self._begins = re.compile("|".join(sorted({re.escape(mark[0]) for mark in known})) or "(?!)")

    def first(self, text: str, at: int) -> tuple[int, str]:
        """Return the place of the first mark, and the mark; where none is, the length and ""."""
        found = self._any.search(text, at)
        return (len(text), "") if found is None else (found.start(), found[0])

    def here(self, text: str, at: int) -> str:
        """Return the longest mark that begins at a place; "" if none does."""
        found = self._any.match(text, at)
        return "" if found is None else found[0]

    def may_come(self, text: str, at: int) -> bool:
        """Whether the text ends, from a place on, with what more text could make a mark, or a longer one."""
        return len(text) - at <= self._longest and text[at:] in self._heads

    def half(self, text: str, at: int) -> int:
        """Return the place from which the end of the text may be the beginning of a mark."""
        for found in self._begins.finditer(text, max(at, len(text) - self._longest)):
            if text[found.start() :] in self._heads:
                return found.start()
        return len(text)


@functools.lru_cache(128)
def marks_of(*marks: str) -> Marks:
    """Return literal texts as marks, made once for all parsers."""
    return Marks(marks)


class TextSource:
    """The text so far, and a place in it: `at`.

    is_ended      no more text comes
    is_cut        a length limit has ended it
    has_met_end   a question has met the end, since this was last set to False
    """

    def __init__(self, text: str = "", is_ended: bool = False) -> None:
        self.text, self.at, self.is_ended = text, 0, is_ended
        self.is_cut = self.has_met_end = False
        self.refuses_end = False  # to meet the end of a cut text raises CutOff

    def drop(self) -> None:
        """Forget the text before the current place, but for one character."""
        keep = max(self.at - 1, 0)
        self.text, self.at = self.text[keep:], self.at - keep

    def _wait(self) -> Steps[bool]:
        """Wait for more text. Returns False at the end."""
        if self.is_ended:
            self.has_met_end = True
            if self.is_cut and self.refuses_end:
                raise CutOff
            return False
        yield
        return True

    def char(self) -> Steps[str]:
        """Return the next character, and stay before it; "" at the end."""
        while self.at == len(self.text):
            if not (yield from self._wait()):
                return ""
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take all characters of a class: `pattern` must be a class with a star."""
        begin = self.at
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or not (yield from self._wait()):
                return self.text[begin : self.at]

    def peek(self, *marks: str) -> Steps[str]:
        """Return the longest of the marks that begins here, and stay before it; "" if none does."""
        known = marks_of(*marks)
        while known.may_come(self.text, self.at):
            if not (yield from self._wait()):
                break
        return known.here(self.text, self.at)

    def take(self, *marks: str) -> Steps[str]:
        """Take the longest of the marks that begins here, and return it; "" if none does."""
        mark = yield from self.peek(*marks)
        self.at += len(mark)
        return mark

    def peek_behind_space(self, *marks: str) -> Steps[str]:
        """Return the mark behind white space, and stay before the space; "" if none is there."""
        begin = self.at
        yield from self.run(SPACE)
        mark = yield from self.peek(*marks)
        self.at = begin
        return mark

    def char_behind_space(self) -> Steps[str]:
        """Take white space, and return the character behind it; "" at the end."""
        yield from self.run(SPACE)
        return (yield from self.char())

    def scan(self, marks: Marks) -> str:
        """Go to the first mark and return it. Without one go as far as none can begin any more; return ""."""
        place, mark = marks.first(self.text, self.at)
        half = marks.half(self.text, self.at)
        is_certain = bool(mark) and (place < half or self.is_ended)
        self.at = place if is_certain else min(place, half)
        return mark if is_certain else ""

    def find(self, marks: Marks) -> Steps[str]:
        """Go to the first mark and return it; where none comes, go to the end and return ""."""
        while not (mark := self.scan(marks)):
            if not (yield from self._wait()):
                self.at = len(self.text)
                return ""
        return mark
