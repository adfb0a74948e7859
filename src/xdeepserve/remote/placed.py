"""Expert servers on a Ray cluster: an actor keeps each server. Ray places the actors, and places them anew
when a node is lost.

Calls of actors carry a server's task and its state; clients of the servers never use Ray.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from xdeepserve.engine.build import with_answers
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.fitting import with_servers_outside
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.remote.children import ServerTask
from xdeepserve.remote.keeper import TRIES, Keeper, Kept

ANSWER_S = 5.0  # for a keeper
PLACED_S = 20.0  # who has not been placed since has no node
LEAVE_S = 60.0


def seats_of(task: ServerTask, checkpoint: Checkpoint, asked: list[int] | None) -> tuple[list[int], int]:
    """Return the seats to fill and the number of all seats. `asked` names the seats; None takes the seats
    that are filled from the start. Raises DeploymentError for unknown seats, or if servers are not processes.
    """
    deployment = msgspec.convert(task.deployment, Deployment)
    config = with_answers(checkpoint.config, deployment, "fp32" if task.precision == "fp32" else "int8")
    place = with_servers_outside(deployment, config).place
    last = place.num_expert_dies - 1
    for seat in asked or ():
        if not 0 <= seat <= last:
            raise DeploymentError(f"there is no seat {seat}: seats are 0 to {last}")
    return asked or [seat for seat in range(last + 1) if seat not in place.vacant], last + 1


class Placed:
    """Keepers of servers, by seat.

    `host` is where servers listen with transport tcp; None means each node's own address. `tell` is called
    with a line for each event.
    """

    def __init__(self, ray: Any, task: ServerTask, host: str | None, tell: Callable[[str], None]) -> None:
        self._ray, self._task, self._host, self._tell = ray, task, host, tell
        self._keepers: dict[int, Any] = {}
        self._seen: dict[int, Kept] = {}
        self._waits: dict[int, float] = {}  # since when, if nobody has been told

    def place(self, seats: Iterable[int]) -> None:
        """Start a keeper for each seat on any node with a free CPU. Nodes are filled evenly.

        Raises XDeepServeError with the transport shm on a cluster of several nodes.
        """
        ray = self._ray
        if not self._task.address.startswith("tcp") and len(ray.nodes()) > 1:
            raise XDeepServeError("experts.transport=shm is for one computer: on several take tcp")
        kept = ray.remote(num_cpus=1, max_restarts=-1, scheduling_strategy="SPREAD")(_NodesKeeper)
        for seat in seats:
            told = msgspec.json.encode(msgspec.structs.replace(self._task, seat=seat))
            self._keepers[seat] = kept.remote(told, self._host)
            self._waits[seat] = time.monotonic()

    def look(self) -> None:
        """Ask all keepers for news, and tell what has changed. Raises XDeepServeError if a server was given
        up."""
        asked = {seat: keeper.kept.remote() for seat, keeper in self._keepers.items()}
        self._ray.wait([*asked.values()], num_returns=len(asked), timeout=ANSWER_S)
        for seat, answer in asked.items():
            try:
                kept: Kept = self._ray.get(answer, timeout=0.0)
            except (self._ray.exceptions.RayError, TimeoutError):
                if time.monotonic() - self._waits.get(seat, math.inf) > PLACED_S:
                    del self._waits[seat]
                    self._tell(f"server {seat} waits for a node of the cluster that has a CPU to spare")
                continue  # it is being placed, or anew
            self._waits.pop(seat, None)
            self._compare(seat, self._seen.get(seat), kept)
            self._seen[seat] = kept

    def _compare(self, seat: int, before: Kept | None, now: Kept) -> None:
        if now.error:
            raise XDeepServeError(f"server {seat} is kept no more: {now.error}")
        if now.is_given_up:
            code = now.ended[-1]
            raise XDeepServeError(f"server {seat} has ended {TRIES} times in a row, at last with code {code}")
        if before is None or now.pid != before.pid:
            codes = now.ended[len(before.ended) :] if before is not None else []
            why = f"since another one ended ({codes[-1]}): " if codes else ""
            self._tell(f"{why}server {seat} is process {now.pid}")

    def leave(self) -> None:
        """Make all servers leave in turn, as the monitor permits. Raises XDeepServeError if a server may
        not."""
        for seat, keeper in [*self._keepers.items()]:
            if not self._ray.get(keeper.leave.remote(LEAVE_S), timeout=2 * LEAVE_S):
                raise XDeepServeError(f"server {seat} has not left within {LEAVE_S:g} s")
            self._tell(f"server {seat} has left")
            self._ray.kill(self._keepers.pop(seat))

    def close(self) -> None:
        """End all servers and keepers that are left."""
        for keeper in self._keepers.values():
            self._ray.kill(keeper)
        self._keepers.clear()


class _NodesKeeper(Keeper):
    """Keeper for a Ray actor: `host` None means the address of its node."""

    def __init__(self, task: bytes, host: str | None) -> None:
        if host is None:
            import ray

            host = ray.util.get_node_ip_address()
        super().__init__(task, host)
