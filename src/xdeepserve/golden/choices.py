"""Golden cases of sparse attention: an indexer's choice, and the attention to it (DeepSeek-V3.2 2.1).

The cases are arithmetic alone, with no protocol. Rows are tokens of one sequence; keys, latents and RoPE keys
are those of its positions. Each row of `chosen` has the chosen positions, ascending, then -1. Some keys are
equal, so that equal scores meet the end of the choice, where the lowest positions are chosen. `int8`:
products of BF16 numbers, and latents in INT8 with a scale each.
"""

from __future__ import annotations

import math

import numpy as np

from xdeepserve.golden import expected
from xdeepserve.golden.harness import Done, floats, rng_of
from xdeepserve.golden.recorder import Arrays, Recording
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import TILE

CONTEXT, TOP_K, HEADS, DEPTH = 40, 6, 3, 8
ATTENTION_HEADS, RANK, ROPE = 2, 16, 4
POSITIONS = (3, 5, 6, 17, 31, 39)  # of the rows
BLOCK_TABLE = (2, 0, 3)  # of blocks of 16 positions


def _inputs() -> Arrays:
    rng, rows = rng_of(20), len(POSITIONS)
    key = floats(rng, (CONTEXT, DEPTH))
    key[1::3] = key[1]  # of equal scores the lowest positions win
    return {
        "q": floats(rng, (rows, HEADS, DEPTH)),
        "weights": floats(rng, (rows, HEADS)),
        "key": key,
        "positions": np.array(POSITIONS, np.int32),
        "block_table": np.array(BLOCK_TABLE, np.int32),
        "q_latent": floats(rng, (rows, ATTENTION_HEADS, RANK)),
        "q_rope": floats(rng, (rows, ATTENTION_HEADS, ROPE)),
        "latent": floats(rng, (CONTEXT, RANK)),
        "k_rope": floats(rng, (CONTEXT, ROPE)),
    }


def _paged(key: c.Array, table: c.Array) -> c.Array:
    """Lay out the indexer's keys as a die's memory has them: [blocks, tiles, D, 16]."""
    cache = np.zeros((table.max() + 1, 1, DEPTH, TILE), np.float32)
    at = np.arange(CONTEXT)
    cache[table[at // TILE], 0, :, at % TILE] = key
    return cache


def sparse_attention(is_int8: bool, seed: int | None) -> Done:
    """Record the kernel's choice, with NumPy's scores, choice and attention.

    No die wakes up, so `seed` does not matter.
    """
    inputs = _inputs()
    q, key = (c.factors(inputs[name]) if is_int8 else inputs[name] for name in ("q", "key"))
    rows, table, positions = len(POSITIONS), inputs["block_table"], inputs["positions"]
    chosen = np.full((rows, TOP_K), -1, np.int32)
    k.choose_positions(
        chosen, q.reshape(rows, -1), inputs["weights"], np.zeros(rows, np.int32), positions,
        _paged(key, table), table[None], is_int8, np.empty(CONTEXT, np.float32), 0, 1,
    )  # fmt: skip
    for row, position in zip(chosen, POSITIONS, strict=True):
        if position < TOP_K:  # it sees no more
            row[: position + 1] = np.arange(position + 1)
    oracle = _oracle(inputs, q, key, is_int8)
    parameters = {"top_k": TOP_K, "softmax_scale": 1 / math.sqrt(RANK), "is_int8": is_int8}
    outputs = {name: array for name, array in oracle.items() if name != "rank0.chosen"}
    done = Done(
        Recording({f"rank0.{name}": x for name, x in inputs.items()}, [], outputs | {"rank0.chosen": chosen}),
        [[]],
        parameters,
    )
    return expected.verified(done, oracle)


def _oracle(inputs: Arrays, q: c.Array, key: c.Array, is_int8: bool) -> Arrays:
    scores = np.full((len(POSITIONS), CONTEXT), -np.inf, np.float32)
    chosen = np.full((len(POSITIONS), TOP_K), -1, np.int32)
    latent, scale = c.quantize_rows(inputs["latent"]) if is_int8 else (inputs["latent"], None)
    attended = []
    for t, position in enumerate(POSITIONS):
        seen = c.index_scores(q[t], key[: position + 1], inputs["weights"][t], is_int8)
        best = c.top_positions(seen, TOP_K)
        scores[t, : position + 1], chosen[t, : len(best)] = seen, best
        attended.append(
            c.attention(
                inputs["q_latent"][t],
                inputs["q_rope"][t],
                latent[best],
                None if scale is None else scale[best],
                inputs["k_rope"][best],
                1 / math.sqrt(RANK),
                False,
            )
        )
    return {"rank0.scores": scores, "rank0.chosen": chosen, "rank0.attended": np.stack(attended)}
