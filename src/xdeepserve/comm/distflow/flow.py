"""DistFlow: peer groups, transfers on raw addresses, and completion queues (DeepServe 4.4, xDeepServe 5.1).

    flow = DistFlow(pod)                                     one instance for each prefill-decode TE pair
    p, d = flow.link_cluster({"prefill": [0, 1], "decode": [16]})
    await flow.transfer(src, dst)                            one side knows all the addresses

    p.send(7, "decode", src)                                 or each side knows its own: the source offers,
    d.receive(7, "prefill", dst)                             the destination wants, and pulls when both do
    p.send_in_parts(8, "decode", [src, more])                or parts, of which the destination pulls the
    p.ready(8, "decode", 1)                                  first ones as soon as they are ready
    for completion in d.poll(): ...
    p.abort_send(7, "decode")                                one side has failed: end the other at once

Control messages go from host to host and carry addresses only. Bytes go from memory to memory, by the
backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from xdeepserve.comm.checks import integer
from xdeepserve.comm.distflow.backends import BACKENDS, Backend
from xdeepserve.comm.distflow.endpoint import Endpoint
from xdeepserve.comm.distflow.spans import pair, spans_of
from xdeepserve.comm.distflow.transport import Transport
from xdeepserve.errors import AddressError, DeploymentError, HardwareError
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod


class DistFlow:
    """Isolated DistFlow instance: a failure in it harms no other (xDeepServe 5.1, step 7).

    `backend` is "ub", "roce", "vpc" or an object of your own. `timeout_ns` is how long, in virtual time, a
    side waits for the other's word once the two have met, and how long the bytes may take.
    `offer_timeout_ns` is how long an offer waits to be wanted: by default an hour, since a destination
    without room may let its sources wait (back-pressure). A pod with nothing else to do is at the deadline at
    once: an hour of virtual time costs nothing. None is for an owner that knows by itself whether the
    destination is alive, and cancels what will not be wanted. `part_timeout_ns` is how long both sides wait
    until a further part of what is offered in parts is ready.
    """

    def __init__(
        self,
        pod: Pod,
        backend: str | Backend = "ub",
        timeout_ns: int = 10_000_000_000,
        offer_timeout_ns: int | None = 3_600_000_000_000,
        part_timeout_ns: int = 120_000_000_000,
    ) -> None:
        if isinstance(backend, str):
            if backend not in BACKENDS:
                raise DeploymentError(f"no DistFlow backend '{backend}': there are {', '.join(BACKENDS)}")
            backend = BACKENDS[backend](pod)
        timeout_ns = integer("DistFlow", "timeout_ns", timeout_ns)
        if offer_timeout_ns is not None:
            offer_timeout_ns = integer("DistFlow", "offer_timeout_ns", offer_timeout_ns)
        part_timeout_ns = integer("DistFlow", "part_timeout_ns", part_timeout_ns)
        self.pod, self.backend = pod, backend
        self._transport = Transport(pod, backend, timeout_ns, offer_timeout_ns, part_timeout_ns)
        self.endpoints: dict[str, Endpoint] = {}

    def link_cluster(self, groups: Mapping[str, Sequence[int]]) -> list[Endpoint]:
        """Make endpoints for groups of nodes, and link each with all others, new or old.

        All is refused if one pair of nodes cannot be reached. To be called on a running event loop.
        """
        check_loop("link_cluster")
        known = {name: endpoint.nodes for name, endpoint in self.endpoints.items()}
        for name, nodes in groups.items():
            if name in known or not nodes:
                problem = "is linked already" if name in known else "has no nodes"
                raise DeploymentError(f"endpoint '{name}' {problem}")
            nodes = [integer(f"endpoint '{name}'", "node", node) for node in nodes]
            if len(set(nodes)) != len(nodes):
                raise DeploymentError(f"endpoint '{name}' has nodes twice: {nodes}")
            for node in nodes:
                self.pod.memory(node)  # raises if there is none
                for other_nodes in known.values():
                    for other in other_nodes:
                        self.backend.check_path(node, other)
                        self.backend.check_path(other, node)
            known[name] = tuple(nodes)
        made = [Endpoint(self._transport, name, known[name]) for name in groups]
        self.endpoints |= {endpoint.name: endpoint for endpoint in made}
        return made

    def transfer(
        self, src: Sequence[tuple[Address, int]], dst: Sequence[tuple[Address, int]]
    ) -> asyncio.Task[int]:
        """Begin to move the bytes of `src`, in order, to `dst`, in order: M nodes to N. Await the result for
        their number.

        The source must not change until then. Everything is checked now, before a byte moves. Raises
        AddressError if spans are out of bounds, misaligned, overlap, differ in total, or are in use: those of
        `dst` by any other transfer under way, those of `src` by one that writes them. Raises HardwareError if
        nodes are not linked or no event loop runs. Awaiting it raises HardwareError if the backend fails.
        """
        sources, targets = spans_of("source", src), spans_of("destination", dst)
        linked = {node for endpoint in self.endpoints.values() for node in endpoint.nodes}
        for span in (*sources, *targets):
            if span.address.node not in linked:
                raise HardwareError(f"transfer: node {span.address.node} is not linked")
            self.pod.memory(span.address.node).check(span.address.offset, span.nbytes)
        check_loop("transfer")
        copies = pair(sources, targets)
        for route in {(copy.src.node, copy.dst.node) for copy in copies}:
            self.backend.check_path(*route)
        self._transport.claim(targets, "transfer")
        try:
            self._transport.share(sources, "transfer")
        except AddressError:
            self._transport.release(targets)
            raise

        async def move() -> int:
            if copies:
                await self._transport.move(copies, "DistFlow transfer")
            return sum(copy.nbytes for copy in copies)

        process = self.pod.clock.spawn(move(), name="DistFlow transfer")

        # Not in `move`: a process that is cancelled before its first step never enters it.
        def release(_: asyncio.Task[int]) -> None:
            self._transport.release(targets)
            self._transport.unshare(sources, "transfer")

        asyncio.Task.add_done_callback(process, release)
        return process

    def close(self) -> None:
        """Stop all endpoints of the instance."""
        for endpoint in self.endpoints.values():
            endpoint.stop()


def check_loop(op: str) -> None:
    """Check for a running event loop, which processes need. Raises HardwareError if there is none."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise HardwareError(f"{op}: to be called on a running event loop") from None
