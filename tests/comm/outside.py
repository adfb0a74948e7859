"""Expert servers with a pod and a buffer each, as processes of their own have, and links to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.comm.services import LAYERS, LAYOUT
from tests.comm.tools import IDENTITY, TOKEN, quantize
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.hw.pod import Pod
from xdeepserve.remote.expert_process import OutsideServer
from xdeepserve.remote.handshake import listen
from xdeepserve.remote.network_card import Nic
from xdeepserve.remote.registered import SharedBuffer, windows
from xdeepserve.remote.server_link import ServerLink, open_link

NUMBERS = itertools.count()


class Far:
    """One server, with a pod of its own, as a process of its own has it."""

    def __init__(self, index: int, address: str, generation: int = 1, layout: ServiceLayout = LAYOUT) -> None:
        node = layout.servers.dies[index]
        pod = Pod()
        plan = pod.plan(node)
        layout.plan_server(plan)
        buffer = SharedBuffer(plan.ends[-1])
        plan.provide = lambda nbytes: buffer.view
        pod.materialise()
        self.server = OutsideServer(
            *(pod.dies[node], index, layout, LAYERS), quantize=quantize, generation=generation - 1
        )
        self.windows = windows(layout, pod.memory(node))
        listener, self.address = listen(address)
        self.heard: list[Exception] = []
        self.nic = Nic(listener, buffer, self.windows, IDENTITY, TOKEN, self.heard.append)

    def close(self) -> None:
        self.nic.close()
        assert self.heard == []


def free_address(kind: str) -> str:
    """One to listen at, which nobody has; kind is unix or tcp."""
    return "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:xdeepserve-test-{next(NUMBERS)}-{id(NUMBERS)}"


@asynccontextmanager
async def linked_servers(
    layout: ServiceLayout, kind: str
) -> AsyncIterator[tuple[list[Far], Mapping[int, ServerLink]]]:
    """A layout's servers, and links to them by node."""
    fars = [Far(index, free_address(kind), layout=layout) for index in range(layout.servers.num_ranks)]
    links = {
        node: await open_link(far.address, "me", IDENTITY, TOKEN)
        for node, far in zip(layout.servers.dies, fars, strict=True)
    }
    try:
        yield fars, links
    finally:
        for link in links.values():
            link.close("the test is over")
        for far in fars:
            far.close()
        await asyncio.sleep(0.01)
