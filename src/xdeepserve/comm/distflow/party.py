"""What both sides of a transfer have in common: spans that are theirs, messages, completions, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from xdeepserve.comm.distflow.rules import State
from xdeepserve.comm.distflow.spans import spans_of
from xdeepserve.comm.distflow.transfer import Completion, Message, Transfer
from xdeepserve.errors import DeploymentError, HardwareError, ProtocolError
from xdeepserve.hw.memory import Address
from xdeepserve.hw.queue import Queue
from xdeepserve.hw.waiting import Waiting

if TYPE_CHECKING:
    from xdeepserve.comm.distflow.flow import DistFlow

Table = dict[tuple[str, int], Transfer]  # open transfers by peer and tag


class Party:
    """A named group of nodes: say the dies of a DP group."""

    def __init__(self, flow: DistFlow, name: str, nodes: tuple[int, ...]) -> None:
        self.flow, self.name, self.nodes = flow, name, nodes
        self._inbox: Queue[Message] = Queue(flow.pod.clock, f"messages of {name}")
        self._completions: list[Completion] = []
        self.on_completion: Callable[[], None] = lambda: None  # tells the owner that it is time to poll
        self._processes: dict[asyncio.Task[Any], None] = {}

    def poll(self) -> list[Completion]:
        """The completions since the last poll, oldest first (step 8)."""
        done, self._completions = self._completions, []
        return done

    def _register(
        self,
        table: Table,
        tag: int,
        peer: str,
        parts: Sequence[Sequence[tuple[Address, int]]],
        state: State,
    ) -> Transfer:
        """A new transfer, for `table`. Whether the two sides fit is known when they meet; what is wrong with
        this one is, now.
        """
        if peer not in self.flow.endpoints:
            raise DeploymentError(f"{self.name} is not linked to '{peer}'")
        if (peer, tag) in table:
            raise ProtocolError(f"{self.name} and {peer} already have an open transfer with tag {tag}")
        side = "source" if state is State.OFFERED else "destination"
        transfer = Transfer(tag, peer, tuple(spans_of(side, pieces) for pieces in parts), state)
        for span in transfer.spans:
            if span.address.node not in self.nodes:
                raise HardwareError(
                    f"node {span.address.node} is not one of {self.name}'s {list(self.nodes)}"
                )
            self.flow.pod.memory(span.address.node).check(span.address.offset, span.nbytes)
        return transfer

    def _release(self, transfer: Transfer) -> None:
        self.flow.release(transfer.claimed)
        self.flow.unshare(transfer.shared, self._reader(transfer.tag))
        transfer.claimed = transfer.shared = ()

    def _reader(self, tag: int) -> str:
        return f"send {tag} of {self.name}"

    def _complete(self, transfer: Transfer, is_source: bool) -> None:
        now = self.flow.pod.clock.now
        self._completions.append(
            Completion(
                transfer.tag,
                transfer.peer,
                is_source,
                transfer.nbytes,
                now,
                transfer.error,
                is_revoked=transfer.state is State.STOPPED,
                ready_ns=tuple(transfer.ready_ns),
                moves=tuple(transfer.moves),
            )
        )
        self.on_completion()

    def _tell(self, peer: str, message: Message) -> None:
        self.flow.endpoints[peer]._inbox.put(message, delay_ns=self.flow.pod.spec.command_ns())

    def _abort(self, table: Table, tag: int, peer: str, is_source: bool) -> bool:
        """End this side of a transfer at once, without a completion. False if it has ended well already."""
        transfer = table.pop((peer, tag), None)
        if transfer is not None:
            assert transfer.process is not None
            transfer.process.cancel()
            self._release(transfer)
            return True
        failed = [
            done
            for done in self._completions
            if (done.tag, done.peer, done.is_source) == (tag, peer, is_source) and done.error is not None
        ]
        self._completions = [done for done in self._completions if done not in failed]
        return bool(failed)

    async def _change(self, transfer: Transfer, op: str, word: str, deadline_ns: int | None) -> None:
        """Wait until the peer's word, or the owner's, has changed the state of a transfer."""
        clock = self.flow.pod.clock
        field = f"{word} of tag {transfer.tag}"
        transfer.waiter = clock.waiter(
            lambda: Waiting(
                op, self.name, transfer.peer, field, word, f"nothing while {transfer.state.value}"
            )
        )
        await clock.wait(transfer.waiter, deadline_ns, idle=deadline_ns is None)

    def _spawn(self, coro: Any, what: str) -> asyncio.Task[Any]:
        process = self.flow.pod.clock.spawn(coro, name=f"DistFlow {self.name}: {what}")
        self._processes[process] = None
        asyncio.Task.add_done_callback(process, lambda done: self._processes.pop(done, None))
        return process
