"""Predicts how long a model's answer to a prompt will be: a classifier of texts (DeepServe 5.3.3), stored
beside the weights.

The paper trains a classifier on prompts and on the lengths of the answers that the served model itself gave,
in buckets of 128 tokens. Here a bucket has 16, since the models are small, and the classifier is an averaged
perceptron over hashed runs of one to three tokens. It counts in integers from first to last, so that the same
answers make the same file on every computer (`tools/make_answer_lengths.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xdeepserve.errors import CheckpointError

FILE = "answer_lengths.npy"  # in a checkpoint's directory
BUCKET, NUM_BUCKETS = 16, 16  # tokens of one; the last has all that is longer
NUM_FEATURES = 4096
EPOCHS = 12
SHAPE = (NUM_FEATURES, NUM_BUCKETS)
PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # odd: of the last, the one before and the first of a run

Integers = NDArray[np.int64]


def features(token_ids: Sequence[int]) -> Integers:
    """Return the features of a prompt, each once, ascending: hashes of its runs of tokens and of its
    length."""
    ids = np.asarray(token_ids, np.uint64) + np.uint64(1)
    hashes = [np.array([len(ids).bit_length()], np.uint64) * np.uint64(PRIMES[0])]
    for length in range(1, 1 + len(PRIMES)):
        runs = np.zeros(max(0, len(ids) - length + 1), np.uint64)
        for back in range(length):
            runs += ids[length - 1 - back : len(ids) - back] * np.uint64(PRIMES[back])
        hashes.append(runs * np.uint64(PRIMES[length - 1]))
    mixed = np.concatenate(hashes) & np.uint64(0xFFFFFFFF)
    mixed ^= mixed >> np.uint64(15)
    return np.unique((mixed * np.uint64(PRIMES[1]) >> np.uint64(12)) % np.uint64(NUM_FEATURES)).astype(
        np.int64
    )


def bucket_of(length: int) -> int:
    """Return the bucket of an answer's length."""
    return min(length // BUCKET, NUM_BUCKETS - 1)


class AnswerLengths:
    """Classifier with weights int16 [NUM_FEATURES, NUM_BUCKETS].

    The bucket with the greatest sum is predicted.
    """

    def __init__(self, weights: NDArray[np.int16]) -> None:
        self.weights = weights

    def bucket(self, token_ids: Sequence[int]) -> int:
        """Predict the bucket of the answer to a prompt."""
        return int(self.weights[features(token_ids)].sum(axis=0, dtype=np.int64).argmax())

    def __call__(self, token_ids: Sequence[int]) -> float:
        """Predict the number of tokens in the answer to a prompt: the middle of its bucket."""
        return BUCKET * (self.bucket(token_ids) + 0.5)


def learned(prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> AnswerLengths:
    """Train on prompts and answer lengths, in this order: the average of all weights during training."""
    found = [features(prompt) for prompt in prompts]
    right = [bucket_of(length) for length in lengths]
    weights, steps = np.zeros(SHAPE, np.int64), np.zeros(SHAPE, np.int64)
    step = 0
    for epoch in range(EPOCHS):
        for number in np.random.default_rng(epoch).permutation(len(found)).tolist():
            step += 1
            rows, wanted = found[number], right[number]
            said = int(weights[rows].sum(axis=0).argmax())
            if said != wanted:
                for bucket, sign in ((wanted, 1), (said, -1)):
                    weights[rows, bucket] += sign
                    steps[rows, bucket] += sign * step
    average = weights * (step + 1) - steps
    most = max(1, int(np.abs(average).max()))
    return AnswerLengths((average * np.iinfo(np.int16).max // most).astype(np.int16))


def read_answer_lengths(directory: Path) -> AnswerLengths | None:
    """Read the classifier beside a model's weights; None without such a file. Raises CheckpointError for a
    file with other contents."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        weights = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not lengths of answers, an array as NumPy saves it") from error
    if weights.shape != SHAPE or weights.dtype != np.int16:
        raise CheckpointError(
            f"{path}: lengths of answers are int16 {list(SHAPE)}, found {weights.dtype} {list(weights.shape)}"
        )
    return AnswerLengths(weights)
