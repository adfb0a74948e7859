"""Read TOML or JSON that people write as structs, and refuse mistakes in the words of the file.

A refusal names the file, the line, the field, what was found and what would work:

    cluster a.toml, line 7: [[te]] number 2: role must be one of both, decode, prefill, found 'decod' (did you
    mean decode?)
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from xdeepserve.errors import InputError, abridged, meant

Form = Literal["TOML", "JSON"]
Place: TypeAlias = tuple[str | int, ...]  # names of fields, and numbers in lists from 0 on
T = TypeVar("T")

LFS_POINTER = "version https://git-lfs."  # begins the text that a clone without Git LFS has for a large file
GET_LFS = "a pointer of Git LFS, not the file itself: `git lfs pull` gets it"


class Mistake(NamedTuple):
    """A field that is wrong: its place, and what is said before and after its name."""

    place: Place
    text: str
    before: str = ""

    def said(self, form: Form) -> str:
        """The mistake in the words of a file of this form."""
        table, name = named(self.place, form)
        return f"{table}{self.before}{name}{' ' if name and self.text[:1].isalpha() else ''}{self.text}"


Unknown = Callable[[Place, Any, Sequence[str]], Mistake]  # from a field, its value, and those that there are


def unknown_field(place: Place, value: Any, known: Sequence[str]) -> Mistake:
    """A field that a section does not have: the one that may be meant, or all that there are."""
    return Mistake(place, meant(place[-1], known) or f"; known are {', '.join(known)}", "unknown field ")


class Document:
    """The content of a file or of a line, parsed: `where` names it in refusals, which are of the class
    `error`. `first`: the number of its line, in a file of which each line is content of its own."""

    def __init__(
        self,
        text: str,
        where: object,
        form: Form,
        *,
        first: int | None = None,
        has_nan: bool = False,
        error: Callable[[str], InputError] = InputError,
    ) -> None:
        self.text, self.where, self.form, self.first, self.error = text, str(where), form, first, error
        try:
            constant = None if has_nan else _no
            parsed = tomllib.loads(text) if form == "TOML" else json.loads(text, parse_constant=constant)
            self.raw: Any = parsed
        except json.JSONDecodeError as wrong:
            raise self._invalid(wrong.msg, wrong.lineno, wrong.colno) from None
        except tomllib.TOMLDecodeError as wrong:
            message, _, at = str(wrong).partition(" (at ")
            message = "a key is given twice" if "overwrite" in message else message
            numbers = [int(each) for each in re.findall("[0-9]+", at)]  # none: at the end
            raise self._invalid(message if numbers else f"{message} at its end", *numbers) from None
        except RecursionError:
            raise self._invalid("it is nested too deeply") from None
        except ValueError as wrong:  # JSON's other constants, and integers of some thousand digits
            raise self._invalid(str(wrong) if "no number" in str(wrong) else "too many digits") from None

    def _invalid(self, message: str, line: int = 0, column: int = 0) -> InputError:
        if self.text.startswith(LFS_POINTER):
            return self.error(refused(self.where, [GET_LFS]))
        at = f"line {(self.first or 1) + line - 1}, column {column}: " if line else self._first_line
        other = "JSON" if self.form == "TOML" else "TOML"
        hint = " (a text stands in quotes)" if message == "Invalid value" else ""
        hint = f"; it looks like {other}" if _looks_like(other, self.text) else hint
        is_word = message.split()[0][1:].islower()
        reason = message[:1].lower() + message[1:] if is_word else message
        return self.error(refused(self.where, [f"{at}not valid {self.form}: {reason}{hint}"]))

    def said(self, mistake: Mistake) -> str:
        """A mistake with its line, if its place or what it lies in has one."""
        place, lines = mistake.place, self._lines
        while place and place not in lines:
            place = place[:-1]
        at = f"line {(self.first or 1) + lines[place] - 1}: " if place else self._first_line
        return at + mistake.said(self.form)

    def refusal(self, mistakes: Iterable[Mistake]) -> InputError:
        """One line about every mistake."""
        return self.error(refused(self.where, [self.said(each) for each in mistakes]))

    def to(self, kind: type[T], unknown: Unknown = unknown_field) -> T:
        """The content as a struct. Raises `error` with every mistake."""
        try:
            return msgspec.convert(self.raw, kind)
        except msgspec.ValidationError as error:
            found = list(mistakes(self.raw, kind, self.form, unknown))
            raise self.refusal(found or [_own_check(str(error))]) from None

    @property
    def _first_line(self) -> str:
        """The number of the line, in a file of lines."""
        return f"line {self.first}: " if self.first else ""

    @functools.cached_property
    def _lines(self) -> dict[Place, int]:
        return dict(reversed(list((_toml_lines if self.form == "TOML" else _json_lines)(self.text))))


def read(path: Path, form: Form, what: str = "", error: Callable[[str], InputError] = InputError) -> Document:
    """The content of a file, which refusals call `what` and its path. Raises `error`."""
    where = f"{what} {path}".lstrip()
    return Document(read_text(path, where, error), where, form, error=error)


def read_line(
    line: bytes, kind: type[T], where: object, number: int, error: Callable[[str], InputError] = InputError
) -> T:
    """Line `number` of a file with a JSON object a line, as a struct. Raises `error`."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as none:
            raise error(refused(str(where), [f"line {number}: {unreadable(none)}"])) from None
        Document(text, where, "JSON", first=number, error=error).to(kind)
        raise error(refused(str(where), [f"line {number}: not valid JSON"])) from wrong  # an escape alone


def read_text(path: Path, where: object, error: Callable[[str], InputError] = InputError) -> str:
    """A text in UTF-8. Raises `error`, which names the file as `where`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as wrong:  # ValueError: no UTF-8, or a name that no file can have
        raise error(f"{where}: {unreadable(wrong)}") from None


def _near(path: Path) -> str:
    """The file beside an absent one that may be meant: of the same ending, and a name much like its own."""
    try:
        stems = [each.stem for each in path.parent.iterdir() if each.suffix == path.suffix]
    except OSError:
        return ""
    near = get_close_matches(path.stem, stems, n=1, cutoff=0.75)
    return f" (did you mean {path.parent / near[0]}{path.suffix}?)" if near else ""


def unreadable(error: Exception) -> str:
    """Why a file cannot be read, or is no text."""
    if isinstance(error, UnicodeDecodeError):
        return f"not a text in UTF-8 (byte {error.start})"
    near = _near(Path(error.filename)) if isinstance(error, FileNotFoundError) and error.filename else ""
    return f"{(isinstance(error, OSError) and error.strerror) or 'cannot be read'}{near}"


def refused(where: str, reasons: Sequence[str]) -> str:
    """Join reasons behind their subject; a line number belongs to the file's name."""
    if not where:
        return "; ".join(reasons)
    return f"{where}{', ' if reasons[0].startswith('line ') else ': '}{'; '.join(reasons)}"


def toml_value(text: str) -> Any:
    """A value of `key=value` as TOML has it, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def mistakes(raw: Any, kind: Any, form: Form, unknown: Unknown = unknown_field) -> Iterator[Mistake]:
    """Everything in which a parsed value is not of a kind."""
    return _Checker(form, unknown).check(raw, _type_info(kind), ())


_type_info = functools.cache(inspect.type_info)

PLURAL = {
    "a section": "a list of sections",
    "an object": "a list of objects",
    "a whole number": "a list of whole numbers",
    "a number": "a list of numbers",
    "a text in quotes": "a list of texts in quotes",
}


class _Checker(NamedTuple):
    form: Form
    unknown: Unknown

    def check(self, value: Any, kind: inspect.Type, place: Place) -> Iterator[Mistake]:
        """Every mistake in a value."""
        match kind:
            case inspect.StructType() if isinstance(value, dict):
                yield from self._section(value, kind, place)
            case inspect.DictType() if isinstance(value, dict):
                for name, each in value.items():
                    yield from self.check(each, kind.value_type, (*place, name))
            case inspect.TupleType() if isinstance(value, list) and len(value) == len(kind.item_types):
                for number, (each, inner) in enumerate(zip(value, kind.item_types, strict=True)):
                    yield from self.check(each, inner, (*place, number))
            case inspect.VarTupleType() | inspect.ListType() if isinstance(value, list):
                for number, each in enumerate(value):
                    yield from self.check(each, kind.item_type, (*place, number))
            case inspect.UnionType():
                yield from self._either(value, kind, place)
            case inspect.LiteralType() if value in kind.values and isinstance(value, str):
                pass
            case inspect.Metadata(type=inspect.StrType(pattern=str() as pattern)) if isinstance(
                value, str
            ) and re.search(pattern, value):
                pass
            case inspect.StrType() if isinstance(value, str):
                pass
            case inspect.BoolType() if isinstance(value, bool):
                pass
            case inspect.IntType() if type(value) is int and _is_within(value, kind):
                pass
            case inspect.FloatType() if type(value) in (int, float) and _is_within(value, kind):
                pass
            case inspect.NoneType() if value is None:
                pass
            case inspect.AnyType() | inspect.CustomType() | inspect.RawType():
                pass
            case inspect.VarTupleType(item_type=inspect.StructType()) if isinstance(value, dict) and place:
                yield Mistake(place, f"must be a list of sections: [[{place[-1]}]], not [{place[-1]}]")
            case _:
                yield Mistake(place, f"must be {self.said(kind)}, found {shown(value)}{_hint(value, kind)}")

    def _section(self, value: dict[str, Any], kind: inspect.StructType, place: Place) -> Iterator[Mistake]:
        fields = {field.encode_name: field for field in kind.fields}
        for name, each in value.items():
            if name in fields:
                yield from self.check(each, fields[name].type, (*place, name))
            elif kind.forbid_unknown_fields:
                yield self.unknown((*place, name), each, list(fields))
        for name, field in fields.items():
            if field.required and name not in value:
                yield Mistake((*place, name), f"is missing: {self.said(field.type)}")

    def _either(self, value: Any, kind: inspect.UnionType, place: Place) -> Iterator[Mistake]:
        found = [list(self.check(value, each, place)) for each in kind.types]
        if not all(found):
            return
        within = next((each for each in found if each[0].place != place), None)
        others = _members(kind)
        if within is not None:  # the right shape, with a mistake inside
            yield from within
        elif len(others) == 1:
            yield from self.check(value, others[0], place)
        else:
            hint = "".join(_hint(value, each) for each in others)
            yield Mistake(place, f"must be {self.said(kind)}, found {shown(value)}{hint}")

    def said(self, kind: inspect.Type) -> str:
        """Describe the values that would work."""
        match kind:
            case inspect.LiteralType():
                return f"one of {', '.join(map(str, kind.values))}"
            case inspect.Metadata(extra={"names": names}):
                return one_of(names)
            case inspect.IntType() | inspect.FloatType():
                what = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
                return what + _bounds(kind)
            case inspect.BoolType():
                return "true or false"
            case inspect.StrType():
                return "a text in quotes"
            case inspect.StructType() | inspect.DictType():
                return "a section" if self.form == "TOML" else "an object"
            case inspect.TupleType():
                return f"a list of {len(kind.item_types)}"
            case inspect.VarTupleType() | inspect.ListType():
                return PLURAL.get(self.said(kind.item_type), "a list")
            case inspect.UnionType():
                return " or ".join(self.said(each) for each in _members(kind))
        return "left out"


def _members(kind: inspect.UnionType) -> list[inspect.Type]:
    """List the types and names that a value may be, without null: to leave a field out is as good."""
    literals = (each.values for each in kind.types if isinstance(each, inspect.LiteralType))
    names = sorted(str(value) for values in literals for value in values)
    others = [each for each in kind.types if not isinstance(each, inspect.LiteralType | inspect.NoneType)]
    return [*([inspect.LiteralType(tuple(names))] if names else []), *others]


def one_of(names: Iterable[str]) -> str:
    """List the names that a value may have, then the forms that it may take, such as `module:function`."""
    every = sorted(names, key=lambda name: (":" in name, name))
    forms = "".join(f" or {name}" for name in every if ":" in name)
    return f"one of {', '.join(name for name in every if ':' not in name)}{forms}"


def _is_within(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (kind.ge is None or kind.ge <= value) and (kind.le is None or value <= kind.le)


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is None:
        return ""
    low, high = (f"{each or 0:,}".removesuffix(".0") for each in (kind.ge, kind.le))
    return f", {low} or more" if kind.le is None or kind.le > 1e15 else f" from {low} to {high}"


def _hint(value: Any, kind: inspect.Type) -> str:
    if isinstance(kind, inspect.LiteralType):
        return meant(value, map(str, kind.values))
    if isinstance(kind, inspect.Metadata):
        return meant(value, (kind.extra or {}).get("names", ()))
    if not isinstance(value, str):
        return ""
    if isinstance(kind, inspect.BoolType) and value.lower() in ("true", "false"):
        return f" (write {value.lower()})"
    is_number = isinstance(kind, inspect.IntType | inspect.FloatType)
    if is_number and not isinstance(toml_value(value), str):
        return " (write it without quotes)"
    is_list = isinstance(kind, inspect.VarTupleType | inspect.ListType)
    return f" (write [{value}])" if is_list and isinstance(toml_value(f"[{value}]"), list) else ""


def shown(value: Any) -> str:
    """A value as a refusal shows it."""
    if isinstance(value, str):
        text = abridged(value)
        return f"'{text[1:-1]}'" if text.endswith('"') else text
    is_json = value is None or isinstance(value, bool | int | float | list | dict)
    return abridged(value) if is_json else str(value)  # TOML has dates, too


def named(place: Place, form: Form) -> tuple[str, str]:
    """How a file calls the section of a list that a place lies in, and the place within."""
    match form, place:
        case "TOML", (str(name), int(number), str(), *_):
            return f"[[{name}]] number {number + 1}: ", _dotted(place[2:])
    return "", _dotted(place)


def _dotted(place: Place) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).removeprefix(".")


def _own_check(message: str) -> Mistake:
    """Return the message of a struct's own check, and the place that it is about."""
    text, _, at = message.partition(" - at `$")
    parts = re.findall(r"\.([^.\[`]+)|\[([0-9]+)\]", at)
    place = tuple(name or int(number) for name, number in parts)
    return Mistake(place, f": {text}" if place else text)


def _no(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _looks_like(form: str, text: str) -> bool:
    try:
        (json if form == "JSON" else tomllib).loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(text.strip())


_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=")


def _toml_lines(text: str) -> Iterator[tuple[Place, int]]:
    """Places of sections and keys, each with its line. What lies in a value is on the line of its key."""
    counts: dict[Place, int] = {}  # of sections in lists
    base: Place = ()
    for number, line in enumerate(text.split("\n"), 1):
        if found := _HEADER.match(line):
            base = ()
            for key in re.findall(_KEY, found[2]):
                base = (*base, counts[base] - 1) if base in counts else base
                base = (*base, key.strip("\"'"))
            if found[1] == "[[":
                counts[base] = counts.get(base, 0) + 1
            yield base, number
            if base in counts:
                base = (*base, counts[base] - 1)
                yield base, number
        elif found := _ASSIGNMENT.match(line):
            yield (*base, *(key.strip("\"'") for key in re.findall(_KEY, found[1]))), number


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|\n|[^\s{}\[\],:"]+')


def _json_lines(text: str) -> Iterator[tuple[Place, int]]:
    """Places of fields and of lists' items, each with its line."""
    line, before, place = 1, "", list[str | int]()
    is_list: list[bool] = []
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
            continue
        if token in "}]":
            place.pop()
            is_list.pop()
        elif token == ",":
            if is_list[-1]:
                place[-1] = int(place[-1]) + 1
        elif token != ":":
            if is_list and is_list[-1]:
                yield tuple(place), line
            elif is_list and before in "{,":
                place[-1] = json.loads(token)
                yield tuple(place), line
            if token in "{[":
                place.append(0)
                is_list.append(token == "[")
        before = token
