"""The exercises, in order: from one field in a die's memory to a model's bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.comm.exchange.layout import HEADER_DTYPE
from xdeepserve.errors import InputError
from xdeepserve.learn import scenes
from xdeepserve.learn.exercise import Exercise


def _packed(result: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Rows by their fields, then byte by byte: what is padding is zero."""
    rows, sent = result
    rows = np.asarray(rows)
    header = rows[:, : HEADER_DTYPE.itemsize].view(HEADER_DTYPE)[:, 0]
    fields = {f"field {name}": header[name] for name in HEADER_DTYPE.names or ()}
    return {"counts": sent.counts, "order": sent.order, **fields, "rows": rows, "shape": sent.shape}


COURSE = (
    Exercise(
        number=1,
        slug="ring_tail",
        title="A ring's tail pointer",
        section="xDeepServe 3.1",
        owner="xdeepserve.comm.p2p.layout",
        name="last_chunks",
        where="send step 3 or receive step 7",
        scene=scenes.send_and_receive,
        parts=lambda result, args: {"fields": result},
        axes={"fields": ("field", "of core, chunk ID, pointer: value")},
        hints=(
            "Of n cores only the last n chunks matter: the core of an earlier one says more by now.",
            "A chunk ID is a count, so chunk 0 has ID 1; the pointer is the ring position behind the chunk.",
            "Positions count for ever: slots, position mod num_slots, are made of them elsewhere.",
        ),
    ),
    Exercise(
        number=2,
        slug="dispatch_counts",
        title="Dispatch: rows and counts",
        section="xDeepServe 3.2",
        owner="xdeepserve.comm.exchange.rows",
        name="pack_tokens",
        where="dispatch step 3",
        scene=scenes.through_trampolines,
        parts=_packed,
        axes={"counts": ("destination rank",), "order": ("row",), "rows": ("row", "byte")}
        | {f"field {name}": ("row",) for name in HEADER_DTYPE.names or ()},
        hints=(
            "Flat index i of topk_idx is token i // K, slot i % K; expert_rank says where its expert lives.",
            "Group by destination with a sort that keeps the order of equals: np.argsort(..., kind='stable').",
            "np.bincount has a place for every rank only if it is told how many there are (minlength).",
        ),
    ),
    Exercise(
        number=3,
        slug="combine_order",
        title="Combine: the order of a sum",
        section="xDeepServe 3.2",
        owner="xdeepserve.comm.exchange.rows",
        name="weighted_sum",
        where="combine, E2A' step 2",
        scene=scenes.through_trampolines,
        parts=lambda result, args: {"sum": result},
        axes={"sum": ("token", "column")},
        hints=(
            "Begin with zeros of float32, and add one slot's product after the other, slot 0 first.",
            "The multiplication rounds once and the addition rounds once: no float64, no einsum, no matmul.",
        ),
    ),
)


def exercise_of(number: int) -> Exercise:
    """One of the course, by its number. InputError if there is none."""
    for exercise in COURSE:
        if exercise.number == number:
            return exercise
    raise InputError(f"there is no exercise {number}: they are 1 to {COURSE[-1].number}")
