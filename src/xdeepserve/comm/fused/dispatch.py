"""FusedDispatch: tokens are quantised and pushed to the ranks of their experts, in three steps (CM 4.2.1)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.checks import check_array
from xdeepserve.comm.exchange.rows import check_scale
from xdeepserve.comm.fused.layout import SLOT_DTYPE
from xdeepserve.comm.fused.place import FusedPlace
from xdeepserve.comm.handle import Handle, Quantize
from xdeepserve.errors import AddressError, ProtocolError


class FusedReceived(NamedTuple):
    """Tokens for the experts of a rank: grouped by expert, in it by source rank, in it by (slot, key)."""

    payload: npt.NDArray[np.int8] | npt.NDArray[np.float32]  # [N, H]
    scale: npt.NDArray[np.float32]  # [N]; 1 if not quantised
    expert_idx: npt.NDArray[np.int32]  # [N], physical
    source_rank: npt.NDArray[np.int32]  # [N]
    batch_slot: npt.NDArray[np.int32]  # [N], row of x at the source
    key_offset: npt.NDArray[np.int32]  # [N], which of its token's top-k
    num_tokens_per_expert: npt.NDArray[np.int64]  # [experts of this rank], sums to N

    def __len__(self) -> int:
        return len(self.scale)


async def fused_dispatch(
    handle: Handle,
    place: FusedPlace,
    x: npt.NDArray[np.generic],
    scale: npt.NDArray[np.float32] | None,
    topk_idx: npt.NDArray[np.int32],
    event_id: int,
) -> FusedReceived:
    """FusedDispatch on a rank: quantise x [T, H], push it to the ranks of its experts, topk_idx [T, K]."""
    die, layout, spec, op = handle.die, place.layout, handle.die.spec, place.titles.dispatch
    await die.clock.sleep(spec.kernel_ns(0, 0))

    # Step 1: the cores loop over (token, key) in a pipeline of three stages, one token a step: (1) load the
    # token into the unified buffer; (2) find its place in the peer's buffer, quantise it and attach scale and
    # routing; (3) write it there, AIV-direct. Each rank writes to a block of its own, so places need no
    # negotiation.
    destination = place.expert_rank[topk_idx.reshape(-1)]
    order = np.argsort(destination, kind="stable")
    counts = np.bincount(destination, minlength=place.group.num_ranks)
    if counts.max() > layout.max_tokens:
        raise AddressError(
            f"{op}: {counts.max()} messages for rank {counts.argmax()}, whose block holds "
            f"{layout.max_tokens}: a token's experts must be different"
        )
    messages = _messages(handle.quantize, place, x, scale, topk_idx, order)
    raw, pieces, start = memoryview(messages.tobytes()), [], 0
    for peer, count in enumerate(counts.tolist()):
        if count:
            stop = start + count * layout.dispatch_message
            block = place.region("dispatch", place.group.dies[peer]).address
            pieces.append((block.plus(layout.dispatch_offset(place.rank, 0)), raw[start:stop]))
            start = stop
    is_quantised = handle.quantize is not None and scale is None
    flops = 4 * len(order) * layout.hidden if is_quantised else 0
    if pieces:
        await die.mte.push(
            pieces,
            load_nbytes=len(order) * layout.hidden * x.itemsize,
            work_ns=spec.kernel_ns(flops, 0, core="aiv", cores=handle.num_cores, is_fused=True),
            num_steps=len(order),
            cores=handle.num_cores,
            name=f"{op} 1 push",
            copies=place.crossing(counts),
        )
    await handle.steps.passed(op, 1)

    # Step 2: the cores meet (all tokens are written: one engine's stores complete in order), then
    # the number of tokens for each expert goes to the expert's rank, as a flag, also if there are none.
    await die.clock.sleep(spec.meeting_ns())
    flags = np.zeros(place.group.num_ranks, layout.flag_dtype)
    np.add.at(flags["counts"], (destination, place.local_idx[topk_idx.reshape(-1)]), 1)
    place.board.begin(event_id)
    await place.board.post(flags, f"{op} 2 flags", handle.num_cores)
    await handle.steps.passed(op, 2)

    # Step 3: poll all flags; prefix sums of the counts are the output offsets, so the cores meet once more;
    # gather the tokens there.
    flags = await place.board.wait(op, handle.means.timeout_ns)
    await die.clock.sleep(spec.meeting_ns())
    num_tokens = int(flags["counts"].sum())
    nbytes = num_tokens * layout.dispatch_message
    gather = partial(_gather, place, flags["counts"].astype(np.int64))
    received = await handle.work(f"{op} 3 gather", gather, 0, 2 * nbytes)
    await handle.steps.passed(op, 3)
    return received


def _messages(
    quantize: Quantize | None,
    place: FusedPlace,
    x: npt.NDArray[np.generic],
    scale: npt.NDArray[np.float32] | None,
    topk_idx: npt.NDArray[np.int32],
    order: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint8]:
    """Build the messages, a message per (token, key), in `order`: uint8 [T * K, message]."""
    layout = place.layout
    payload = x
    if quantize is not None and scale is None:
        payload, scale = quantize(x.view(np.float32))
    if scale is None:
        scale = np.ones(len(x), np.float32)
    batch_slot, key_offset = np.divmod(order, layout.top_k)
    messages = np.zeros((len(order), layout.dispatch_message), np.uint8)
    nbytes = layout.hidden * layout.dispatch_payload.itemsize
    messages[:, :nbytes] = np.ascontiguousarray(payload).view(np.uint8)[batch_slot]
    slots = messages[:, layout.slot_offset :][:, : SLOT_DTYPE.itemsize].view(SLOT_DTYPE)[:, 0]
    slots["scale"] = scale[batch_slot]
    slots["source_rank"] = place.rank
    slots["batch_slot"] = batch_slot
    slots["key_offset"] = key_offset
    slots["expert_idx"] = topk_idx.reshape(-1)[order]
    return messages


def _gather(place: FusedPlace, counts: npt.NDArray[np.int64]) -> FusedReceived:
    """Gather the dispatch buffer into contiguous output. counts: [R, E], messages by source rank and local
    expert."""
    layout, memory, op = place.layout, place.die.memory, place.titles.dispatch
    shape = (layout.num_ranks, layout.max_tokens, layout.dispatch_message)
    buffer = memory.view(place.region("dispatch"), np.uint8, shape)
    per_source = counts.sum(axis=1).tolist()
    if max(per_source) > layout.max_tokens:
        source = int(np.argmax(per_source))
        raise ProtocolError(
            f"{op}: rank {place.rank}: peer {source} posts {per_source[source]} tokens, "
            f"but its block holds {layout.max_tokens}"
        )
    arrived = np.concatenate([buffer[source, :count] for source, count in enumerate(per_source)])
    slots = arrived[:, layout.slot_offset :][:, : SLOT_DTYPE.itemsize].view(SLOT_DTYPE)[:, 0]
    local_of = {e: place.local_idx[e] for e in np.flatnonzero(place.expert_rank == place.rank).tolist()}
    local = np.array([local_of.get(e, -1) for e in slots["expert_idx"].tolist()], np.int64)
    found = np.zeros_like(counts)
    for source, rows in enumerate(np.split(local, np.cumsum(per_source)[:-1])):
        found[source] = np.bincount(rows[rows >= 0], minlength=counts.shape[1])
    if not np.array_equal(found, counts):
        source = int(np.flatnonzero((found != counts).any(axis=1))[0])
        raise ProtocolError(
            f"{op}: rank {place.rank}: peer {source} posts {counts[source].tolist()} tokens for the "
            f"experts here, but its messages are for {found[source].tolist()}"
        )
    order = np.argsort(local, kind="stable")  # within an expert: by source rank, then (slot, key)
    payload_nbytes = layout.hidden * layout.dispatch_payload.itemsize
    payload = memory.view(place.region("output"), np.uint8, (len(order), payload_nbytes))
    payload[:] = arrived[order, :payload_nbytes]
    out = memory.view(place.region("output_slots"), SLOT_DTYPE, len(order))
    out[:] = slots[order]
    return FusedReceived(
        payload=payload.view(layout.dispatch_payload),
        scale=out["scale"],
        expert_idx=out["expert_idx"],
        source_rank=out["source_rank"],
        batch_slot=out["batch_slot"],
        key_offset=out["key_offset"],
        num_tokens_per_expert=counts.sum(axis=0)[: int((place.expert_rank == place.rank).sum())],
    )


def check_tokens(
    place: FusedPlace,
    x: npt.NDArray[np.generic],
    scale: npt.NDArray[np.generic] | None,
    topk_idx: npt.NDArray[np.generic],
) -> None:
    """Check x [T, H], scale [T] (if x is quantised) and topk_idx [T, K]. Raises AddressError if they do not
    fit the layout."""
    layout, op = place.layout, place.titles.dispatch
    for name, array in (("x", x), ("topk_idx", topk_idx)):
        check_array(op, name, array)
    dtype = np.dtype(np.float32 if scale is None else np.int8)
    if x.dtype != dtype or x.ndim != 2 or x.shape[1] != layout.hidden or not x.flags.c_contiguous:
        raise AddressError(
            f"{op}: x must be contiguous {dtype} [T, {layout.hidden}], not {x.dtype} {x.shape}"
        )
    if scale is not None:
        check_scale(op, len(x), layout.quantize, scale)
    if len(x) > layout.local_batch:
        raise AddressError(f"{op}: {len(x)} tokens exceed the layout's batch of {layout.local_batch}")
    if topk_idx.dtype != np.int32 or topk_idx.shape != (len(x), layout.top_k):
        expected = f"int32 [{len(x)}, {layout.top_k}]"
        raise AddressError(f"{op}: topk_idx must be {expected}, not {topk_idx.dtype} {topk_idx.shape}")
    num_experts = len(place.expert_rank)
    if topk_idx.size and not 0 <= topk_idx.min() <= topk_idx.max() < num_experts:
        raise AddressError(f"{op}: topk_idx has values outside the physical experts 0..{num_experts - 1}")
    # With more than one expert a rank, a repeated expert could still fit the block, and answer one place
    # twice.
    ordered = np.sort(topk_idx, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise AddressError(f"{op}: a token's experts must be different")
