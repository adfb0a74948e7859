"""States of a TE's life, from plan to end, and the causes of changes."""

from __future__ import annotations

from typing import Literal, TypeAlias

from xdeepserve.engine.dp.events import EventLog, TEChanged
from xdeepserve.machine import follow

Life: TypeAlias = Literal[
    "planned",  # its dies and their memory are known; nothing runs
    "loading",  # its weights are on their way to its dies
    "ready",  # its die programs and its loop run
    "draining",  # it ends when it has nothing to do any more
    "lost",  # a die of the pod has failed, or a loop: nothing of it runs any more
    "gone",
]
LIVES: dict[tuple[Life, str], Life] = {
    ("planned", "start"): "ready",  # with the pod: its weights are there
    ("planned", "load"): "loading",
    ("loading", "start"): "ready",
    ("loading", "stop"): "gone",  # they do not come
    ("ready", "drain"): "draining",
    ("ready", "lose"): "lost",
    ("draining", "resume"): "ready",
    ("draining", "lose"): "lost",
    ("draining", "stop"): "gone",
    ("ready", "stop"): "gone",  # it did not hear of the end in time
    ("lost", "stop"): "gone",
}


class Lifetime:
    """Current state of a TE's life, as its parts read it, and how the TE is to end."""

    def __init__(self, te: str, tell: EventLog) -> None:
        self._te, self._tell = te, tell
        self.now: Life = "planned"
        self.moves_out = False  # sequences that are here go on elsewhere
        self.is_open = False  # the job executor gives the TE work, and can give it to another one
        self.ends_idle = False  # the TE ends when it has no work, whoever still wants its blocks

    @property
    def is_running(self) -> bool:
        """Whether the die programs and the loop run."""
        return self.now in ("ready", "draining")

    def follow(self, cause: str) -> None:
        """Change the state as LIVES says; raise ProtocolError for a cause that does not apply now."""
        refusal = f"TE {self._te} cannot {cause}: it is {self.now}"
        self.now = follow(LIVES, self.now, cause, lambda: refusal)
        self._tell(TEChanged(self._te, self.now))
