"""Call the exercises' functions with arguments made by hand, for cases that no short run of a pod reaches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from xdeepserve.comm.distflow import spans
from xdeepserve.comm.distflow.spans import Span
from xdeepserve.comm.exchange import rows
from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.engine.balance import eplb
from xdeepserve.engine.die import drafts
from xdeepserve.engine.dp.block_table import BlockTable, Holding
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.ways import arithmetic
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.memory import Address
from xdeepserve.learn.stand_in import NotYetError
from xdeepserve.model import canonical
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.kernels import drafts as accepting
from xdeepserve.model.reference import Canonical, Reference
from xdeepserve.model.weights import RECIPES


@contextlib.contextmanager
def refused_by_some() -> Iterator[None]:
    """Ignore errors raised by the package's own function too.

    The stand-in has compared them with the learner's already.
    """
    try:
        yield
    except NotYetError:
        raise
    except XDeepServeError:
        pass


def gates() -> None:
    """Call `gate` with equal values, groups of one expert, scores as small as GATE_EPS, and weights not
    normalised."""
    tied, small = np.full((2, 8), 0.5, np.float32), np.full((1, 8), 1e-20, np.float32)
    none, bias = np.zeros(0, np.float32), np.linspace(-1, 0, 8, dtype=np.float32)
    canonical.gate(tied, none, 4, 2, 3, True, 1.0)
    canonical.gate(tied, np.round(bias), 8, 3, 2, True, 2.5)
    canonical.gate(small, none, 2, 1, 2, True, 1.0)
    canonical.gate(tied * small[:1] + bias**2, bias, 2, 1, 2, False, 2.5)
    canonical.gate(bias[None] ** 4, none, 4, 1, 2, False, 1.0, best_of_group=1)


def packed() -> None:
    """Call `pack_tokens` with float32 rows, chosen (token, slot) pairs, a rank that gets none, and more rows
    than a block holds."""
    layout = Layout(num_ranks=3, max_tokens=2, top_k=2, hidden=4, max_experts_per_rank=1, quantize=False)
    x, scale = np.arange(8, dtype=np.float32).reshape(2, 4) - np.float32(0.5), np.ones(2, np.float32)
    expert_rank = np.array([0, 2, 1])
    for experts, chosen in (
        ([[1, 0], [0, 1]], None),
        ([[1, 0], [0, 1]], np.array([1, 3])),
        ([[0, 0], [0, 1]], None),
    ):
        with refused_by_some():
            rows.pack_tokens("by hand", layout, expert_rank, 3, x, scale, np.array(experts, np.int32), chosen)


def sums() -> None:
    """Call `weighted_sum` with products all -0, with a sum that cancels, and with no token at all."""
    rows.weighted_sum(np.full((1, 2, 3), -0.0, np.float32), np.ones((1, 2), np.float32))
    rows.weighted_sum(np.array([[[1.0], [2.0**-24], [-1.0]]], np.float32), np.ones((1, 3), np.float32))
    rows.weighted_sum(np.zeros((0, 4, 5), np.float32), np.zeros((0, 4), np.float32))


def quantised() -> None:
    """Call `quantize_rows` with halves at a scale of 1, and with values next to halves at scales with rounded
    reciprocals."""
    halves = np.arange(-126.5, 127, dtype=np.float32)
    arithmetic.quantize_rows(np.append(halves, np.float32(127))[None])
    tops = np.array([3.0, 0.7, 41.0, 1e-3], np.float32)
    next_to = halves * (tops / np.float32(127))[:, None]
    arithmetic.quantize_rows(np.concatenate([next_to, tops[:, None]], axis=1))


def attentions(model: Checkpoint) -> None:
    """Call `attend_to` with every recipe, also without INT8, and with tokens that see scattered positions."""
    rng = np.random.default_rng(4)
    for recipe in RECIPES:
        weights, c = Reference(model, recipe).weights, model.config
        layer = Canonical(c, recipe, weights.layers[0], weights.cos[:4], weights.sin[:4])
        queries = [(c.num_attention_heads, each) for each in (c.qk_nope_head_dim, c.qk_rope_head_dim)]
        widths = (*queries, (c.kv_lora_rank,), (c.qk_rope_head_dim,))
        seen = [np.array(positions) for positions in ([0], [1], [0, 2], [1, 2, 3])]
        layer.attend_to(seen, *(rng.standard_normal((4, *width)).astype(np.float32) for width in widths))


def copies() -> None:
    """Call `copy` on private, shared and indexed blocks, with and without a free slot.

    In the last case, a block of the index is evicted for the copy.
    """
    for num_blocks in (2, 1):
        table, holding = BlockTable(num_blocks, 4, 64), Holding()
        table.append_block(holding)
        table.copy(holding, 0)
        child = table.fork(holding)
        with refused_by_some():
            table.copy(child, 0)
    table, holding = RTC(2, 4, 64), Holding()
    table.append_block(holding)
    table.publish(holding, [1, 2, 3, 4])
    table.copy(holding, 0)
    table.copy(table.fork(holding), 0)


def confirmed() -> None:
    """Call `accept` with drafts after a prompt, of which only the last row has logits, and with an empty
    step."""
    lists = [1, 2, 3, 7, 8, 9], [0, 0, 0, 1, 1, 1], [0, 2], [2, 3, 4, 5]
    for tokens in ([5, 8, 9, 4], [5, 8, 1, 9], [8, 9, 9, 4]):
        given = [np.array(each, np.int32) for each in (*lists, tokens)]
        accepting.accept(np.full(2, 7, np.int32), *given)
    accepting.accept(*np.zeros((6, 0), np.int32))


def pairs() -> None:
    """Call `pair` with ranges touching, and with ranges to refuse.

    These have other totals, are misaligned or empty, or write bytes twice.
    """

    def cut(node: int, *sizes: int, first: int = 0) -> list[Span]:
        ends = np.cumsum((first, *sizes)).tolist()
        return [Span(Address(node, at), nbytes) for at, nbytes in zip(ends, sizes, strict=False)]

    spans.pair(cut(0, 64, 64, 32), cut(1, 64, 64, 32))
    spans.pair(cut(0, 96, 64), cut(1, 32, 128))
    for src, dst in (
        (cut(0, 64), cut(1, 32)),
        (cut(0, 64, first=8), cut(1, 64)),
        (cut(0, 64), cut(1, 64, first=8)),
        (cut(0, 32, 0, 32), cut(1, 64)),
        (cut(0, 64), cut(0, 64, first=32)),
        (cut(0, 64, 64), cut(1, 64) * 2),
    ):
        with refused_by_some():
            spans.pair(src, dst)


def placements() -> None:
    """Call `place` with other work on dies, an expert replicated twice, swaps, and a replica without a place.

    The last five calls need swaps: equally good ones, ones that siblings forbid, and ones after which loads
    differ.
    """
    tokens = np.array([[40, 10], [6, 6], [30, 2], [5, 5]], np.int64)
    eplb.place(tokens, [0, 2], [0, 1, 2, 3], [1, 1, 1, 1], [0.0, 0.5, 0.0, 0.25])
    eplb.place(tokens, [0, 0, 2], [0, 1, 2, 3], [0, 1, 1, 2])
    eplb.place(tokens, [0, 2], [0, 1, 2, 3], [1, 0, 1, 0])
    eplb.place(tokens, [2, 1, 0], [0, 1, 1, 0], [2, 1])
    eplb.place(tokens, [0, 0], [0, 1, 2, 3], [2, 1, 0, 0])
    for counts, chosen, primary, free in (
        ([12, 24, 4, 4, 12], [4, 0, 4, 1], [2, 1, 2, 1, 2], [2, 2, 1]),
        ([16, 16, 8, 12], [1, 1, 2, 0, 3], [0, 0, 2, 1], [2, 2, 2]),
        ([24, 4, 4, 16], [1, 2, 2, 3], [0, 0, 0, 1], [2, 1, 2]),
        ([12, 12, 24, 8], [0, 2, 2], [1, 2, 0, 0], [0, 2, 1]),
        ([24, 4, 4, 24], [0, 0, 3, 2], [1, 2, 2, 0], [2, 2, 1]),
    ):
        eplb.place(np.array(counts, np.int64)[:, None], chosen, primary, free)


def steps_undone() -> dict[str, np.ndarray[Any, Any]]:
    """Call `rows_before` for two undone steps of three, with the steps given in order and in other orders."""
    rows = [np.full(4, value, np.float32) for value in range(4)]
    found = {3: {7: rows[0]}, 4: {7: rows[1], 8: rows[2]}, 5: {7: rows[3]}}
    orders = (3, 4, 5), (5, 3, 4), (4, 5, 3)
    return {
        f"block {block}, two steps undone, which stood there as {order}": row
        for order in orders
        for block, row in sorted(drafts.rows_before({step: found[step] for step in order}, StepNo(4)).items())
    }
