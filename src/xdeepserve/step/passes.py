"""Parts of a pass besides decoder layers: embedding, norm and head, and the ends of an MTP pass.

EMBED -> decoder layers -> HEAD                          the main model
MTP_INPUT -> one decoder layer -> MTP_HEAD, MTP_STATES   each pass of MTP

The weights are those of `Frame.ends`, so that both have embedding, norm and head by the same names.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.hw.spec import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import MTP, Layer
from xdeepserve.step import v4
from xdeepserve.step.attention import float_work
from xdeepserve.step.frame import Frame, Model
from xdeepserve.step.stage import Counts, Op, OpWork, Program, Stage

ROW = 4.0  # bytes of a row's element that a small kernel reads and writes, both in BF16


def small_kernels(count: int, states: float = 0.0, logits: float = 0.0) -> OpWork:
    """Return the work of `count` small kernels, which copy or norm each row's state `states` times, and move
    `logits` bytes for each entry of the vocabulary."""

    def work(model: Model, layer: Layer, n: Counts) -> Work:
        c = model.config
        return Work(kernels=count, moved=n.rows * (ROW * states * c.hidden_size + logits * c.vocab_size))

    return work


def _mtp_input_work(model: Model, layer: Layer, n: Counts) -> Work:
    size = 2.0 * model.config.hidden_size**2
    return small_kernels(5, states=4)(model, layer, n) + float_work(n.rows, size)


def head_work(norms: int) -> OpWork:
    """Return the work of a head on rows that are gathered, and normed by `norms` kernels: the whole head is
    read, never quantised; FP32 logits are written, and read by the sampler, which runs in the same graph (CM
    4.2.4)."""

    def work(model: Model, layer: Layer, n: Counts) -> Work:
        size = float(model.config.hidden_size * model.config.vocab_size)
        return small_kernels(3 + norms, 1 + norms, logits=8.0)(model, layer, n) + float_work(n.rows, size)

    return work


def _embed(f: Frame) -> None:
    k.gather_rows(f.h, f.ends.embed, np.asarray(f.token_ids, np.int32))
    if f.config.v4 is not None:
        f.streams[:] = f.h[:, None]


def _norm(f: Frame) -> None:
    if f.config.v4 is not None:
        v4.leave_streams(f)
    k.rms_norm(f.hidden[: len(f.h)], f.h, f.ends.norm, f.config.rms_norm_eps)


def logit_hidden(f: Frame, rows: Array) -> Array:
    """Gather the rows of `rows` [T, H] for which logits are wanted: [R, H]."""
    chosen = f.take("logit_hidden", len(f.logit_rows), f.config.hidden_size)
    k.gather_rows(chosen, rows, np.asarray(f.logit_rows, np.int32))
    return chosen


def _head(f: Frame) -> None:
    f.linears.matmul(f.logits, logit_hidden(f, f.hidden), f.ends.head.w)


def _mtp_input(f: Frame) -> None:
    """Compute h [T, H] = eh_proj . concat[enorm(embedding of tokens [T]), hnorm(states of rows [T])]."""
    c, mtp, count = f.config, f.ends, len(f.h)
    assert isinstance(mtp, MTP)
    assert mtp.eh_proj is not None
    both = f.take("both", count, 2 * c.hidden_size)
    part = f.take("embedding", count, c.hidden_size)
    k.gather_rows(part, mtp.embed, np.asarray(f.token_ids, np.int32))
    k.rms_norm(part, part, mtp.enorm, c.rms_norm_eps)
    both[:, : c.hidden_size] = part
    k.gather_rows(part, f.hidden, f.state_rows)
    k.rms_norm(part, part, mtp.hnorm, c.rms_norm_eps)
    both[:, c.hidden_size :] = part
    f.linears.matmul(f.h, both, mtp.eh_proj.w)


def _mtp_head(f: Frame) -> None:
    states = logit_hidden(f, f.whole)
    k.rms_norm(states, states, f.ends.norm, f.config.rms_norm_eps)
    f.linears.matmul(f.logits, states, f.ends.head.w)


def _keep_states(f: Frame) -> None:
    """Restore states of earlier steps from the tails of their blocks, behind this step's, and save this
    step's last ones there."""
    f.hidden[len(f.h) :] = f.tail[f.mended_blocks]
    f.overwritten.update(zip(f.kept_blocks.tolist(), f.tail[f.kept_blocks], strict=True))
    f.tail[f.kept_blocks] = f.hidden[f.kept_rows]


norm = Op(_norm, small_kernels(1, states=1))
head = Op(_head, head_work(norms=0), operators=2)
mtp_input = Op(_mtp_input, _mtp_input_work, operators=5)
keep_states = Op(_keep_states, small_kernels(1, states=1))
mtp_head = Op(_mtp_head, head_work(norms=1), operators=3)

EMBED: Program = (Stage("Embed", (Op(_embed, small_kernels(1, states=1)),), "aiv", "all"),)
HEAD: Program = (Stage("Norm", (norm,), "aiv", "all"), Stage("Sample", (head,), rows="logits"))
MTP_INPUT: Program = (Stage("MTPInput", (mtp_input,), rows="all"),)
MTP_HEAD: Program = (Stage("Draft", (mtp_head,), rows="logits"),)
MTP_STATES: Program = (Stage("DraftState", (norm, keep_states), "aiv", "all"),)
