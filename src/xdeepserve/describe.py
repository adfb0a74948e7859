"""What a deployment of a model would be: dies, roles, memory, experts. Nothing is allocated."""

from __future__ import annotations

from xdeepserve.engine.build import PodPlan

MIB = 1 << 20


def describe(plan: PodPlan) -> str:
    """A table for people."""
    c, s, pod = plan.config, plan.sizes, plan.pod
    experts = (
        f"{c.n_routed_experts} routed experts, top {c.num_experts_per_tok}"
        if c.num_moe_layers
        else "no experts"
    )
    lines = [
        f"model       {plan.checkpoint.name}: {c.num_hidden_layers} layers ({c.num_moe_layers} MoE), hidden "
        f"{c.hidden_size}, {experts}, {c.num_nextn_predict_layers} MTP, vocabulary {c.vocab_size}",
        f"precision   {plan.recipe}",
        f"deployment  {plan.deployment.name}: {_roles(plan)}",
        f"context     {s.max_model_len} tokens; {s.num_blocks} KV blocks of {s.block_size} per DP group",
        f"step        at most {s.max_seqs} sequences and {s.max_tokens} token rows per DP group, "
        f"{s.mtp} drafts each",
        "",
        f"{'die':>4}  {'place':<22}{'routed experts':<16}{'weights':>10}{'KV':>10}{'activations':>13}"
        f"{'XCCL':>10}  MiB",
    ]
    for rank, mem in enumerate(plan.memories):
        node = pod.memories.plans[rank]
        app = mem.weight_nbytes + mem.cache_nbytes + mem.activation_nbytes
        place = pod.topology.name(rank)
        held = f"{mem.experts.start}..{mem.experts.stop - 1}" if len(mem.experts) else "none"
        sizes = (mem.weight_nbytes, mem.cache_nbytes, mem.activation_nbytes, node.nbytes - app)
        weights, cache, activations, xccl = (nbytes / MIB for nbytes in sizes)
        lines.append(
            f"{rank:>4}  {place:<22}{held:<16}{weights:>10.2f}{cache:>10.2f}{activations:>13.2f}{xccl:>10.2f}"
        )
    capacity = int(pod.spec.hbm_bytes.value)
    largest = max(node.nbytes for node in pod.memories.plans.values())
    lines += [
        "",
        f"memory      {pod.memories.nbytes / MIB:.1f} MiB of this computer for {s.num_dies} dies; "
        f"the fullest die uses {largest / MIB:.2f} of its {capacity / MIB:.0f} MiB",
    ]
    return "\n".join(lines)


def _roles(plan: PodPlan) -> str:
    if plan.sizes.num_dies == 1:
        return "1 die holds attention and all experts"
    n = plan.sizes.num_dies
    if plan.exchange is None:
        return f"DP{n}: {n} dies, each a DP group of its own"
    return (
        f"DP{n} + EP{n} on the same {n} dies: each a DP group with its share of the experts, dispatch/combine"
    )
