"""Write the torch model as an ordinary Hugging Face directory in BF16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from model import Model


def tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name in the checkpoint; stacks of experts come apart."""
    for name, value in model.state_dict().items():
        if ".experts." in name:
            before, after = name.split(".experts.")
            for expert, matrix in enumerate(value):
                yield f"{before}.experts.{expert}.{after}", matrix
        else:
            yield name, value


def export(model: Model, directory: Path) -> None:
    """`config.json`, `generation_config.json`, `model.safetensors`. The selection bias stays float32."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    generation = {
        "bos_token_id": model.config["bos_token_id"],
        "eos_token_id": model.config["eos_token_id"],
        "do_sample": False,
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    stored = {
        name: value.to(torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16).clone()
        for name, value in tensors(model)
    }
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
