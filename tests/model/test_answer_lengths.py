"""Lengths of answers predicted from the tokens of prompts: counted in integers, learned, shipped, refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tools.make_answer_lengths import accuracy, answers

from xdeepserve import LLM
from xdeepserve.errors import CheckpointError
from xdeepserve.model.answer_lengths import (
    BUCKET,
    FILE,
    NUM_BUCKETS,
    NUM_FEATURES,
    SHAPE,
    AnswerLengths,
    bucket_of,
    features,
    learned,
    read_answer_lengths,
)
from xdeepserve.model.presets import PRESET_DIRECTORY


def drawn(seed: int, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts whose third token says how long the answer is."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(50, 500) for _ in range(rng.randrange(3, 30))] for _ in range(count)]
    for prompt in prompts:
        prompt[2] = rng.randrange(4)
    return prompts, [20 + 60 * prompt[2] for prompt in prompts]


def test_features_are_of_runs_and_of_nothing_else() -> None:
    one = features([1, 2, 3, 4])
    assert len(one) == 1 + 4 + 3 + 2
    assert one.tolist() == sorted(set(one.tolist()))
    assert one.min() >= 0
    assert one.max() < NUM_FEATURES
    assert np.array_equal(one, features([1, 2, 3, 4]))
    assert not np.array_equal(one, features([4, 3, 2, 1])), "order counts"
    assert len(set(one.tolist()) & set(features([1, 2, 3, 9, 9, 9, 9, 9]).tolist())) == 3 + 2 + 1
    assert len(features([])) == 1
    assert len(features([2**31 - 1])) == 2


def test_buckets() -> None:
    assert [bucket_of(n) for n in (0, BUCKET - 1, BUCKET, 10**6)] == [0, 0, 1, NUM_BUCKETS - 1]


def test_what_can_be_learned_is_learned_and_the_same_again() -> None:
    prompts, lengths = drawn(1, 400)
    predictor = learned(prompts, lengths)
    assert np.array_equal(predictor.weights, learned(prompts, lengths).weights)
    assert predictor.weights.dtype == np.int16
    assert np.abs(predictor.weights.astype(int)).max() == np.iinfo(np.int16).max
    held_out, true = drawn(2, 200)
    right = [predictor.bucket(prompt) == bucket_of(n) for prompt, n in zip(held_out, true, strict=True)]
    assert np.mean(right) > 0.95
    assert predictor(held_out[0]) == BUCKET * (predictor.bucket(held_out[0]) + 0.5)


def test_what_lies_beside_weights_is_read_or_refused(tmp_path: Path) -> None:
    assert read_answer_lengths(tmp_path) is None
    np.save(tmp_path / FILE, np.zeros(SHAPE, np.int16))
    found = read_answer_lengths(tmp_path)
    assert isinstance(found, AnswerLengths)
    assert found([1, 2, 3]) == BUCKET / 2
    np.save(tmp_path / FILE, np.zeros((3, 4), np.int16))
    with pytest.raises(CheckpointError, match=r"int16 \[4096, 16\], found int16 \[3, 4\]"):
        read_answer_lengths(tmp_path)
    (tmp_path / FILE).write_bytes(b"no array")
    with pytest.raises(CheckpointError, match="not lengths of answers"):
        read_answer_lengths(tmp_path)


def test_what_is_shipped_predicts_answers_that_it_has_not_seen() -> None:
    """The model's own, to held-out prompts: far better than what is most common."""
    predictor = read_answer_lengths(PRESET_DIRECTORY / "tiny")
    assert predictor is not None
    with LLM("tiny", "monolithic", overrides=["scheduler.max_num_seqs=32"]) as llm:
        found = answers(llm, "held-out", 6)
    share, _ = accuracy(predictor, found)
    buckets = [bucket_of(length) for _, _, length in found]
    assert share > np.bincount(buckets).max() / len(found) + 0.2
