"""Prediction of an answer's length, learned from the answers of a trace's first part (DeepServe 5.3.3).

The paper trains a classifier on the texts of prompts. A trace has no texts, but it has the length of a prompt
and its first block, which requests of an application or of a chat share. The prediction is the median of
learned answers that agree in both. If they are too few, agreement in one is enough; else all count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from xdeepserve.errors import InputError
from xdeepserve.platform.traces import TracedRequest

Lengths = Literal["none", "predicted", "told"]  # what a policy is told of answers that are yet to come
ENOUGH = 8  # answers, from which on a group has a median of its own
BUCKET = 128  # tokens: what the paper counts as the same length


class LengthPredictor:
    """Predictor fitted to past requests, at least one."""

    def __init__(self, learned: Sequence[TracedRequest]) -> None:
        groups: dict[Hashable, list[int]] = {}
        for request in learned:
            for key in _keys(request):
                groups.setdefault(key, []).append(request.output_length)
        self._medians = {
            key: float(np.median(lengths))
            for key, lengths in groups.items()
            if len(lengths) >= ENOUGH or key == ALL
        }

    def __call__(self, request: TracedRequest) -> float:
        """Predict the tokens of a request's answer; the answer itself is not looked at."""
        return next(self._medians[key] for key in _keys(request) if key in self._medians)


ALL = "all"


def _keys(request: TracedRequest) -> list[Hashable]:
    """List the groups of a request, the finest first. Prompts of a group are at most twice as long as each
    other."""
    octave = request.input_length.bit_length()
    opening = request.blocks[:1]
    by_opening: list[Hashable] = [(opening, octave), (opening,)] if opening else []
    return [*by_opening, octave, ALL]


class HeldOutError(NamedTuple):
    """Errors of predictions for `num` held-out answers, and of the learned median for comparison."""

    num: int
    mean_error: float  # tokens, absolute
    mean_error_of_median: float
    same_bucket: float  # share of predictions in the answer's bucket of 128 tokens
    same_bucket_of_median: float

    def line(self) -> str:
        """Format the errors in words."""
        return (
            f"off by {self.mean_error:.0f} tokens on {self.num} held out, {100 * self.same_bucket:.0f} % in "
            f"the right {BUCKET}; one median: {self.mean_error_of_median:.0f}, "
            f"{100 * self.same_bucket_of_median:.0f} %"
        )


def split(requests: Sequence[TracedRequest]) -> tuple[Sequence[TracedRequest], Sequence[TracedRequest]]:
    """Split a trace into the first half, to learn from, and the rest. Raises InputError if either would be
    empty."""
    half = len(requests) // 2
    while half < len(requests) and half and requests[half].at_ns == requests[half - 1].at_ns:
        half += 1  # who comes at the same time is in the same half
    if not 0 < half < len(requests):
        raise InputError("lengths are learned from the first half of a trace, and this one has no two halves")
    return requests[:half], requests[half:]


def held_out_error(
    predictor: LengthPredictor, learned: Sequence[TracedRequest], held_out: Sequence[TracedRequest]
) -> HeldOutError:
    """Compute the errors of the predictor, and of the median of what it has learned."""
    true = np.array([each.output_length for each in held_out])
    found = np.array([predictor(each) for each in held_out])
    median = np.full(len(true), np.median([each.output_length for each in learned]))
    errors = [float(np.abs(guess - true).mean()) for guess in (found, median)]
    same = [float((guess // BUCKET == true // BUCKET).mean()) for guess in (found, median)]
    return HeldOutError(len(true), errors[0], errors[1], same[0], same[1])


def told_lengths(
    lengths: Lengths, requests: Sequence[TracedRequest]
) -> tuple[Callable[[TracedRequest], float], HeldOutError | None]:
    """Make the function for telling a policy each request's length; 0 means unknown. Predictions are told for
    the second half only, and their error is returned, too. Raises InputError for a trace too short to learn
    from."""
    if lengths == "none":
        return lambda request: 0.0, None
    if lengths == "told":
        return lambda request: request.output_length, None
    learned, held_out = split(requests)
    predictor, begins = LengthPredictor(learned), held_out[0].at_ns
    error = held_out_error(predictor, learned, held_out)
    return lambda request: predictor(request) if request.at_ns >= begins else 0.0, error
