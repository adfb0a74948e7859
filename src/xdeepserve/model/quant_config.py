"""Quantisation of linear layers as declared by `quantization_config` in a config.json.

Two layouts are read:

    compressed-tensors, format `int-quantized`   X.weight I8 [out, in] and X.weight_scale [out, 1]: W8A8, one
                                                 scale per output channel, activations quantised per token as
                                                 they come. vLLM reads the same files.
    fp8 (DeepSeek's own)                         X.weight F8_E4M3 [out, in] and X.weight_scale_inv F32, one
                                                 number per block of 128 x 128, to multiply with.

Which layers are quantised is not decided here but by the dtypes of the stored tensors: `ignore` lists and
targets only repeat what the files say.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec

from xdeepserve.model.config_reader import whole

COMPRESSED_TENSORS, FP8 = "compressed-tensors", "fp8"
INT_FORMAT = "int-quantized"
DEFAULT_BLOCK = (128, 128)
_FMT_PREFIX = re.compile(r"^(torch[.])?(float8_|fp8_|f8_)?")  # e4m3, float8_e4m3fn and torch.float8_e4m3fn
MAX_BLOCK = 2**12  # rows or columns with one scale: scales are spread over whole blocks when they are read


class QuantConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Format of a checkpoint's quantised layers."""

    kind: Literal["int8", "fp8"]
    block: tuple[int, int] = DEFAULT_BLOCK  # rows and columns that share a scale; fp8 only


def parse_quant_config(raw: object) -> tuple[QuantConfig | None, list[str]]:
    """Parse the value of `quantization_config`; also return the unsupported parts, one phrase each."""
    if raw is None:
        return None, []
    method = raw.get("quant_method") if isinstance(raw, dict) else raw
    if isinstance(raw, dict) and method in (None, "", "none"):
        left = {key: value for key, value in raw.items() if value and key != "quant_method"}
        if not left:  # an object without content, as left behind when weights were converted
            return None, []
    if isinstance(method, str):
        method = method.lower()
    if isinstance(raw, dict) and method == COMPRESSED_TENSORS:
        return QuantConfig(kind="int8"), _compressed_tensors_problems(raw)
    if isinstance(raw, dict) and method == FP8:
        return _fp8(raw)
    return None, [
        f"quantization_config ({json.dumps(method)}) is not supported (only compressed-tensors {INT_FORMAT} "
        "W8A8, DeepSeek's fp8 with blocks, and unquantised F32, BF16 or F16 weights are)"
    ]


def _fp8(raw: dict[str, Any]) -> tuple[QuantConfig | None, list[str]]:
    problems = []
    fmt = raw.get("fmt")
    if fmt is not None and _FMT_PREFIX.sub("", str(fmt).lower()) not in ("e4m3", "e4m3fn"):
        problems.append(f"quantization_config.fmt {json.dumps(fmt)} is not supported (only e4m3 is)")
    if (scheme := raw.get("activation_scheme")) not in (None, "dynamic"):
        problems.append(
            f"quantization_config.activation_scheme {json.dumps(scheme)} is not supported (only dynamic is)"
        )
    block = raw.get("weight_block_size")
    rows, columns = map(whole, block) if isinstance(block, list) and len(block) == 2 else (0, 0)
    if all(type(n) is int and 0 < n <= MAX_BLOCK for n in (rows, columns)):
        return QuantConfig(kind="fp8", block=(rows, columns)), problems
    problems.append(
        f"quantization_config.weight_block_size must be two positive integers up to {MAX_BLOCK}, "
        f"found {json.dumps(block)[:80]}"
    )
    return None, problems


def _compressed_tensors_problems(raw: dict[str, Any]) -> list[str]:
    problems = []
    if raw.get("format") != INT_FORMAT:
        problems.append(
            f"quantization_config.format {json.dumps(raw.get('format'))} is not supported "
            f"(only {INT_FORMAT} is)"
        )
    if raw.get("kv_cache_scheme") is not None:
        problems.append("quantization_config.kv_cache_scheme is not supported (only null is)")
    # Both are often there and say nothing.
    for key, field, silent in (
        ("transform_config", "config_groups", ()),
        ("sparsity_config", "format", ("dense",)),
    ):
        found = raw.get(key)
        if found and not (isinstance(found, dict) and (not found.get(field) or found[field] in silent)):
            problems.append(f"quantization_config.{key} is not supported (only null is)")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return [*problems, "quantization_config.config_groups must be an object that is not empty"]
    for name, group in groups.items():
        where = f"quantization_config.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        inputs = group.get("input_activations") if isinstance(group, dict) else None
        problems += _scheme_problems(f"{where}.weights", weights, "channel", is_dynamic=False)
        problems += _scheme_problems(f"{where}.input_activations", inputs, "token", is_dynamic=True)
        if isinstance(group, dict) and group.get("output_activations") is not None:
            problems.append(f"{where}.output_activations is not supported (only null is)")
    return problems


def _scheme_problems(where: str, found: object, strategy: str, is_dynamic: bool) -> list[str]:
    """List the differences from symmetric INT8 with a scale per `strategy`."""
    if not isinstance(found, dict):
        return [f"{where} must be an object, found {json.dumps(found)}"]
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": is_dynamic}
    defaults = {"type": "int", "symmetric": True, "dynamic": False}
    return [
        f"{where}.{key} {json.dumps(found.get(key, defaults.get(key)))} is not supported "
        f"(only {json.dumps(value)} is)"
        for key, value in wanted.items()
        if found.get(key, defaults.get(key)) != value
    ]


def compressed_tensors_config(ignore: list[str], version: str) -> dict[str, Any]:
    """Make the `quantization_config` for files written by `xdeepserve quantize`."""
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None}
    weights = {**scheme, "strategy": "channel", "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
    inputs = {**scheme, "strategy": "token", "dynamic": True, "observer": None, "observer_kwargs": {}}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": INT_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": version,
    }
