"""Expected outputs of each case, by the NumPy oracles, so that wrong vectors are never written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.comm import oracles
from xdeepserve.errors import XDeepServeError
from xdeepserve.golden.harness import Done
from xdeepserve.golden.recorder import Arrays
from xdeepserve.model.canonical import quantize_rows


def verified(done: Done, expected: Arrays) -> Done:
    """Return the case, after comparing its outputs with the oracles', bit for bit.

    XDeepServeError if an output that the oracles compute is missing or has other bytes.
    """
    outputs = done.recording.outputs
    for name, array in expected.items():
        found = outputs.get(name)
        if found is None or (found.dtype, found.tobytes()) != (array.dtype, array.tobytes()):
            raise XDeepServeError(f"golden case: output {name} is not what the NumPy oracle says")
    return done


def exchange(
    inputs: Arrays,
    expert_rank: Sequence[int],
    expert: oracles.Expert,
    quantize: bool,
    is_fused: bool = False,
) -> Arrays:
    """Compute the outputs of dispatch and combine, or with `is_fused` of FusedDispatch and FusedCombine."""
    quantizer = quantize_rows if quantize else None
    ranks = range(sum(name.endswith(".topk_idx") for name in inputs))
    x, topk_idx = ([inputs[f"rank{rank}.{name}"] for rank in ranks] for name in ("x", "topk_idx"))
    dispatch = oracles.fused_dispatch if is_fused else oracles.dispatch
    result: Arrays = {}
    for rank in ranks:
        received = dispatch(x, topk_idx, expert_rank, rank, quantizer)
        result |= {f"rank{rank}.received.{name}": array for name, array in received.items()}
        combined = oracles.combine(x[rank], topk_idx[rank], expert, quantizer)
        if is_fused:
            weights, shared = (inputs[f"rank{rank}.{name}"] for name in ("topk_weights", "shared"))
            combined = oracles.fused_combine(combined, weights, shared)
        result[f"rank{rank}.combined"] = combined
    return result


def a2e(inputs: Arrays, expert: oracles.Expert) -> Arrays:
    """Compute the outputs of A2E and E2A at the attention dies."""
    result: Arrays = {}
    for rank in range(sum(name.endswith(".topk_idx") for name in inputs)):
        x, topk_idx, weights = (inputs[f"rank{rank}.{name}"] for name in ("x", "topk_idx", "topk_weights"))
        answers = oracles.combine(x, topk_idx, expert, quantize_rows)
        result[f"rank{rank}.combined"] = oracles.weighted_sum(answers, weights)
    return result


def collective(op: str, inputs: Arrays, num_ranks: int, root: int) -> Arrays:
    """Compute each rank's output of a collective, in plain NumPy."""
    if op == "barrier":
        return {f"rank{rank}.passed": inputs[f"rank{rank}.event_ids"] for rank in range(num_ranks)}
    if op == "all_to_all":
        return {
            f"rank{rank}.from{peer}": inputs[f"rank{peer}.to{rank}"]
            for rank in range(num_ranks)
            for peer in range(num_ranks)
        }
    whole = [inputs[f"rank{rank}.x"] for rank in range(num_ranks)]
    return {f"rank{rank}.result": oracles.collective(op, whole, rank, root=root) for rank in range(num_ranks)}


def transfers(
    inputs: Arrays, moves: Sequence[tuple[Sequence[oracles.Piece], Sequence[oracles.Piece]]]
) -> Arrays:
    """Compute the buffers after DistFlow's transfers, one after the other."""
    buffers = [bytearray(inputs[f"rank{rank}.buffer"].tobytes()) for rank in range(len(inputs))]
    for src, dst in moves:
        oracles.transfer(buffers, src, dst)
    return {f"rank{rank}.buffer": np.frombuffer(buffer, np.uint8) for rank, buffer in enumerate(buffers)}
