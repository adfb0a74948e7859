"""What faults do to a memory pool: to its servers, their volumes and its Controller (`hw.fault_kinds`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .memory_pool import MemoryPool


class PoolFaults:
    """The parts of a pool that can break. Where a fault has nothing to act on, it does nothing: a server that
    is lost already, a ring that a lost Controller cannot change."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self._without_host: set[int] = set()

    def parts(self, num_servers: int) -> dict[tuple[str, int], Callable[[str, bool], None]]:
        """For `Pod.parts`; hosts are those of the servers."""
        parts: dict[tuple[str, int], Callable[[str, bool], None]] = {
            ("mp_controller", 0): self._break_controller
        }
        for number in range(num_servers):
            parts["host", number] = partial(self._break_host, number)
            parts["mp_server", number] = partial(self._break_server, number)
            parts["volume", number] = partial(self._break_volume, number)
        return parts

    def _break_volume(self, number: int, kind: str, is_on: bool) -> None:
        self.pool.servers[number].volume.disk.fault = kind if is_on else None

    def _break_controller(self, kind: str, is_on: bool) -> None:
        self.pool.controller.is_lost = is_on

    def _break_host(self, number: int, kind: str, is_on: bool) -> None:
        self._without_host.add(number)
        self._break_server(number, kind, is_on)

    def _break_server(self, number: int, kind: str, is_on: bool) -> None:
        server, controller = self.pool.servers[number], self.pool.controller
        if kind == "lost":
            if is_on and not server.is_lost:
                server.lose()
            elif not is_on and number not in self._without_host:
                server.recover()
        elif not controller.is_lost and (server.name in controller.view().members) == is_on:
            (controller.leave if is_on else controller.join)(server.name)
