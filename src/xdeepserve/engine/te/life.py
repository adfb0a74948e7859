"""The life of a TE: what it is from its plan to its end, and by which causes that changes."""

from __future__ import annotations

from typing import Literal, TypeAlias

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
    ("draining", "lose"): "lost",
    ("draining", "stop"): "gone",
    ("ready", "stop"): "gone",  # it did not hear of the end in time
    ("lost", "stop"): "gone",
}
