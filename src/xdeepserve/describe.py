"""What a deployment of a model would be: dies, roles, memory, experts. Nothing is allocated."""

from __future__ import annotations

from xdeepserve.engine.build import PodPlan, TEPlan
from xdeepserve.engine.deployment import ExecutionConfig, Sizes
from xdeepserve.engine.programs.expert import ExpertMemory
from xdeepserve.engine.programs.memory_plan import DieMemory

MIB = 1 << 20


def describe(plan: PodPlan) -> str:
    """A table for people."""
    c, s, pod = plan.config, plan.tes[0].sizes, plan.pod
    experts = "no experts"
    if c.num_moe_layers:
        experts = f"{c.n_routed_experts} routed experts, top {c.num_experts_per_tok}"
    lines = [
        f"model       {plan.checkpoint.name}: {c.num_hidden_layers} layers ({c.num_moe_layers} MoE), hidden "
        f"{c.hidden_size}, {experts}, {c.num_nextn_predict_layers} MTP, vocabulary {c.vocab_size}",
        f"precision   {plan.recipe}",
        f"deployment  {plan.deployment.name}: {'; '.join(team(te) for te in plan.tes)}",
        f"context     {s.max_model_len} tokens; {s.num_blocks} KV blocks of {s.block_size} per DP group",
        f"step        at most {s.max_seqs} sequences and {s.max_tokens} token rows per DP group, "
        + drafts(s),
        f"host        {host(plan.deployment.execution)}",
        "",
        f"{'die':>4}  {'place':<12}{'TE':<12}{'heads':<10}{'routed experts':<16}{'weights':>9}{'KV':>9}"
        f"{'activations':>13}{'XCCL':>9}  MiB",
    ]
    for te in plan.tes:
        for die, mem in te.all_memories:
            node = pod.memories.plans[die]
            app = mem.weight_nbytes + mem.cache_nbytes + mem.activation_nbytes
            held = _span(mem.experts)
            heads = _span(mem.heads) if isinstance(mem, DieMemory) else "none"
            if isinstance(mem, ExpertMemory) and mem.is_shared:
                held = "shared"
            sizes = (mem.weight_nbytes, mem.cache_nbytes, mem.activation_nbytes, node.nbytes - app)
            weights, cache, activations, xccl = (nbytes / MIB for nbytes in sizes)
            lines.append(
                f"{die:>4}  {pod.topology.name(die):<12}{te.sizes.name:<12}{heads:<10}{held:<16}"
                f"{weights:>9.2f}{cache:>9.2f}{activations:>13.2f}{xccl:>9.2f}"
            )
    capacity = int(pod.spec.hbm_bytes.value)
    dies = [node for number, node in pod.memories.plans.items() if pod.topology.is_die(number)]
    largest = max(node.nbytes for node in dies)
    lines += [
        "",
        f"memory      {pod.memories.nbytes / MIB:.1f} MiB of this computer for {len(dies)} dies; "
        f"the fullest die uses {largest / MIB:.2f} of its {capacity / MIB:.0f} MiB",
    ]
    return "\n".join(lines)


def drafts(s: Sizes) -> str:
    """How many drafts a sequence has in a step, and who makes them."""
    if not s.mtp:
        return "no drafts"
    layers = "one MTP layer" if s.num_mtp_layers == 1 else f"{s.num_mtp_layers} MTP layers"
    again = ", used again" if s.num_mtp_layers < s.mtp else ""
    return f"{s.mtp} draft{'s' if s.mtp > 1 else ''} each, by {layers}{again}"


def host(execution: ExecutionConfig | None) -> str:
    """How steps are planned and launched, in virtual time."""
    if execution is None:
        return "costs nothing (see the settings execution.*)"
    parts = [
        "steps are graphs" if execution.mode == "graph" else "operators are launched one by one",
        "planned while the one before runs" if execution.overlap else "planned one after the other",
        f"{execution.mtp} MTP",
        "cores pinned" if execution.pin_cores else "cores not pinned",
        "guards of graphs cached" if execution.cache_graphs else "guards of graphs checked each time",
        "controlled collection of garbage" if execution.control_gc else "automatic collection of garbage",
    ]
    return ", ".join(parts)


def _span(held: range) -> str:
    return f"{held.start}..{held.stop - 1}" if len(held) else "none"


def team(te: TEPlan) -> str:
    """What the dies of a TE are."""
    n = te.sizes.num_dies
    name = "" if te.sizes.role == "both" else f"{te.sizes.name}: "
    if te.sizes.has_expert_dies:
        s = te.sizes
        return (
            f"{name}{s.num_domains} DP domains of {n // s.num_domains} attention dies, "
            f"{len(s.experts_of)} dies of routed experts, {s.num_shared_dies} of the shared one"
        )
    if n == 1:
        return f"{name}1 die holds attention and all experts"
    if te.sizes.tp > 1:
        s, mode = te.sizes, "TP" if te.sizes.tp_mode == "tp" else "SP-TP-SP"
        experts = f" + EP{n}" if te.exchange is not None else ""
        return (
            f"{name}DP{s.num_groups} x TP{s.tp}{experts}, {n} dies; the {s.tp} of a DP group share its heads "
            f"by {mode}, and each holds all latents"
        )
    if te.exchange is None:
        return f"{name}DP{n}, {n} dies, each a DP group of its own"
    return f"{name}DP{n} + EP{n}, {n} dies, each a DP group with its share of the experts"
