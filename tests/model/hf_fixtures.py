"""Small DeepSeek-V3 checkpoints with what Hugging Face transformers computes for them.

Only configs, seeds and expected outputs are stored; weights are generated from the seed. The expected
outputs are made by `tools/make_hf_fixtures.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from xdeepserve.model.checkpoint import INDEX_FILE, SINGLE_FILE
from xdeepserve.model.config import load_config
from xdeepserve.model.export import to_storage, write_checkpoint
from xdeepserve.model.seeded import SeededCheckpoint, hash_words

DIRECTORY = Path(__file__).parent.parent / "fixtures" / "hf"
WRITTEN_CONFIGS = DIRECTORY / "written_configs.json"
PROMPT_LENGTHS = (1, 17, 130)
NUM_GREEDY_TOKENS = 24
ROPE_POSITIONS = (0, 1, 2, 7, 31, 63, 129, 500)


@dataclass(frozen=True)
class Fixture:
    """One checkpoint. Lists of outputs follow `prompts`."""

    name: str
    seed: int
    storage: str  # "f32" or "bf16": the weights are the same
    num_shards: int  # 1: a single file; more: an expert's tensors lie in different files
    config: dict[str, Any]

    @cached_property
    def prompts(self) -> list[list[int]]:
        vocab_size = self.config["vocab_size"]
        return [
            (hash_words(self.seed, f"prompt of {length}", length) % vocab_size).tolist()
            for length in PROMPT_LENGTHS
        ]

    @cached_property
    def expected(self) -> dict[str, NDArray[Any]]:
        with np.load(DIRECTORY / f"{self.name}.npz") as arrays:
            return dict(arrays)

    @property
    def logits(self) -> list[NDArray[np.float32]]:
        """Of each prompt's last position, float32 [vocab]."""
        return list(self.expected["logits"])

    @property
    def tokens(self) -> list[list[int]]:
        """24 greedy tokens after each prompt; the end token does not stop them."""
        return [row.tolist() for row in self.expected["tokens"]]

    @property
    def mtp_logits(self) -> list[NDArray[np.float32]]:
        """The MTP layer's last position, given the prompt and its first greedy token, float32 [vocab].

        Empty if the checkpoint has no MTP layer.
        """
        return list(self.expected["mtp_logits"]) if "mtp_logits" in self.expected else []

    def checkpoint_dir(self, parent: Path) -> Path:
        """Write the checkpoint below `parent`, in this fixture's own storage and layout."""
        directory = parent / self.name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        checkpoint = SeededCheckpoint(self.name, directory, load_config(directory), self.seed)
        write_checkpoint(checkpoint, directory, self.storage)
        if self.num_shards > 1:
            deal_into_shards(directory, checkpoint, self.storage, self.num_shards)
        return directory


def deal_into_shards(directory: Path, checkpoint: SeededCheckpoint, storage: str, num_shards: int) -> None:
    """Replace the single file by shards dealt like cards, so that no expert is whole in any of them."""
    with safe_open(directory / SINGLE_FILE, framework="numpy") as single:
        names = sorted(single.keys())
    (directory / SINGLE_FILE).unlink()
    weight_map = {name: f"shard-{i % num_shards}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        held = {
            name: to_storage(checkpoint.tensor(name), storage) for name in names if weight_map[name] == file
        }
        save_file(held, directory / file, metadata={"format": "pt"})
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def written_configs() -> dict[str, dict[str, Any]]:
    """What transformers writes into config.json once it has read a fixture's, by name."""
    configs: dict[str, dict[str, Any]] = json.loads(WRITTEN_CONFIGS.read_text())
    return configs


def fixtures(file: str = "fixtures.json") -> list[Fixture]:
    definitions = json.loads((DIRECTORY / file).read_text())
    return [Fixture(name=name, **fields) for name, fields in definitions.items()]


BY_NAME: dict[str, Fixture] = {f.name: f for f in fixtures()}
V4: dict[str, Fixture] = {f.name: f for f in fixtures("v4.json")}
"""Those of DeepSeek-V4, which has a reference and no engine yet."""
