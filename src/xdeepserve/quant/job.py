"""Quantise a checkpoint on disk: layer by layer, resumable, and never half-written (see `part`).

Memory holds one layer and the hidden states of the calibration text, whatever the size of the model.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from xdeepserve import errors
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint, expected_tensors, fallback
from xdeepserve.model.config import INT8_ATTENTION, ModelConfig, read_json_object
from xdeepserve.model.export import COMPANIONS
from xdeepserve.model.quant_config import compressed_tensors_config
from xdeepserve.model.tensor_file import TensorFile
from xdeepserve.model.tensors import layer_section, stored_tensors
from xdeepserve.quant.forward import FloatLayer, LayerResult, Walk, expert_load, finite_tensor
from xdeepserve.quant.layer_quantizer import LayerQuantizer, LayerReport, LinearReport
from xdeepserve.quant.method import Method
from xdeepserve.quant.part import Part
from xdeepserve.quant.rounding import channel_scale, dequantize, relative_error, round_weight
from xdeepserve.quant.sensitivity import sensitive_layers

REPORT_FILE = "quantization.json"
MIN_ROWS = 4  # tokens that every expert must see (xDeepServe 4.7)
MAX_GROWTH = 64  # times the calibration set may grow
IGNORED = ["lm_head", "re:.*kv_b_proj$", "re:.*mlp[.]gate$", "re:.*eh_proj$", "re:.*shared_head.*"]
COMPRESSED_TENSORS_VERSION = "0.10.2"  # whose layout is written

Sequences = Callable[[int], "list[int] | None"]  # calibration sequence i, None when there are no more
Progress = Callable[[str, int, int], None]  # what is done, steps done, steps in all


class Report(msgspec.Struct):
    """Report of a quantisation, also written beside the weights."""

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
    sequences: Sequences | None,
    *,
    num_sequences: int = 64,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Write `checkpoint` in INT8 to `destination`, which must not exist. Raises InputError with a one-line
    message.

    After an interrupt, the same call continues behind the last finished layer, with the same result. Without
    `sequences` nothing is calibrated or measured, which suits methods that do not need text.
    """
    if checkpoint.config.v4 is not None:
        raise errors.InputError(
            f"{checkpoint.name}: deepseek_v4 is not quantised here; serve it as it is stored"
        )
    try:
        job = Quantization(checkpoint, destination, method, progress)
        try:
            return job.run(sequences, num_sequences)
        finally:
            job.part.unlock()
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            what = "no space left; with more of it, the same command goes on behind the last finished layer"
        raise errors.InputError(f"{destination}: cannot be written: {what}") from None


class Quantization:
    """Quantisation of a checkpoint, file by file."""

    def __init__(self, checkpoint: Checkpoint, destination: Path, method: Method, progress: Progress) -> None:
        self.checkpoint, self.config, self.method = checkpoint, checkpoint.config, method
        self.destination, self.progress = destination, progress
        if not destination.name:  # ".", "/" and "": there is no name beside which to work
            raise errors.InputError(f"{destination}: exists already; choose a new directory")
        self.num_layers = self.config.num_layers_with_mtp
        self.part = Part(destination, self.num_layers + 1)  # the last file has what belongs to no layer

    def run(self, sequences: Sequences | None, num_sequences: int) -> Report:
        self._check(needs_text=sequences is None)
        known = self._identity(sequences, num_sequences)
        self.part.open(known)  # now, and not after calibration
        if sequences is None:
            self.part.begin(known)
            report = Report(self.method.name, 0, 0, None, 0, {})
            for layer_idx in range(self.num_layers):
                self._show(f"layer {layer_idx}", layer_idx)
                report.layers[f"model.layers.{layer_idx}"] = self._rounded_layer(layer_idx)
            return self._end(report)
        chosen, load = self._calibration(sequences, num_sequences)
        self.part.begin(known | {"text": _digest(chosen)})
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
        exact = Walk(self.checkpoint, chosen)  # what the original model computes
        keep = self._kept_float(chosen)
        for layer_idx in range(self.num_layers):
            self._show(f"layer {layer_idx}", layer_idx)
            found = self._layer(layer_idx, walk, exact, keep)
            report.layers[f"model.layers.{layer_idx}"] = found.linears
            report.attention[f"model.layers.{layer_idx}"] = found.attention
            if found.int8_attention:
                report.int8_attention.append(layer_idx)
        return self._end(report)

    def _end(self, report: Report) -> Report:
        """Write the tensors outside of layers, and give the directory its final name."""
        if not self.part.file(self.num_layers).is_file():
            self.part.save(self.num_layers, dict(self._rest()))
        self._finish(report)
        self._show("done", self.num_layers)
        return report

    # ---- before anything is written -----------------------------------------------------------------

    def _check(self, needs_text: bool) -> None:
        name, stored = self.checkpoint.name, self.config.quantization
        if not self.checkpoint.has_weights:
            raise errors.CheckpointError(
                f"{name}: a configuration without weights, so there is nothing to quantise; use a checkpoint "
                "with *.safetensors files"
            )
        if needs_text and self.method.needs_text:
            raise errors.InputError(f"{self.method.name} needs calibration text")
        if stored is not None and stored.kind == "int8":
            raise errors.CheckpointError(f"{name}: already quantised to INT8; quantise the original instead")
        if self.destination.resolve() == self.checkpoint.directory.resolve():
            raise errors.InputError(
                f"{self.destination}: exists already, as the model to quantise; choose a new directory"
            )
        if self.destination.exists() or self.destination.is_symlink():
            raise errors.InputError(f"{self.destination}: exists already; choose a new directory")
        if not self.destination.parent.is_dir():
            raise errors.InputError(f"{self.destination.parent}: no such directory to write into")
        needed = estimated_bytes(self.config)
        disk = shutil.disk_usage(self.destination.parent)
        if not disk.total:  # /proc and its like
            raise errors.InputError(f"{self.destination.parent}: this file system holds no files")
        free = disk.free + self.part.nbytes
        if needed > free:
            raise errors.InputError(
                f"{self.destination}: no space left: about {needed / 1e6:,.0f} MB are needed, "
                f"{free / 1e6:,.0f} MB are free"
            )
        for name in reversed(list(self._outside_layers())):  # now, and not after hours of work
            finite_tensor(self.checkpoint, name)

    def _calibration(self, sequences: Sequences, count: int) -> tuple[list[list[int]], dict[int, Array]]:
        """Choose calibration texts: double the number until every expert sees MIN_ROWS tokens, or no text is
        left.

        Texts that are too short for the MTP layers are skipped.
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
                if not index:
                    raise errors.InputError("the calibration text is empty")
                raise errors.InputError(
                    f"the calibration text is too short: none of {index} texts is longer than "
                    f"{self.config.num_nextn_predict_layers} tokens, as the MTP layers need"
                )
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

    def _identity(self, sequences: Sequences | None, count: int) -> dict[str, Any]:
        """Describe the job as far as it is known before calibration: an unfinished job must agree on all of
        this to be continued."""
        weights = hashlib.sha256()
        for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
            weights.update(self.checkpoint.tensor(name).tobytes())
        first: list[list[int]] = []
        while sequences and len(first) < count and (text := sequences(len(first))) is not None:
            first.append(text)
        source = self.checkpoint.directory.resolve()
        stats = [(path.name, path.stat()) for path in sorted(source.glob("*.safetensors"))]
        return {
            "source": str(source),
            "name": self.checkpoint.name,  # presets with computed weights share a directory
            "config": msgspec.json.encode(self.config, order="deterministic").decode(),
            "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
            "method": msgspec.to_builtins(self.method),
            "weights": weights.hexdigest(),
            "samples": None if sequences is None else [count, _digest(first)],
        }

    def _kept_float(self, chosen: list[list[int]]) -> frozenset[str]:
        """Choose modules to keep in floating point, by the rule of `sensitivity` (mixed precision)."""
        ratio, shapes = self.method.keep_ratio, expected_tensors(self.config)
        if ratio is None:
            return frozenset()
        errors: dict[str, float] = {}
        walk = Walk(self.checkpoint, chosen)
        for layer_idx in range(self.num_layers):
            self._show(f"trying layer {layer_idx}", layer_idx)
            walk.enter(layer_idx)
            weights = FloatLayer(self.checkpoint, layer_idx)
            quantizer = LayerQuantizer(self.config, layer_idx, weights, self.method)
            found = quantizer.trial(walk.h, walk.lengths, walk.chosen)
            errors |= {f"model.layers.{layer_idx}.{module}": error for module, error in found.items()}
            walk.step(layer_idx, weights)
        sizes = {name.removesuffix(".weight"): math.prod(shape) for name, shape in shapes.items()}
        total = sum(size for name, size in sizes.items() if name in errors or ".experts." in name)
        return sensitive_layers(errors, sizes, ratio, self.method.keep_share * total)

    # ---- one layer ----------------------------------------------------------------------------------

    def _layer(self, layer_idx: int, walk: Walk, exact: Walk, keep: frozenset[str]) -> LayerReport:
        """Quantise a layer, or read the finished layer; then run both models' hidden states through it."""
        walk.enter(layer_idx)
        exact.enter(layer_idx)
        report_file = self.part.report_file(layer_idx)
        if report_file.is_file():
            report = msgspec.json.decode(report_file.read_bytes(), type=LayerReport)
        else:
            prefix = f"model.layers.{layer_idx}."
            quantizer = LayerQuantizer(
                self.config,
                layer_idx,
                FloatLayer(self.checkpoint, layer_idx),
                self.method,
                {name.removeprefix(prefix) for name in keep if name.startswith(prefix)},
            )
            result = quantizer.run(walk.h, exact.h, walk.lengths, walk.chosen, MIN_ROWS)
            report = quantizer.report()
            self.part.save(layer_idx, self._tensors(layer_idx, result))
            self.part.write(report_file.name, msgspec.json.encode(report))
        # From the file, so that an interrupted job goes on with the same numbers.
        result = self._read(layer_idx, report.int8_attention)
        walk.step(layer_idx, result)
        exact.step(layer_idx, FloatLayer(self.checkpoint, layer_idx))
        return report

    def _rounded_layer(self, layer_idx: int) -> list[LinearReport]:
        """Round a layer's linear layers to the nearest INT8, or read the report of the finished layer."""
        report_file = self.part.report_file(layer_idx)
        if report_file.is_file():
            return msgspec.json.decode(report_file.read_bytes(), type=LayerReport).linears
        prefix, result, reports = f"model.layers.{layer_idx}.", LayerResult({}, {}), list[LinearReport]()
        section = layer_section(self.config, layer_idx)
        for row, expert in section.arrays(self.config):
            for module in row.sources("", expert) if row.kind == "int8" else ():
                w = finite_tensor(self.checkpoint, f"{prefix}{module}.weight")
                scale = channel_scale(w)
                q = round_weight(w, scale)
                result.int8[module] = (q, scale)
                lost = relative_error(dequantize(q, scale), w)
                reports.append(LinearReport(module, 0, lost, None, None, is_kept_float=False))
        self.part.save(layer_idx, self._tensors(layer_idx, result))
        self.part.write(report_file.name, msgspec.json.encode(LayerReport(reports, 0.0, False)))
        return reports

    def _tensors(self, layer_idx: int, result: LayerResult) -> dict[str, Array]:
        """List a layer's tensors as stored, MTP's own tensors included."""
        prefix = f"model.layers.{layer_idx}."
        tensors: dict[str, Array] = {}
        for module, (q, scale) in result.int8.items():
            tensors[f"{prefix}{module}.weight"] = q
            tensors[f"{prefix}{module}.weight_scale"] = scale[:, None]
        for name, array in result.floats.items():
            tensors[prefix + name] = array
        for name in expected_tensors(self.config):
            if name.startswith(prefix) and name not in tensors and not self._is_shared(name):
                tensors[name] = finite_tensor(self.checkpoint, name)
        return tensors

    def _is_shared(self, name: str) -> bool:
        """Whether a tensor only repeats the tensor that stands in for it."""
        other = fallback(name, self.config)
        if other is None:
            return False
        return np.array_equal(self.checkpoint.tensor(name), self.checkpoint.tensor(other), equal_nan=True)

    def _read(self, layer_idx: int, int8_attention: bool) -> LayerResult:
        """Read a finished layer from disk."""
        prefix = f"model.layers.{layer_idx}."
        file = TensorFile(self.part.file(layer_idx))
        result = LayerResult({}, {}, int8_attention)
        for name in sorted(file.names):
            short = name.removeprefix(prefix)
            if file.dtype(name) == "I8":
                scale = file.float32(f"{name}_scale")[:, 0]
                result.int8[short.removesuffix(".weight")] = (file.tensor(name), scale)
            elif not name.endswith(".weight_scale"):
                result.floats[short] = file.float32(name)
        return result

    # ---- the end ------------------------------------------------------------------------------------

    def _rest(self) -> Iterator[tuple[str, Array]]:
        """Yield the tensors outside of all layers: embedding, final norm, head."""
        for name in self._outside_layers():
            if not name.startswith("model.layers.") and not self._is_shared(name):
                yield name, finite_tensor(self.checkpoint, name)

    def _outside_layers(self) -> Iterator[str]:
        """Name the tensors outside of layers, not read by calibration: embedding, final norm, heads."""
        for name in expected_tensors(self.config):
            if not name.startswith("model.layers.") or ".shared_head." in name:
                yield name

    def _finish(self, report: Report) -> None:
        found = ((name, self.checkpoint.directory / name) for name in COMPANIONS if name != "config.json")
        self.part.finish(
            {name: source for name, source in found if source.is_file()},
            (REPORT_FILE, msgspec.json.format(msgspec.json.encode(report)) + b"\n"),
            (json.dumps(self.config_json(report), indent=2) + "\n").encode(),
        )

    def config_json(self, report: Report) -> dict[str, Any]:
        """Return the content of the quantised checkpoint's `config.json`."""
        kept = [
            f"{layer_name}.{one.module}"
            for layer_name, reports in report.layers.items()
            for one in reports
            if one.is_kept_float
        ]
        raw = read_json_object(self.checkpoint.config_path)
        raw["num_nextn_predict_layers"] = self.config.num_nextn_predict_layers
        if report.int8_attention:
            raw[INT8_ATTENTION] = report.int8_attention
        raw["quantization_config"] = compressed_tensors_config(
            [*_ignored(self.config), *sorted(kept)], COMPRESSED_TENSORS_VERSION
        )
        return raw


def _digest(texts: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _ignored(config: ModelConfig) -> list[str]:
    """List the patterns of modules that are never quantised: IGNORED, and those of the model's family."""
    patterns = [*IGNORED]
    for name, row in stored_tensors(config).items():
        module = name.removesuffix(".weight")
        is_known = any(module == each or re.fullmatch(each.removeprefix("re:"), module) for each in patterns)
        if row.kind in ("matrix", "router", "linear") and not is_known:
            patterns.append("re:.*" + "[.]".join(module.split(".")[-2:]) + "$")
    return patterns


def estimated_bytes(config: ModelConfig) -> int:
    """Estimate the bytes of the quantised files, from above: INT8 where the recipe has it, float32
    elsewhere."""
    total = 0
    for row in stored_tensors(config).values():
        out, *_ = shape = row.stored_shape(config)
        total += math.prod(shape) + 4 * out if row.kind == "int8" else 4 * math.prod(shape)
    return total
