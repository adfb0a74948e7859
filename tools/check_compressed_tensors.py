"""Hold INT8 files beside compressed-tensors, the library that reads them for transformers and vLLM.

    python -m venv .venv-ct
    .venv-ct/bin/pip install -e . torch 'transformers==4.57.6' 'compressed-tensors==0.12.2'
    .venv-ct/bin/python tools/check_compressed_tensors.py [--write tests/fixtures/compressed_tensors]

Both ways. `tiny` is quantised here and loaded by transformers, by way of compressed-tensors: the same layers
are INT8, integers and scales are the same, and along held-out text both models mean the same token. Then a
small random model is quantised and written by compressed-tensors and read here; `--write` keeps it, with its
logits, for the tests.

(transformers 5 stacks experts into one tensor, and cannot take them from any INT8 file.)
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    disable_quantization,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from xdeepserve.corpus import EXAMINED, sample
from xdeepserve.model.checkpoint import Checkpoint, open_checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.quant_config import compressed_tensors_config
from xdeepserve.model.reference import Reference
from xdeepserve.model.tokenizer import load_tokenizer
from xdeepserve.quant.calibration import calibration_sequences
from xdeepserve.quant.job import quantize_checkpoint
from xdeepserve.quant.method import METHODS

TOLERANCE = 1e-4  # of a logit: sums in another order
AGREEMENT = 0.97  # share of places where both models mean the same token
TEXTS = 2  # per domain
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
IDS = [(7 * i + i * i) % 40 for i in range(24)]


def load(directory: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def int8_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dtype == torch.int8
    }


def check_ours(directory: Path, checkpoint: Checkpoint) -> None:
    """What `xdeepserve quantize` wrote, read by transformers."""
    model = load(directory)
    found = int8_layers(model)
    inside = [f"model.layers.{i}." for i in range(checkpoint.config.num_hidden_layers)]
    names = [name.removesuffix(".weight") for name in checkpoint.names() if name.startswith(tuple(inside))]
    ours = {name for name in names if checkpoint.int8(name) is not None}
    if set(found) != ours:
        raise SystemExit(f"not the same layers are INT8: {sorted(set(found) ^ ours)[:3]}")
    for name, module in found.items():
        stored = checkpoint.int8(name)
        assert stored is not None
        same = np.array_equal(module.weight.numpy(), stored[0])
        if not (same and np.array_equal(module.weight_scale.numpy(), stored[1])):
            raise SystemExit(f"{name}: other integers or scales")
    print(f"{len(found)} layers are INT8 in both, with the same integers and scales")
    agreement(model, checkpoint)


@torch.no_grad()
def agreement(model: nn.Module, checkpoint: Checkpoint) -> None:
    tokenizer, reference = load_tokenizer(checkpoint.directory), Reference(checkpoint, "int8")
    assert tokenizer is not None
    same = total = 0
    for domain in EXAMINED:
        for i in range(TEXTS):
            one = sample(domain, "held-out", 2, i)
            prompt, answer = tokenizer.encode(one.prompt), tokenizer.encode(one.answer)
            ids, places = [*prompt, *answer], slice(max(len(prompt) - 1, 0), -1)
            theirs = model(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).numpy()[places]
            same += int((theirs == reference.logits(ids).argmax(-1)[places]).sum())
            total += len(theirs)
    print(f"the most likely token is the same at {same} of {total} places of answers")
    if same < AGREEMENT * total:
        raise SystemExit(f"less than {AGREEMENT}")


@torch.no_grad()
def write_theirs(directory: Path) -> None:
    """A random model, quantised and written by compressed-tensors, with the logits of its INT8 weights."""
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL, attn_implementation="eager")).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    raw = compressed_tensors_config(["lm_head", "re:.*kv_b_proj$", "re:.*mlp[.]gate$"], "0.12.2")
    raw["quantization_status"] = "frozen"
    apply_quantization_config(model, QuantizationConfig.model_validate(raw))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.copy_(module.weight.abs().amax(dim=1, keepdim=True) / 127)
    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(str(directory))
    again = load(directory)
    ModelCompressor.from_pretrained_model(again).decompress_model(again)
    again.apply(disable_quantization)
    logits = again(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    np.savez_compressed(directory / "expected.npz", ids=np.array(IDS, np.int32), logits=logits)


def check_theirs(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    expected = np.load(directory / "expected.npz")
    logits = Reference(checkpoint, "fp32").logits(expected["ids"].tolist())
    difference = float(np.abs(logits - expected["logits"]).max())
    print(f"a model that compressed-tensors wrote: largest difference of a logit {difference:.1e}")
    if difference > TOLERANCE:
        raise SystemExit(f"more than {TOLERANCE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="keep the model that compressed-tensors wrote here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out, source = Path(scratch) / "int8", resolve_model("tiny")
        quantize_checkpoint(source, out, METHODS["smoothquant+gptq"], calibration_sequences(source))
        check_ours(out, open_checkpoint(out))
        theirs = args.write or Path(scratch) / "theirs"
        write_theirs(theirs)
        print(json.loads((theirs / "config.json").read_text())["quantization_config"]["format"])
        check_theirs(theirs)


if __name__ == "__main__":
    main()
