"""The book of a TE's members: its tables fit together, and nothing else says who belongs to a TE."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

import pytest

from tests.sources import SRC, tree_of
from xdeepserve import LLM
from xdeepserve.comm.services.layout import Presence
from xdeepserve.engine.te.members import HEARS, MEMBERS, PRESENCE, TAKES_PART, At, Listener, Move
from xdeepserve.errors import ProtocolError

TRUTH = {("pod", "lost"), ("memories", "silent")}
GROUND = ("hw/", "comm/")  # what dies do: their reads are answered, or not

# Functions that read what is, and say so at once: by a loss, a move of a member, an event or LostDieError.
DETECTORS = {
    "engine/te/server_monitor.py:ServerMonitor._silent_clients": "reads the memory of clients, look by look",
    "engine/te/server_monitor.py:ServerMonitor.look": "yields the losses that its looks have found",
    "engine/te/server_monitor.py:ServerMonitor.find_lost": "reads the memory of servers before a rollback",
    "engine/te/server_monitor.py:ServerMonitor._has_answered": "reads the bell in a server's memory",
    "engine/te/repairs.py:Repairs.mend": "a page of a lost die cannot be restored",
    "engine/serving/te_group.py:TEGroup._lose_dies": "reads the memory of each die of a TE that is given up",
    "engine/serving/joining.py:Joining._give_back": "tests the dies of a TE that could not join",
    "engine/serving/failover.py:Failover._test": "tests the dies of a TE that was given up",
    "engine/build.py:PodPlan.bring": "looks at the dies of a TE before it serves",
    "engine/te/server_seats.py:ServerSeats._check_whole": "tests the die of a server before it serves",
}
# Functions that read what is and return it: whoever uses one reads what is, too.
DOORS = {
    "engine/te/server_monitor.py:ServerMonitor.die_is_well": "a test of a die that serves nothing",
    "engine/te/server_monitor.py:ServerMonitor.memory_answers": "a read of a die's memory",
    "hw/pod.py:Pod.find_free": "no die that is lost is free",
    "hw/pod.py:Pod.free_dies": "no die that is lost is free",
    "hw/self_test.py:well_dies": "the test itself",
}
# Functions that are neither, and why belief is not enough.
WANTS_TRUTH = {
    # Whether a fault may be injected: the promise that requests outlive it is about all that is broken.
    "engine/serving/te_group.py:TEGroup.cannot_lose": "refuses a second loss while one is not found",
    "page/breaking.py:Breaker.break_die": "no die is broken twice",
    # Dies are taken from the pod, and the pod has none that are lost.
    "engine/serving/kept_kv.py:KeptKV.__init__": "KV is kept on dies whose memory answers",
    "engine/build.py:PodPlan._moved": "takes free dies for a TE",
    "engine/te/server_seats.py:ServerSeats._take_die": "takes a free die for a server",
    "engine/serving/failover.py:what_helps": "names settings by the dies that are free",
    "engine/serving/failover.py:Failover.cannot_replace": "counts the dies that are free",
    "engine/serving/failover.py:Failover._replace": "takes free dies for a TE",
    "engine/serving/failover.py:Failover._restart": "names settings by the dies that are free",
    # Memory is given back: what runs on a broken die never ends by itself.
    "engine/te/server_seats.py:ServerSeats._free_when_idle": "ends what runs on a lost die before it is free",
    "engine/te/listeners.py:release": "a memory that does not answer has no slots to release",
    "engine/te/listeners.py:admit": "nor has it slots for clients that come",
    # Bytes are looked at: a broken memory has been scribbled over.
    "engine/build.py:PodPlan.mend": "compares weights with their digests",
    "engine/build.py:PodPlan.bring_server": "compares weights with their digests",
    "engine/run/lockstep/lockstep.py:Lockstep.check_integrity": "compares weights of dies",
    "page/die_bytes.py:die_bytes": "shows bytes",
}


class Piece(NamedTuple):
    """A function of the sources, or what stands outside of functions, with the names that it reads."""

    place: str
    used: frozenset[str]
    forwarded: frozenset[str]  # those that it returns as something to decide by

    @property
    def name(self) -> str:
        return self.place.rpartition(":")[2].rpartition(".")[2]

    @property
    def file(self) -> str:
        return self.place.partition(":")[0]


SAYINGS = {"None", "str | None", "Iterator[Loss]"}  # what says that something is lost, and is no truth to ask


def pieces() -> Iterator[Piece]:
    """All pieces of the sources; a function within one belongs to it."""
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC).as_posix()
        for node in tree_of(path).body:
            is_class = isinstance(node, ast.ClassDef)
            for each in node.body if is_class else [node]:
                is_function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                names = [*([node.name] if is_class else []), *([each.name] if is_function else [])]
                says = is_function and each.returns is not None and ast.unparse(each.returns) in SAYINGS
                forwarded = returned_by(each) if is_function and not says else frozenset()
                yield Piece(f"{file}:{'.'.join(names)}", names_in(each), forwarded)


def names_in(node: ast.AST) -> frozenset[str]:
    """Names that are read in a piece of source; those of the truth come with their owner."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            of = each.value
            owner = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
            owned = owner.lstrip("_"), each.attr
            found.add(".".join(owned) if owned in TRUTH else each.attr)
        elif isinstance(each, ast.Name):
            found.add(each.id)
    return frozenset(found)


def returned_by(function: ast.AST) -> frozenset[str]:
    """Names in what a function returns or yields, with those that its variables were made of."""
    made: dict[str, frozenset[str]] = {}
    returned: frozenset[str] = frozenset()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
            value = node.iter if isinstance(node, ast.For) else node.value
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            flat = [name for each in targets for name in getattr(each, "elts", [each])]
            for name in {name.id for name in flat if isinstance(name, ast.Name)}:
                made[name] = made.get(name, frozenset()) | (frozenset() if value is None else names_in(value))
        elif isinstance(node, ast.Return | ast.Yield) and node.value is not None:
            returned |= names_in(node.value)
    while more := frozenset[str]().union(*(made.get(name, ()) for name in returned)) - returned:
        returned |= more
    return returned


def readers(beyond: Sequence[Piece]) -> tuple[set[str], set[str]]:
    """Places of pieces that read what is, and of those that forward it, directly or by one that forwards
    it."""
    truth, forwards, more = {".".join(each) for each in TRUTH}, set[Piece](), set[Piece]()
    in_file: dict[str, set[str]] = {}

    def tells(piece: Piece) -> set[str]:
        return truth | in_file.get(piece.file, set())

    while more := {each for each in beyond if each.forwarded & tells(each)} - forwards:
        forwards |= more
        truth |= {each.name for each in more if each.name[0] != "_"}
        for each in more:
            in_file.setdefault(each.file, set()).add(each.name)
    found = {each.place for each in beyond if each.used & tells(each)}
    return found, {each.place for each in forwards}


def test_only_detectors_read_what_is() -> None:
    """All others ask the book, or the log of events; where that is not enough, the table says why."""
    beyond = [each for each in pieces() if not each.place.startswith(GROUND)]
    found, forwards = readers(beyond)
    of_ground = {place.rpartition(":")[2].rpartition(".")[2] for place in DOORS if place.startswith(GROUND)}
    found |= {each.place for each in beyond if each.used & of_ground}
    doors = {place for place in DOORS if not place.startswith(GROUND)}
    assert {place for place in forwards if "._" not in place} == doors
    assert found == {*DETECTORS, *doors, *WANTS_TRUTH}
    assert {each.place for each in pieces()} >= {*DOORS}


def test_a_property_that_forwards_what_is_is_followed() -> None:
    """Whoever asks it reads what is, also where another one lies between."""
    source = """
class Plan:
    @property
    def is_broken(self) -> bool:
        lost = self._pod.lost
        return bool(lost)

class Group:
    def is_no_good(self, plan: Plan) -> bool:
        return plan.is_broken or self.is_full

    def why_not(self, plan: Plan) -> str | None:
        return "it is broken" if self.is_no_good(plan) else None

    def places(self) -> list[int]:
        return self.dies
"""
    made = [
        Piece(f"made_up.py:{owner.name}.{each.name}", names_in(each), returned_by(each))
        for owner in ast.parse(source).body
        if isinstance(owner, ast.ClassDef)
        for each in owner.body
        if isinstance(each, ast.FunctionDef)
    ]
    found, forwards = readers(made)
    broken, no_good, why = (
        f"made_up.py:{each}" for each in ("Plan.is_broken", "Group.is_no_good", "Group.why_not")
    )
    assert found == {broken, no_good, why}
    assert forwards >= {broken, no_good}


def test_every_state_is_reached_and_left() -> None:
    reached = {"held", "coming", "there"}  # members begin so
    while more := {then for (at, _), then in MEMBERS.items() if at in reached} - reached:
        reached |= more
    assert reached == {*get_args(At)}
    assert {*get_args(At)} - {at for at, _ in MEMBERS} == {"lost", "gone"}
    assert {move for _, move in MEMBERS} == {*get_args(Move)}


def test_every_part_is_told_of_some_move_that_there_is() -> None:
    assert {move for _, move in HEARS} <= {*get_args(Move)}
    assert {listener for told in HEARS.values() for listener in told} == {*get_args(Listener)}


def test_clients_hear_of_each_change_of_a_presence() -> None:
    def presence(at: At) -> Presence:
        return PRESENCE.get(at, Presence.ABSENT)

    for (at, move), then in MEMBERS.items():
        if move != "lose" and presence(at) is not presence(then):
            assert "mask" in HEARS["server", move], (at, move)


def test_whoever_stops_taking_part_is_awaited_no_more() -> None:
    for (at, move), then in MEMBERS.items():
        if at in TAKES_PART and then not in TAKES_PART:
            told = HEARS["client" if move == "lose" else "server", move]
            assert "rollback" in told, (at, move)


def test_a_move_that_is_not_in_the_table_changes_nothing() -> None:
    with LLM("tiny-random", "eaas", overrides=["max_model_len=64"]) as llm:
        members = llm.engine.je.tes[0].members
        server = members.servers[1]
        with pytest.raises(ProtocolError, match="server 1 of te on die 5 cannot answer: it is there"):
            members.move(server, "answer")
        assert (server.at, members.presence(1)) == ("there", Presence.THERE)


def test_a_seat_has_an_incumbent_and_an_heir() -> None:
    with LLM("tiny-random", "eaas", overrides=["max_model_len=64", "experts.copies=1"]) as llm:
        members = llm.engine.je.tes[0].members
        former = members.servers[1]
        members.listen({})
        members.move(former, "miss")
        heir = members.call(1, 20)
        assert (members.incumbent(1), members.heir(1)) == (former, heir)
        assert members.presence(1) is Presence.LOST
        assert not members.gets_replicas(1)
        members.move(former, "answer")
        members.move(former, "replace")
        members.move(heir, "seat")
        assert (members.incumbent(1), members.heir(1), members.spare) == (heir, None, [former])
        assert (heir.epoch, members.epoch(1), members.servers[-1]) == (2, 2, heir)
        members.move(heir, "miss")
        members.move(former, "free")
