"""Turns logits into a step's results: tokens, log probabilities, and the number of accepted drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.messages import LOGPROB_SLOTS
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.plans import StepPlan
from xdeepserve.errors import RequestError, XDeepServeError
from xdeepserve.model import sampling
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels import sample
from xdeepserve.model.kernels.drafts import accept


class Chooser(Protocol):
    """Chooses tokens from logits; `faults` are errors of the step's logit rows that have no results."""

    faults: dict[int, XDeepServeError]

    def choose(self, plan: StepPlan, logits: Array) -> None:
        """Write the results of a step from its logits [rows, V]."""

    def draw(self, out: Array, logits: Array, plan: StepPlan, rows: Sequence[int], ahead: int) -> None:
        """Write tokens to `out`, int32 [rows]: for each logit row the token `ahead` positions later."""


class Sampler:
    """Samples tokens by seed, choice and position; computes log probabilities and accepted drafts."""

    def __init__(self, rank: DieRank, mem: DieMemory) -> None:
        self.rank, self.mem = rank, mem
        self.faults: dict[int, XDeepServeError] = {}
        self._drawn: StepPlan | None = None  # the latest one whose tokens lockstep has drawn

    def take(self, plan: StepPlan, tokens: Array) -> None:
        """Take the tokens of a step, int32 [rows], that lockstep has drawn for all dies at once.

        If one of them could not be drawn, `choose` draws again and finds out why.
        """
        if tokens.min() >= 0:
            self.mem.result("sampled", plan.step, len(tokens))[:] = tokens
            self._drawn = plan

    def choose(self, plan: StepPlan, logits: Array) -> None:
        """Write a step's tokens, log probabilities and numbers of accepted drafts to the result buffers."""
        rows, result = len(logits), self.mem.result
        sampled = result("sampled", plan.step, rows)
        if plan is not self._drawn:
            self.draw(sampled, self._edited(plan, logits), plan, range(rows), ahead=1)
        for row, count in enumerate(plan.num_logprobs):
            if count >= 0 and row not in self.faults:
                try:
                    self._report_row(plan, logits, sampled, row, count)
                except Exception as error:
                    self._blame(row, error)
        self._accept(plan, sampled)

    def _accept(self, plan: StepPlan, sampled: Array) -> None:
        """Write each sequence's number of accepted drafts, from the step's index lists in HBM."""
        take, rows, seqs = self.mem.workspace.take, plan.num_tokens, len(plan.num_drafts)
        num_accepted = self.mem.result("num_accepted", plan.step, seqs)
        if not self.mem.steps.mtp:
            num_accepted[:] = 0
            return
        lists = take("token_ids", rows), take("seq_of", rows), take("num_drafts", seqs)
        accept(num_accepted, *lists, take("logit_rows", len(sampled)), sampled)

    def _edited(self, plan: StepPlan, logits: Array) -> Array:
        """Return the logits for drawing tokens; a changed copy if the plan edits any row."""
        if not plan.edits:
            return logits
        logits = logits.copy()
        for row, edits in plan.edits.items():
            if edits.fault:
                self._blame(row, RequestError(edits.fault, param="structured_outputs"))
                continue
            sampling.edit(
                logits[row],
                bias=edits.bias,
                repetition_penalty=edits.repetition_penalty,
                seen=edits.seen,
                frequency_penalty=edits.frequency_penalty,
                presence_penalty=edits.presence_penalty,
                counts=edits.counts,
                allowed=edits.allowed,
            )
        return logits

    def draw(self, out: Array, logits: Array, plan: StepPlan, rows: Sequence[int], ahead: int) -> None:
        """Draw tokens for some logit rows; a row that fails gets token 0, to go on with, and a fault."""
        try:
            self._draw(out, logits, plan, rows, ahead)
        except Exception as error:
            if len(rows) > 1:
                for i, row in enumerate(rows):
                    self.draw(out[i : i + 1], logits[i : i + 1], plan, [row], ahead)
            else:
                out[:] = 0
                self._blame(rows[0], error)

    def _blame(self, row: int, error: Exception) -> None:
        """Record an error for a logit row, so its sequence fails and the die goes on."""
        if not isinstance(error, XDeepServeError):
            cause, error = error, XDeepServeError(f"rank {self.rank}: {error!r}")
            error.__cause__ = cause
        self.faults.setdefault(row, error)

    def _draw(self, out: Array, logits: Array, plan: StepPlan, rows: Sequence[int], ahead: int) -> None:
        given = columns([(plan, rows)], ahead)
        sample(out, logits, *given)
        tokens = out.tolist()
        if min(tokens, default=0) < 0:
            row = next(row for row, token in enumerate(tokens) if token < 0)
            raise XDeepServeError(
                f"rank {self.rank}: no token for position {given.position[row]} of a sequence: logits are "
                "not all numbers; a weight may not be one, or be too large"
            )

    def _report_row(self, plan: StepPlan, logits: Array, sampled: Array, row: int, count: int) -> None:
        """Write log probabilities of a row's `count` likeliest tokens, and of the token that follows."""
        rows, result = len(logits), self.mem.result
        ids = result("logprob_ids", plan.step, rows, LOGPROB_SLOTS)
        values, ranks = result("logprobs", plan.step, rows, LOGPROB_SLOTS), result("ranks", plan.step, rows)
        target = plan.targets[row] if plan.targets[row] >= 0 else int(sampled[row])
        log_probs = sampling.log_probs(logits[row])
        top = np.argsort(-logits[row], kind="stable")[:count]
        ids[row, 0], values[row, 0] = target, log_probs[target]
        ids[row, 1 : 1 + len(top)], values[row, 1 : 1 + len(top)] = top, log_probs[top]
        ranks[row] = 1 + int(np.count_nonzero(logits[row] > logits[row, target]))


class Columns(NamedTuple):
    """Numbers by which rows of logits are sampled, in the order of the kernel's arguments."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    choice: Array
    position: Array


def columns(plans: Sequence[tuple[StepPlan, Sequence[int]]], ahead: int) -> Columns:
    """Return the numbers of some logit rows of plans, for the tokens `ahead` positions later."""

    found = [(plan, row) for plan, rows in plans for row in rows]
    return Columns(
        np.array([plan.temperature[row] for plan, row in found], np.float32),
        np.array([plan.top_k[row] for plan, row in found], np.int32),
        np.array([plan.top_p[row] for plan, row in found], np.float64),
        np.array([plan.min_p[row] for plan, row in found], np.float32),
        np.array([plan.seed[row] % 2**64 for plan, row in found], np.uint64),
        np.array([plan.choice[row] for plan, row in found], np.uint64),
        np.array([plan.positions[plan.logit_rows[row]] + ahead for plan, row in found], np.uint64),
    )
