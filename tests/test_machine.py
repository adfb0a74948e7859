"""One way to apply a table of transitions: what is in it happens, what is not is refused by name."""

import enum

import pytest

from xdeepserve.errors import ProtocolError
from xdeepserve.machine import Machine, follow, word


class Light(enum.Enum):
    RED = "red"
    GREEN = "green"
    BROKEN = "out of order"


class Turn(enum.IntEnum):
    SWITCH_ON = 0
    FAIL = 1


TABLE = {
    (Light.RED, Turn.SWITCH_ON): Light.GREEN,
    (Light.GREEN, Turn.FAIL): Light.BROKEN,
    (Light.GREEN, Turn.SWITCH_ON): Light.RED,
}


def test_a_machine_goes_where_its_table_says_and_nowhere_else() -> None:
    light = Machine(TABLE, Light.RED, "light 7")
    assert light.after(Turn.SWITCH_ON) is Light.GREEN
    assert light.state is Light.RED
    light.move(Turn.SWITCH_ON)
    assert light.state is Light.GREEN
    light.move(Turn.FAIL)
    with pytest.raises(ProtocolError, match=r"^light 7 cannot switch on while out of order$"):
        light.move(Turn.SWITCH_ON)
    assert light.state is Light.BROKEN


def test_errors_are_worded_as_asked_for_and_braces_in_names_are_harmless() -> None:
    light = Machine(TABLE, Light.BROKEN, "a {light}", "{who} that is {state} will not {event}")
    with pytest.raises(ProtocolError, match=r"^a \{light\} that is out of order will not blink \{\}$"):
        light.after(Turn.SWITCH_ON, "blink {}")


def test_what_comes_to_its_end_is_done_and_what_raises_has_failed() -> None:
    light = Machine(TABLE, Light.GREEN, "light")
    with light.ending(Turn.SWITCH_ON, Turn.FAIL):
        assert light.state is Light.GREEN
    assert light.state is Light.RED
    light.move(Turn.SWITCH_ON)
    with pytest.raises(KeyError), light.ending(Turn.SWITCH_ON, Turn.FAIL):
        raise KeyError
    assert light.state is Light.BROKEN


def test_many_small_states_follow_a_table_without_a_machine_each() -> None:
    assert follow(TABLE, Light.RED, Turn.SWITCH_ON, lambda: "not said") is Light.GREEN
    with pytest.raises(ProtocolError, match=r"^why$"):
        follow(TABLE, Light.RED, Turn.FAIL, lambda: "why")
    assert (word(Turn.SWITCH_ON), word(Light.BROKEN)) == ("switch on", "out of order")
