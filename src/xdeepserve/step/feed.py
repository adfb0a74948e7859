"""Operations after attention: a dense MLP, or routing, routed experts and the shared one.

mlp_up, mlp_down       the MLP of a layer without experts, added to the row
gate                   norm and routing
collect, find_physical  load of logical experts; from these to physical ones (xDeepServe 4.5)
take_own, take_received  the rows that are here for this die's routed experts
run_experts            these experts, on them
run_copy               a copy of the shared expert here for the tokens of many dies, on them
run_either             both, where a die has both
shared_expert          on the die's own rows
round_own, round_shared  the outputs of experts here, as if they had come as INT8 (xDeepServe 4.7)
add_outputs            all experts' outputs by weight, added to the row
add_sums               the same, where all but an own shared expert's are added up already
add_answers            the same, made elsewhere
"""

from __future__ import annotations

import numpy as np

from xdeepserve.hw.spec import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import MLP, Held, Layer
from xdeepserve.step.attention import ACTIVATED, QUANTISED, SCALED, RowParallel, linear_work
from xdeepserve.step.frame import Frame, Model
from xdeepserve.step.linear import Linears, Rows
from xdeepserve.step.stage import Counts, Op, free


def mlp_work(rows: float, mlp: MLP) -> Work:
    return up_work(rows, mlp) + linear_work(rows, mlp.w2)


def up_work(rows: float, mlp: MLP) -> Work:
    activated = 0 if mlp.w2.scale is None else ACTIVATED * rows * mlp.w2.k
    return linear_work(rows, mlp.w13) + Work(between=activated)


# ---- a layer without experts ------------------------------------------------------------------------


def _dense(layer: Layer) -> MLP:
    assert layer.mlp is not None
    return layer.mlp


def _norm(f: Frame) -> None:
    f.source = f.linears.norm(f.take("x", *f.h.shape), f.h, f.layer.ffn_norm, f.config.rms_norm_eps)


def _mlp_up(f: Frame) -> None:
    _norm(f)
    f.linears.apply(_gate_up(f), f.source, _dense(f.layer).w13)


def _gate_up(f: Frame) -> Array:
    return f.take("gate_up", len(f.h), _dense(f.layer).w13.n)


def _activated(f: Frame) -> Array:
    act = f.take("act", len(f.h), _dense(f.layer).w2.k)
    k.swiglu(act, _gate_up(f))
    return act


MLP_DOWN = RowParallel(
    linear=lambda layer: _dense(layer).w2,
    buffer="act",
    floats=_activated,
    rows=lambda f: f.linears.activate(_gate_up(f), _dense(f.layer).w2),
)


# ---- experts ----------------------------------------------------------------------------------------


def _gate(f: Frame) -> None:
    c, rows, moe = f.config, len(f.h), f.moe
    _norm(f)
    logits = f.take("gate_logits", rows, c.n_routed_experts)
    f.linears.gate(logits, f.take("x", *f.h.shape), moe.gate)
    routing = (moe.bias, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor, c.best_of_group)
    k.gate(f.topk_idx, f.topk_weights, logits, *routing, c.scoring == "softmax")


def _collect(f: Frame) -> None:
    assert f.replicas is not None
    f.replicas.collect(f.topk_idx, f.moe)


def _find_physical(f: Frame) -> None:
    """Replace logical experts by physical ones; without replicas they are the same. The shared expert, if
    elsewhere, comes last."""
    rows, top_k = f.topk_idx.shape
    physical = f.take("topk_physical", rows, top_k + (f.shared_expert is not None))
    if f.replicas is None:
        physical[:, :top_k] = f.topk_idx
    else:
        f.replicas.find(physical[:, :top_k], f.topk_idx, f.moe)
    if f.shared_expert is not None:
        physical[:, top_k] = f.shared_expert
    f.topk_idx = physical


def _take_own(f: Frame) -> None:
    f.expert_in, f.local_idx = f.source, f.topk_idx.reshape(-1)
    f.expert_out = f.slot_out = f.take("slot_out", f.topk_idx.size, f.config.hidden_size)


def _take_received(f: Frame) -> None:
    """Take the rows received by a dispatch or an A2E, with experts numbered from this die's first."""
    f.local_idx = f.take("expert_idx", len(f.expert_idx))
    np.subtract(f.expert_idx, f.slots.start, out=f.local_idx)


def _run_experts(f: Frame) -> None:
    if f.arrivals is not None:
        f.arrivals.accept(f.local_idx, f.experts)
    f.linears.run_experts(f.expert_out, f.expert_in, f.local_idx, f.experts, len(f.slots))


def _run_copy(f: Frame) -> None:
    x, scale, _ = f.expert_in
    rows = Rows(np.ascontiguousarray(x), None if scale is None else np.ascontiguousarray(scale))
    run_mlp(f.linears, f.expert_out, rows, f.copy)


def _run_either(f: Frame) -> None:
    given, experts, out, is_copy = f.expert_in, f.expert_idx, f.expert_out, f.expert_idx >= f.first_copy
    for mine, run in ((np.flatnonzero(~is_copy), _run_received), (np.flatnonzero(is_copy), _run_copy)):
        if len(mine):
            scale = None if given.scale is None else given.scale[mine]
            f.expert_in, f.expert_idx = Rows(given.x[mine], scale), experts[mine]
            f.expert_out = np.empty((len(mine), out.shape[1]), np.float32)
            run(f)
            out[mine] = f.expert_out
    f.expert_in, f.expert_idx, f.expert_out = given, experts, out


def _run_received(f: Frame) -> None:
    _take_received(f)
    _run_experts(f)


def _shared_expert(f: Frame) -> None:
    mlp = f.moe.shared
    if mlp is not None:
        f.shared = f.take("shared", *f.h.shape)
        run_mlp(f.linears, f.shared, f.source, mlp)


def run_mlp(linears: Linears, out: Array, rows: Rows, mlp: MLP) -> None:
    """Run the MLP of the shared expert on rows prepared for its first layer: out [T, H]."""
    gate_up = linears.take("gate_up", len(out), mlp.w13.n)
    linears.apply(gate_up, rows, mlp.w13)
    linears.apply(out, linears.activate(gate_up, mlp.w2), mlp.w2, is_row_parallel=True)


def _round_own(f: Frame) -> None:
    k.round_to_int8(f.slot_out)


def _round_shared(f: Frame) -> None:
    k.round_to_int8(f.shared)


def _is_bf16(f: Frame) -> bool:
    """Whether experts' outputs must still be rounded to BF16, as in the INT8 recipe. INT8 outputs have been
    rounded where they were made."""
    return f.is_int8 and not f.config.int8_answers


def _add_outputs(f: Frame) -> None:
    k.combine(f.h, f.slot_out, k.IN_ORDER, f.topk_weights, f.shared, _is_bf16(f))


def _add_sums(f: Frame) -> None:
    k.add_sums(f.h, f.reduced, f.shared, _is_bf16(f))


def _add_answers(f: Frame) -> None:
    k.add(f.h, f.h, f.reduced)


# ---- costs ------------------------------------------------------------------------------------------


def _gate_work(model: Model, layer: Layer, n: Counts) -> Work:
    return Work(gates=1)


def _collect_work(model: Model, layer: Layer, n: Counts) -> Work:
    """Work of counting each row's experts: a number is read, and a counter is read and written."""
    return Work(kernels=1, moved=12.0 * n.rows * model.config.num_experts_per_tok)


def _find_work(model: Model, layer: Layer, n: Counts) -> Work:
    """Work of finding replicas: of each row's experts the number, how many replicas, which one; and it is
    written."""
    return Work(kernels=1, moved=16.0 * n.rows * model.config.num_experts_per_tok)


def expert_work(model: Model, n: Counts) -> Work:
    """Work of grouped GEMMs of `n.copies` rows; weights of each expert with rows are read once."""
    size = 3 * model.config.hidden_size * model.config.moe_intermediate_size
    operations, weights = 2.0 * n.copies * size, float(n.touched * size * model.matrix_nbytes)
    if not model.is_int8:
        return Work(bf16=operations, weights=weights)
    between = _between(n.copies, model.config.hidden_size, model.config.moe_intermediate_size)
    return Work(int8=operations, weights=weights, between=between)


def _between(rows: float, hidden: int, width: int) -> float:
    """Bytes that vector kernels read and write in an expert's MLP, for rows that have come as INT8."""
    return rows * ((2 * SCALED + ACTIVATED + QUANTISED) * width + SCALED * hidden)


def _copy_work(model: Model, weights: Layer | Held, n: Counts) -> Work:
    held = weights.moe if isinstance(weights, Layer) else weights
    assert held is not None
    assert held.shared is not None
    work, width = mlp_work(n.shared, held.shared), held.shared.w2.k
    return work._replace(between=_between(n.shared, model.config.hidden_size, width)) if work.int8 else work


def _shared_work(model: Model, layer: Layer, n: Counts) -> Work:
    assert layer.moe is not None
    return Work() if layer.moe.shared is None else mlp_work(n.rows, layer.moe.shared)


mlp_up = Op(_mlp_up, lambda model, layer, n: up_work(n.rows, _dense(layer)), "heads", operators=2)
mlp_down = Op(MLP_DOWN.run, MLP_DOWN.work, "sum", operators=3)
gate = Op(_gate, _gate_work, operators=3)
collect = Op(_collect, _collect_work)
find_physical = Op(_find_physical, _find_work)
take_own = Op(_take_own, free, operators=0)
take_received = Op(_take_received, free, operators=0)
run_experts = Op(_run_experts, lambda model, layer, n: expert_work(model, n), operators=6)
run_copy = Op(_run_copy, _copy_work, operators=3)
run_either = Op(
    _run_either,
    lambda model, weights, n: expert_work(model, n) + _copy_work(model, weights, n),
    operators=run_experts.operators + run_copy.operators,
)
shared_expert = Op(_shared_expert, _shared_work, operators=3)
round_own = Op(_round_own, free)
round_shared = Op(_round_shared, free)
add_outputs = Op(_add_outputs, free)
add_sums = Op(_add_sums, free)
add_answers = Op(_add_answers, free)
