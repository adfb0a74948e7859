"""Models included in the package; no network is needed.

tiny          trained on `xdeepserve.corpus` by `tools/train`: an ordinary Hugging Face directory
tiny-random   a config, tokenizer files and a seed: its weights are computed, and mean nothing
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xdeepserve.errors import CheckpointError, meant
from xdeepserve.model.checkpoint import Checkpoint, ConfigOnly, has_weight_files, open_checkpoint
from xdeepserve.model.config import load_config
from xdeepserve.model.seeded import SeededCheckpoint, normal_tensor

PRESETS = ("tiny", "tiny-random", "tiny-r1")
# Configurations without weights, for timing-only runs; after the first MegaScale-Infer's Table 4, whose sizes
# are written down as those of grouped-query attention with experts in every layer.
CONFIGS = ("deepseek-r1", "mixtral-8x22b", "dbrx", "scaled-moe")
# What Hugging Face calls models of these very sizes, without the organisation and in lower case.
ALIASES = {
    **dict.fromkeys(("deepseek-v3", "deepseek-v3-base", "deepseek-v3-0324", "deepseek-v3.1"), "deepseek-r1"),
    **dict.fromkeys(("deepseek-r1-zero", "deepseek-r1-0528"), "deepseek-r1"),
    **dict.fromkeys(("mixtral-8x22b-v0.1", "mixtral-8x22b-instruct-v0.1"), "mixtral-8x22b"),
    **dict.fromkeys(("dbrx-base", "dbrx-instruct"), "dbrx"),
}
ORGANISATIONS = ("deepseek-ai/", "mistralai/", "databricks/")
PRESET_DIRECTORY = Path(__file__).parent / "preset_files"


def preset_name(name_or_path: str | Path) -> str | None:
    """Return the preset of a name, in any case and by Hugging Face's names, too; None if there is none."""
    name = str(name_or_path)
    if name in (*PRESETS, *CONFIGS):
        return name
    if os.path.exists(name):  # False, too, of a name that no file can have
        return None
    name = name.lower()
    name = next((name.removeprefix(each) for each in ORGANISATIONS if name.startswith(each)), name)
    name = ALIASES.get(name, name)
    return name if name in (*PRESETS, *CONFIGS) else None


def resolve_model(name_or_path: str | Path) -> Checkpoint:
    """Open a model: a preset by name, else a checkpoint directory by path. Raises CheckpointError.

    The path of a config.json, or of a directory without weights, gives a model that only takes time.
    """
    preset = preset_name(name_or_path)
    if preset in ("tiny-random", "tiny-r1"):
        return TinyCheckpoint(preset)
    if preset in CONFIGS:
        return ConfigOnly(preset, PRESET_DIRECTORY / preset)
    if preset is not None:
        return open_checkpoint(PRESET_DIRECTORY / preset)
    if not os.path.exists(name_or_path):
        configs = ", ".join(("deepseek-r1", "deepseek-v3", *CONFIGS[1:]))
        names = f"{', '.join(PRESETS)}; for what only takes time {configs}"
        known = f"neither a preset ({names}) nor a directory that is there"
        nearest = meant(name_or_path, (*PRESETS, *CONFIGS, *ALIASES)) or "; nothing is downloaded"
        raise CheckpointError(f"model {str(name_or_path)[:400]!r}: {known}{nearest}")
    path = Path(name_or_path)
    if path.is_file() and path.suffix == ".json":
        folder = path.resolve().parent
        return ConfigOnly(folder.name if path.name == "config.json" else path.stem, path.parent, path.name)
    if (path / "config.json").is_file() and not has_weight_files(path):
        return ConfigOnly(path.resolve().name, path)
    return open_checkpoint(path)


class TinyCheckpoint(SeededCheckpoint):
    """Preset `tiny-random`: DeepSeek-V3 in everything but size, with seeded weights.

    `tiny-r1` has all of DeepSeek-R1's 61 layers and 256 experts, of tiny width.

    Departures from plain random weights make it pleasant to watch. The head favours tokens that print, so
    that its (meaningless) text is readable. Layers add little to the residual stream and the MTP layer passes
    the next token's embedding on, so that about a quarter of the drafts are accepted.
    """

    def __init__(self, name: str = "tiny-random") -> None:
        # Both have the same vocabulary, and the tokenizer files are there once.
        super().__init__(
            name, PRESET_DIRECTORY / "tiny-random", load_config(PRESET_DIRECTORY / name), seed=384
        )

    @property
    def config_path(self) -> Path:
        return PRESET_DIRECTORY / self.name / "config.json"

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == "lm_head.weight":
            return self._head()
        if name.endswith(".eh_proj.weight"):
            return self._mtp_projection(name)
        return super().tensor(name)

    def _gain(self, name: str) -> float:
        gain = super()._gain(name)
        return gain / 3 if name.endswith(("o_proj.weight", "down_proj.weight")) else gain

    def _head(self) -> NDArray[np.float32]:
        """Return the head [vocab, hidden]. Ids 3..258 are the bytes, 263 and up letter pairs, 1 ends a
        text."""
        config = self.config
        head = normal_tensor(
            self.seed,
            "lm_head.weight",
            (config.vocab_size, config.hidden_size),
            4.0 / math.sqrt(config.hidden_size),
        )
        ids = np.arange(config.vocab_size)
        prints = ((ids >= 3 + 0x20) & (ids <= 3 + 0x7E)) | (ids >= 263)
        # Powers of two, so that the scaled weights are still BF16.
        head[~prints] *= np.float32(0.25)
        return head

    def _mtp_projection(self, name: str) -> NDArray[np.float32]:
        """Return MTP's projection [hidden, 2 x hidden]: the identity on the embedding's half, noise on the
        hidden state's."""
        hidden = self.config.hidden_size
        projection = np.zeros((hidden, 2 * hidden), dtype=np.float32)
        projection[:, :hidden] = np.eye(hidden, dtype=np.float32)
        projection[:, hidden:] = normal_tensor(self.seed, name, (hidden, hidden), 0.25 / math.sqrt(hidden))
        return projection
