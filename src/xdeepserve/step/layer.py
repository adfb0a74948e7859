"""A decoder layer of DeepSeek-V3, from top to bottom: what every runner runs (xDeepServe Figure 10).

attention   MLAProlog -> MLA -> output projection; or with keys and values of groups of heads, GQA; or with
            positions that an indexer chooses, DSA
feed        an MLP, or gate -> dispatch -> experts -> combine -> shared expert
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from xdeepserve.model.families import AttentionKind
from xdeepserve.model.tensors import Layer
from xdeepserve.step import attention as mla
from xdeepserve.step import grouped as gqa
from xdeepserve.step import sparse as dsa
from xdeepserve.step import v4
from xdeepserve.step.feed import (
    add_answers,
    add_outputs,
    add_sums,
    collect,
    find_physical,
    gate,
    mlp_down,
    mlp_up,
    round_own,
    round_shared,
    run_copy,
    run_either,
    run_experts,
    shared_expert,
    take_own,
    take_received,
)
from xdeepserve.step.stage import LayerProgram, Meet, Op, Program, Stage

Holds: TypeAlias = Literal["routed", "shared", "both"]


class Where(NamedTuple):
    """Where a layer's experts are, as seen from a die with attention.

    experts       `here`: all on this die; `among`: each die has some, by dispatch and combine; `away`: on
                  dies of their own, by A2E and E2A, the shared one as well
    has_shared    the shared expert is on the token's own die
    has_routes    tokens are led to physical experts, which are replicas of logical ones, or copies of the
                  shared one; `collects`: tokens of logical ones are counted
    pushes        `among`, by FusedDispatch and FusedCombine instead
    int8_answers  outputs of experts that need not travel are rounded as if they did, to INT8
    holds         what this die has for the tokens of all: routed experts, a copy of the shared one, or both
    """

    experts: Literal["here", "among", "away"] = "here"
    has_shared: bool = True
    has_routes: bool = False
    collects: bool = False
    pushes: bool = False
    int8_answers: bool = False
    holds: Holds = "routed"


def decoder_layer(layer: Layer, where: Where) -> LayerProgram:
    """Compose a decoder layer for one die, or for each die of a group in which every die has its own rows."""
    feed = dense() if layer.moe is None else moe(where)
    if layer.hc_ffn_fn is not None:
        feed = (CONNECT_FEED, Stage("Gate", (v4.gate,), "aiv"), *feed[1:], SPREAD)
    return LayerProgram(ATTENTION[layer.attention], feed)


CONNECT_ATTENTION = Stage("Connect", (v4.connect_attention,), "aiv")
CONNECT_FEED = Stage("Connect", (v4.connect_feed,), "aiv")
SPREAD = Stage("Spread", (v4.spread,), "aiv")


def _v4_attention(*attend: Op) -> Program:
    return (
        CONNECT_ATTENTION,
        Stage("MLAProlog", (v4.down_proj, v4.up_proj)),
        Stage("MQA", attend, attends=True),
        Stage("OProj", (v4.head_outputs, v4.out_proj)),
        SPREAD,
    )


ATTENTION: dict[AttentionKind, Program] = {
    "mla": (
        Stage("MLAProlog", (mla.down_proj, mla.up_proj)),
        Stage("MLA", (mla.attend,), attends=True),
        Stage("OProj", (mla.head_outputs, mla.out_proj)),
    ),
    "gqa": (
        Stage("QKVProlog", (mla.down_proj, gqa.up_proj)),
        Stage("GQA", (gqa.attend,), attends=True),
        Stage("OProj", (gqa.head_outputs, mla.out_proj)),
    ),
    "dsa": (
        Stage("MLAProlog", (dsa.down_proj, dsa.up_proj)),
        Stage("DSA", (dsa.choose, dsa.attend), attends=True),
        Stage("OProj", (mla.head_outputs, mla.out_proj)),
    ),
    "dsa-shared": (
        Stage("MLAProlog", (mla.down_proj, mla.up_proj)),
        Stage("DSA", (dsa.attend,), attends=True),
        Stage("OProj", (mla.head_outputs, mla.out_proj)),
    ),
    "window": _v4_attention(v4.attend),
    "csa": _v4_attention(v4.compress, v4.choose, v4.attend),
    "hca": _v4_attention(v4.compress, v4.attend),
}


def dense() -> Program:
    """Compose the part after attention of a layer without experts."""
    return (Stage("MLP", (mlp_up, mlp_down)),)


def moe(where: Where) -> Program:
    """Compose the part after attention of a layer with experts."""
    routing = [Stage("Gate", (gate,), "aiv")]
    if where.collects:
        routing.append(Stage("Collect", (collect,), "aiv"))
    if where.has_routes:
        routing.append(Stage("Route", (find_physical,), "aiv"))
    if where.experts == "away":
        return (*routing, Meet("a2e"), Meet("e2a"), Stage("Residual", (add_answers,), "aiv"))

    shared: tuple[Op, ...] = (shared_expert,) if where.has_shared else ()
    own: tuple[Op, ...] = (take_own, run_experts)
    if where.int8_answers:
        shared, own = (*shared, round_shared) if shared else (), (*own, round_own)
    outputs = Stage("SharedExpert", (*shared, add_outputs))
    if where.experts == "here":
        return (*routing, Stage("Experts", own), outputs)
    experts = expert_stage(where.holds)
    if where.pushes:
        outputs = Stage("SharedExpert", (*shared, add_sums))
        return (*routing, Meet("fused_dispatch"), experts, Meet("fused_combine"), outputs)
    return (*routing, Meet("dispatch"), experts, Meet("combine"), outputs)


def expert_stage(holds: Holds = "routed") -> Stage:
    """Compose the stage of a die's experts, on the rows received for them."""
    ops = {"routed": (take_received, run_experts), "shared": (run_copy,), "both": (run_either,)}
    return Stage("Experts", ops[holds], rows="received")
