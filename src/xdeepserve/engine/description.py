"""What a deployment of a model would be: dies, roles, memory, experts. Nothing is allocated."""

from __future__ import annotations

import itertools

from xdeepserve.comm.distflow import backend_between
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import ExecutionConfig, Hardware
from xdeepserve.engine.deploy.sizes import Sizes
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.te.te_plan import TEPlan

MIB = 1 << 20
HARDWARE: dict[Hardware, str] = {
    "cm384": "CloudMatrix384 dies",
    "910b": "Ascend 910B, a server for each TE",
}
SHOWN_ALIKE = 16  # more dies in a row that differ in nothing but their experts take one line


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
        *_replicas(plan),
        f"context     {s.max_model_len} tokens; {s.num_blocks} KV blocks of {s.block_size} per DP group",
        *(
            f"{'step' if te is plan.tes[0] else '':<12}at most {te.sizes.max_seqs} sequences and "
            f"{te.sizes.max_tokens} token rows per DP group, {drafts(te.sizes)}"
            f"{f' ({te.sizes.name})' if len(plan.tes) > 1 else ''}"
            for te in plan.tes
        ),
        *hosts(plan),
        *transfers(plan),
        "",
        f"{'die':>9}  {'place':<12}{'TE':<12}{'heads':<10}{'routed experts':<16}{'weights':>10}{'KV':>11}"
        f"{'activations':>13}{'XCCL':>9}  MiB",
    ]
    for te in plan.tes:
        for _, alike in itertools.groupby(te.all_memories, lambda each: _numbers(plan, *each)):
            run = list(alike)
            if len(run) <= SHOWN_ALIKE:
                lines += [_line(plan, te, [each]) for each in run]
            else:
                lines.append(_line(plan, te, run))
    capacity = int(pod.spec.hbm_bytes.value)
    num_dies = sum(map(pod.topology.is_die, pod.memories.plans))
    uses, but = "uses", ""
    if plan.timing is not None:
        uses, but = "would use", ", without activations and XCCL's areas: time only"
    if lack(plan):
        but += "; it does not fit"
    lines += [
        "",
        f"memory      {pod.memories.nbytes / MIB:.1f} MiB of this computer for {counted(num_dies)}; "
        f"the fullest die {uses} {fullest(plan) / MIB:.2f} of its {capacity / MIB:.0f} MiB{but}",
    ]
    return "\n".join(lines)


def counted(number: int, what: str = "dies") -> str:
    """How many: "1 die", "2 dies", "3 attention dies"."""
    return f"{number} {what.replace('dies', 'die').replace('domains', 'domain') if number == 1 else what}"


def lack(plan: PodPlan) -> str:
    """That weights and KV are more than a die has, where time alone would not notice; empty if they fit."""
    need, has = fullest(plan), plan.pod.spec.hbm_bytes.value
    if need <= has:
        return ""
    return f"weights and KV of the fullest die take {need / 2**30:.1f} GiB, and it has {has / 2**30:.0f}"


def fullest(plan: PodPlan) -> int:
    """Bytes that the die which holds most has to hold: weights, KV, and what of the rest is planned."""
    return max(sum(_numbers(plan, *each)) for te in plan.tes for each in te.all_memories)


def _replicas(plan: PodPlan) -> list[str]:
    """Copies of experts, or room for replicas of hot ones, and when these change."""
    s = plan.tes[0].sizes
    if not s.redundant_slots:
        return []
    if s.copies_of:
        copies = sum(map(len, s.copies_of)) // s.experts_of[-1].stop
        servers = "another server" if copies == 1 else f"{copies} other servers"
        return [f"copies      each routed expert is on {servers}, too, from the start"]
    slots = f"{s.redundant_slots} redundant slot{'s' if s.redundant_slots > 1 else ''}"
    when = "never filled"
    if s.balance_interval_ns:
        when = f"balanced every {s.balance_interval_ns / 1e9:g} s of virtual time"
    return [f"replicas    {slots} in each layer on each die with experts, {when}"]


def drafts(s: Sizes) -> str:
    """How many drafts a sequence has in a step, and who makes them."""
    if not s.mtp:
        return "no drafts"
    layers = "one MTP layer" if s.num_mtp_layers == 1 else f"{s.num_mtp_layers} MTP layers"
    again = ", used again" if s.num_mtp_layers < s.mtp else ""
    return f"{s.mtp} draft{'s' if s.mtp > 1 else ''} each, by {layers}{again}"


def hosts(plan: PodPlan) -> list[str]:
    """How steps are planned and launched, in virtual time; TEs of one role do it alike."""
    execution = plan.deployment.execution
    if execution is None:
        return ["host        costs nothing (see the settings execution.*)"]
    roles = dict.fromkeys(te.sizes.role for te in plan.tes)
    said = [host(execution.for_role(role)) + (f" ({role})" if len(roles) > 1 else "") for role in roles]
    return [f"{'' if number else 'host':<12}{text}" for number, text in enumerate(said)]


def transfers(plan: PodPlan) -> list[str]:
    """What prefill and decode run on, and how KV goes from one to the other, where they are apart."""
    if all(te.sizes.role == "both" for te in plan.tes):
        return []
    prefills, decodes = ([te for te in plan.tes if te.sizes.role == role] for role in ("prefill", "decode"))
    asked = plan.deployment.fabric
    found = {
        backend_between(plan.pod, prefill.dies, decode.dies, asked).name
        for prefill in prefills
        for decode in decodes
    }
    why = ", which both sides are on" if asked == "auto" else ""
    hardware = f"prefill and decode on {HARDWARE['cm384']}"
    if prefills[0].sizes.hardware != "cm384":
        hardware = f"prefill on {HARDWARE[prefills[0].sizes.hardware]}; decode on {HARDWARE['cm384']}"
    return [
        f"hardware    {hardware}",
        f"KV          from prefill to decode by {plan.deployment.transfer}, over "
        f"{' and '.join(sorted(found))}{why}",
    ]


def host(execution: ExecutionConfig) -> str:
    """How the host launches and plans the steps of the TEs of one role, in words."""
    parts = [
        "operators are launched one by one" if execution.mode == "op" else "steps are graphs",
        "planned while the one before runs" if execution.overlap else "planned one after the other",
        f"{execution.mtp} MTP",
        "cores pinned" if execution.pin_cores else "cores not pinned",
        "guards of graphs cached" if execution.cache_graphs else "guards of graphs checked each time",
        "controlled collection of garbage" if execution.control_gc else "automatic collection of garbage",
    ]
    return ", ".join(parts)


def _numbers(plan: PodPlan, die: int, mem: DieMemory | ExpertMemory) -> tuple[int, int, int, int]:
    """Bytes of weights, KV cache, activations and XCCL's areas; the last two are 0 where time alone is told,
    since nobody plans them then."""
    weights, cache, activations = mem.weight_nbytes, mem.cache_nbytes, mem.activation_nbytes
    if plan.timing is not None:
        return weights, cache, 0, 0
    return weights, cache, activations, plan.pod.memories.plans[die].nbytes - weights - cache - activations


def _line(plan: PodPlan, te: TEPlan, run: list[tuple[int, DieMemory | ExpertMemory]]) -> str:
    """A line of the table: one die, or a row of dies that differ in their experts alone."""
    (die, mem), (last, last_mem) = run[0], run[-1]
    held = _span(range(mem.experts.start, last_mem.experts.stop))
    if len(mem.slots) > len(mem.experts):
        held += f" + {len(mem.slots) - len(mem.experts)}"
    heads = _span(mem.heads) if isinstance(mem, DieMemory) else "none"
    if mem.is_shared:
        held = f"shared{held.removeprefix('none')}"
    weights, cache, activations, xccl = (nbytes / MIB for nbytes in _numbers(plan, die, mem))
    number = str(die) if die == last else f"{die}..{last}"
    return (
        f"{number:>9}  {plan.pod.topology.name(die):<12}{te.sizes.name:<12}{heads:<10}{held:<16}"
        f"{weights:>10.2f}{cache:>11.2f}{activations:>13.2f}{xccl:>9.2f}"
    )


def _span(held: range) -> str:
    return f"{held.start}..{held.stop - 1}" if len(held) else "none"


def team(te: TEPlan) -> str:
    """What the dies of a TE are."""
    s, n = te.sizes, te.sizes.num_dies
    name = "" if s.role == "both" else f"{s.name}: "
    if s.experts == "away":
        return (
            f"{name}{counted(s.num_domains, 'DP domains')} of "
            f"{counted(n // s.num_domains, 'attention dies')}, "
            f"{counted(len(s.routed_dies))} of routed experts, "
            f"{s.num_shared_dies} of the shared one"
        )
    if n == 1:
        return f"{name}1 die holds attention and all experts"
    overlap = f"; {s.num_microbatches} microbatches overlap by {s.overlap}" if s.overlap else ""
    if s.tp > 1:
        mode = "TP" if s.tp_mode == "tp" else "SP-TP-SP"
        experts = f" + EP{n}" if s.experts == "among" else ""
        return (
            f"{name}DP{s.num_groups} x TP{s.tp}{experts}, {n} dies; the {s.tp} of a DP group share its heads "
            f"by {mode}, and each holds all latents{overlap}"
        )
    if s.o_proj_tp > 1:
        overlap = f"; {s.o_proj_tp} neighbours share an output projection{overlap}"
    if s.experts != "among":
        return f"{name}DP{n}, {n} dies, each a DP group of its own{overlap}"
    shared = f", {s.num_shared_dies} of them with the shared one for all" if s.num_shared_dies else ""
    return f"{name}DP{n} + EP{n}, {n} dies, each a DP group with its share of the experts{shared}{overlap}"
