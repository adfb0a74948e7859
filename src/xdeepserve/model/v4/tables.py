"""Tables of DeepSeek-V4's tensors, in the columns of tensors.py, and their spellings in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator

from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tensor_row import Tensor


def _by_group(c: ModelConfig, w: Array) -> Array:
    """Give each group of heads its own matrix [groups, out, in]."""
    assert c.v4 is not None
    return w.reshape(c.v4.o_groups, c.v4.o_lora_rank, -1)


def _connection(part: str) -> tuple[Tensor, ...]:
    return (
        Tensor(f"{part}_fn", (part,), "(2+n)n nH", "router", parameter="fn"),
        Tensor(f"{part}_base", (part,), "(2+n)n", parameter="base"),
        Tensor(f"{part}_scale", (part,), "3", parameter="scale"),
    )


def _compressor(name: str, module: str, rate: str, columns: str, depth: str) -> tuple[Tensor, ...]:
    return (
        Tensor(f"{name}_kv", (f"{module}.wkv",), f"{columns} H", "matrix"),
        Tensor(f"{name}_gate", (f"{module}.wgate",), f"{columns} H", "matrix", gain=1.5),
        Tensor(f"{name}_ape", (module,), f"{rate} {columns}", parameter="ape"),
        Tensor(f"{name}_norm", (f"{module}.norm",), depth),
    )


WINDOW = (
    Tensor("attn_norm", ("attn_norm",), "H"),
    *_connection("hc_attn"),
    Tensor("wq_a", ("attn.wq_a",), "Q H", "int8"),
    Tensor("q_norm", ("attn.q_norm",), "Q"),
    Tensor("wq_b", ("attn.wq_b",), "N(P+R) Q", "int8", "heads", gain=1.5),
    Tensor("wkv_a", ("attn.wkv",), "C+R H", "int8"),
    Tensor("kv_norm", ("attn.kv_norm",), "C+R"),
    Tensor("sinks", ("attn",), "N", parameter="attn_sink"),
    Tensor("wo_a", ("attn.wo_a",), "GO NV/G", "matrix", arrange=_by_group, arranged="G O NV/G"),
    Tensor("wo", ("attn.wo_b",), "H GO", "int8", "inputs"),
    Tensor("ffn_norm", ("ffn_norm",), "H"),
    *_connection("hc_ffn"),
)
HCA = (*WINDOW, *_compressor("entry", "attn.compressor", "mH", "V", "V"))
CSA = (
    *WINDOW,
    *_compressor("entry", "attn.compressor", "mC", "2V", "V"),
    Tensor("index_wq", ("attn.indexer.wq_b",), "NX Q", "matrix"),
    *_compressor("index_entry", "attn.indexer.compressor", "mC", "2X", "X"),
    Tensor("index_gate", ("attn.indexer.weights_proj",), "NI H", "router"),
)
EXPERTS = (
    Tensor("experts.w13", ("ffn.experts.{}.w1", "ffn.experts.{}.w3"), "M H", "int8"),
    Tensor("experts.w2", ("ffn.experts.{}.w2",), "H M", "int8"),
    Tensor("shared.w13", ("ffn.shared_experts.w1", "ffn.shared_experts.w3"), "S H", "int8"),
    Tensor("shared.w2", ("ffn.shared_experts.w2",), "H S", "int8"),
)
GATE = Tensor("gate", ("ffn.gate",), "E H", "router", gain=1.5)
MOE = (GATE, Tensor("bias", ("ffn.gate",), "B", parameter="bias"), *EXPERTS)
HASH_MOE = (GATE, Tensor("by_token", ("ffn.gate",), "vocab K", parameter="tid2eid"), *EXPERTS)


def _head_mix(module: str) -> tuple[Tensor, ...]:
    return (
        Tensor("hc_head_fn", (module,), "n nH", "router", parameter="fn"),
        Tensor("hc_head_base", (module,), "n", parameter="base"),
        Tensor("hc_head_scale", (module,), "1", parameter="scale"),
    )


MTP_LAYER = (
    Tensor("embed", ("embed_tokens",), "vocab H"),
    Tensor("enorm", ("enorm",), "H"),
    Tensor("hnorm", ("hnorm",), "H"),
    Tensor("e_proj", ("e_proj",), "H H", "linear"),
    Tensor("h_proj", ("h_proj",), "H H", "linear"),
    *_head_mix("hc_head"),
    Tensor("norm", ("norm",), "H"),
    Tensor("head", ("shared_head.head",), "vocab H", "linear"),
)
HEAD = (
    *_head_mix("model.hc_head"),
    Tensor("norm", ("model.norm",), "H"),
    Tensor("head", ("lm_head",), "vocab H", "linear"),
)

# ---- spellings -----------------------------------------------------------------------------------------

_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "model.head.weight": "lm_head.weight",
}
_WORDS = [  # in a layer, transformers' and those of files that it writes -> published
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("self_attn.compressor.indexer.scorer.", "attn.indexer."),
    ("self_attn.compressor.indexer.q_b_proj.", "attn.indexer.wq_b."),
    ("self_attn.compressor.indexer.", "attn.indexer.compressor."),
    ("self_attn.", "attn."),
    ("attn.norm.", "attn.kv_norm."),
    ("attn.q_a_norm.", "attn.q_norm."),
    ("attn.q_a_proj.", "attn.wq_a."),
    ("attn.q_b_proj.", "attn.wq_b."),
    ("attn.kv_proj.", "attn.wkv."),
    ("attn.o_a_proj.", "attn.wo_a."),
    ("attn.o_b_proj.", "attn.wo_b."),
    ("compressor.kv_proj.", "compressor.wkv."),
    ("compressor.gate_proj.", "compressor.wgate."),
    ("compressor.kv_norm.", "compressor.norm."),
    ("mlp.", "ffn."),
    ("shared_experts.gate_proj.", "shared_experts.w1."),
    ("shared_experts.up_proj.", "shared_experts.w3."),
    ("shared_experts.down_proj.", "shared_experts.w2."),
]
_PARAMETERS = {
    "attn.sinks": "attn.attn_sink",
    "attn.compressor.position_bias": "attn.compressor.ape",
    "attn.indexer.compressor.position_bias": "attn.indexer.compressor.ape",
    "ffn.gate.e_score_correction_bias": "ffn.gate.bias",
}
_STREAMS = re.compile(
    r"(?:hc_(attn|ffn|head)_|(attn|ffn)_hc[.](?:hc_)?|hc_(attn|ffn|head)[.]hc_)(fn|base|scale)"
)
_LAYER = re.compile(r"(?:model[.])?(layers|mtp)[.](\d+)[.](.*)")


def spelled(name: str, num_layers: int) -> str:
    """Return the name in the tables for a tensor's published name, or transformers', or that of its files.

    Tables have `model.` before layers, those of MTP behind the others, and a dot in hc_attn.fn and the like.
    """
    if layer := _LAYER.fullmatch(name):
        number = int(layer[2]) + (num_layers if layer[1] == "mtp" else 0)
        return f"model.layers.{number}.{_in_layer(layer[3])}"
    name = _OUTSIDE.get(name, name)
    if streams := _STREAMS.fullmatch(name.removeprefix("model.")):
        return f"model.hc_{streams[1] or streams[2] or streams[3]}.{streams[4]}"
    return name


def _in_layer(name: str) -> str:
    if streams := _STREAMS.fullmatch(name):
        return f"hc_{streams[1] or streams[2] or streams[3]}.{streams[4]}"
    for theirs, ours in _WORDS:
        if name.startswith(theirs) or f".{theirs}" in name:
            name = name.replace(theirs, ours, 1)
    name = _PARAMETERS.get(name, name)
    return f"{name.removesuffix('.scale')}.weight_scale_inv" if name.endswith(".scale") else name


def published(name: str, num_layers: int) -> str:
    """Return the published name of a tensor that the tables have under `name`."""
    if layer := _LAYER.fullmatch(name):
        number, rest = int(layer[2]), re.sub(r"^(hc_\w+)[.](fn|base|scale)$", r"\1_\2", layer[3])
        return f"layers.{number}.{rest}" if number < num_layers else f"mtp.{number - num_layers}.{rest}"
    outside = {ours: theirs for theirs, ours in _OUTSIDE.items() if not theirs.startswith("model.")}
    return outside.get(name, name.removeprefix("model.").replace("hc_head.", "hc_head_"))


FUSED = re.compile(r"(model[.]layers[.]\d+[.]ffn[.]experts[.])(gate_up_proj|down_proj)")


def experts_of(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int, slice]]:
    """Yield the tensors of single experts that are fused in one [E, out, in], by the tables' names: name,
    expert and rows."""
    stem, what = FUSED.fullmatch(name).groups()  # type: ignore[union-attr]
    half = shape[1] // 2
    rows = {"w1": slice(0, half), "w3": slice(half, None)} if what == "gate_up_proj" else {"w2": slice(None)}
    for expert in range(shape[0]):
        yield from ((f"{stem}{expert}.{part}.weight", expert, cut) for part, cut in rows.items())
