"""A pod's expert servers as processes: started and ended with the pod, unless a monitor is named."""

from __future__ import annotations

import ipaddress
import os
import secrets

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment, ExpertConfig
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.engine.ways.services.real import identity
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.clock import Hears
from xdeepserve.model.presets import PRESETS
from xdeepserve.model.weights import Recipe
from xdeepserve.remote.children import Children, MonitorTask, ServerTask
from xdeepserve.remote.watcher import Watcher

TOKEN = "XDEEPSERVE_TOKEN"


def given_token(transport: str, host: str = "127.0.0.1") -> str:
    """Return the token shared by servers, clients and monitor. Raises DeploymentError if the environment has
    no token and tcp, or a monitor's `host` beyond the loopback, needs it."""
    token = os.environ.get(TOKEN, "")
    if transport == "tcp" and not token:
        raise DeploymentError(f"experts.transport=tcp needs a token that all share: set {TOKEN}")
    if not token and not _is_loopback(host):
        raise DeploymentError(f"--host {host} is for other computers, too, and needs a token: set {TOKEN}")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


class ServersOutside:
    """Server processes of a task executor (TE).

    `task` is each server's task without seat and address; `seats` are the seats that have a server from the
    start.
    """

    def __init__(
        self,
        watcher: Watcher,
        task: ServerTask,
        transport: str,
        monitor: str | None,
        seats: list[int],
        identity: str,
    ) -> None:
        self.watcher, self._task, self._transport, self._seats = watcher, task, transport, seats
        self._identity, self.children = identity, Children()
        self.monitor = monitor
        if monitor is not None:
            self._token = given_token(transport)

    def launch(self) -> None:
        """Start the monitor and the servers, unless the deployment names a monitor. Servers load in the
        background."""
        if self.monitor is not None:
            return
        self._token = secrets.token_hex(16)
        try:
            self.monitor = self.children.start_monitor(MonitorTask(self._token, is_quiet=True))
            for seat in self._seats:
                self.add(seat)
        except BaseException:
            self.children.close()
            raise

    def add(self, seat: int) -> None:
        """Start a process for a seat that has no server."""
        assert self.monitor is not None
        address = "tcp:127.0.0.1:0" if self._transport == "tcp" else f"unix:xdeepserve-{secrets.token_hex(8)}"
        self.children.start_server(
            msgspec.structs.replace(
                self._task, monitor=self.monitor, token=self._token, address=address, seat=seat
            )
        )

    async def start(self, hears: Hears) -> None:
        """Wait until there are links to servers of all experts. Raises XDeepServeError if that fails; `hears`
        is told of an error in keeping these links."""
        assert self.monitor is not None
        self.watcher.start(self.monitor, self._token, self._identity, hears)
        await self.watcher.ready(self.children.check)

    async def stop(self) -> None:
        await self.watcher.close()
        self.close()

    def close(self) -> None:
        """End all processes started here. Harmless when repeated."""
        self.children.close()


def servers_outside(watcher: Watcher, te: TEPlan, deployment: Deployment, recipe: Recipe) -> ServersOutside:
    """Plan the server processes of a task executor (TE). Raises DeploymentError if a token is needed and
    missing."""
    assert te.services is not None
    checkpoint, place = te.checkpoint, te.sizes.place
    model = checkpoint.name if checkpoint.name in PRESETS else str(checkpoint.directory)
    alone = msgspec.structs.replace(deployment, threads=1)  # processes share this computer
    task = ServerTask(model, recipe, msgspec.to_builtins(alone), "", "", "")
    experts = deployment.experts or ExpertConfig()
    seats = [number for number in range(place.num_expert_dies) if number not in place.vacant]
    whom = identity(te.services, te.sizes.experts, recipe, checkpoint.digest())
    return ServersOutside(watcher, task, experts.transport, experts.monitor, seats, whom)
