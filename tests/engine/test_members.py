"""The book of a TE's members: its tables fit together, and nothing else says who belongs to a TE."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import get_args

import pytest

from tests.sources import SRC, tree_of
from xdeepserve import LLM
from xdeepserve.comm.services.layout import Presence
from xdeepserve.engine.te.members import HEARS, MEMBERS, PRESENCE, TAKES_PART, At, Listener, Move
from xdeepserve.errors import ProtocolError

OF_THE_POD = {  # files of `engine` that say which dies there are; all other readers of truth are detectors
    "engine/build.py": "plans on dies that are well, and ends loading where one is lost",
}
DETECTORS = {
    "engine/te/server_monitor.py": "the monitor of servers and clients",
    "engine/te/lost_pages.py": "a page of a lost die cannot be restored",
    "engine/te/te_plan.py": "a TE with a lost die is no peer to load from",
    "engine/serving/te_group.py": "reads of silent memory, by which a loss is known at once",
    "engine/serving/failover.py": "counts the dies that are well",
    "engine/run/lockstep/lockstep.py": "a lost die ends the run of all, as its exchange would",
}
TRUTH = {("pod", "lost"), ("memories", "silent")}


def truths(tree: ast.AST) -> Iterator[str]:
    """Reads of `pod.lost` and `memories.silent`, also of private names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = node.value
            name = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
            if (name.lstrip("_"), node.attr) in TRUTH:
                yield f"{name}.{node.attr}"


def test_only_detectors_read_what_is() -> None:
    found = {
        path.relative_to(SRC).as_posix()
        for path in (SRC / "engine").rglob("*.py")
        if any(truths(tree_of(path)))
    }
    assert found == {*DETECTORS, *OF_THE_POD}


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
