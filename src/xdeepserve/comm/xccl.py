"""XCCL: a rank's handle on the exchange of tokens between experts (XDS 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import AddressError, DeploymentError, ProtocolError
from ..hw.die import Die
from ..hw.engines import Copy
from ..hw.memory import Address, Region
from ..hw.waiting import Waiting
from .bf16 import from_bf16, to_bf16
from .combine import combine
from .dispatch import Received, dispatch
from .layout import FIELD, FIELD_DTYPE, Field, Group, Layout
from .protocol import Arrivals, Look, Phase, Step, next_phase

T = TypeVar("T")
Float32 = npt.NDArray[np.float32]


class Kernels(NamedTuple):
    """The arithmetic that the operators fuse, handed in because it belongs to the model."""

    quantize: Callable[[Float32], tuple[npt.NDArray[np.int8], Float32]]
    """float32 [T, H] -> int8 [T, H], float32 scale [T]."""
    to_bf16: Callable[[Float32], npt.NDArray[np.uint16]] = to_bf16
    from_bf16: Callable[[npt.NDArray[np.uint16]], Float32] = from_bf16


class XCCL:
    """Dispatch and combine of one rank. All ranks of the group run the same operations in the same order.

    `layout.plan` must have been called on the plans of all the group's dies. `timeout_ns` is how long, in
    virtual time, an operation waits for its peers. `on_step(op, step)` is called when a step of the paper's
    seven is complete, for walkthroughs and fault tests.
    """

    def __init__(
        self,
        die: Die,
        rank: int,
        group: Group,
        layout: Layout,
        kernels: Kernels | None = None,
        timeout_ns: int = 1_000_000_000,
        on_step: Callable[[str, int], None] | None = None,
    ) -> None:
        if not 0 <= rank < group.num_ranks or group.dies[rank] != die.index:
            raise DeploymentError(
                f"die {die.index} is not rank {rank} of the group of dies {list(group.dies)}"
            )
        if (layout.num_ranks, layout.max_experts_per_rank) != (group.num_ranks, group.max_experts_per_rank):
            raise DeploymentError(
                f"the layout is for {layout.num_ranks} ranks, the group has {group.num_ranks}"
            )
        if layout.quantize and kernels is None:
            raise DeploymentError("a quantised exchange needs kernels to quantise with")
        self.die, self.rank, self.group, self.layout, self.kernels = die, rank, group, layout, kernels
        self.timeout_ns = timeout_ns
        self.on_step = on_step
        self.phase = Phase.READY
        self._last_event_id = {Step.DISPATCH: 0, Step.COMBINE: 0}
        self.expert_rank = np.asarray(group.expert_rank, np.int64)
        self.received: Received | None = None
        self.sent_order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.sent_counts: npt.NDArray[np.int64] = np.zeros(group.num_ranks, np.int64)
        self.sent_shape = (0, layout.top_k)
        self._peer_fields: dict[str, list[Address]] = {}
        self._event_before = 0
        self._step_start = 0

    async def dispatch(
        self, x: Float32, topk_idx: npt.NDArray[np.int32], event_id: int, quantize: bool | None = None
    ) -> Received:
        """Send every token to the ranks of its experts; the token copies that came for this rank's experts.

        x: float32 [T, H], T may be 0. topk_idx: int32 [T, K], physical experts, all of a token different.
        event_id: from 1, greater than that of any earlier dispatch, and the same on all ranks.
        quantize: if given, must agree with the layout.

        The result's arrays are views of the rank's memory, valid until its next dispatch. Raises
        DeadlineError if a rank does not take part in time, ProtocolError if one does something else,
        AddressError for arguments that the layout does not hold. After an error the handle must be reset.
        """
        if quantize is not None and quantize != self.layout.quantize:
            raise AddressError(f"dispatch: the layout is for quantize={self.layout.quantize}, not {quantize}")
        return await self._run(Step.DISPATCH, event_id, dispatch(self, x, topk_idx, event_id))

    async def combine(self, expert_out: Float32, event_id: int) -> Float32:
        """Send the experts' answers back to where the tokens came from.

        expert_out: float32 [N, H], one row for each received row, in that order.
        event_id: greater than that of any earlier combine; it may be the dispatch's.
        Returns float32 [T, K, H]: what expert topk_idx[t, k] made of this rank's token t, not yet weighted or
        summed (rounded to bfloat16 on the way if the layout is quantised). Raises as `dispatch` does.
        """
        return await self._run(Step.COMBINE, event_id, combine(self, expert_out, event_id))

    def reset(self) -> None:
        """Forget a failed or unfinished exchange.

        All ranks must do so when none is in an exchange, then go on with an event ID that none has used.
        """
        self.phase = next_phase(self.phase, Step.RESET)
        for step, op in ((Step.DISPATCH, "dispatch"), (Step.COMBINE, "combine")):
            posted = max(field.event_id for field in self.fields(op))
            self._last_event_id[step] = max(self._last_event_id[step], posted)

    # ---- shared by the two operators ----------------------------------------------------------------

    async def _run(self, step: Step, event_id: int, operation: Any) -> Any:
        try:
            last = self._last_event_id[step]
            if event_id <= last:
                raise ProtocolError(
                    f"{step.name.lower()}: rank {self.rank} was given event {event_id} after {last}: "
                    "event IDs must increase"
                )
            self.phase = next_phase(self.phase, step)
        except ProtocolError:
            operation.close()
            raise
        self._event_before, self._last_event_id[step] = last, event_id
        self._step_start = self.die.clock.now
        try:
            result = await operation
        except BaseException:
            self.phase = next_phase(self.phase, Step.FAIL)
            raise
        self.phase = next_phase(self.phase, Step.DONE)
        return result

    def region(self, op: str, part: str) -> Region:
        """One of this rank's regions: its fields, blocks or rows."""
        memory = self.die.memory
        area = {"fields": memory.metadata, "blocks": memory.managed, "rows": memory.app}[part]
        return area.regions[self.layout.region(op, part)]

    def block_offset(self, op: str, peer: int) -> int:
        """Offset in this rank's memory of its block for `peer`."""
        size = self.layout.dispatch_block if op == "dispatch" else self.layout.combine_block
        return self.region(op, "blocks").offset + peer * size

    def fields(self, op: str) -> list[Field]:
        """What the peers' fields in this rank's memory say now."""
        region = self.region(op, "fields")
        raw = self.die.memory.read(region.offset, region.nbytes)
        return [Field(*values) for values in FIELD.iter_unpack(raw)]

    async def post_fields(self, op: str, event_id: int, counts: npt.NDArray[np.int64]) -> None:
        """Step 4: tell every rank how many rows there are for it and where, in its field for this rank."""
        num_ranks = self.group.num_ranks
        fields = np.zeros(num_ranks, FIELD_DTYPE)
        size = self.layout.dispatch_block if op == "dispatch" else self.layout.combine_block
        fields["event_id"] = event_id
        fields["pointer"] = self.block_offset(op, 0) + size * np.arange(num_ranks)
        fields["num_tokens"] = counts
        raw = memoryview(fields.tobytes())
        if op not in self._peer_fields:
            name, memories = self.layout.region(op, "fields"), self.die.fabric.memories
            regions = [memories[die].metadata.regions[name] for die in self.group.dies]
            self._peer_fields[op] = [region.address.plus(self.rank * FIELD.size) for region in regions]
        pieces = [
            (address, raw[start : start + FIELD.size])
            for address, start in zip(self._peer_fields[op], range(0, len(raw), FIELD.size), strict=True)
        ]
        await self.die.mte.store(pieces, name=f"{op} 4 post fields")

    async def wait_for_fields(self, op: str, event_id: int) -> list[Field]:
        """Step 5: poll the own metadata until all ranks have posted; what they posted."""
        die, region = self.die, self.region(op, "fields")
        arrivals = Arrivals(op, self.rank, self.group.num_ranks, event_id, self._event_before)
        raw = die.memory.read(region.offset, region.nbytes)
        event_ids = np.frombuffer(raw, FIELD_DTYPE)["event_id"]
        look = Look.FIRST
        last = None  # who kept this rank waiting, and until when

        def observe(offset: int, nbytes: int) -> bool:
            nonlocal look, last
            if look is Look.FIRST:
                arrivals.look_at_all(event_ids.tolist())
                look = Look.WRITE
            else:
                # One write is one field: peers post nothing else here.
                at = offset - region.offset
                last = at // FIELD.size, die.clock.now
                arrivals.look(last[0], FIELD.unpack_from(raw, at)[0], Look.WRITE)
            return arrivals.is_complete

        def describe() -> Waiting:
            seen = {peer: int(event_ids[peer]) for peer in arrivals.awaited[:8]}
            return Waiting(op, self.rank, Ranks(arrivals.awaited), "event ID", event_id, seen)

        deadline_ns = die.clock.now + self.timeout_ns
        await die.wait_fields(
            region.offset, region.nbytes, observe, deadline_ns=deadline_ns, describe=describe
        )
        if last is not None:
            # An arrow from the store that ended the wait to the wait: who held up the barrier.
            source, now = self.group.dies[last[0]], die.clock.now
            die.trace.flow(f"{op} last field", source, "MTE3", last[1] - 1, die.index, "XCCL", now - 1)
        return self.fields(op)

    async def pull(self, op: str, fields: list[Field], row_nbytes: int) -> npt.NDArray[np.uint8]:
        """Steps 6-7: read every peer's rows for this rank into the own app area; uint8 [rows, row_nbytes]."""
        rows = self.region(op, "rows")
        counts = [field.num_tokens for field in fields]
        num_rows = sum(counts)
        if num_rows * row_nbytes > rows.nbytes:
            raise ProtocolError(
                f"{op}: rank {self.rank} has no room for the {num_rows} rows that its peers post"
            )
        pieces, offset = [], rows.offset
        for die, field in zip(self.group.dies, fields, strict=True):
            nbytes = field.num_tokens * row_nbytes
            if nbytes:
                pieces.append(Copy(Address(die, field.pointer), Address(self.die.index, offset), nbytes))
                offset += nbytes
        if pieces:
            await self.die.mte.copy(pieces, name=f"{op} 6-7 pull")
        return self.die.memory.view(rows, np.uint8, (num_rows, row_nbytes))

    def write_pieces(
        self, op: str, rows: npt.NDArray[np.uint8], counts: npt.NDArray[np.int64]
    ) -> list[tuple[Address, memoryview]]:
        """Step 3: rows, grouped by rank, to this rank's blocks for those ranks."""
        raw, row_nbytes = memoryview(rows.tobytes()), rows.shape[1]
        pieces, start = [], 0
        for peer, count in enumerate(counts.tolist()):
            if count:
                stop = start + count * row_nbytes
                pieces.append((Address(self.die.index, self.block_offset(op, peer)), raw[start:stop]))
                start = stop
        return pieces

    def step_done(self, op: str, step: int) -> None:
        """Note that steps up to `step` of the paper's seven are complete."""
        name = f"{op} {step}" if step < 7 else f"{op} 6-7"
        now = self.die.clock.now
        if now > self._step_start:
            self.die.trace.span(self.die.index, "XCCL", name, self._step_start, now)
        self._step_start = now
        if self.on_step is not None:
            self.on_step(op, step)


class Ranks(tuple[int, ...]):
    """Rank numbers that print short."""

    def __str__(self) -> str:
        return f"{list(self)}" if len(self) <= 8 else f"{list(self[:8])} and {len(self) - 8} more"
