"""Walkthrough 11: from float to INT8, and where the error goes.

One decoder layer of the trained model is quantised by every method, with inputs from calibration text. First
the picture of xDeepServe's Figure 15: some activation channels are far larger than others, and one scale per
token must hold them all; smoothing moves their range into the weights. Then each method's error, split into
what rounding weights costs and what rounding activations costs (xDeepServe 4.7, CloudMatrix384 4.5).

    python examples/11_int8.py [--plot FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from xdeepserve.errors import InputError
from xdeepserve.model.canonical import Array
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.progress import working
from xdeepserve.quant.calibration import calibration_sequences
from xdeepserve.quant.forward import FloatLayer, Walk, rms_norm, silu
from xdeepserve.quant.layer_quantizer import LayerQuantizer, LinearReport
from xdeepserve.quant.method import METHODS
from xdeepserve.quant.smoothquant import smoothing_scale, w8a8_error

LAYER = 2
NUM_TEXTS = 24
STEPS = "▁▂▃▄▅▆▇█"
KINDS = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def title(text: str) -> None:
    print(f"\n--- {text}")


def bars(values: Array, width: int = 64) -> str:
    """Largest first, a block a channel; the scale ends at the largest."""
    ordered = np.sort(values)[::-1]
    picked = ordered[np.linspace(0, len(ordered) - 1, min(width, len(ordered))).astype(int)]
    return "".join(STEPS[int(value / ordered[0] * (len(STEPS) - 1))] for value in picked)


def spread(values: Array) -> float:
    """How many times larger the largest channel is than the middle one."""
    return float(values.max() / np.median(values[values > 0]))


def show_channels(name: str, activations: Array, weights: Array) -> None:
    for what, values in (("activations", activations), ("weights", weights)):
        print(f"  {name} {what:<11} {bars(values)} largest / median {spread(values):5.1f}")


def smoothing(layer: FloatLayer, x: Array) -> dict[str, Array]:
    """Figure 15 for the input of the shared expert's down_proj; the channel maxima before and after."""
    name = "mlp.shared_experts"
    inner = silu(layer.apply(f"{name}.gate_proj", x)) * layer.apply(f"{name}.up_proj", x)
    w = layer.get(f"{name}.down_proj.weight")
    s = smoothing_scale(np.abs(inner).max(axis=0), [w], alpha=0.5)
    before = (np.abs(inner).max(axis=0), np.abs(w).max(axis=0))
    after = (np.abs(inner / s).max(axis=0), np.abs(w * s).max(axis=0))
    show_channels("before", *before)
    show_channels("after ", *after)
    plain, smooth = w8a8_error(inner, [w], np.ones_like(s)), w8a8_error(inner, [w], s)
    print(f"  error of the output (relative, squared): {plain:.2e} before, {smooth:.2e} after")
    print(f"  smoothing evens the activations out: {spread(after[0]) < spread(before[0])}")
    print(f"  smoothing lowers the error: {smooth < plain}")
    return dict(zip(("x before", "w before", "x after", "w after"), (*before, *after), strict=True))


def compare(checkpoint: Checkpoint, walk: Walk) -> dict[str, list[LinearReport]]:
    """The layer by every method, on the same inputs."""
    reports = {}
    with working(f"Quantising layer {LAYER}") as status:
        for name, method in METHODS.items():
            status.detail = name
            quantizer = LayerQuantizer(checkpoint.config, LAYER, FloatLayer(checkpoint, LAYER), method)
            quantizer.run(walk.h, walk.h, walk.lengths, walk.chosen, fallback_rows=4)
            reports[name] = quantizer.reports
    return reports


def mean(reports: list[LinearReport], field: str, kind: str = "") -> float:
    return float(np.mean([getattr(one, field) for one in reports if one.module.endswith(kind)]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", type=Path, help="draw the first picture as well (needs matplotlib)")
    args = parser.parse_args()
    checkpoint = resolve_model("tiny")
    with working(f"Computing layers 0 to {LAYER - 1} for {NUM_TEXTS} texts"):
        sequences = calibration_sequences(checkpoint)
        walk = Walk(checkpoint, [ids for i in range(NUM_TEXTS) if (ids := sequences(i)) is not None])
        for layer_idx in range(LAYER):
            walk.run(layer_idx)
    layer = FloatLayer(checkpoint, LAYER)

    title("Step 1: channels before and after smoothing (Figure 15)")
    x = rms_norm(walk.h, layer.get("post_attention_layernorm.weight"), checkpoint.config.rms_norm_eps)
    channels = smoothing(layer, x)
    if args.plot is not None:
        plot(args.plot, channels)

    title(f"Step 2: layer {LAYER} by every method: error of the outputs, relative and squared, times 1e6")
    reports = compare(checkpoint, walk)
    print(f"  {'method':<18} {'weights':>8} {'activations':>12} {'both':>8}")
    for name, found in reports.items():
        row = [mean(found, field) * 1e6 for field in ("weights", "activations", "both")]
        print(f"  {name:<18} {row[0]:>8.1f} {row[1]:>12.1f} {row[2]:>8.1f}")
    rtn, best = reports["rtn"], reports["smoothquant+gptq"]
    for name in ("smoothquant+gptq", "cloudmatrix"):
        for field in ("weights", "activations"):
            is_no_worse = mean(reports[name], field) <= mean(rtn, field)
            print(f"  {name} is no worse than rounding to the nearest on {field}: {is_no_worse}")
    print("  (False is no failure: one layer of a model of 4 M parameters does not tell how methods rank)")

    title("Step 3: where the error sits")
    print(f"  {'':<20} {'rtn':>8} {'smoothquant+gptq':>18}")
    for kind in KINDS:
        print(f"  {kind:<20} {mean(rtn, 'both', kind) * 1e6:>8.1f} {mean(best, 'both', kind) * 1e6:>18.1f}")


def plot(file: Path, channels: dict[str, Array]) -> None:
    """Four panels: activations and weights, before and after."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'xdeepserve[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(16, 3), layout="constrained")
    for axis, (name, values) in zip(axes, channels.items(), strict=True):
        axis.bar(np.arange(len(values)), values, width=1.0)
        axis.set_title(name)
        axis.set_xlabel("channel")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
