"""What a pass has besides decoder layers: embedding, norm and head, and the ends of an MTP pass.

embed -> decoder layers -> norm -> head            the main model
mtp_input -> one decoder layer -> mtp_head         each pass of MTP
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xdeepserve.hw.work import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tensors import MTP, Linear
from xdeepserve.step.linear import Buffers, Linears

# A fitted number stands for host, head and sampling of a pass: to read a whole BF16 head would take longer
# (1.4 ms), so the head must be shared out.
PASS = Work(passes=1)
IN_PASS = Work()  # billed with it, or with a layer's small kernels


class Ends(NamedTuple):
    """The ends of a pass on one die. Outputs first."""

    config: ModelConfig
    buffers: Buffers
    linears: Linears

    def embed(self, h: Array, table: Array, token_ids: list[int]) -> None:
        """h [T, H] = rows of table [V, H]."""
        k.gather_rows(h, table, np.asarray(token_ids, np.int32))

    def norm(self, hidden: Array, h: Array, weight: Array) -> None:
        """hidden [T, H] = the last norm of h [T, H]."""
        k.rms_norm(hidden, h, weight, self.config.rms_norm_eps)

    def head(self, logits: Array, hidden: Array, rows: list[int], head: Linear) -> None:
        """logits [R, V] of the rows `rows` of hidden [T, H]."""
        chosen = self.buffers.take("logit_hidden", len(rows), self.config.hidden_size)
        k.gather_rows(chosen, hidden, np.asarray(rows, np.int32))
        self.linears.matmul(logits, chosen, head.w)

    def mtp_input(self, h: Array, mtp: MTP, states: Array, index: Array, tokens: Array) -> None:
        """h [T, H] = eh_proj . concat[enorm(embedding of tokens [T]), hnorm(states[index])]."""
        c, take = self.config, self.buffers.take
        both = take("both", len(index), 2 * c.hidden_size)
        part = take("embedding", len(index), c.hidden_size)
        k.gather_rows(part, mtp.embed, tokens)
        k.rms_norm(part, part, mtp.enorm, c.rms_norm_eps)
        both[:, : c.hidden_size] = part
        k.gather_rows(part, states, index)
        k.rms_norm(part, part, mtp.hnorm, c.rms_norm_eps)
        both[:, c.hidden_size :] = part
        self.linears.matmul(h, both, mtp.eh_proj.w)

    def mtp_head(self, logits: Array, mtp: MTP, h: Array, rows: list[int]) -> None:
        """logits [R, V] of the rows `rows` of h [T, H]."""
        states = np.empty((len(rows), self.config.hidden_size), np.float32)
        k.gather_rows(states, h, np.array(rows, np.int32))
        k.rms_norm(states, states, mtp.norm, self.config.rms_norm_eps)
        self.linears.matmul(logits, states, mtp.head.w)
