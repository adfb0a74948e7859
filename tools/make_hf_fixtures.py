"""Compute what Hugging Face transformers says of the fixture checkpoints, for the parity tests.

Needs torch and transformers, which this package does not; run it in an environment of its own:

    python -m venv .venv-hf && .venv-hf/bin/pip install torch transformers msgspec ml_dtypes
    PYTHONPATH=src:tests/model .venv-hf/bin/python tools/make_hf_fixtures.py [NAME ...]

float32 on the CPU, eager attention, eager experts. A fixture is refused if float64 would choose other tokens
or if its logits are too flat or its routing too regular to tell a wrong implementation from a right one.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hf_fixtures import (
    DIRECTORY,
    NUM_GREEDY_TOKENS,
    ROPE_POSITIONS,
    V4,
    WRITTEN_CONFIGS,
    Fixture,
    fixtures,
    written_configs,
)
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from xdeepserve.model.checkpoint import SINGLE_FILE
from xdeepserve.model.config import load_config


def load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint as transformers loads it; a tensor it misses, or an unknown one, is an error."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    empty = {name for name, tensor in model.named_parameters() if tensor.numel() == 0}
    assert info["missing_keys"] <= empty, info
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    assert all(key.startswith(mtp) for key in info["unexpected_keys"]), info
    return model.eval()


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[np.ndarray, list[int], float]:
    """Logits of the prompt's last position, the greedy tokens, and the least lead of a chosen token."""
    ids, logits, leads = list(prompt), [], []
    for _ in range(NUM_GREEDY_TOKENS):
        logits.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
        best = torch.topk(logits[-1], 2)
        leads.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return logits[0].numpy(), ids[len(prompt) :], min(leads)


def causal_mask(_layer: int, inputs_embeds: torch.Tensor, *_: object) -> dict[str, torch.Tensor]:
    """0 for positions up to a token's own, -inf behind it, [1, 1, T, T]: as the main model makes it."""
    count = inputs_embeds.shape[1]
    mask = torch.full((count, count), torch.finfo(inputs_embeds.dtype).min).triu(1)
    return {"attention_mask": mask[None, None].to(inputs_embeds.dtype)}


@torch.no_grad()
def mtp_logits(model: PreTrainedModel, prompt: list[int], first_token: int) -> np.ndarray:
    """The draft logits of transformers' own MTP layer after the prompt and one token."""
    # transformers finds MTP tensors by a pattern that knows only the published model's layer 61.
    layer = re.escape(f"model.layers.{model.config.num_hidden_layers}.")
    model._keys_to_ignore_on_load_unexpected = [f"{layer}.*"]
    config = model.config
    if hasattr(config, "mlp_layer_types"):  # transformers counts MTP layers of DeepSeek-V3's class alone
        config.num_mtp_layers = config.num_nextn_predict_layers
        config.mtp_mlp_layer_types = ["sparse"] * config.num_mtp_layers
        config.mtp_layer_types = ["indexed_attention"] * config.num_mtp_layers
    mtp = MtpModel.from_pretrained(model).eval()
    if hasattr(config, "index_topk"):  # MtpModel makes no mask for it, and wants one result of a layer
        mtp.create_masks_for_mtp_layer = causal_mask
        for layer in mtp.layers:
            layer.mtp_block.register_forward_hook(
                lambda _module, _inputs, out: out[0] if isinstance(out, tuple) else out
            )
    hidden = model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state
    positions = torch.arange(1, len(prompt) + 1)[None]
    shifted = torch.tensor([[*prompt[1:], first_token]])
    _, logits, _ = mtp(shifted, hidden, attention_mask=None, position_ids=positions, mtp_cache=None)
    return logits[0, -1].numpy()


@torch.no_grad()
def v4_mtp_logits(directory: Path, model: PreTrainedModel, prompt: list[int], first_token: int) -> np.ndarray:
    """The draft logits of DeepSeek-V4's published MTP layer, composed of transformers' modules: transformers
    itself leaves that layer out. It is loaded as a model of one layer."""
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    tensors = load_file(directory / SINGLE_FILE)
    draft = {name.removeprefix("mtp.0."): each for name, each in tensors.items() if name.startswith("mtp.0.")}
    whole = ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")
    projections = ("e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight")
    stored = {name: each for name, each in draft.items() if name in whole}
    stored |= {f"layers.0.{name}": each for name, each in draft.items() if name not in (*whole, *projections)}
    stored |= {name: tensors[name] for name in ("embed.weight", "head.weight")}
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        save_file(stored, Path(place) / SINGLE_FILE, metadata={"format": "pt"})
        mtp = load(Path(place), torch.float32)
    e_proj, h_proj, enorm, hnorm = (draft[name].float() for name in projections)
    streams: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda _module, _inputs, out: streams.append(out))
    model(torch.tensor([prompt]), use_cache=False)
    hook.remove()
    ids, eps = torch.tensor([[*prompt[1:], first_token]]), config["rms_norm_eps"]
    embedding = functional.rms_norm(model.model.embed_tokens(ids), enorm.shape, enorm, eps) @ e_proj.T
    hidden = functional.rms_norm(streams[0], hnorm.shape, hnorm, eps) @ h_proj.T
    hook = mtp.model.layers[0].register_forward_pre_hook(
        lambda _module, inputs: (embedding[:, :, None] + hidden, *inputs[1:])
    )
    logits = mtp(ids, use_cache=False).logits
    hook.remove()
    return logits[0, -1].numpy()


@torch.no_grad()
def experts_used(model: PreTrainedModel, prompt: list[int]) -> int:
    """The least number of distinct experts that any MoE layer chooses over a prompt."""
    used: list[int] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, out: used.append(len(out[2].unique())))
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    model(torch.tensor([prompt]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(used)


def keep_written_config(fixture: Fixture, directory: Path) -> None:
    """The config.json that `save_pretrained` writes of a fixture. Kimi's would be read with remote code."""
    if fixture.config["model_type"] == "kimi_k2":
        return
    written: dict[str, Any] = json.loads(AutoConfig.from_pretrained(directory).to_json_string())
    found = written_configs() | {fixture.name: written}
    order = [each.name for each in [*fixtures(), *V4.values()] if each.name in found]
    lines = [f"{json.dumps(name)}: {json.dumps(found[name], sort_keys=True)}" for name in order]
    WRITTEN_CONFIGS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def expected(fixture: Fixture, directory: Path) -> dict[str, np.ndarray]:
    config_path = directory / "config.json"
    if fixture.config["model_type"] == "kimi_k2":
        # transformers reads Kimi K2 with remote code only; the architecture is the same.
        config_path.write_text(json.dumps(fixture.config | {"model_type": "deepseek_v3"}))
    model, exact = load(directory, torch.float32), load(directory, torch.float64)
    runs = [greedy(model, prompt) for prompt in fixture.prompts]
    worst = 0.0
    for prompt, (logits, tokens, lead) in zip(fixture.prompts, runs, strict=True):
        exact_logits, exact_tokens, _ = greedy(exact, prompt)
        worst = max(worst, float(np.abs(logits - exact_logits).max()))
        assert tokens == exact_tokens, f"{fixture.name}: float64 chooses other tokens; take another seed"
        assert lead > 4e-3, f"{fixture.name}: a token leads by only {lead}; take another seed"
        assert logits.std() > 1.0, f"{fixture.name}: logits are flat"
        assert len(set(tokens)) > 4, f"{fixture.name}: greedy tokens {tokens} are monotonous"
    num_used = experts_used(model, fixture.prompts[-1])
    assert num_used > load_config(directory).n_routed_experts * 0.7, (
        f"{fixture.name}: only {num_used} experts are used"
    )
    assert worst < 2e-4, f"{fixture.name}: float32 and float64 differ by {worst}"
    kinds = {"layer_type": "compress"} if fixture.name in V4 else {}
    turned = model.model.rotary_emb(torch.zeros(1), torch.tensor([ROPE_POSITIONS]), **kinds)
    if fixture.name in V4:
        cos, sin = turned
    elif isinstance(turned, tuple):  # every pair's angle twice
        cos, sin = (table[..., : table.shape[-1] // 2] for table in turned)
    else:  # DeepSeek-V2's, as complex numbers
        cos, sin = turned.real, turned.imag
    arrays = {
        "logits": np.stack([logits for logits, _, _ in runs]),
        "tokens": np.array([tokens for _, tokens, _ in runs], dtype=np.int32),
        "cos": cos[0].numpy(),
        "sin": sin[0].numpy(),
        "softmax_scale": np.float64(model.model.layers[0].self_attn.scaling),
    }
    if fixture.config.get("num_nextn_predict_layers"):
        pairs = zip(fixture.prompts, runs, strict=True)
        draft = partial(v4_mtp_logits, directory) if fixture.name in V4 else mtp_logits
        arrays["mtp_logits"] = np.stack([draft(model, prompt, tokens[0]) for prompt, (_, tokens, _) in pairs])
    print(
        f"{fixture.name}: logits deviate {arrays['logits'].std():.2f}, float64 differs by {worst:.1e}, "
        f"{num_used} experts used, least lead {min(lead for _, _, lead in runs):.3f}"
    )
    return arrays


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wanted = sys.argv[1:]
    for fixture in [*fixtures(), *V4.values()]:
        if wanted and fixture.name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = fixture.checkpoint_dir(Path(directory))
            keep_written_config(fixture, checkpoint)
            arrays = expected(fixture, checkpoint)
        np.savez(DIRECTORY / f"{fixture.name}.npz", **arrays)


if __name__ == "__main__":
    main()
