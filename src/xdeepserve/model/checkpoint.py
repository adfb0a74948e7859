"""Checkpoints: named tensors of a DeepSeek-V3 model, from a Hugging Face directory.

Every name and shape in the file headers is checked against the config before any weight is read. Then tensors
are read one at a time, so memory use depends only on what the caller keeps.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from xdeepserve.errors import CheckpointError
from xdeepserve.model.attention_tables import INDEXER
from xdeepserve.model.config import NEEDS_INDEXER, ModelConfig, load_config, read_json_object
from xdeepserve.model.config_reader import MAX_FILE_NAME, MAX_INDEX_BYTES, MAX_INDEXED
from xdeepserve.model.tensor_file import RenamedTensor, TensorFile
from xdeepserve.model.tensors import mtp_section, stored_tensors
from xdeepserve.model.v4.storage import FP4_BLOCK, SCALE_DTYPES, by_table_names, from_fp4, powers_of_two

Stored: TypeAlias = dict[str, TensorFile | RenamedTensor]
SUPPORTED_DTYPES = ("F32", "BF16", "F16")
LINEAR_LAYERS = tuple(  # of attention and MLPs; of experts as Mixtral calls them; of an indexer
    f"{end}.weight"
    for end in (
        *("_proj", "_proj_with_mqa", ".w1", ".w2", ".w3", ".wq_b", ".wk"),
        *(".wq_a", ".wkv", ".wo_a", ".wo_b"),
    )
)
SCALED_DTYPES = {"I8": "int8", "F8_E4M3": "fp8"}  # of linear layers, if config.json says so
CHANGING = (".bias", "_norm.weight", "layernorm.weight", "e_score_correction_bias", ".sinks")
WHOLE_NUMBERS = ".tid2eid"  # experts by token id
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ROWS_AT_ONCE = 4096  # of tied matrices that are compared
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class Checkpoint(ABC):
    """Weights of a model by Hugging Face names. `directory` holds the config and perhaps tokenizer files."""

    has_weights = True

    def __init__(self, name: str, directory: Path, config: ModelConfig) -> None:
        self.name = name
        self.directory = directory
        self.config = config

    @property
    def config_path(self) -> Path:
        """Path of the file from which `config` was read."""
        return self.directory / "config.json"

    def names(self) -> list[str]:
        """List every tensor of the model, in a fixed order. `tensor` knows each of them."""
        return list(expected_tensors(self.config))

    @abstractmethod
    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read a tensor as float32, C-contiguous, with the shape given by `expected_tensors`; a fresh array.

        A quantised tensor is multiplied with its scales.
        """

    def int8(self, module: str) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
        """Return weight [out, in] and scale [out, 1] of a linear layer that is stored in INT8, else None."""
        return None

    def digest(self) -> str:
        """Digest everything behind the model's numbers, independent of the checkpoint's name."""
        sha = hashlib.blake2b(self.config.to_bytes(), digest_size=16)
        for name in self.names():
            sha.update(name.encode())
            sha.update(self.tensor(name).data)
        return sha.hexdigest()


class ConfigOnly(Checkpoint):
    """Model with a configuration and no weights: its costs can be computed, but no tokens."""

    has_weights = False

    def __init__(self, name: str, directory: Path, config_name: str = "config.json") -> None:
        super().__init__(name, directory, load_config(directory, config_name))
        self._config_name = config_name

    @property
    def config_path(self) -> Path:
        return self.directory / self._config_name

    def tensor(self, name: str) -> NDArray[np.float32]:
        raise CheckpointError(f"model {self.name}: a configuration without weights; it has no tensor {name}")

    def digest(self) -> str:
        """Digest the configuration, which is all that there is."""
        return hashlib.blake2b(self.config.to_bytes(), digest_size=16).hexdigest()


def has_weight_files(directory: Path) -> bool:
    """Whether a directory has any file of weights that a checkpoint could be read from."""
    return next(directory.glob("*.safetensors"), None) is not None


class KeptCheckpoint(Checkpoint):
    """Checkpoint keeping another's tensors, each read or computed once.

    Meant for callers that load a small model thousands of times.
    """

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source.name, source.directory, source.config)
        self._source = source
        self._kept: dict[str, NDArray[np.float32]] = {}

    @property
    def config_path(self) -> Path:
        return self._source.config_path

    def names(self) -> list[str]:
        return self._source.names()

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name not in self._kept:
            self._kept[name] = self._source.tensor(name)
        return self._kept[name].copy()

    def int8(self, module: str) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
        return self._source.int8(module)

    def digest(self) -> str:
        return self._source.digest()


def open_checkpoint(path: str | Path) -> DirectoryCheckpoint:
    """Open a Hugging Face directory: `config.json` and safetensors files, sharded or not.

    Tensors may be F32, BF16 or F16, and linear layers INT8 or FP8 with scales (see `quant_config`).

    MTP layers that the config promises but the files leave out (as transformers does when it saves) are
    dropped from the config. Tensors that the model does not have are ignored. Raises CheckpointError.
    """
    directory = Path(path)
    if not os.path.exists(directory):  # False, too, of a name that no file can have
        raise CheckpointError(f"{_abridged(str(directory))}: no such directory")
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory; a checkpoint is a directory with config.json")
    config = load_config(directory)
    stored: Stored = dict(_stored_tensors(directory))
    if config.v4 is not None:
        stored = by_table_names(stored, config.num_hidden_layers)
    config = msgspec.structs.replace(config, num_nextn_predict_layers=_count_mtp_layers(config, stored))
    _check_complete(directory, config, stored)
    _check_tied(directory, config, stored)
    if config.quantization is not None and config.quantization.kind == "int8":
        config = msgspec.structs.replace(config, kept_float=_kept_float(config, stored))
    return DirectoryCheckpoint(directory, config, stored)


class DirectoryCheckpoint(Checkpoint):
    """Checkpoint in a directory, made by `open_checkpoint`.

    Tensors are read on demand from memory-mapped safetensors files.
    """

    def __init__(self, directory: Path, config: ModelConfig, stored: Stored) -> None:
        super().__init__(directory.resolve().name, directory, config)
        self._stored = stored

    def tensor(self, name: str) -> NDArray[np.float32]:
        found = _find(name, self.config, self._stored)
        if found is None:
            raise CheckpointError(f"{self.directory}: the model has no tensor {name}")
        file = self._stored[found]
        match file.dtype(found):
            case "I8" if self._is_fp4:
                return from_fp4(file.tensor(found), self._scales(found))
            case "I8":
                q, scale = self._int8(found)
                return q.astype(np.float32) * scale
            case "F8_E4M3":
                return self._from_fp8(found)
            case _:
                return file.float32(found)

    def digest(self) -> str:
        """Digest the config and the files, as they are stored."""
        sha = hashlib.blake2b(self.config.to_bytes(), digest_size=16)
        for path in sorted({file.path for file in self._stored.values()}):
            with path.open("rb") as file:
                while chunk := file.read(1 << 22):
                    sha.update(chunk)
        return sha.hexdigest()

    def int8(self, module: str) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
        name = f"{module}.weight"
        if self._is_fp4 or name not in self._stored or self._stored[name].dtype(name) != "I8":
            return None
        return self._int8(name)

    @property
    def _is_fp4(self) -> bool:
        """Whether bytes that are called I8 are two numbers of four bits each."""
        return self.config.v4 is not None

    def _scales(self, name: str) -> NDArray[np.float32]:
        """Read the scales of an FP8 or FP4 weight."""
        name = f"{name}_scale_inv"
        return powers_of_two(self._stored[name].tensor(name))

    def _int8(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        scale = self._stored[f"{name}_scale"].float32(f"{name}_scale")
        return self._stored[name].tensor(name), scale.reshape(-1, 1)

    def _from_fp8(self, name: str) -> NDArray[np.float32]:
        """Dequantise an FP8 weight: each block times its `weight_scale_inv` (DeepSeek-V3 report, section
        3.3.2)."""
        assert self.config.quantization is not None
        rows, columns = self.config.quantization.block
        weight, scale = self._stored[name].float32(name), self._scales(name)
        scale = np.repeat(np.repeat(scale, rows, axis=0), columns, axis=1)
        return weight * scale[: weight.shape[0], : weight.shape[1]]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model by Hugging Face name. Matrices are [out_features,
    in_features].

    `lm_head.weight` is among them even if tied, and so are an MTP layer's own embedding and head, which
    checkpoints may leave out (see `fallback`).
    """
    shape = functools.cache(lambda row: row.stored_shape(config))
    return {name: shape(row) for name, row in stored_tensors(config).items()}


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters in all tensors, MTP's included."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def fallback(name: str, config: ModelConfig) -> str | None:
    """Name the stand-in for an absent tensor: for a tied head, or an MTP layer's shared embedding and
    head."""
    if name == _HEAD:
        return _EMBEDDING if config.tie_word_embeddings else None
    if name.startswith("model.layers.") and name.endswith(".embed_tokens.weight"):
        return _EMBEDDING
    if name.endswith(".shared_head.head.weight"):
        return _HEAD
    return None


def _find(name: str, config: ModelConfig, stored: Stored) -> str | None:
    """Find the stored tensor to read for `name`: itself, else its stand-in."""
    candidate: str | None = name
    while candidate is not None and candidate not in stored:
        candidate = fallback(candidate, config)
    return candidate


def _count_mtp_layers(config: ModelConfig, stored: Stored) -> int:
    """Count the MTP layers of which the files hold at least a part; an incomplete one is an error found
    later."""
    count = 0
    while count < config.num_nextn_predict_layers:
        mtp = mtp_section(config, count)
        if not any(f"{mtp.source}{row.modules[0]}.{row.parameter}" in stored for row in mtp.rows):
            break
        count += 1
    return count


def _check_complete(directory: Path, config: ModelConfig, stored: Stored) -> None:
    """Check from the headers alone that every tensor is there, with the right shape and a readable dtype.
    Raises CheckpointError if not."""
    expected = expected_tensors(config)
    missing = [name for name in expected if _find(name, config, stored) is None]
    indexer = [name for name in stored if INDEXER in name] if config.attention != "dsa" else []
    if indexer:
        raise CheckpointError(f"{directory}: {_abridged(indexer[0])} {NEEDS_INDEXER}")
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(expected)} tensors are missing: {_first_few(missing)}"
        )
    beyond = re.compile(r"model[.]layers[.](\d+)[.]")
    unread = [
        name
        for name in stored
        if name.endswith(CHANGING)
        and name not in expected
        and not ((layer := beyond.match(name)) and int(layer[1]) >= config.num_hidden_layers)
    ]
    if unread:
        raise CheckpointError(
            f"{directory}: {len(unread)} tensors would change the answer, and the model of config.json has "
            f"no such: {_first_few(unread)}"
        )
    wrong_shape, wrong_dtype = [], []
    for name, shape in expected.items():
        if name not in stored:
            continue
        dtype = stored[name].dtype(name)
        headers = {name: shape}
        if dtype in SCALED_DTYPES and _allows(config, dtype) and name.endswith(LINEAR_LAYERS):
            if config.v4 is not None and dtype == "I8":
                headers[name] = (shape[0], -(-shape[1] // 2))
            scale, scale_shape = _scale_of(name, shape, config, dtype)
            if scale not in stored:
                wrong_dtype.append(f"{name} is {dtype} without {scale.rpartition('.')[2]}")
                continue
            headers[scale] = scale_shape
            if stored[scale].dtype(scale) not in (*SUPPORTED_DTYPES, *SCALE_DTYPES):
                wrong_dtype.append(f"{scale} is {stored[scale].dtype(scale)}")
        elif dtype not in SUPPORTED_DTYPES and not (dtype == "I64" and name.endswith(WHOLE_NUMBERS)):
            wrong_dtype.append(f"{name} is {dtype}")
        for found, wanted in headers.items():
            seen = stored[found].shape(found)
            if seen != wanted and not (found != name and seen == (wanted[0],) and dtype == "I8"):
                wrong_shape.append(f"{found} is {list(seen)}, expected {list(wanted)}")
    if wrong_shape:
        raise CheckpointError(
            f"{directory}: wrong shape of {len(wrong_shape)} tensors: {_first_few(wrong_shape)}"
        )
    if wrong_dtype:
        raise CheckpointError(
            f"{directory}: unsupported dtype of {len(wrong_dtype)} tensors: {_first_few(wrong_dtype)} "
            f"(supported: {', '.join(SUPPORTED_DTYPES)})"
        )


def _check_tied(directory: Path, config: ModelConfig, stored: Stored) -> None:
    """Refuse a head that differs from the embedding to which config.json ties it.

    vLLM then takes the embedding, and transformers the stored head, so neither would be right for everybody.
    """
    if not config.tie_word_embeddings or not {_HEAD, _EMBEDDING} <= stored.keys():
        return
    for start in range(0, config.vocab_size, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, config.vocab_size)
        head, embedding = (
            stored[name].rows(name, start, stop).astype(np.float32) for name in (_HEAD, _EMBEDDING)
        )
        if not np.array_equal(head, embedding, equal_nan=True):
            raise CheckpointError(
                f"{directory}: tie_word_embeddings is true, and {_HEAD} differs from {_EMBEDDING}; set "
                f"tie_word_embeddings to false in config.json to use {_HEAD}, or remove that tensor"
            )


def _allows(config: ModelConfig, dtype: str) -> bool:
    """Whether config.json announces tensors of this dtype."""
    if config.v4 is not None:
        return config.quantization is not None and config.quantization.kind == "fp8"
    return config.quantization is not None and SCALED_DTYPES[dtype] == config.quantization.kind


def _scale_of(
    name: str, shape: tuple[int, ...], config: ModelConfig, dtype: str
) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of the scales of a quantised weight."""
    assert config.quantization is not None
    if config.v4 is not None and dtype == "I8":
        return f"{name}_scale_inv", (shape[0], -(-shape[1] // FP4_BLOCK))
    if config.quantization.kind == "int8":
        return f"{name}_scale", (shape[0], 1)
    rows, columns = config.quantization.block
    return f"{name}_scale_inv", (-(-shape[0] // rows), -(-shape[1] // columns))


def _kept_float(config: ModelConfig, stored: Stored) -> frozenset[str]:
    """List the linear layers, by name, that the recipe would have in INT8 and the checkpoint has in floating
    point."""
    weights = [name for name, row in stored_tensors(config).items() if row.kind == "int8" and name in stored]
    return frozenset(name.removesuffix(".weight") for name in weights if stored[name].dtype(name) != "I8")


def _first_few(items: list[str], limit: int = 3) -> str:
    more = f"; and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(map(_abridged, items[:limit])) + more


def _abridged(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:80]}... ({len(text)} characters)"


def _stored_tensors(directory: Path) -> Iterator[tuple[str, TensorFile]]:
    """Yield (name, open file) of every stored tensor: from one file, else by the index, else from all
    safetensors files."""
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
        opened = TensorFile(directory / file)
        for name in sorted(opened.names):
            if name in owner:
                raise CheckpointError(f"{directory}: {name} is in two files, {owner[name]} and {file}")
            owner[name] = file
            yield name, opened


def _indexed_tensors(directory: Path) -> Iterator[tuple[str, TensorFile]]:
    """Yield each tensor's name and file by the index; the files, all in the directory, must agree with it."""
    weight_map = read_json_object(directory / INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX_FILE}: weight_map must map tensor names to file names")
    if len(weight_map) > MAX_INDEXED:
        found = f"found {len(weight_map)}"
        raise CheckpointError(f"{directory / INDEX_FILE}: weight_map may name {MAX_INDEXED} tensors, {found}")
    files = sorted(set(weight_map.values()))
    outside = [repr(file) for file in files if not _is_shard_name(file)]
    if outside:
        raise CheckpointError(
            f"{directory / INDEX_FILE}: weight_map must name safetensors files in the same directory, found "
            f"{_first_few(outside)}"
        )
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{directory}: {len(absent)} of {len(files)} files named in {INDEX_FILE} are missing: "
            f"{_first_few(absent)}"
        )
    opened = {file: TensorFile(directory / file) for file in files}
    lost = [f"{name} in {file}" for name, file in weight_map.items() if name not in opened[file].names]
    if lost:
        raise CheckpointError(
            f"{directory}: {INDEX_FILE} names tensors that are not there: {_first_few(lost)}"
        )
    for name, file in weight_map.items():
        yield name, opened[file]


def _is_shard_name(file: str) -> bool:
    """Whether a name is of a file in the directory itself, not a path out of it on any system.

    The file may be a link, as in the cache of Hugging Face's hub, because the directory's owner put it there.
    """
    is_plain = file == PurePosixPath(file).name == PureWindowsPath(file).name
    is_name = file.isprintable() and len(file.encode()) <= MAX_FILE_NAME
    return is_plain and is_name and file.endswith(".safetensors")
