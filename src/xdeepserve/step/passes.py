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
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tensors import MTP, Layer
from xdeepserve.step.frame import Frame, Model
from xdeepserve.step.stage import Counts, Op, Program, Stage, free

# A fitted number stands for host and head of a pass: to read a whole BF16 head would take longer (1.4 ms), so
# the head must be shared out. All else is billed with it, or with a layer's small kernels.
PASS = Work(passes=1)


def pass_work(c: ModelConfig, rows: float) -> Work:
    """Work of a pass outside its layers: the FP32 logits of `rows` rows are written, and read by the
    sampler, which runs in the same graph (CM 4.2.4)."""
    return PASS + Work(moved=8.0 * rows * c.vocab_size)


def _head_work(model: Model, layer: Layer, n: Counts) -> Work:
    return pass_work(model.config, n.rows)


def _embed(f: Frame) -> None:
    k.gather_rows(f.h, f.ends.embed, np.asarray(f.token_ids, np.int32))


def _norm(f: Frame) -> None:
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


norm = Op(_norm, free)
head = Op(_head, _head_work, operators=2)
mtp_head = Op(_mtp_head, _head_work, operators=3)

EMBED: Program = (Stage("Embed", (Op(_embed, free),), "aiv", "all"),)
HEAD: Program = (Stage("Norm", (norm,), "aiv", "all"), Stage("Sample", (head,), rows="logits"))
MTP_INPUT: Program = (Stage("MTPInput", (Op(_mtp_input, free, operators=5),), rows="all"),)
MTP_HEAD: Program = (Stage("Draft", (mtp_head,), rows="logits"),)
MTP_STATES: Program = (Stage("DraftState", (norm, Op(_keep_states, free)), "aiv", "all"),)
