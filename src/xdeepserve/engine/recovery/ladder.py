"""Ladder of failures on one page: what may be lost, and what is done about it (XDS 6.2, EaaS 3.4).

Whatever notices a loss makes a `Loss` and hands it to the loss's task executor (TE). `climb` goes through the
rungs of LADDER in order. The first rung that is for this kind of loss, and that knows no reason why it cannot
help, mends it. A mend that fails makes the loss worse, and the next rung gets it. Nothing else decides.

A rung of the `loop` waits for dies, and is climbed in the TE's loop alone. All other rungs wait for nothing:
their effects on all parts of a TE, and on all TEs, happen at one moment of virtual time.

The column `why_not` is asked beforehand, too: whether requests would outlive the loss of a die is the
question of whether any rung could mend a loss that is only `foreseen`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Set
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from xdeepserve.errors import XDeepServeError, as_named

T = TypeVar("T")

LossKind: TypeAlias = Literal[
    "glitch",
    "report",
    "irreparable",
    "server",
    "missed",
    "silence",
    "die",
    "shell",
    "error",
    "breach",
    "replacement",
    "departure",
    "engine",
]
LOSSES: Final[Mapping[LossKind, str]] = {  # how each kind of loss is noticed
    "glitch": "a die reports an error code; its memory stays",
    "report": "a driver reports what must be put right first, such as a lost page of HBM",
    "irreparable": "a driver reports a lost page with metadata, by which dies and other TEs agree",
    "server": "an expert server has not answered the monitor's heartbeats, or a rollback would wait for it",
    "missed": "the memory of an expert server's client has been silent for several looks of the monitor",
    "silence": "a wait of the TE's loop has ended at its deadline: heartbeats, transfers or exchanges",
    "die": "a read of a die's memory has found no answer",
    "shell": "the control plane has heard nothing from a TE-shell",
    "error": "any other error has ended a process of the TE, or a rung's mend",
    "breach": "an invariant has not held after a turn: a fault of this program, which no other TE mends",
    "replacement": "no TE could be brought up in the place of one that was given up",
    "departure": "a TE has left, and the TEs that were to go on without it have been lost meanwhile",
    "engine": "an error has ended a process that works for all TEs",
}
OF_A_TE: Final[frozenset[LossKind]] = frozenset(LOSSES) - {"breach", "replacement", "departure", "engine"}


class Loss(NamedTuple):
    """Something that a TE can no longer rely on: some dies, or all of the TE if `dies` is empty.

    `te` is the TE's name, or None for a loss that concerns no TE in service. `error` is None for a loss that
    is foreseen: somebody asks what would happen.
    """

    kind: LossKind
    te: str | None
    dies: tuple[int, ...]
    error: Exception | None

    @property
    def is_foreseen(self) -> bool:
        """Whether nothing has happened yet, and only certain help counts."""
        return self.error is None

    @property
    def reason(self) -> XDeepServeError:
        """Error with which requests end if nothing helps."""
        assert self.error is not None, "a foreseen loss is not mended"
        return as_named(self.error, f"{self.te}: " if self.te else "")

    def worsened(self, error: Exception) -> Loss:
        """Return the loss that is left when a mend has failed."""
        return self._replace(kind="error" if self.kind in OF_A_TE else self.kind, error=error)


class Remedy(NamedTuple):
    """Working side of a rung: why it cannot help with a loss, in a sentence, and what mends the loss."""

    why_not: Callable[[Loss], str | None]
    mend: Callable[[Loss], Awaitable[None] | None]


RungName: TypeAlias = Literal["run again", "mask", "go on without", "wait", "replace", "give up", "end"]
Remedies: TypeAlias = Mapping[RungName, Remedy]

STAGES: Final[Mapping[str, str]] = {  # of recovery (XDS 6.2), up to the last resort
    "3": "steps were run again",
    "2": "a TE was given up",
    "1": "all were started anew",
}


class Rung(NamedTuple):
    """A row of the ladder. `cannot` says in the documents what the remedy's `why_not` answers.

    A remedy after which the TE goes on tells `dp.events.Mended`: people read `told` then, and it counts as a
    recovery of this stage. Other rungs change the lives of TEs, and these are told.
    """

    name: RungName
    runs: Literal["loop", "TE", "group"]  # in the TE's loop; on the parts of one TE; on all TEs
    kinds: Set[LossKind]
    cannot: str
    mends: str
    told: str = ""
    stage: str = ""


LADDER: Final = (
    Rung(
        name="run again",
        runs="loop",
        kinds={"glitch", "report"},
        cannot="the code is `unspecified`, `recovery.stage=2`, or `recovery.max_rollbacks` glitches in a row",
        mends="all dies go back to the step before, reports are put right, steps run again (stage 3)",
        told="runs its steps again, in epoch {epoch}",
        stage="3",
    ),
    Rung(
        name="mask",
        runs="TE",
        kinds={"server"},
        cannot="asked beforehand: no other server has its experts",
        mends="clients ask other servers; a client that finds none ends with an error (EaaS 3.4)",
    ),
    Rung(
        name="go on without",
        runs="TE",
        kinds={"missed", "silence", "die"},
        cannot="the dies are no clients of expert servers, or the TE has no other client",
        mends="the client's requests go on at other clients, from their tokens (EaaS 3.4, 5.4)",
    ),
    Rung(
        name="wait",
        runs="TE",
        kinds={"missed"},
        cannot="never",
        mends="nothing: if the die is needed, a heartbeat's deadline or a read will tell",
    ),
    Rung(
        name="replace",
        runs="group",
        kinds=OF_A_TE,
        cannot="no `recovery.failover`, or the TE was leaving; asked beforehand: too few dies or restarts",
        mends="the TE is given up, and another one comes up in its place (stage 2, then 1)",
    ),
    Rung(
        name="give up",
        runs="group",
        kinds=OF_A_TE | {"replacement"},
        cannot="the other TEs could not serve without it, and none is on its way",
        mends="the TE is given up, and its requests go on at other TEs, from their tokens",
    ),
    Rung(
        name="end",
        runs="group",
        kinds=LOSSES.keys(),
        cannot="asked beforehand: it helps no request",
        mends="every request ends with the error",
    ),
)
RUNGS: Final[Mapping[RungName, Rung]] = {rung.name: rung for rung in LADDER}


async def climb(loss: Loss, remedies: Remedies) -> Loss | None:
    """Mend a loss by the first rung that can; return what is left of it if none of these remedies could."""
    for rung in LADDER:
        remedy = remedies.get(rung.name)
        if remedy is None or loss.kind not in rung.kinds or remedy.why_not(loss) is not None:
            continue
        try:
            mending = remedy.mend(loss)
            if mending is not None:
                await mending
            return None
        except Exception as error:
            loss = loss.worsened(error)
    return loss


def reasons(loss: Loss, remedies: Remedies) -> list[str | None]:
    """Return why each rung for a loss cannot help, in order; None for a rung that can."""
    rungs = (rung.name for rung in LADDER if loss.kind in rung.kinds)
    return [remedies[name].why_not(loss) for name in rungs if name in remedies]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, also where no process could wait.

    Losses are noticed inside reads and writes of memory, and by owners who hear of a process's end.
    """
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    work.close()
    raise AssertionError("a rung outside of the TE's loop waits")
