"""Checkpoints: named tensors of a DeepSeek-V3 model, from a Hugging Face directory.

Every name and shape is checked against the config from the file headers, before any weight is read; then
tensors are read one at a time, so that memory stays bounded by what the caller keeps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .config import ModelConfig, load_config, read_json_object

SUPPORTED_DTYPES = ("F32", "BF16", "F16")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class Checkpoint(ABC):
    """Weights by their Hugging Face names. `directory` holds the config and perhaps tokenizer files."""

    has_weights = True

    def __init__(self, name: str, directory: Path, config: ModelConfig) -> None:
        self.name = name
        self.directory = directory
        self.config = config

    def names(self) -> list[str]:
        """Every tensor of the model, in a fixed order. `tensor` knows each of them."""
        return list(expected_tensors(self.config))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in float32."""
        return 4 * sum(math.prod(shape) for shape in expected_tensors(self.config).values())

    @abstractmethod
    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor, float32, C-contiguous, of the shape that `expected_tensors` says; a fresh array."""


def open_checkpoint(path: str | Path) -> DirectoryCheckpoint:
    """Open a Hugging Face directory (`config.json` and safetensors files, sharded or not; F32, BF16 or F16).

    MTP layers that the config promises but the files leave out (as transformers does when it saves) are
    dropped from the config. Tensors that the model does not have are ignored. Raises CheckpointError.
    """
    directory = Path(path)
    if not directory.exists():
        raise CheckpointError(f"{directory}: no such directory")
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory; a checkpoint is a directory with config.json")
    config = load_config(directory)
    stored = dict(_stored_tensors(directory))
    config = msgspec.structs.replace(config, num_nextn_predict_layers=_count_mtp_layers(config, stored))
    _check_complete(directory, config, stored)
    return DirectoryCheckpoint(directory, config, stored)


class DirectoryCheckpoint(Checkpoint):
    """Tensors read on demand from memory-mapped safetensors files. Made by `open_checkpoint`."""

    def __init__(self, directory: Path, config: ModelConfig, stored: dict[str, Any]) -> None:
        super().__init__(directory.resolve().name, directory, config)
        self._stored = stored

    def tensor(self, name: str) -> NDArray[np.float32]:
        found = _find(name, self.config, self._stored)
        if found is None:
            raise CheckpointError(f"{self.directory}: the model has no tensor {name}")
        array = self._stored[found].get_tensor(found)
        if array.dtype == ml_dtypes.bfloat16:  # the upper half of a float32's bits
            return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.ascontiguousarray(array, dtype=np.float32)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of the model. Matrices are [out_features, in_features].

    `lm_head.weight` is among them even if tied, and so are an MTP layer's own embedding and head, which
    checkpoints may leave out (see `fallback`).
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden)}
    for layer_idx in range(config.num_layers_with_mtp):
        prefix = f"model.layers.{layer_idx}."
        layer = _layer_tensors(config, layer_idx)
        if layer_idx >= config.num_hidden_layers:
            layer |= _mtp_tensors(config)
        shapes |= {prefix + name: shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), _HEAD: (config.vocab_size, hidden)}


def fallback(name: str, config: ModelConfig) -> str | None:
    """The tensor that stands in for an absent one: a tied head, an MTP layer's shared embedding and head."""
    if name == _HEAD:
        return _EMBEDDING if config.tie_word_embeddings else None
    if name.startswith("model.layers.") and name.endswith(".embed_tokens.weight"):
        return _EMBEDDING
    if name.endswith(".shared_head.head.weight"):
        return _HEAD
    return None


def _layer_tensors(config: ModelConfig, layer_idx: int) -> dict[str, tuple[int, ...]]:
    """A decoder layer: MLA, then a dense MLP or a router with its experts."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if config.q_lora_rank is None:
        shapes["self_attn.q_proj.weight"] = (heads * config.qk_head_dim, hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (config.q_lora_rank, hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes["self_attn.q_b_proj.weight"] = (heads * config.qk_head_dim, config.q_lora_rank)
    shapes |= {
        "self_attn.kv_a_proj_with_mqa.weight": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (config.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            config.kv_lora_rank,
        ),
        "self_attn.o_proj.weight": (hidden, heads * config.v_head_dim),
        "post_attention_layernorm.weight": (hidden,),
    }
    if not config.is_moe(layer_idx):
        return shapes | _mlp_tensors("mlp.", hidden, config.intermediate_size)
    shapes["mlp.gate.weight"] = (config.n_routed_experts, hidden)
    shapes["mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
    for expert_idx in range(config.n_routed_experts):
        shapes |= _mlp_tensors(f"mlp.experts.{expert_idx}.", hidden, config.moe_intermediate_size)
    if config.n_shared_experts:
        shared = config.n_shared_experts * config.moe_intermediate_size
        shapes |= _mlp_tensors("mlp.shared_experts.", hidden, shared)
    return shapes


def _mlp_tensors(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }


def _mtp_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What an MTP layer has beside its decoder layer. `eh_proj` reads concat[embedding, hidden]."""
    hidden, vocab = config.hidden_size, config.vocab_size
    return {
        "embed_tokens.weight": (vocab, hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
    }


def _find(name: str, config: ModelConfig, stored: dict[str, Any]) -> str | None:
    """The stored tensor to read for `name`: itself, else what stands in for it."""
    candidate: str | None = name
    while candidate is not None and candidate not in stored:
        candidate = fallback(candidate, config)
    return candidate


def _count_mtp_layers(config: ModelConfig, stored: dict[str, Any]) -> int:
    """How many MTP layers the files begin to hold; one that is there in part is an error found later."""
    count = 0
    while count < config.num_nextn_predict_layers:
        prefix = f"model.layers.{config.num_hidden_layers + count}."
        if not any(prefix + name in stored for name in _mtp_tensors(config)):
            break
        count += 1
    return count


def _check_complete(directory: Path, config: ModelConfig, stored: dict[str, Any]) -> None:
    """Every tensor there, of the right shape and of a dtype that can be read; all from headers."""
    expected = expected_tensors(config)
    missing = [name for name in expected if _find(name, config, stored) is None]
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(expected)} tensors are missing: {_first_few(missing)}"
        )
    wrong_shape, wrong_dtype = [], []
    for name, shape in expected.items():
        if name not in stored:
            continue
        header = stored[name].get_slice(name)
        if tuple(header.get_shape()) != shape:
            wrong_shape.append(f"{name} is {list(header.get_shape())}, expected {list(shape)}")
        if header.get_dtype() not in SUPPORTED_DTYPES:
            wrong_dtype.append(f"{name} is {header.get_dtype()}")
    if wrong_shape:
        raise CheckpointError(
            f"{directory}: wrong shape of {len(wrong_shape)} tensors: {_first_few(wrong_shape)}"
        )
    if wrong_dtype:
        raise CheckpointError(
            f"{directory}: unsupported dtype of {len(wrong_dtype)} tensors: {_first_few(wrong_dtype)} "
            f"(supported: {', '.join(SUPPORTED_DTYPES)})"
        )


def _first_few(items: list[str], limit: int = 3) -> str:
    return "; ".join(items[:limit]) + (f"; and {len(items) - limit} more" if len(items) > limit else "")


def _stored_tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """(name, open file) of every stored tensor: one file, else the index, else all safetensors files."""
    if (directory / SINGLE_FILE).is_file():
        files = [SINGLE_FILE]
    elif (directory / INDEX_FILE).is_file():
        yield from _indexed_tensors(directory)
        return
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no safetensors files in this directory")
    owner: dict[str, str] = {}
    for file in files:
        handle = _open_file(directory / file)
        for name in handle.keys():  # noqa: SIM118 (not a dict)
            if name in owner:
                raise CheckpointError(f"{directory}: {name} is in two files, {owner[name]} and {file}")
            owner[name] = file
            yield name, handle


def _indexed_tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """As the index says, which must be true of the files."""
    weight_map = read_json_object(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX_FILE}: weight_map must map tensor names to file names")
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{directory}: {len(absent)} of {len(files)} files named in {INDEX_FILE} are missing: "
            f"{_first_few(absent)}"
        )
    handles = {file: _open_file(directory / file) for file in files}
    held = {file: frozenset(handle.keys()) for file, handle in handles.items()}
    lost = [f"{name} in {file}" for name, file in weight_map.items() if name not in held[file]]
    if lost:
        raise CheckpointError(
            f"{directory}: {INDEX_FILE} names tensors that are not there: {_first_few(lost)}"
        )
    for name, file in weight_map.items():
        yield name, handles[file]


def _open_file(path: Path) -> Any:
    """Map a safetensors file; its header is checked against its length here."""
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: truncated or corrupt safetensors file ({error})") from None
