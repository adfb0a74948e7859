"""Fault kinds by place, error codes, and moments of operations to plan faults at.

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

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

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
    """Row of a kind of fault at a place: its fields beside place and time, and how the project treats it.

    `meaning` is for people, in the documents and on the page. A kind with a `button` is on the page's menu,
    with the first of `tried`. `xdeepserve chaos --every-step` tries all of these on each die.
    """

    meaning: str
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    is_of_a_moment: bool = False  # over at once; else a fault without for_us lasts for ever
    needs_all_dies: bool = False  # what mends it waits for every die of a TE
    tried: tuple[Mapping[str, Any], ...] = ()  # fields of typical faults
    chaos: str = ""  # name of the random numbers by which chaos draws such faults on any die
    button: str = ""


RULES: dict[tuple[Place, Kind], Rule] = {
    ("die", "lost"): Rule("ends in the middle, answers nobody, for ever", tried=({},), button="Lose it"),
    ("die", "stalled"): Rule(
        "begins no kernel and no transfer", needs=("for_us",), tried=({"for_us": 50.0},)
    ),
    ("die", "slow"): Rule("its kernels take so many times as long", needs=("for_us", "factor")),
    ("die", "late"): Rule(
        "what it reads and writes elsewhere begins so much later", needs=("for_us", "by_us")
    ),
    ("die", "glitch"): Rule(
        "what it is at ends with an error code; its memory stays",
        needs=("code",),
        is_of_a_moment=True,
        needs_all_dies=True,
        tried=({"code": "aicore-exception"},),
        button="Glitch",
    ),
    ("die", "bad-page"): Rule(
        "a page of its HBM loses what it held, and a healthy one comes in",
        needs=("page",),
        is_of_a_moment=True,
        needs_all_dies=True,
        tried=({"page": "kv/0/latent"}, {"page": "weights/layers.1.experts.w13"}),
        chaos="pages",
    ),
    ("host", "lost"): Rule("all dies of the server, and its part of the memory pool"),
    ("host", "stalled"): Rule(
        "its CPU stands still, and with it the loops of TE-shells and DP groups there", needs=("for_us",)
    ),
    ("link", "down"): Rule(
        "who sends or reads by it gets an error at once", needs=("plane",), may=("for_us",)
    ),
    ("link", "blocked"): Rule("nothing begins to go by it, and nobody is told", needs=("plane", "for_us")),
    ("link", "slow"): Rule("its bytes take so many times as long", needs=("plane", "for_us", "factor")),
    ("link", "flipped"): Rule(
        "one bit of the next payload, and that is all", needs=("plane",), is_of_a_moment=True
    ),
    ("volume", "error"): Rule("can be neither read nor written", may=("for_us",)),
    ("volume", "full"): Rule("can be read, and takes nothing new", may=("for_us",)),
    ("volume", "torn"): Rule(
        "of the next commit, the second half never gets to the disk", is_of_a_moment=True
    ),
    ("mp_server", "lost"): Rule("answers nobody; its DRAM is worth nothing afterwards", may=("for_us",)),
    ("mp_server", "left"): Rule("out of the pool's ring: views of before are stale", may=("for_us",)),
    ("mp_controller", "lost"): Rule("whoever has a view goes on with it", may=("for_us",)),
}
SAYS = ("for_us", "factor", "by_us", "plane", "code", "page")  # what some kinds say, and others must not


def kinds_at(place: Place) -> list[Kind]:
    """List the kinds of faults possible at a place."""
    return [kind for where, kind in RULES if where == place]


# Error codes with which a die's driver says what has failed while the die goes on.
#
# The paper speaks of known error codes without naming any (xDeepServe 6.2); these stand for the kinds of
# faults that CANN's runtime tells apart.


class ErrorCode(NamedTuple):
    """Meaning of an error code, and whether the same work may succeed when repeated.

    A code that is reported (`errors.DriverReport`) says what the host must put right before that.
    """

    meaning: str
    is_transient: bool
    is_reported: bool = False


ERROR_CODES = {
    "aicore-exception": ErrorCode("a kernel on AI cores has ended with an exception", True),
    "vector-core-exception": ErrorCode("a kernel on vector cores has ended with an exception", True),
    "mte-error": ErrorCode("a memory transfer engine has ended a copy with a bus error", True),
    "dma-error": ErrorCode("the DMA engine has ended a copy with an error", True),
    "link-error": ErrorCode("a link has given a packet up after sending it again and again", True),
    "task-timeout": ErrorCode("the driver has ended a task that took too long", True),
    "unspecified": ErrorCode("the driver does not say what has failed", False),
    "hbm-page": ErrorCode("a page of memory was lost, and a healthy one is in its place", True, True),
}
PAGE_LOST = "hbm-page"
GLITCHES = [code for code, row in ERROR_CODES.items() if not row.is_reported]  # the die is as it was


# Moments of operations, at which faults may be planned: the n-th time that a step of one is complete.
#
# Dies pass the steps of the papers' operations ("dispatch" 1 to 8; in lockstep they take none of them one by
# one); the memory pool those of "put" (1 a place is given, 2 its bytes are there, 3 it is committed) and of
# "get" (1 pinned, 2 to be promoted, 3 in DRAM, 4 released).


class Moment(NamedTuple):
    """The `event`-th completion, from 1, of an operation's step on a node; None stands for any node."""

    operation: str
    step: int
    event: int
    node: int | None


class Moments:
    """Calls functions at planned moments.

    Off and nearly free unless a function waits or `counts` are wanted.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.counts: Counter[tuple[str, int, int | None]] = Counter()
        self._then: dict[Moment, list[Callable[[], None]]] = {}

    def at(self, moment: Moment, then: Callable[[], None]) -> None:
        """Call `then` at a moment, if it ever comes. `then` must not wait."""
        self.is_on = True
        self._then.setdefault(moment, []).append(then)

    def passed(self, operation: str, step: int, node: int) -> None:
        """Note the completion of an operation's step on a node, and call what was planned for it."""
        for where in (node, None):
            self.counts[operation, step, where] += 1
            moment = Moment(operation, step, self.counts[operation, step, where], where)
            for then in self._then.pop(moment, ()):
                then()
