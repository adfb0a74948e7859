"""Supervised fine-tuning as a task (DeepServe 3), by transformers and torch: the `train` extra.

All weights that transformers loads of the model are trained, by AdamW on all tokens of the examples. Weights
that it does not load (MTP's layers) stay unchanged. The same job on the same machine gives the same file.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xdeepserve.errors import InputError
from xdeepserve.jobs.job_records import TrainingSettings
from xdeepserve.jobs.quantizing import Tell, prepared
from xdeepserve.jobs.task_process import TaskSpec
from xdeepserve.model.presets import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

LEARNING_RATE = 1e-4  # times a job's multiplier
SEED = 0
EXTRA = "fine-tuning needs torch and transformers: pip install 'xdeepserve[train]'"
KEPT = (  # not answer_lengths.npy: a model that is trained answers otherwise
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
)


def check_extra() -> None:
    """Raise InputError, with a one-line message, if the libraries for training are not installed."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise InputError(EXTRA)


def train(spec: TaskSpec, tell: Tell) -> dict[str, Any]:
    """Train the checkpoint, keeping all dtypes. Raises InputError."""
    check_extra()
    settings, texts = spec.order.training_settings, prepared(spec).calibration
    texts = [ids for ids in texts if len(ids) > 1]
    if settings is None or not texts:
        raise InputError("no example has two tokens or more, so that there is nothing to learn")
    source = resolve_model(spec.order.source).directory
    found: dict[str, Any] = {"trained_tokens": settings.n_epochs * sum(map(len, texts))}
    if not spec.model.exists():  # else it was finished, and the news of it lost
        found["train_loss"] = _train(source, spec.model, texts, settings, tell)
    return found


def batches(num_texts: int, settings: TrainingSettings) -> Iterator[list[int]]:
    """Yield the numbers of the examples of each step: each example once an epoch, in the epoch's own
    order."""
    for epoch in range(settings.n_epochs):
        order = np.random.default_rng((SEED, epoch)).permutation(num_texts).tolist()
        yield from (order[at : at + settings.batch_size] for at in range(0, num_texts, settings.batch_size))


def _train(
    source: Path, target: Path, texts: list[list[int]], settings: TrainingSettings, tell: Tell
) -> float:
    """Train the model and return the loss of the last step. The finished checkpoint appears under `target` at
    once."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    model.train()
    rate = LEARNING_RATE * settings.learning_rate_multiplier
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    steps, loss = list(batches(len(texts), settings)), 0.0
    for number, some in enumerate(steps, 1):
        longest = max(len(texts[each]) for each in some)
        ids = torch.zeros((len(some), longest), dtype=torch.long)
        labels = torch.full((len(some), longest), -100)
        for row, each in enumerate(some):
            ids[row, : len(texts[each])] = labels[row, : len(texts[each])] = torch.tensor(texts[each])
        found = model(input_ids=ids, labels=labels, use_cache=False).loss
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = float(found.detach())
        tell(f"step {number}", {"step": number, "total_steps": len(steps), "train_loss": loss})
    written = target.with_name("being-written")
    shutil.rmtree(written, ignore_errors=True)
    model.save_pretrained(written)
    trained = {name: each for path in written.glob("*.safetensors") for name, each in load_file(path).items()}
    _write(source, written, trained)
    os.replace(written, target)
    return loss


def _write(source: Path, target: Path, trained: dict[str, Any]) -> None:
    """Write the files of `source` with the trained tensors in place of the original ones."""
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target)
    target.mkdir()
    for name in KEPT:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    index: dict[str, str] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        for name, old in tensors.items():
            if name in trained:
                tensors[name] = trained.pop(name).to(old.dtype).contiguous()
        save_file(tensors, target / path.name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, path.name)
    if trained:
        raise InputError(f"{source.name} has no {min(trained)}, which transformers has trained")
    if (source / "model.safetensors.index.json").exists():
        told = {"metadata": {}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(told))
