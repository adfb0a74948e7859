"""Rows for the transfer of KV from prefill to decode: by request or by layer, over each fabric and means."""

from __future__ import annotations

from xdeepserve.engine.deploy.teams import num_routed_experts
from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import Case, few_blocks, prefill_and_decode
from xdeepserve.verify.parallel import tensor_parallel_sizes


def transfers(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows of KV transfer by request and by layer, over every fabric, also from DP groups of several
    dies."""
    pair, layer = prefill_and_decode(dies), "transfer=layer"
    rows = []
    for tp in (1, *tensor_parallel_sizes(config, min(4, dies), "tp")):
        prefill = (f"prefill.dies={tp}", f"prefill.tp={tp}", pair[1])
        for mtp in range(3 if config.num_nextn_predict_layers else 1):
            variant = f"prefill TP{tp}, {mtp} drafts"
            if tp > 1 and mtp:  # the others have rows already
                rows.append(Case("pd", f"KV by request, {variant}", (*prefill, f"mtp={mtp}")))
            rows.append(Case("pd", f"KV by layer, {variant}", (*prefill, f"mtp={mtp}", layer)))
    for fabric in ("roce", "vpc"):
        over = (*pair, f"fabric={fabric}")
        rows += [
            Case("pd", f"KV by request over {fabric}", over),
            Case("pd", f"KV by layer over {fabric}", (*over, layer)),
        ]
    other = (f"prefill.dies={min(4, dies)}", pair[1], "prefill.hardware=910b")
    rows += [
        Case("pd", "prefill on 910B", other),
        Case("pd", "prefill on 910B, KV by layer over vpc", (*other, layer, "fabric=vpc")),
        Case("pd", "KV by layer, few KV blocks", (*pair, layer, *few_blocks(config)), crowded=True),
        Case("pd", "KV by layer, prefixes cached", (*pair, layer), repeated=True),
        Case("pd", "KV by layer, planned ahead", (*pair, layer, "execution.overlap=true"), crowded=True),
    ]
    rows += _sent_and_received(config, dies) + _decode_first(config, dies)
    if num_routed_experts(config, 1):
        rows += [
            Case("transformerless", "KV by layer", (layer,)),
            Case("transformerless", "KV by layer, dataflow", (layer, "dataflow=true"), crowded=True),
        ]
    return rows


def _decode_first(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows with decode blocks reserved before a prefill TE gets the request."""
    pair, first, layer = prefill_and_decode(dies), "scheduler.admission=decode", "transfer=layer"
    two, tight = ("prefill.count=2", "decode.count=2"), few_blocks(config)
    over = "transfer_over=send-receive"
    return [
        Case("pd", "decode first", (*pair, first)),
        Case("pd", "decode first, 2 prefill and 2 decode TEs", (*two, *pair, first), crowded=True),
        Case("pd", "decode first, few KV blocks", (*pair, first, *tight), crowded=True),
        Case("pd", "decode first, KV by layer, few KV blocks", (*pair, first, layer, *tight), crowded=True),
        Case("pd", "decode first, KV by layer, send and receive", (*pair, first, layer, over)),
    ]


def _sent_and_received(config: ModelConfig, dies: int) -> list[Case]:
    """List the rows with KV sent by XCCL's send and receive, from prefill DP groups of one die and of
    several.

    The decode DP groups that receive have one die each.
    """
    pair, over, layer = prefill_and_decode(dies), "transfer_over=send-receive", "transfer=layer"
    rows = []
    for tp in (1, *tensor_parallel_sizes(config, min(4, dies), "tp")):
        prefill = (f"prefill.dies={tp}", f"prefill.tp={tp}", pair[1], over)
        rows += [
            Case("pd", f"KV by request, send and receive, prefill TP{tp}", prefill),
            Case("pd", f"KV by layer, send and receive, prefill TP{tp}", (*prefill, layer)),
        ]
    two = ("prefill.count=2", "decode.count=2", *pair, over)
    zero = (*pair, "transfer_over=zero-copy")
    rows += [
        Case("pd", "KV by request, zero copy", zero),
        Case("pd", "KV by layer, zero copy, few KV blocks", (*zero, layer, *few_blocks(config))),
        Case("pd", "KV by request, send and receive, 2 prefill and 2 decode TEs", two, crowded=True),
        Case("pd", "KV by layer, send and receive, few KV blocks", (*pair, over, layer, *few_blocks(config))),
    ]
    if num_routed_experts(config, 1):
        rows.append(Case("transformerless", "KV by layer, send and receive", (over, layer), crowded=True))
    return rows
