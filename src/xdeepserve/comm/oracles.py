"""Reference results of every primitive, in NumPy: no dies, no bytes on their way, no time.

For tests of this package's protocols and of yours. Everything is written as a walk over sources, tokens and
slots, as slow and as plain as can be, and shares no code with the protocols, not even the rounding to
bfloat16; results are compared bit by bit. `expert_rank[e]` is where physical expert e lives, `quantize` makes
int8 [T, H] and float32 [T] of float32 [T, H], or is None where nothing is quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Float32: TypeAlias = npt.NDArray[np.float32]
Int32: TypeAlias = npt.NDArray[np.int32]
Quantize: TypeAlias = Callable[[Float32], tuple[npt.NDArray[np.int8], Float32]]
Expert: TypeAlias = Callable[[int, Float32], Float32]
"""A physical expert's number and a token [H] -> its answer [H]."""
Piece: TypeAlias = tuple[int, int, int]
"""Of a transfer on raw addresses: which buffer, from which byte on, how many."""


def round_to_bf16(x: Float32) -> Float32:
    """Round to the nearest bfloat16 value, ties to even, in exact float64."""
    low = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    to_low, to_high = np.abs(x.astype(float) - low), np.abs(high.astype(float) - x)
    low_is_even = (low.view(np.uint32) & np.uint32(0x10000)) == 0
    return np.where((to_low < to_high) | ((to_low == to_high) & low_is_even), low, high)


# ---- dispatch and combine (XDS 3.2) -----------------------------------------------------------------


def dispatch(
    tokens: Sequence[Float32],
    topk_idx: Sequence[Int32],
    expert_rank: Sequence[int],
    rank: int,
    quantize: Quantize | None = None,
) -> dict[str, Array]:
    """Compute the members of `Received` at `rank`. tokens: [T, H] of each source, topk_idx: [T, K] of each.

    Rows are ordered by source, in it by (token, slot).
    """
    rows: list[tuple[Any, ...]] = []
    counts = []
    for x, topk in zip(tokens, topk_idx, strict=True):
        payload, scale = _quantized(x, quantize)
        mine = [
            (payload[t], scale[t], e, t, k)
            for t in range(len(x))
            for k, e in enumerate(topk[t])
            if expert_rank[e] == rank
        ]
        rows += mine
        counts.append(len(mine))
    columns = _columns(rows, 5)
    return {
        "payload": _payload(columns[0], tokens, quantize),
        "scale": np.array(columns[1], np.float32),
        "expert_idx": np.array(columns[2], np.int32),
        "token_idx": np.array(columns[3], np.int32),
        "slot": np.array(columns[4], np.int32),
        "num_tokens_per_rank": np.array(counts, np.int64),
    }


def combine(x: Float32, topk_idx: Int32, expert: Expert, quantize: Quantize | None = None) -> Float32:
    """Compute the answers of each token's experts, over the way there and back: float32 [T, K, H]."""
    payload, scale = _quantized(x, quantize)
    x = payload.astype(np.float32) * scale[:, None]
    out = np.zeros((*topk_idx.shape, x.shape[1]), np.float32)
    for t, k in np.ndindex(*topk_idx.shape):
        out[t, k] = expert(int(topk_idx[t, k]), x[t])
    return out if quantize is None else round_to_bf16(out)


def weighted_sum(answers: Float32, topk_weights: Float32) -> Float32:
    """Sum [T, K, H] by weights [T, K] to [T, H], slot by slot, each step rounded: the result of E2A after
    `combine`."""
    out = np.zeros((answers.shape[0], answers.shape[2]), np.float32)
    for t, k in np.ndindex(*topk_weights.shape):
        out[t] = out[t] + answers[t, k] * topk_weights[t, k]
    return out


# ---- FusedDispatch and FusedCombine (CM 4.2.1) ------------------------------------------------------


def fused_dispatch(
    tokens: Sequence[Float32],
    topk_idx: Sequence[Int32],
    expert_rank: Sequence[int],
    rank: int,
    quantize: Quantize | None = None,
) -> dict[str, Array]:
    """Compute the members of `FusedReceived` at `rank`: like `dispatch`, but ordered by the rank's experts
    first."""
    rows: list[tuple[Any, ...]] = []
    counts = []
    for e in [e for e, home in enumerate(expert_rank) if home == rank]:
        before = len(rows)
        for source, (x, topk) in enumerate(zip(tokens, topk_idx, strict=True)):
            payload, scale = _quantized(x, quantize)
            for t, k in np.ndindex(*topk.shape):
                if topk[t, k] == e:
                    rows.append((payload[t], scale[t], e, source, t, k))
        counts.append(len(rows) - before)
    columns = _columns(rows, 6)
    return {
        "payload": _payload(columns[0], tokens, quantize),
        "scale": np.array(columns[1], np.float32),
        "expert_idx": np.array(columns[2], np.int32),
        "source_rank": np.array(columns[3], np.int32),
        "batch_slot": np.array(columns[4], np.int32),
        "key_offset": np.array(columns[5], np.int32),
        "num_tokens_per_expert": np.array(counts, np.int64),
    }


def fused_combine(answers: Float32, topk_weights: Float32, shared: Float32 | None = None) -> Float32:
    """Combine the answers [T, K, H] to [T, H]: the weighted sum, then the shared expert's output."""
    total = weighted_sum(answers, topk_weights)
    return total if shared is None else total + shared


# ---- collectives ------------------------------------------------------------------------------------


def tree(parts: Sequence[Array], reduction: str = "sum") -> Array:
    """Reduce in the canonical order, by recursion: the largest power of two of ranks to the left."""
    if len(parts) == 1:
        return parts[0]
    left = 1
    while 2 * left < len(parts):
        left *= 2
    a, b = tree(parts[:left], reduction), tree(parts[left:], reduction)
    return a + b if reduction == "sum" else np.where(a > b, a, b)


def collective(op: str, inputs: Sequence[Any], rank: int, reduction: str = "sum", root: int = 0) -> Any:
    """Compute the result of `Collectives.<op>` at `rank`; inputs are the arguments at each rank."""
    if op == "barrier":
        return None
    if op == "broadcast":
        return inputs[root]
    if op == "all_gather":
        return np.stack(inputs)
    if op == "all_to_all":
        return [inputs[source][rank] for source in range(len(inputs))]
    whole = tree(inputs, reduction)
    if op == "all_reduce":
        return whole
    return whole[len(whole) * rank // len(inputs) : len(whole) * (rank + 1) // len(inputs)]


# ---- from memory to memory --------------------------------------------------------------------------


def ring(messages: Sequence[bytes], slot_nbytes: int, num_slots: int) -> list[bytes]:
    """Compute a ring's slots after send and receive: chunk after chunk, each written over its slot's old
    bytes."""
    slots = [b""] * num_slots
    position = 0
    for message in messages:
        for chunk in [message[i : i + slot_nbytes] for i in range(0, len(message), slot_nbytes)] or [b""]:
            old = slots[position % num_slots]
            slots[position % num_slots] = chunk + old[len(chunk) :]
            position += 1
    return slots


def transfer(buffers: Sequence[bytearray], src: Sequence[Piece], dst: Sequence[Piece]) -> None:
    """Compute a DistFlow transfer in place: the bytes of `src`, in order, go to `dst`, in order."""
    data = b"".join(buffers[buffer][at : at + nbytes] for buffer, at, nbytes in src)
    for buffer, at, nbytes in dst:
        buffers[buffer][at : at + nbytes], data = data[:nbytes], data[nbytes:]


# ---- rows -------------------------------------------------------------------------------------------


def _quantized(x: Float32, quantize: Quantize | None) -> tuple[Array, Float32]:
    return (x, np.ones(len(x), np.float32)) if quantize is None else quantize(x)


def _columns(rows: list[tuple[Any, ...]], num_columns: int) -> list[Any]:
    return list(zip(*rows, strict=True)) if rows else [[]] * num_columns


def _payload(rows: Any, tokens: Sequence[Float32], quantize: Quantize | None) -> Array:
    dtype = np.float32 if quantize is None else np.int8
    return np.array(rows, dtype).reshape(len(rows), tokens[0].shape[1])
