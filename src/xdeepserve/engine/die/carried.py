"""Completes on the die a plan that the host made while the previous step was still running.

The host only knows that a sequence goes on with one token more, and with how many drafts. The die has the
rest in its memory: the token, the drafts, and how many of the previous step's drafts were accepted. All rows
of the sequence shift by that number. A kernel reads these values and completes the rows in HBM, so nothing of
it passes the host. CloudMatrix 4.2.4 keeps the metadata of MTP's graphs on the NPU for the same reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.carried import resolve

if TYPE_CHECKING:
    from xdeepserve.engine.die.die_memory import DieMemory
    from xdeepserve.engine.plans import StepPlan

OF_ROWS = "token_ids", "positions", "slots"  # what the kernel completes


class CarriedRows(NamedTuple):
    """A step's rows and sequences in a die's memory, in the order of the kernel's arguments."""

    token_ids: Array  # int32 [T]
    positions: Array  # int32 [T]
    slots: Array  # int32 [T]
    seq_of: Array  # int32 [T]
    block_tables: Array  # int32 [S, B]
    carried_seq: Array  # int32 [S]
    carried_row: Array  # int32 [S]
    sampled: Array  # int32, results of the step before
    accepted: Array
    drafts: Array  # int32 [., K]

    @classmethod
    def of(cls, mem: DieMemory, plan: StepPlan) -> CarriedRows:
        """View a step's buffers and write what the plan says of carried sequences.

        Known tokens, positions, slots and block tables are in the buffers already.
        """
        steps, before, rows = mem.steps, plan.step - 1, plan.num_tokens
        take, seqs = mem.workspace.take, len(plan.block_tables)
        found = cls(
            take("token_ids", rows),
            take("positions", rows),
            take("slots", rows),
            take("seq_of", rows),
            take("block_tables", seqs, mem.kv.sizes.max_blocks_per_seq),
            take("carried_seq", seqs),
            take("carried_row", seqs),
            mem.result("sampled", before, steps.max_logit_rows),
            mem.result("num_accepted", before, steps.max_seqs),
            mem.result("drafts", before, steps.max_seqs, max(1, steps.mtp)),
        )
        found.carried_seq[:], found.carried_row[:] = plan.carried_seq, plan.carried_row
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of HBM moved by the kernel: the rows read and written, and the values looked up for them."""
        rows, seqs, size = len(self.token_ids), len(self.carried_seq), np.dtype(np.int32).itemsize
        return size * (2 * len(OF_ROWS) * rows + rows + 2 * rows + 3 * seqs)

    def resolve(self, block_size: int) -> None:
        """Complete the rows in HBM."""
        resolve(*self, block_size)

    @property
    def completed(self) -> dict[str, list[int]]:
        """The plan's fields that `resolve` has completed."""
        return {name: getattr(self, name).tolist() for name in OF_ROWS}
