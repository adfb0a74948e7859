"""The operations after attention: a dense MLP, or routing, routed experts and the shared one.

mlp_up, mlp_down       the MLP of a layer without experts, added to the row
gate                   norm and routing
collect, find_replica  load of logical experts; from these to physical ones (xDeepServe 4.5)
take_own, take_received  the rows that are here for this die's routed experts
run_experts            these experts, on them
shared_expert          on the die's own rows
add_outputs            all experts' outputs by weight, added to the row
add_answers            the same, made elsewhere
"""

from __future__ import annotations

import numpy as np

from xdeepserve.hw.work import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import MLP, Layer
from xdeepserve.step.attention import RowParallel, linear_work
from xdeepserve.step.frame import NO_ROWS, Frame, Model
from xdeepserve.step.linear import Linears, Rows
from xdeepserve.step.stage import Counts, Op, free


def mlp_work(rows: float, mlp: MLP) -> Work:
    return linear_work(rows, mlp.w13) + linear_work(rows, mlp.w2)


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
    routing = (moe.bias, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor)
    k.gate(f.topk_idx, f.topk_weights, logits, *routing)


def _collect(f: Frame) -> None:
    assert f.replicas is not None
    f.replicas.collect(f.topk_idx, f.moe)


def _find_replica(f: Frame) -> None:
    assert f.replicas is not None
    physical = f.take("topk_physical", *f.topk_idx.shape)
    f.replicas.route(physical, f.topk_idx, f.moe)
    f.topk_idx = physical


def _take_own(f: Frame) -> None:
    f.expert_in, f.local_idx = f.source, f.topk_idx.reshape(-1)
    f.expert_out = f.slot_out = f.take("slot_out", f.topk_idx.size, f.config.hidden_size)


def _take_received(f: Frame) -> None:
    """`expert_in` and `expert_out` are those that dispatch left."""
    f.local_idx = f.take("expert_idx", len(f.expert_idx))
    np.subtract(f.expert_idx, f.slots.start, out=f.local_idx)


def _run_experts(f: Frame) -> None:
    experts = f.moe.experts
    assert experts is not None
    if f.arrivals is not None:
        f.arrivals.accept(f.local_idx, experts)
    f.linears.route(f.expert_out, f.expert_in, f.local_idx, experts, len(f.slots))


def _shared_expert(f: Frame) -> None:
    mlp = f.moe.shared
    if mlp is not None:
        f.shared = f.take("shared", *f.h.shape)
        run_mlp(f.linears, f.shared, f.source, mlp)


def run_mlp(linears: Linears, out: Array, rows: Rows, mlp: MLP) -> None:
    """out [T, H] = the MLP of the shared expert, of rows as its first layer takes them."""
    gate_up = linears.take("gate_up", len(out), mlp.w13.n)
    linears.apply(gate_up, rows, mlp.w13)
    linears.apply(out, linears.activate(gate_up, mlp.w2), mlp.w2, is_row_parallel=True)


def _add_outputs(f: Frame) -> None:
    shared = NO_ROWS if f.moe.shared is None else f.shared
    # INT8: experts' outputs are BF16, as if each came from a die of its own.
    k.combine(f.h, f.slot_out, f.topk_weights, shared, f.is_int8)


def _add_answers(f: Frame) -> None:
    k.add(f.h, f.h, f.reduced)


# ---- costs ------------------------------------------------------------------------------------------


def _gate_work(model: Model, layer: Layer, n: Counts) -> Work:
    return Work(gates=1)


def expert_work(model: Model, n: Counts) -> Work:
    """Grouped GEMMs of `n.copies` rows: weights of the experts that have rows are read once."""
    size = 3 * model.config.hidden_size * model.config.moe_intermediate_size
    operations, weights = 2.0 * n.copies * size, float(n.touched * size * model.matrix_nbytes)
    return Work(int8=operations, weights=weights) if model.is_int8 else Work(bf16=operations, weights=weights)


def _shared_work(model: Model, layer: Layer, n: Counts) -> Work:
    assert layer.moe is not None
    return Work() if layer.moe.shared is None else mlp_work(n.rows, layer.moe.shared)


mlp_up = Op(_mlp_up, lambda model, layer, n: linear_work(n.rows, _dense(layer).w13), "heads")
mlp_down = Op(MLP_DOWN.run, MLP_DOWN.work, "sum")
gate = Op(_gate, _gate_work)
collect = Op(_collect, free)
find_replica = Op(_find_replica, free)
take_own = Op(_take_own, free)
take_received = Op(_take_received, free)
run_experts = Op(_run_experts, lambda model, layer, n: expert_work(model, n))
shared_expert = Op(_shared_expert, _shared_work)
add_outputs = Op(_add_outputs, free)
add_answers = Op(_add_answers, free)
