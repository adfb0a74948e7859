"""A pod's servers that are processes: started and ended with it, unless a monitor is named."""

from __future__ import annotations

import ipaddress
import os
import secrets

import msgspec

from xdeepserve.engine.outside.children import Children, MonitorTask, ServerTask
from xdeepserve.engine.outside.watcher import Watcher
from xdeepserve.errors import DeploymentError

TOKEN = "XDEEPSERVE_TOKEN"


def given_token(transport: str, host: str = "127.0.0.1") -> str:
    """The token that servers, clients and their monitor share, which listens at `host`. DeploymentError if
    there has to be one."""
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
    """Those of one TE. `task` is what its servers are told, but for where and who they are; `seats` are
    those that somebody is to have from the start."""

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
        """Start the monitor and the servers, if that is on us; they load while others do."""
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
        """A process of our own for a seat where nobody is."""
        assert self.monitor is not None
        address = "tcp:127.0.0.1:0" if self._transport == "tcp" else f"unix:xdeepserve-{secrets.token_hex(8)}"
        self.children.start_server(
            msgspec.structs.replace(
                self._task, monitor=self.monitor, token=self._token, address=address, seat=seat
            )
        )

    async def start(self) -> None:
        """Until there is a link to servers of all experts. XDeepServeError if that is not to be."""
        assert self.monitor is not None
        self.watcher.start(self.monitor, self._token, self._identity)
        await self.watcher.ready(self.children.check)

    async def stop(self) -> None:
        await self.watcher.close()
        self.close()

    def close(self) -> None:
        """End our own processes. Harmless when repeated."""
        self.children.close()
