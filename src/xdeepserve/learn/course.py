"""The exercises of the course, in order: from one field in a die's memory to a model's bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.comm.exchange.layout import HEADER_DTYPE
from xdeepserve.errors import InputError
from xdeepserve.learn import scenes
from xdeepserve.learn.exercise import Exercise


def _packed(result: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Split dispatch rows into fields, then bytes; padding must be zero."""
    rows, sent = result
    rows = np.asarray(rows)
    header = rows[:, : HEADER_DTYPE.itemsize].view(HEADER_DTYPE)[:, 0]
    fields = {f"field {name}": header[name] for name in HEADER_DTYPE.names or ()}
    return {"counts": sent.counts, "order": sent.order, **fields, "rows": rows, "shape": sent.shape}


def _by_head(result: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Describe the memory layout of an attention output, then give its numbers by head."""
    (tokens, heads), rows = args[2].shape[:2], np.asarray(result)
    layout = f"{rows.dtype} {list(rows.shape)}, {'' if rows.flags.c_contiguous else 'not '}contiguous"
    by_head = rows.reshape(tokens, heads, -1) if rows.size and rows.size % (tokens * heads) == 0 else rows
    return {"layout": layout, "output": by_head}


def _booked(result: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Give a block's copy, and the block table's books after it."""
    table, holding = args[:2]
    return {
        "the copy": result,
        "the sequence's slots": list(holding.slots),
        "the sequence's blocks in the index": len(holding.nodes),
        "users": list(table._users),
        "free slots": list(table._free),
        "busy slots": sorted(set().union(*table._busy.values())),
    }


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
            "Group by destination with a sort that keeps the order of equals: kind='stable'.",
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
    Exercise(
        number=4,
        slug="mla_absorption",
        title="MLA: attention in the latent space",
        section="DeepSeek-V2 2.1",
        owner="xdeepserve.model.reference:Canonical",
        name="attend_to",
        where="attention of the forward pass",
        scene=scenes.forward_pass,
        parts=_by_head,
        axes={"output": ("position", "head", "value")},
        hints=(
            "q . (W_uk c) = (W_uk^T q) . c: each head's query goes into the latent space once, by w_uk.",
            "With INT8, quantize_rows(latent) is what the cache holds; token t sees latent[seen[t]].",
            "Batched products are [N, T, ...]: transpose(1, 0, 2) there and back; at the end w_uv.",
        ),
    ),
    Exercise(
        number=5,
        slug="group_gating",
        title="Gating, limited to groups",
        section="DeepSeek-V3 2.1.2",
        owner="xdeepserve.model.canonical",
        name="gate",
        where="the gate of the forward pass",
        scene=scenes.forward_pass,
        parts=lambda result, args: {"topk_idx": result[0], "topk_weights": result[1]},
        axes={"topk_idx": ("token", "slot"), "topk_weights": ("token", "slot")},
        hints=(
            "A group's score is the sum of its two best (scores + bias); closed groups are -inf.",
            "A stable argsort of the negated values gives ties to the lower index.",
            "Weights are scores without bias, over (their sum, slot by slot, + GATE_EPS), then scaled.",
        ),
    ),
    Exercise(
        number=6,
        slug="int8_tokens",
        title="INT8 with a scale per token",
        section="CloudMatrix384 4.5",
        owner="xdeepserve.engine.ways.arithmetic",
        name="quantize_rows",
        where="A2E step 2",
        scene=scenes.through_trampolines,
        parts=lambda result, args: {"scale": result[1], "q": result[0]},
        axes={"scale": ("token",), "q": ("token", "column")},
        hints=(
            "scale = max(largest magnitude of the row, 1e-12) / 127, all in float32.",
            "np.rint rounds halves to even; astype alone would cut off.",
        ),
    ),
    Exercise(
        number=7,
        slug="copy_on_write",
        title="Paged KV: copy on write",
        section="DeepServe 4.3",
        owner="xdeepserve.engine.dp.block_table:BlockTable",
        name="copy",
        where="the block table of a DP group, before a step",
        scene=scenes.choices_that_share_blocks,
        parts=_booked,
        axes={"the sequence's slots": ("block",), "users": ("slot",), "free slots": ("place",)},
        hints=(
            "A block that is private already needs no copy: is_shared says so.",
            "The sequence is the only user of its new slot, and no user of the old one any more: _drop_user.",
            "What it writes is no longer what the prefix index knows: holding.nodes ends before this block.",
        ),
        changes=True,
    ),
    Exercise(
        number=8,
        slug="mtp_acceptance",
        title="MTP: which drafts are accepted",
        section="xDeepServe 4.6",
        owner="xdeepserve.model.kernels.drafts",
        name="accept",
        where="sampling, after a step with drafts",
        scene=scenes.drafts_of_two,
        parts=lambda result, args: {"accepted drafts": args[0]},
        axes={"accepted drafts": ("sequence",)},
        hints=(
            "A row's logits foretell the next row's token: draft row r is right if row r - 1 samples it.",
            "A draft after a wrong one was computed from a wrong token: count from the first, and stop.",
            "sampled has a place per logit row, not per row: logit_rows names them.",
        ),
        changes=True,
    ),
    Exercise(
        number=9,
        slug="kv_handoff",
        title="The KV handoff: bytes to bytes",
        section="xDeepServe 5.1",
        owner="xdeepserve.comm.distflow.spans",
        name="pair",
        where="DistFlow, a transfer",
        scene=scenes.kv_goes_to_decode,
        parts=lambda result, args: {"copies": result},
        axes={"copies": ("copy", "of source, destination, bytes: value", "of node, offset: value")},
        hints=(
            "Keep two places: a span and how much of it is done, on either side.",
            "A copy is as long as the shorter of what is left on the two sides.",
            "When a span is done, the next one begins at 0; both sides may end at once.",
        ),
    ),
    Exercise(
        number=10,
        slug="trampoline",
        title="The trampoline: who serves whom",
        section="xDeepServe 3.3",
        owner="xdeepserve.comm.trampoline.layout:Sides",
        name="served",
        where="A2E, before step 5",
        scene=scenes.through_trampolines,
        parts=lambda result, args: {f"attention ranks of expert rank {args[1]}": result},
        axes={},
        hints=(
            "Attention rank a belongs to expert rank a mod X; here you go the other way.",
            "They are X apart: range takes a step.",
        ),
    ),
    Exercise(
        number=11,
        slug="eplb_placement",
        title="EPLB: where replicas go",
        section="xDeepServe 4.5",
        owner="xdeepserve.engine.balance.eplb",
        name="place",
        where="EPLB, phase 1",
        scene=scenes.replicas_move,
        parts=lambda result, args: {"replicas": result},
        axes={"replicas": ("die", "slot")},
        hints=(
            "share = tokens / (1 + times chosen); a die begins with its base and its primaries' shares.",
            "argmin takes the lower of equals: np.where(fitting, load, np.inf).argmin().",
            "A swap: expert to die `taken`, what lies there to die `room`; min over tuples breaks ties.",
        ),
    ),
    Exercise(
        number=12,
        slug="rollback_rows",
        title="Rollback: as if it had not happened",
        section="xDeepServe 6.2",
        owner="xdeepserve.engine.die.drafts",
        name="rows_before",
        where="rollback, its step 3",
        scene=scenes.a_die_that_fails_twice,
        parts=lambda result, args: {
            "blocks": sorted(result),
            "rows": [np.asarray(result[block]) for block in sorted(result)],
        },
        axes={"blocks": ("block",), "rows": ("block", "column")},
        hints=(
            "Steps from `step` on have not happened, `step` included.",
            "Go from the newest to the oldest; what comes later on this way replaces what was there.",
        ),
    ),
)


def exercise_of(number: int) -> Exercise:
    """Find an exercise of the course by its number. InputError if there is none."""
    for exercise in COURSE:
        if exercise.number == number:
            return exercise
    raise InputError(f"there is no exercise {number}: they are 1 to {COURSE[-1].number}")
