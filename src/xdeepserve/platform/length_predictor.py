"""How long an answer will be: learned from the answers of a trace's first part (DeepServe 5.3.3).

The paper trains a classifier on texts of prompts. A trace has no texts; what it has is how long a prompt is,
and the block it opens with, which requests of one application or of one chat share. The prediction is the
median of the learned answers that are alike in both; where there are too few of them, in one; else of all.
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
    """Fitted to these requests, of which there is at least one."""

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
        """Tokens of its answer, of which nothing is looked at."""
        return next(self._medians[key] for key in _keys(request) if key in self._medians)


ALL = "all"


def _keys(request: TracedRequest) -> list[Hashable]:
    """The groups that a request is in, the finest first. Prompts of a kind are at most twice as long."""
    octave = request.input_length.bit_length()
    opening = request.blocks[:1]
    by_opening: list[Hashable] = [(opening, octave), (opening,)] if opening else []
    return [*by_opening, octave, ALL]


class HeldOutError(NamedTuple):
    """How far predictions of `num` answers that were not learned are off, beside always saying the median of
    those that were."""

    num: int
    mean_error: float  # tokens, absolute
    mean_error_of_median: float
    same_bucket: float  # share of predictions in the answer's bucket of 128 tokens
    same_bucket_of_median: float

    def line(self) -> str:
        """In words."""
        return (
            f"off by {self.mean_error:.0f} tokens on {self.num} held out, {100 * self.same_bucket:.0f} % in "
            f"the right {BUCKET}; one median: {self.mean_error_of_median:.0f}, "
            f"{100 * self.same_bucket_of_median:.0f} %"
        )


def split(requests: Sequence[TracedRequest]) -> tuple[Sequence[TracedRequest], Sequence[TracedRequest]]:
    """The first half, to learn from, and what comes later. InputError where there is nothing in one of them.

    All answers of the first half count as known, though the last of them still run when the second begins.
    """
    half = len(requests) // 2
    while half < len(requests) and half and requests[half].at_ns == requests[half - 1].at_ns:
        half += 1  # who comes at the same time is in the same half
    if not 0 < half < len(requests):
        raise InputError("lengths are learned from the first half of a trace, and this one has no two halves")
    return requests[:half], requests[half:]


def held_out_error(
    predictor: LengthPredictor, learned: Sequence[TracedRequest], held_out: Sequence[TracedRequest]
) -> HeldOutError:
    """How far the predictor is off, and the median of what it has learned."""
    true = np.array([each.output_length for each in held_out])
    found = np.array([predictor(each) for each in held_out])
    median = np.full(len(true), np.median([each.output_length for each in learned]))
    errors = [float(np.abs(guess - true).mean()) for guess in (found, median)]
    same = [float((guess // BUCKET == true // BUCKET).mean()) for guess in (found, median)]
    return HeldOutError(len(true), errors[0], errors[1], same[0], same[1])


def told_lengths(
    lengths: Lengths, requests: Sequence[TracedRequest]
) -> tuple[Callable[[TracedRequest], float], HeldOutError | None]:
    """What a policy is told of each of these requests; 0 is nothing. A prediction is told of the second half,
    and its error comes with it. InputError for a trace that cannot be learned from."""
    if lengths == "none":
        return lambda request: 0.0, None
    if lengths == "told":
        return lambda request: request.output_length, None
    learned, held_out = split(requests)
    predictor, begins = LengthPredictor(learned), held_out[0].at_ns
    error = held_out_error(predictor, learned, held_out)
    return lambda request: predictor(request) if request.at_ns >= begins else 0.0, error
