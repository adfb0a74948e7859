"""Rules and life cycles as tables: {(state, event): next state}, and the one place that applies them.

The states of a protocol, a transfer, a sequence or a die, and what leads from one to the other, are written
down as a literal table, in which each line can say why. What is not in the table cannot happen: it is a
ProtocolError, and changes nothing. States and events are enums; errors call them by their values if those are
words, else by their names.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from xdeepserve.errors import ProtocolError

S = TypeVar("S")
E = TypeVar("E")
State = TypeVar("State", bound=enum.Enum)
Event = TypeVar("Event", bound=enum.Enum)


def follow(table: Mapping[tuple[S, E], S], state: S, event: E, refusal: Callable[[], str]) -> S:
    """The state that `event` leads to. ProtocolError, saying `refusal()`, if the table has none."""
    try:
        return table[state, event]
    except KeyError:
        raise ProtocolError(refusal()) from None


def word(member: enum.Enum) -> str:
    """Return the name of a state or an event in errors."""
    return member.value if isinstance(member.value, str) else member.name.lower().replace("_", " ")


class Machine(Generic[State, Event]):
    """Something that is in a state, and leaves it as a table says.

    `who` it is, and how errors put it: `wording` has the fields {who}, {event} and {state}.
    """

    __slots__ = ("state", "table", "who", "wording")

    def __init__(
        self,
        table: Mapping[tuple[State, Event], State],
        state: State,
        who: str,
        wording: str = "{who} cannot {event} while {state}",
    ) -> None:
        self.table, self.state, self.who, self.wording = table, state, who, wording

    def after(self, event: Event, name: str | None = None) -> State:
        """Where an event would lead to. ProtocolError, which calls it `name` if given, if nowhere."""
        return follow(self.table, self.state, event, lambda: self._refusal(event, name))

    def move(self, event: Event, name: str | None = None) -> None:
        """Go there. ProtocolError as for `after`; nothing has changed then."""
        self.state = self.after(event, name)

    @contextlib.contextmanager
    def ending(self, done: Event, fail: Event) -> Iterator[None]:
        """Run the work of a state: send `done` when the work has ended, `fail` at any error."""
        try:
            yield
        except BaseException:
            self.move(fail)
            raise
        self.move(done)

    def _refusal(self, event: Event, name: str | None) -> str:
        return self.wording.format(who=self.who, event=name or word(event), state=word(self.state))
