"""Kinds of faults: where each may happen, and what it has to say.

A place is a part of the pod and its number:

    die             as numbered in the deployment
    host            a server's CPU with its DRAM, and all dies of that server
    link            two dies on the UB or the RoCE plane, two hosts on the VPC plane: both ways
    volume          of the memory pool; by the number of its MP Server
    mp_server       MP Server of the memory pool
    mp_controller   the pool's Controller; there is one, number 0

A kind that a row does not need `for_us` for, and may have it, lasts for ever without.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "lost",
    "stalled",
    "slow",
    "late",
    "glitch",
    "bad-page",
    "down",
    "blocked",
    "flipped",
    "left",
    "error",
    "full",
    "torn",
]
Place = Literal["die", "host", "link", "volume", "mp_server", "mp_controller"]
OnPlane = Literal["ub", "roce", "vpc"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PLACES: tuple[Place, ...] = get_args(Place)


class Rule(NamedTuple):
    """What a fault of a kind at a place says, beside when and where; `meaning` is for people."""

    meaning: str
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()


RULES: dict[tuple[Place, Kind], Rule] = {
    ("die", "lost"): Rule("ends in the middle, answers nobody, for ever"),
    ("die", "stalled"): Rule("begins no kernel and no transfer", needs=("for_us",)),
    ("die", "slow"): Rule("its kernels take `factor` times as long", needs=("for_us", "factor")),
    ("die", "late"): Rule(
        "what it reads and writes elsewhere begins `by_us` late", needs=("for_us", "by_us")
    ),
    ("die", "glitch"): Rule("its kernels and transfers end with an error; its memory stays", needs=("code",)),
    ("die", "bad-page"): Rule(
        "a page of its HBM loses what it held; a healthy one comes in", needs=("page",)
    ),
    ("host", "lost"): Rule("all dies of the server, and its part of the memory pool"),
    ("host", "stalled"): Rule("its CPU stands still, and with it all loops of the host", needs=("for_us",)),
    ("link", "down"): Rule("who sends or reads by it gets an error", needs=("plane",), may=("for_us",)),
    ("link", "blocked"): Rule("nothing goes by it, and nobody is told", needs=("plane", "for_us")),
    ("link", "slow"): Rule("bytes take `factor` times as long", needs=("plane", "for_us", "factor")),
    ("link", "flipped"): Rule("one bit of the next payload (see `checksums`)", needs=("plane",)),
    ("volume", "error"): Rule("can be neither read nor written", may=("for_us",)),
    ("volume", "full"): Rule("can be read, and takes nothing new", may=("for_us",)),
    ("volume", "torn"): Rule("the next commit gets there by half"),
    ("mp_server", "lost"): Rule("answers nobody; its DRAM is worth nothing afterwards", may=("for_us",)),
    ("mp_server", "left"): Rule("out of the ring: views of before are stale", may=("for_us",)),
    ("mp_controller", "lost"): Rule("who has a view goes on with it", may=("for_us",)),
}
SAYS = ("for_us", "factor", "by_us", "plane", "code", "page")  # what some kinds say, and others must not


def kinds_at(place: Place) -> list[Kind]:
    """What can happen at a place."""
    return [kind for where, kind in RULES if where == place]
