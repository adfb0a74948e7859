"""Post-training quantisation as tasks: prepare, quantise, evaluate (DeepServe 3; CloudMatrix 4.5).

A lost task may be run again: `prepare` and `evaluate` from the beginning, `quantize` behind the last finished
layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from xdeepserve.errors import InputError
from xdeepserve.jobs.task_process import TaskSpec
from xdeepserve.jobs.training_text import MAX_TOKENS, read_lines, split, token_ids
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.tokenizer import load_tokenizer
from xdeepserve.model.weights import Recipe

Tell = Callable[[str, dict[str, Any] | None], None]  # what has been done, and figures of it
MIN_TOKENS = 2  # of an example that can be examined on


class Prepared(msgspec.Struct):
    """Token ids of the examples for calibration, and of held-out examples."""

    calibration: list[list[int]]
    held_out: list[list[int]]


def prepare(spec: TaskSpec, tell: Tell) -> dict[str, Any]:
    """Convert examples to token ids, and choose the held-out examples. Raises InputError."""
    checkpoint = resolve_model(spec.order.source)
    tokenizer = load_tokenizer(checkpoint.directory)
    if tokenizer is None:
        raise InputError(f"{spec.order.model} has no tokenizer, so it cannot read the training file")
    limit = min(MAX_TOKENS, checkpoint.config.max_position_embeddings)
    try:
        examples = token_ids(read_lines(Path(spec.training)), tokenizer, limit)
        if spec.validation is None:
            found = Prepared(*split(examples))
        else:
            held_out = token_ids(read_lines(Path(spec.validation)), tokenizer, limit)
            found = Prepared(examples, held_out)
    finally:
        tokenizer.close()
    found.held_out = [ids for ids in found.held_out if len(ids) >= MIN_TOKENS]
    if not found.held_out:
        raise InputError(f"no example to examine on has {MIN_TOKENS} tokens or more")
    largest = max(max(ids, default=0) for ids in [*found.calibration, *found.held_out])
    if largest >= checkpoint.config.vocab_size:
        raise InputError(f"{spec.order.model}: its tokenizer makes ids that the model does not know")
    _file(spec).write_bytes(msgspec.json.encode(found))
    return {
        "calibration_examples": len(found.calibration),
        "calibration_tokens": sum(map(len, found.calibration)),
        "held_out_examples": len(found.held_out),
        "held_out_tokens": sum(map(len, found.held_out)),
    }


def quantize(spec: TaskSpec, tell: Tell) -> dict[str, Any]:
    """Quantise the checkpoint to INT8. Raises InputError."""
    from xdeepserve.evals.run import mean_errors
    from xdeepserve.quant.job import quantize_checkpoint
    from xdeepserve.quant.method import METHODS

    texts = prepared(spec).calibration
    if not spec.model.exists():  # else it was finished, and the news of it lost
        quantize_checkpoint(
            resolve_model(spec.order.source),
            spec.model,
            METHODS[spec.order.algorithm],
            lambda i: texts[i] if i < len(texts) else None,
            num_sequences=spec.order.samples,
            progress=lambda what, done, total: tell(what, {"step": done, "total_steps": total}),
        )
    return {"mean_relative_error": mean_errors(spec.model)}


def evaluate(spec: TaskSpec, tell: Tell) -> dict[str, Any]:
    """Compute the perplexity of held-out examples: the original's in fp32, and the new model's in int8, as
    served. Raises InputError."""
    texts = prepared(spec).held_out
    return {
        "perplexity": {
            "original": _perplexity(spec.order.source, "fp32", texts),
            spec.order.changed: _perplexity(str(spec.model), "int8", texts),
        },
    }


def _perplexity(model: str, recipe: Recipe, texts: list[list[int]]) -> float:
    """Compute perplexity with teacher forcing, on one die, over all tokens except each text's first."""
    from xdeepserve.evals.run import token_losses
    from xdeepserve.llm import LLM

    length = max(map(len, texts)) + 1
    with LLM(model, "monolithic", recipe, max_model_len=length, threads=1, progress=False) as llm:
        losses = [token_losses(llm.logits(ids)[:-1], ids[1:]) for ids in texts]
    return math.exp(sum(float(each.sum()) for each in losses) / sum(map(len, losses)))


def _file(spec: TaskSpec) -> Path:
    return Path(spec.directory) / "prepared.json"


def prepared(spec: TaskSpec) -> Prepared:
    """Read the results of `prepare`."""
    return msgspec.json.decode(_file(spec).read_bytes(), type=Prepared)
