"""Describes a planned deployment in text: dies, roles, memory, experts. Nothing is allocated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from xdeepserve.comm.distflow import backend_between
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Device, ExecutionConfig
from xdeepserve.engine.deploy.sizes import ExpertSizes, StepSizes, TEPlace
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.model.config import ModelConfig

MIB = 1 << 20
NAMES: dict[Device, str] = {"cm384": "CloudMatrix384 dies", "910b": "Ascend 910B"}  # others: in capitals
SHOWN_ALIKE = 16  # more dies in a row that differ in nothing but their experts take one line


class DieMemoryUse(NamedTuple):
    """Memory needed and available on a die, in bytes."""

    device: Device
    weights: int
    need: int  # weights and KV; without `timing` activations and XCCL's areas, too
    has: int

    @property
    def share(self) -> float:
        """Needed share of the die's memory; above 1 it does not fit."""
        return self.need / self.has


def describe(plan: PodPlan) -> str:
    """Describe a planned pod in text: model, roles, hardware, and a table of its dies with their memory."""
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
        *_vacancies(plan),
        f"context     {s.steps.max_model_len} tokens; {s.kv.num_blocks} KV blocks of "
        f"{s.kv.block_size} per DP group",
        *(
            f"{'step' if te is plan.tes[0] else '':<12}at most {te.sizes.steps.max_seqs} sequences and "
            f"{te.sizes.steps.max_tokens} token rows per DP group, {drafts(te.sizes.steps)}"
            f"{f' ({te.name})' if len(plan.tes) > 1 else ''}"
            for te in plan.tes
        ),
        *hosts(plan),
        *hardware(plan),
        *transfers(plan),
        "",
        f"{'die':>9}  {'place':<12}{'TE':<12}{'heads':<10}{'routed experts':<16}{'weights':>10}{'KV':>11}"
        f"{'activations':>13}{'XCCL':>9}  MiB",
    ]
    for te in plan.tes:
        for _, alike in itertools.groupby(te.all_memories, lambda each: _kind(plan, *each)):
            run = list(alike)
            if len(run) <= SHOWN_ALIKE:
                lines += [_line(plan, te, [each]) for each in run]
            else:
                lines.append(_line(plan, te, run))
    num_dies = sum(map(pod.topology.is_die, pod.memories.plans))
    here = f"memory      {pod.memories.nbytes / MIB:.1f} MiB of this computer for {counted(num_dies)}"
    dies = fullest(plan)
    if len(dies) == 1:
        return "\n".join([*lines, "", f"{here}; {_filled(plan, dies[0])}"])
    return "\n".join([*lines, "", here, *(f"{'':12}{_filled(plan, die)}" for die in dies)])


def _filled(plan: PodPlan, die: DieMemoryUse) -> str:
    """Say how much memory the fullest die of a kind uses, and whether it fits."""
    uses, but = "uses", ""
    if plan.timing is not None:
        uses, but = "would use", ", without activations and XCCL's areas: time only"
    if die.share > 1:
        but += "; it does not fit"
    return f"the fullest {_which(die)} {uses} {die.need / MIB:.2f} of its {die.has / MIB:.0f} MiB{but}"


def _which(die: DieMemoryUse) -> str:
    return "die" if die.device == "cm384" else f"die ({named(die.device)})"


def counted(number: int, what: str = "dies") -> str:
    """Format a count with a noun: "1 die", "2 dies", "3 attention dies"."""
    return f"{number} {what.replace('dies', 'die').replace('domains', 'domain') if number == 1 else what}"


def lack(plan: PodPlan) -> str:
    """Name the die most short of memory for weights and KV; "" if all of them fit.

    Timing-only runs would not notice otherwise.
    """
    die = max(fullest(plan), key=lambda each: each.share)
    if die.share <= 1:
        return ""
    need, has = die.need / 2**30, round(die.has / 2**30, 1)
    return f"weights and KV of the fullest {_which(die)} take {need:.1f} GiB, and it has {has:g}"


def memory_uses(plan: PodPlan) -> Iterator[DieMemoryUse]:
    """Yield the memory needed by each die of a pod, and the memory of its own hardware."""
    for te in plan.tes:
        devices = te.sizes.place.device_of_each
        for die, mem in te.all_memories:
            need = sum(_numbers(plan, die, mem))
            yield DieMemoryUse(devices[die], mem.weight_nbytes, need, plan.pod.hbm_nbytes(die))


def fullest(plan: PodPlan) -> list[DieMemoryUse]:
    """Find, for each kind of hardware, the die that needs the largest part of its memory."""
    found: dict[Device, DieMemoryUse] = {}
    for die in memory_uses(plan):
        found[die.device] = max(found.get(die.device, die), die, key=lambda each: each.share)
    return list(found.values())


def _replicas(plan: PodPlan) -> list[str]:
    """Describe copies of experts, or room for replicas of hot ones, and when these change."""
    rooms = [te for te in plan.tes if te.sizes.experts.has_slots]
    if not rooms:
        return []
    experts = rooms[0].sizes.experts
    if experts.copies_of:
        copies = sum(map(len, experts.copies_of)) // experts.experts_of[-1].stop
        if not copies:
            return []
        servers = "another server" if copies == 1 else f"{copies} other servers"
        return [f"copies      each routed expert is on {servers}, too, from the start"]
    when = "never filled"
    if experts.balance_interval_ns:
        when = f"balanced every {experts.balance_interval_ns / 1e9:g} s of virtual time"
    roles = {te.sizes.place.role: te for te in rooms}
    lines: list[str] = []
    for role, te in roles.items():
        which = f" ({role})" if len({each.sizes.place.role for each in plan.tes}) > 1 else ""
        lines += [
            f"{'' if lines else 'replicas':<12}{_room(te.sizes.experts)}, {when}{which}",
            f"{'':12}{_experts_by_die(plan.config, te.sizes.experts)}{which}",
        ]
    return lines


def _room(experts: ExpertSizes) -> str:
    """Describe the redundant slots of a TE."""
    each = set(experts.redundant_of)
    number = max(each) if len(each) == 1 else sum(experts.redundant_of)
    slots = f"{number} redundant slot{'s' if number > 1 else ''} in each layer"
    first = ", filled from the start" if experts.first_of else ""
    if len(each) == 1:
        return f"{slots} on each die with experts{first}"
    return f"{slots} on {counted(sum(map(bool, experts.redundant_of)))}{first}"


def _experts_by_die(config: ModelConfig, experts: ExpertSizes) -> str:
    """Count the experts on each die of a TE, for runs of dies with equally many of each kind."""
    is_on_each = experts.where == "among" and not experts.num_shared_dies and bool(config.n_shared_experts)
    kinds = [
        (len(held), redundant, int(is_on_each or experts.is_shared(holder)))
        for holder, (held, redundant) in enumerate(zip(experts.experts_of, experts.redundant_of, strict=True))
    ]
    names = ("routed", "redundant", "shared")
    runs = ((kind, len(list(alike))) for kind, alike in itertools.groupby(kinds))
    return "; ".join(
        f"{counted(dies)} with {' + '.join(f'{n} {name}' for n, name in zip(kind, names, strict=True) if n)}"
        for kind, dies in runs
    )


def _vacancies(plan: PodPlan) -> list[str]:
    """Name the dies reserved for expert servers that may join (EaaS)."""
    seats = [
        f"die {place.expert_dies[number]}"
        for place in (te.sizes.place for te in plan.tes if te.members.keeps)
        for number in place.vacant
    ]
    if not seats:
        return []
    return [
        f"vacancies   {' and '.join(seats)} {'is' if len(seats) == 1 else 'are'} kept for an expert server "
        "that may join"
    ]


def drafts(s: StepSizes) -> str:
    """Describe how many drafts a sequence has in a step, and which MTP layers make them."""
    if not s.mtp:
        return "no drafts"
    layers = "one MTP layer" if s.num_mtp_layers == 1 else f"{s.num_mtp_layers} MTP layers"
    again = ", used again" if s.num_mtp_layers < s.mtp else ""
    return f"{s.mtp} draft{'s' if s.mtp > 1 else ''} each, by {layers}{again}"


def hosts(plan: PodPlan) -> list[str]:
    """Describe how steps are planned and launched, in virtual time, with a line for each role."""
    execution = plan.deployment.execution
    if execution is None:
        return [
            "host        costs nothing: the deployment has no section [execution], as presets with "
            "prefill apart have"
        ]
    roles = dict.fromkeys(te.sizes.place.role for te in plan.tes)
    said = [host(execution.for_role(role)) + (f" ({role})" if len(roles) > 1 else "") for role in roles]
    return [f"{'' if number else 'host':<12}{text}" for number, text in enumerate(said)]


def named(device: Device) -> str:
    """Name a kind of hardware in text, such as "L40S"."""
    return NAMES.get(device, device.upper())


def hardware(plan: PodPlan) -> list[str]:
    """Describe the hardware of each role, where there are several roles or other dies than a
    CloudMatrix384's."""
    on: dict[str, list[str]] = {}
    for role, place in {te.sizes.place.role: te.sizes.place for te in plan.tes}.items():
        on.setdefault(_on(place), []).append("prefill with decode" if role == "both" else role)
    if all(te.sizes.place.role == "both" for te in plan.tes):
        return [f"hardware    {text}" for text in on if plan.tes[0].sizes.place.is_foreign]
    return ["hardware    " + "; ".join(f"{' and '.join(roles)} {text}" for text, roles in on.items())]


def _on(place: TEPlace) -> str:
    """Describe the hardware of a TE: "on L40S", or "with attention on H20 and experts on L40S"."""
    if place.hardware != "cm384":
        return f"on {named(place.hardware)}, a server for each TE"
    attention, experts = place.devices
    if attention == experts:
        return f"on {named(attention)}"
    return f"with attention on {named(attention)} and experts on {named(experts)}"


def transfers(plan: PodPlan) -> list[str]:
    """Describe how KV goes from prefill to decode, where they are apart."""
    if all(te.sizes.place.role == "both" for te in plan.tes):
        return []
    prefills, decodes = (
        [te for te in plan.tes if te.sizes.place.role == role] for role in ("prefill", "decode")
    )
    asked = plan.deployment.fabric
    found = {
        backend_between(plan.pod, prefill.dies, decode.dies, asked).name
        for prefill in prefills
        for decode in decodes
    }
    why = ", which both sides are on" if asked == "auto" else ""
    return [
        f"KV          from prefill to decode by {plan.deployment.transfer}, over "
        f"{' and '.join(sorted(found))}{why}"
    ]


def host(execution: ExecutionConfig) -> str:
    """Describe how the host launches and plans the steps of a role's TEs."""
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
    """Return the bytes of weights, KV cache, activations and XCCL's areas on a die.

    The last two are 0 in timing-only runs, since they are not planned there.
    """
    weights, cache, activations = mem.weight_nbytes, mem.cache_nbytes, mem.activation_nbytes
    if plan.timing is not None:
        return weights, cache, 0, 0
    return weights, cache, activations, plan.pod.memories.plans[die].nbytes - weights - cache - activations


def _kind(plan: PodPlan, die: int, mem: DieMemory | ExpertMemory) -> tuple[object, ...]:
    """Return the key of a table row: kinds of experts held, and bytes; equal dies share a row."""
    return bool(len(mem.experts)), mem.is_shared, _numbers(plan, die, mem)


def _line(plan: PodPlan, te: TEPlan, run: list[tuple[int, DieMemory | ExpertMemory]]) -> str:
    """Format a line of the table: one die, or a row of dies that differ in their experts alone."""
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
        f"{number:>9}  {plan.pod.topology.name(die):<12}{te.name:<12}{heads:<10}{held:<16}"
        f"{weights:>10.2f}{cache:>11.2f}{activations:>13.2f}{xccl:>9.2f}"
    )


def _span(held: range) -> str:
    return f"{held.start}..{held.stop - 1}" if len(held) else "none"


def team(te: TEPlan) -> str:
    """Describe the dies of a TE and how they share the work."""
    place = te.sizes.place
    name = "" if place.role == "both" else f"{te.name}: "
    if place.num_expert_dies:
        attention = (
            f"{name}{counted(place.num_domains, 'DP domains')} of "
            f"{counted(place.dies_per_domain, 'attention dies')}"
        )
        if not te.members.keeps:
            return f"{attention}, with the same expert servers"
        return (
            f"{attention}, "
            f"{counted(place.num_routed_dies - place.num_vacant)} of routed experts, "
            f"{place.num_shared_dies} of the shared one"
        )
    if place.num_dies == 1:
        return f"{name}1 die holds attention and all experts"
    return f"{name}{_division(te)}"


def _division(te: TEPlan) -> str:
    """Describe how dies that hold attention and experts share the work."""
    n, groups, experts = len(te.dies), te.sizes.groups, te.sizes.experts
    overlap = _overlap(te)
    if groups.tp > 1:
        mode = "TP" if groups.tp_mode == "tp" else "SP-TP-SP"
        parallel = f" + EP{n}" if experts.where == "among" else ""
        return (
            f"DP{groups.num_groups} x TP{groups.tp}{parallel}, {n} dies; the {groups.tp} of a DP group share "
            f"its heads by {mode}, and each holds all latents{overlap}"
        )
    if groups.o_proj_tp > 1:
        overlap = f"; {groups.o_proj_tp} neighbours share an output projection{overlap}"
    if experts.where != "among":
        return f"DP{n}, {n} dies, each a DP group of its own{overlap}"
    copies = experts.num_shared_dies
    shared = f", {copies} of them with the shared one for all" if copies else ""
    return f"DP{n} + EP{n}, {n} dies, each a DP group with its share of the experts{shared}{overlap}"


def _overlap(te: TEPlan) -> str:
    walk = te.sizes.walk
    where = " in steps that are predicted to end sooner so" if walk.is_dynamic else ""
    return f"; {walk.num_microbatches} microbatches overlap by {walk.overlap}{where}" if walk.overlap else ""
