"""Make what predicts the lengths of a model's answers: the model answers prompts, and a classifier learns.

    python tools/make_answer_lengths.py             writes the file of `tiny`, the same bits on every computer
    python tools/make_answer_lengths.py --check     compares with it instead, and says how good it is

Prompts are the corpus' training samples; what is printed is the accuracy on held-out ones, which share no key
with them. DeepServe (5.3.3) reports 84.9 % of buckets of 128 tokens, for other models and texts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from xdeepserve import LLM, SamplingParams
from xdeepserve.corpus import EXAMINED, Split
from xdeepserve.evals.samples import examined
from xdeepserve.model.answer_lengths import BUCKET, FILE, AnswerLengths, bucket_of, learned
from xdeepserve.model.presets import PRESET_DIRECTORY

TRAINED, HELD_OUT = 400, 60  # prompts of each domain
MOST = 255  # tokens of an answer
SETTINGS = ["scheduler.max_num_seqs=64", "scheduler.max_num_batched_tokens=512", "cache.num_blocks=4096"]
Answers = list[tuple[str, list[int], int]]


def answers(llm: LLM, split: Split, each: int) -> Answers:
    """Domain, prompt and the length of the model's own answer, greedy, for so many samples of each domain."""
    samples = [examined(domain, index, split) for domain in EXAMINED for index in range(each)]
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.encode(sample.prompt) for sample in samples]
    params = SamplingParams(max_tokens=MOST, temperature=0.0)
    outputs = llm.generate(prompts, params)
    return [
        (sample.domain, prompt, len(output.outputs[0].token_ids))
        for sample, prompt, output in zip(samples, prompts, outputs, strict=True)
    ]


def accuracy(predictor: AnswerLengths, found: Answers) -> tuple[float, float]:
    """The share of answers whose bucket is right, and tokens that predictions are off by."""
    right = [predictor.bucket(prompt) == bucket_of(length) for _, prompt, length in found]
    return float(np.mean(right)), float(np.mean([abs(predictor(prompt) - n) for _, prompt, n in found]))


def report(predictor: AnswerLengths, trained: Answers, held_out: Answers) -> None:
    """Accuracy beside that of always saying what is most common."""
    buckets = [bucket_of(length) for _, _, length in trained]
    common = int(np.bincount(buckets).argmax())
    rows: Sequence[tuple[str, Answers]] = [
        ("trained on", trained),
        ("held out", held_out),
        *((f"  {domain}", [each for each in held_out if each[0] == domain]) for domain in EXAMINED),
    ]
    print(f"{'':<14}{'answers':>8}{f'right {BUCKET}':>10}{'off by':>9}{'most common':>13}")
    for name, found in rows:
        share, error = accuracy(predictor, found)
        same = np.mean([bucket_of(length) == common for _, _, length in found])
        print(f"{name:<14}{len(found):>8}{100 * share:>8.1f} %{error:>9.1f}{100 * same:>11.1f} %")


def main() -> int:
    """1 if the file is to be the same, and is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the file that is there")
    args = parser.parse_args()
    with LLM("tiny", "monolithic", overrides=SETTINGS) as llm:
        trained, held_out = answers(llm, "train", TRAINED), answers(llm, "held-out", HELD_OUT)
    predictor = learned([each[1] for each in trained], [each[2] for each in trained])
    report(predictor, trained, held_out)
    path = PRESET_DIRECTORY / "tiny" / FILE
    if args.check:
        is_same = bool(np.array_equal(np.load(path), predictor.weights))
        print(f"{path.name} is {'the same' if is_same else 'ANOTHER'}")
        return 0 if is_same else 1
    np.save(path, predictor.weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
