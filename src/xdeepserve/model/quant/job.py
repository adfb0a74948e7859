"""Quantise a checkpoint on disk: layer by layer, resumable, and never half-written.

Work goes on in `DESTINATION.part`, which has no config.json and so is no checkpoint. Each finished layer is
one file there; when all are done the index and the config are written, and the directory gets its name.
Memory holds one layer and the calibration text's hidden states, whatever the size of the model.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ... import errors
from ..canonical import Array
from ..checkpoint import INDEX_FILE, Checkpoint, expected_tensors, fallback
from ..config import INT8_ATTENTION, ModelConfig, read_json_object
from ..export import COMPANIONS
from ..quant_config import compressed_tensors_config
from ..tensor_file import TensorFile
from ..weights import MODULES
from .forward import FloatLayer, Walk, expert_load, finite_tensor, layer
from .layer import LayerQuantizer, LayerReport, LayerResult, LinearReport
from .method import Method

JOB_FILE, REPORT_FILE, UNFINISHED = "job.json", "quantization.json", "unfinished"
MIN_ROWS = 4  # tokens that every expert must see (xDeepServe 4.7)
MAX_GROWTH = 64  # times the calibration set may grow
IGNORED = ["lm_head", "re:.*kv_b_proj$", "re:.*mlp[.]gate$", "re:.*eh_proj$", "re:.*shared_head.*"]
COMPRESSED_TENSORS_VERSION = "0.10.2"  # whose layout is written

Sequences = Callable[[int], "list[int] | None"]  # calibration sequence i, None when there are no more
Progress = Callable[[str, int, int], None]  # what is done, steps done, steps in all


class Report(msgspec.Struct):
    """What happened, also written beside the weights."""

    method: str
    num_sequences: int
    num_tokens: int
    rarest_expert: int | None  # tokens that the least used expert saw
    num_starved: int  # experts that saw fewer than MIN_ROWS
    layers: dict[str, list[LinearReport]]
    # By layer: what INT8 weights of attention cost its outputs, and the layers that use them.
    attention: dict[str, float] = {}
    int8_attention: list[int] = []


def quantize_checkpoint(
    checkpoint: Checkpoint,
    destination: Path,
    method: Method,
    sequences: Sequences,
    *,
    num_sequences: int = 64,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Write `checkpoint` in INT8 to `destination`, which must not exist. Raises InputError, one clear line.

    Interrupted, the same call goes on behind the last finished layer, with the same result.
    """
    try:
        return _Job(checkpoint, destination, method, progress).run(sequences, num_sequences)
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            what = "no space left; with more of it, the same command goes on behind the last finished layer"
        raise errors.InputError(f"{destination}: cannot be written: {what}") from None


class _Job:
    def __init__(self, checkpoint: Checkpoint, destination: Path, method: Method, progress: Progress) -> None:
        self.checkpoint, self.config, self.method = checkpoint, checkpoint.config, method
        self.destination, self.progress = destination, progress
        self.part = destination.with_name(destination.name + ".part")
        self.num_layers = self.config.num_layers_with_mtp

    def run(self, sequences: Sequences, num_sequences: int) -> Report:
        self._check()
        chosen, load = self._calibration(sequences, num_sequences)
        self._begin(chosen)
        counts = [count for per_layer in load.values() for count in per_layer.tolist()]
        report = Report(
            method=self.method.name,
            num_sequences=len(chosen),
            num_tokens=sum(len(sequence) for sequence in chosen),
            rarest_expert=min(counts, default=None),
            num_starved=sum(count < MIN_ROWS for count in counts),
            layers={},
        )
        walk = Walk(self.checkpoint, chosen)
        exact = Walk(self.checkpoint, chosen) if self.method.compensate else None
        for layer_idx in range(self.num_layers):
            self._show(f"layer {layer_idx}", layer_idx)
            found = self._layer(layer_idx, walk, exact)
            report.layers[f"model.layers.{layer_idx}"] = found.linears
            report.attention[f"model.layers.{layer_idx}"] = found.attention
            if found.int8_attention:
                report.int8_attention.append(layer_idx)
        if not self._file(self.num_layers).is_file():
            self._save(f"layer-{self.num_layers:05d}", dict(self._rest()))
        self._finish(report)
        self._show("done", self.num_layers)
        return report

    # ---- before anything is written -----------------------------------------------------------------

    def _check(self) -> None:
        name, stored = self.checkpoint.name, self.config.quantization
        if stored is not None and stored.kind == "int8":
            raise errors.CheckpointError(f"{name}: already quantised to INT8; quantise the original instead")
        if self.destination.exists():
            raise errors.InputError(f"{self.destination}: exists already; choose a new directory")
        if not self.destination.parent.is_dir():
            raise errors.InputError(f"{self.destination.parent}: no such directory to write into")
        needed, free = estimated_bytes(self.config), shutil.disk_usage(self.destination.parent).free
        if self.part.is_dir():
            free += sum(path.stat().st_size for path in self.part.iterdir())
        if needed > free:
            raise errors.InputError(
                f"{self.destination}: no space left: about {needed / 1e6:,.0f} MB are needed, "
                f"{free / 1e6:,.0f} MB are free"
            )

    def _calibration(self, sequences: Sequences, count: int) -> tuple[list[list[int]], dict[int, Array]]:
        """Doubled until every expert sees MIN_ROWS tokens, or there is no more text.

        Texts that are too short for the MTP layers are passed over.
        """
        chosen: list[list[int]] = []
        target, index, load = count, 0, {}
        while True:
            while len(chosen) < target and index < count * MAX_GROWTH:
                if (sequence := sequences(index)) is None:
                    break
                index += 1
                if len(sequence) > self.config.num_nextn_predict_layers:
                    chosen.append(sequence)
            if not chosen:
                raise errors.InputError("the calibration text is empty")
            load = expert_load(
                self.checkpoint,
                chosen,
                partial(self._show, f"calibrating with {len(chosen)} texts"),
            )
            rarest = min((int(per_layer.min()) for per_layer in load.values()), default=MIN_ROWS)
            if rarest >= MIN_ROWS or len(chosen) < target or target * 2 > count * MAX_GROWTH:
                return chosen, load
            target *= 2

    def _show(self, what: str, done: int) -> None:
        self.progress(what, done, self.num_layers)

    def _begin(self, chosen: list[list[int]]) -> None:
        """Make the working directory, or find that it holds this very job."""
        digest = hashlib.sha256(json.dumps(chosen).encode())
        for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
            digest.update(self.checkpoint.tensor(name).tobytes())
        job = {
            "source": str(self.checkpoint.directory.resolve()),
            "method": msgspec.to_builtins(self.method),
            "digest": digest.hexdigest(),
        }
        path = self.part / JOB_FILE
        if self.part.is_dir() and any(one.name != UNFINISHED for one in self.part.iterdir()):
            found = read_json_object(path) if path.is_file() else {}
            if found != json.loads(json.dumps(job)):
                raise errors.InputError(
                    f"{self.part}: holds another unfinished job; delete it, or finish it with its settings"
                )
            return
        self.part.mkdir(exist_ok=True)
        self._write(JOB_FILE, json.dumps(job).encode())

    # ---- one layer ----------------------------------------------------------------------------------

    def _layer(self, layer_idx: int, walk: Walk, exact: Walk | None) -> LayerReport:
        """Quantise a layer, or find it done; then both streams go through it."""
        walk.enter(layer_idx)
        if exact is not None:
            exact.enter(layer_idx)
        reports_path = self.part / f"layer-{layer_idx:05d}.json"
        if reports_path.is_file():
            report = msgspec.json.decode(reports_path.read_bytes(), type=LayerReport)
        else:
            quantizer = LayerQuantizer(
                self.config, layer_idx, FloatLayer(self.checkpoint, layer_idx), self.method
            )
            exact_h = None if exact is None else exact.h
            result, report = quantizer.run(walk.h, exact_h, walk.lengths, MIN_ROWS), quantizer.report()
            self._save(f"layer-{layer_idx:05d}", self._tensors(layer_idx, result))
            self._write(reports_path.name, msgspec.json.encode(report))
        # From the file, so that an interrupted job goes on with the same numbers.
        result = self._read(layer_idx, report.int8_attention)
        walk.h, _ = layer(self.config, result, layer_idx, walk.h, walk.lengths)
        if exact is not None:
            weights = FloatLayer(self.checkpoint, layer_idx)
            exact.h, _ = layer(self.config, weights, layer_idx, exact.h, exact.lengths)
        return report

    def _tensors(self, layer_idx: int, result: LayerResult) -> dict[str, Array]:
        """The layer as it is stored, MTP's own tensors included."""
        prefix = f"model.layers.{layer_idx}."
        tensors: dict[str, Array] = {}
        for module, (q, scale) in result.int8.items():
            tensors[f"{prefix}{module}.weight"] = q
            tensors[f"{prefix}{module}.weight_scale"] = scale[:, None]
        for name, array in result.floats.items():
            tensors[prefix + name] = array
        for name in expected_tensors(self.config):
            if name.startswith(prefix) and name not in tensors and not self._is_shared(name):
                tensors[name] = self.checkpoint.tensor(name)
        return tensors

    def _is_shared(self, name: str) -> bool:
        """Whether a tensor only repeats the one that stands in for it."""
        other = fallback(name, self.config)
        if other is None:
            return False
        return np.array_equal(self.checkpoint.tensor(name), self.checkpoint.tensor(other), equal_nan=True)

    def _read(self, layer_idx: int, int8_attention: bool) -> LayerResult:
        """A finished layer, from its file."""
        prefix = f"model.layers.{layer_idx}."
        file = TensorFile(self._file(layer_idx))
        result = LayerResult({}, {}, int8_attention)
        for name in sorted(file.names):
            short = name.removeprefix(prefix)
            if file.dtype(name) == "I8":
                scale = file.float32(f"{name}_scale")[:, 0]
                result.int8[short.removesuffix(".weight")] = (file.tensor(name), scale)
            elif not name.endswith(".weight_scale"):
                result.floats[short] = file.float32(name)
        return result

    # ---- files --------------------------------------------------------------------------------------

    def _rest(self) -> Iterator[tuple[str, Array]]:
        """What belongs to no layer: embedding, final norm, head."""
        for name in expected_tensors(self.config):
            if not name.startswith("model.layers.") and not self._is_shared(name):
                yield name, finite_tensor(self.checkpoint, name)

    def _save(self, name: str, tensors: dict[str, Array]) -> None:
        """One file, which is there whole or not at all. Raises OSError."""
        half = self.part / UNFINISHED
        try:
            save_file(
                {key: _compact(array) for key, array in tensors.items()}, half, metadata={"format": "pt"}
            )
        except SafetensorError as error:  # the library's own error hides the system's
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code)) from None
        shutil.copymode(self.part / JOB_FILE, half)  # the library lets nobody else read what it writes
        half.replace(self.part / f"{name}.safetensors")

    def _write(self, name: str, content: bytes) -> None:
        """A small file, which is there whole or not at all."""
        half = self.part / UNFINISHED
        half.write_bytes(content)
        half.replace(self.part / name)

    def _file(self, number: int) -> Path:
        """A finished layer's file, which may have its final name already."""
        final = self.part / f"model-{number + 1:05d}-of-{self.num_layers + 1:05d}.safetensors"
        return final if final.is_file() else self.part / f"layer-{number:05d}.safetensors"

    def _finish(self, report: Report) -> None:
        """Index, config and companions; then the directory gets its name."""
        total = self.num_layers + 1
        weight_map: dict[str, str] = {}
        size = 0
        for number in range(total):
            new = self.part / f"model-{number + 1:05d}-of-{total:05d}.safetensors"
            self._file(number).replace(new)
            file = TensorFile(new)
            weight_map |= dict.fromkeys(sorted(file.names), new.name)
            size += new.stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        self._write(INDEX_FILE, (json.dumps(index, indent=1) + "\n").encode())
        for companion in COMPANIONS:
            source = self.checkpoint.directory / companion
            if source.is_file() and companion != "config.json":
                shutil.copyfile(source, self.part / companion)
        self._write(REPORT_FILE, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        self._write("config.json", (json.dumps(self._config_json(report), indent=2) + "\n").encode())
        self.part.replace(self.destination)
        for path in [*self.destination.glob("layer-*.json"), self.destination / JOB_FILE]:
            path.unlink()

    def _config_json(self, report: Report) -> dict[str, Any]:
        kept = [
            f"{layer_name}.{one.module}"
            for layer_name, reports in report.layers.items()
            for one in reports
            if one.is_kept_float
        ]
        raw = read_json_object(self.checkpoint.directory / "config.json")
        raw["num_nextn_predict_layers"] = self.config.num_nextn_predict_layers
        if report.int8_attention:
            raw[INT8_ATTENTION] = report.int8_attention
        raw["quantization_config"] = compressed_tensors_config(
            [*IGNORED, *_with_partners(kept)], COMPRESSED_TENSORS_VERSION
        )
        return raw


def _with_partners(kept: list[str]) -> list[str]:
    """Gate and up are kept together."""
    names = set(kept)
    for name in kept:
        for one, other in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
            if name.endswith(one):
                names.add(name.removesuffix(one) + other)
    return sorted(names)


def estimated_bytes(config: ModelConfig) -> int:
    """Bytes that the quantised files take at most: INT8 where the recipe has it, float32 elsewhere."""
    quantised = {module for modules in MODULES.values() for module in modules}
    total = 0
    for name, shape in expected_tensors(config).items():
        module = ".".join(name.split(".")[3:]).removesuffix(".weight")
        is_int8 = module in quantised or ".mlp.experts." in name
        total += math.prod(shape) * (1 if is_int8 else 4) + (4 * shape[0] if is_int8 else 0)
    return total


def _compact(array: Array) -> Array:
    """float32 that loses nothing in BF16 is stored so."""
    if array.dtype != np.float32:
        return np.ascontiguousarray(array)
    half = array.astype(ml_dtypes.bfloat16)
    return half if np.array_equal(half.astype(np.float32), array) else np.ascontiguousarray(array)
