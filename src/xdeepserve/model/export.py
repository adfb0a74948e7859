"""Write any checkpoint as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from xdeepserve.bf16 import to_bf16
from xdeepserve.model.answer_lengths import FILE as ANSWER_LENGTHS
from xdeepserve.model.checkpoint import INDEX_FILE, SINGLE_FILE, WHOLE_NUMBERS, Checkpoint, fallback
from xdeepserve.model.v4.tables import published

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    ANSWER_LENGTHS,
)
StorageDtype = Literal["bf16", "f32"]


def write_checkpoint(
    checkpoint: Checkpoint, directory: Path, dtype: StorageDtype = "bf16", max_shard_bytes: int | None = None
) -> None:
    """Save COMPANIONS and weights; sharded with an index if `max_shard_bytes` is given.

    "bf16" rounds to nearest even and loses nothing for seeded weights. Tensors that only repeat their
    stand-in (a tied head, an MTP layer's shared embedding) are left out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for companion in COMPANIONS:
        source = checkpoint.directory / companion
        if companion == "config.json":
            source = checkpoint.config_path
        if source.is_file() and source.resolve() != (directory / companion).resolve():
            shutil.copyfile(source, directory / companion)
    if max_shard_bytes is None:
        tensors = {
            _published(name, checkpoint): to_storage(array, dtype, name)
            for name, array in _distinct_tensors(checkpoint)
        }
        save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
        return
    shards = _plan_shards(checkpoint, dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total_size = 0
    for shard_idx, names in enumerate(shards, start=1):
        file = f"model-{shard_idx:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            _published(name, checkpoint): to_storage(checkpoint.tensor(name), dtype, name) for name in names
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


def _published(name: str, checkpoint: Checkpoint) -> str:
    """Return the name that a tensor has in files of its family."""
    config = checkpoint.config
    return name if config.v4 is None else published(name, config.num_hidden_layers)


def to_storage(array: NDArray[np.float32], dtype: StorageDtype, name: str = "") -> NDArray[np.generic]:
    """Convert a float32 array to the stored type; BF16 becomes ml_dtypes' type, which the safetensors library
    knows, and a table of whole numbers int64."""
    if name.endswith(WHOLE_NUMBERS):
        return array.astype(np.int64)
    if dtype == "f32":
        return array
    return to_bf16(array).view(ml_dtypes.bfloat16)


def _distinct_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name in checkpoint.names():
        array, other = checkpoint.tensor(name), fallback(name, checkpoint.config)
        if other is None or not np.array_equal(array, checkpoint.tensor(other)):
            yield name, array


def _plan_shards(checkpoint: Checkpoint, dtype: StorageDtype, max_shard_bytes: int) -> list[list[str]]:
    """Return the tensor names of each shard, filled in order; a tensor larger than the limit has a shard of
    its own."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, array in _distinct_tensors(checkpoint):
        size = array.size * (2 if dtype == "bf16" else 4)
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
