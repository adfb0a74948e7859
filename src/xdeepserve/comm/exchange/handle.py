"""XCCL: a rank's handle on the exchange of tokens between experts (XDS 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.channel import Carrier, Inbox, Means, Observer, Outbox, Steps
from xdeepserve.comm.checks import integer
from xdeepserve.comm.exchange.combine import combine
from xdeepserve.comm.exchange.dispatch import dispatch
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.exchange.rows import Float32, Int32, Kernels, Received, Sent, check_answers, check_tokens
from xdeepserve.comm.turns import Phase, Step, Turns
from xdeepserve.comm.wire import Field
from xdeepserve.errors import AddressError, DeploymentError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Region

__all__ = ["XCCL", "Kernels", "Received"]

T = TypeVar("T")


class XCCL:
    """Dispatch and combine of one rank. All ranks of the group run the same operations in the same order.

    `layout.plan` must have been called on the plans of all the group's dies. A group may be smaller than its
    layout: the survivors of a die that is lost make new handles, reset them and go on. `timeout_ns` is how
    long, in virtual time, an operation waits for its peers. `cores` is how many AIV cores its kernels use
    (all by default) and `carrier` what moves the rows of steps 6-7; neither changes a byte.
    `on_step(op, step)` is called when a step of the paper's seven is complete, for walkthroughs and fault
    tests. `names` is what traces and errors call the two operations, `label` the ranks, and `lane`
    where traces show it.
    """

    def __init__(
        self,
        die: Die,
        rank: int,
        group: Group,
        layout: Layout,
        kernels: Kernels | None = None,
        timeout_ns: int = 1_000_000_000,
        on_step: Observer | None = None,
        cores: int | None = None,
        carrier: Carrier = "mte",
        names: tuple[str, str] = ("dispatch", "combine"),
        label: str = "",
        lane: str = "XCCL",
    ) -> None:
        if not 0 <= rank < group.num_ranks or group.dies[rank] != die.index:
            raise DeploymentError(
                f"die {die.index} is not rank {rank} of the group of dies {list(group.dies)}"
            )
        most = layout.max_experts_per_rank
        if group.num_ranks > layout.num_ranks or group.max_experts_per_rank > most:
            raise DeploymentError(
                f"the layout is for {layout.num_ranks} ranks with {most} experts each, "
                f"the group has {group.num_ranks} with up to {group.max_experts_per_rank}"
            )
        if layout.quantize and kernels is None:
            raise DeploymentError("a quantised exchange needs kernels to quantise with")
        self.die, self.rank, self.group, self.layout, self.kernels = die, rank, group, layout, kernels
        self.means = means_of(die, cores, carrier, timeout_ns)
        self.steps = Steps(die, on_step, lane)
        self.names = names
        called: list[object] = [f"{label} {peer}" if label else peer for peer in range(group.num_ranks)]
        self.called = called[rank]
        self.turns = Turns(self.called, *names)
        self.event_before = 0
        self.outboxes: dict[str, Outbox] = {}
        self.inboxes: dict[str, Inbox] = {}
        for op, blocks in (("dispatch", layout.dispatch), ("combine", layout.combine)):
            self.outboxes[op] = Outbox(die, blocks, rank, group.dies)
            self.inboxes[op] = Inbox(die, blocks, group.dies, self.called, called)
        self.expert_rank = np.asarray(group.expert_rank, np.int64)
        self.own_experts = np.flatnonzero(self.expert_rank == rank)
        self.received: Received | None = None
        self.sent = Sent(np.zeros(0, np.int64), np.zeros(group.num_ranks, np.int64), (0, layout.top_k))

    @property
    def phase(self) -> Phase:
        return self.turns.phase

    @property
    def on_step(self) -> Observer | None:
        return self.steps.on_step

    @on_step.setter
    def on_step(self, observer: Observer | None) -> None:
        self.steps.on_step = observer

    async def dispatch(
        self,
        x: Float32 | npt.NDArray[np.int8],
        topk_idx: Int32,
        event_id: int,
        quantize: bool | None = None,
        scale: Float32 | None = None,
    ) -> Received:
        """Send every token to the ranks of its experts; the token copies that came for this rank's experts.

        x: float32 [T, H], T may be 0. topk_idx: int32 [T, K], physical experts, all of a token different.
        event_id: from 1, greater than that of any earlier dispatch, and the same on all ranks.
        quantize: if given, must agree with the layout.
        scale: float32 [T] if x is int8 and was quantised before (a trampoline forwards what it received).

        The result's arrays are views of the rank's memory, valid until its next dispatch. Raises
        DeadlineError if a rank does not take part in time, ProtocolError if one does something else,
        AddressError for arguments that the layout does not hold. After one of the first two the handle must
        be reset; a refused call has not happened.
        """
        if quantize is not None and quantize != self.layout.quantize:
            raise AddressError(f"dispatch: the layout is for quantize={self.layout.quantize}, not {quantize}")

        def check() -> None:
            check_tokens(self.names[0], self.layout, len(self.expert_rank), x, scale, topk_idx)

        return await self._run(Step.DISPATCH, event_id, dispatch(self, x, scale, topk_idx, event_id), check)

    async def combine(self, expert_out: Float32, event_id: int) -> Float32:
        """Send the experts' answers back to where the tokens came from.

        expert_out: float32 [N, H], one row for each received row, in that order.
        event_id: greater than that of any earlier combine; it may be the dispatch's.
        Returns float32 [T, K, H]: what expert topk_idx[t, k] made of this rank's token t, not yet weighted or
        summed (rounded to bfloat16 on the way if the layout is quantised). Raises as `dispatch` does.
        """

        def check() -> None:
            check_answers(self.names[1], self.layout, self.received, expert_out)

        return await self._run(Step.COMBINE, event_id, combine(self, expert_out, event_id), check)

    def reset(self) -> None:
        """Forget a failed or unfinished exchange.

        All ranks must do so when none is in an exchange, then go on with an event ID that none has used.
        """
        newest = {op: int(inbox.view["event_id"].max()) for op, inbox in self.inboxes.items()}
        self.turns.reset({Step.DISPATCH: newest["dispatch"], Step.COMBINE: newest["combine"]})

    async def _run(
        self, step: Step, event_id: int, operation: Coroutine[Any, Any, T], check: Callable[[], None]
    ) -> T:
        try:
            self.event_before = self.turns.begin(step, event_id, check)
        except BaseException:
            operation.close()
            raise
        self.steps.begin()
        is_done = False
        try:
            result = await operation
            is_done = True
        finally:
            self.turns.end(is_done)
        return result

    # ---- for those who look on ----------------------------------------------------------------------

    @property
    def sent_counts(self) -> npt.NDArray[np.int64]:
        """[R]: rows that the latest dispatch sent to each rank."""
        return self.sent.counts

    def region(self, op: str, part: str) -> Region:
        """One of this rank's regions: its fields, blocks or rows."""
        inbox, outbox = self.inboxes[op], self.outboxes[op]
        return {"fields": inbox.region, "blocks": outbox.region, "rows": inbox.rows_region}[part]

    def block_offset(self, op: str, peer: int) -> int:
        """Offset in this rank's memory of its block for `peer`."""
        return self.outboxes[op].pointer(peer)

    def fields(self, op: str) -> list[Field]:
        """What the peers' fields in this rank's memory say now."""
        return self.inboxes[op].fields()


def means_of(die: Die, cores: int | None, carrier: Carrier, timeout_ns: int) -> Means:
    """Checked: DeploymentError for cores that the die does not have, or a carrier that nobody has."""
    total = die.spec.num_cores("aiv")
    cores = None if cores is None else integer(f"die {die.index}", "cores", cores)
    timeout_ns = integer(f"die {die.index}", "timeout_ns", timeout_ns)
    if cores is not None and not 1 <= cores <= total:
        raise DeploymentError(f"die {die.index} has 1..{total} AIV cores to use, not {cores}")
    if carrier not in ("mte", "urma"):
        raise DeploymentError(f"rows are carried by mte or urma, not {carrier!r}")
    return Means(cores, carrier, timeout_ns)
