"""Plans for people: tables, the reasons of each bound, and the effect of changed assumptions."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from xdeepserve.hw.accelerators import ACCELERATORS, Accelerator
from xdeepserve.planner.devices import Pairing, cheaper, paired, slower
from xdeepserve.planner.layouts import LayoutPlan, batch_of, max_requests, predict, roles_of, sized
from xdeepserve.planner.moe_shape import BF16, MoEShape
from xdeepserve.planner.performance import GAP_NS, Times, util
from xdeepserve.planner.pod_search import least_dies, worth
from xdeepserve.planner.search import Bound
from xdeepserve.prices.curve import Curve
from xdeepserve.prices.profile import HERE, ROWS, USABLE, Demand, PodProfile

EXTRAPOLATED = "extrapolated"
WORDS = (
    "T_iter: a decode iteration. Of a microbatch in a layer: T_a, attention for its b_a rows; T_e,",
    "experts for its b_e token copies; T_c, its way to them, or back; T_f, the slower of T_a and T_e;",
    "(1) to (8): equations of MegaScale-Infer",
)
BOUNDS = {
    "SLO": "one more request would break the SLO (MegaScale-Infer, equation 7)",
    "memory": "one more request would not fit in memory (MegaScale-Infer, equation 8)",
    "range": "more requests would be beyond what was measured",
}
COST_UNIT = "a price of 1 is that of an L20 (MegaScale-Infer, Table 3)"
DECODE_ONLY, NOT_HERE = "decode only: it needs", "which no device of this plan does"
WIDTH = 108  # of lines that are wrapped
PER_COST = "tok/s/cost: for a price of 1"


def lines_of(attention: Curve, experts: Curve) -> list[str]:
    """Format k1 to k4 of a layer, by attention rows and by experts' token copies, and the fit of the
    lines."""
    (k1, k2), (k3, k4) = attention.line(), experts.line()
    return [
        f"fitted: T_a = {k1 / 1e3:.3g} us b_a + {k2 / 1e3:.0f} us (within {100 * attention.misfit():.0f} %), "
        f"T_e = {k3 / 1e3:.3g} us b_e + {k4 / 1e3:.0f} us (within {100 * experts.misfit():.0f} %)",
        "plans are made with the points that were measured, not with these lines",
    ]


def conditions(times: Times, m: int, layers: int) -> list[str]:
    """Format conditions 1 to 4 with their numbers."""
    low, high = times.bounds(m, layers)
    is_hidden = times.hides_communication(m)
    slower = "attention sets" if times.f == times.a else "the experts set"
    if times.busy > max(times.a, times.e):
        slower = "the experts, busy with other domains or what they exchange, set"
    return [
        f"(1) T_a = {times.a / 1e3:.0f} us, T_e = {times.e / 1e3:.0f} us, T_f = {times.f / 1e3:.0f} us: "
        f"{slower} the pace",
        f"(2) T_c = {times.c / 1e3:.0f} us {'<' if times.c < times.f else 'NOT <'} T_f",
        f"(3) m >= 2 (1 + T_c / T_f) = {2 * (1 + times.c / times.f):.2f}: m = {m} "
        + ("hides all communication" if is_hidden else "leaves attention idle at times"),
        f"(4) {low / 1e6:.1f} ms <= T_iter of a microbatch <= {high / 1e6:.1f} ms"
        if is_hidden
        else f"(4) does not hold without (3): a layer takes {max(m * times.f, times.cycle) / 1e3:.0f} us, "
        f"m T_f = {m * times.f / 1e3:.0f} us or T_a + T_e + 2 T_c = {times.cycle / 1e3:.0f} us",
    ]


# ---- pods ------------------------------------------------------------------------------------------------


def shown(plans: Sequence[LayoutPlan], count: int) -> list[LayoutPlan]:
    """Choose plans to show: the best of each kind and pair of devices, then the best of all, in their
    order."""
    firsts: dict[tuple[object, ...], int] = {}
    for i, plan in enumerate(plans):
        firsts.setdefault((plan.layout.kind, plan.layout.devices), i)
    chosen = [*firsts.values(), *(i for i in range(len(plans)) if i not in firsts.values())]
    return [plans[i] for i in sorted(chosen[:count])]


def pod_table(plans: Sequence[LayoutPlan], counts_price: bool = False) -> list[str]:
    """Format a line for each plan; the last figure is per chip of two dies, or for a price of 1."""
    per = "tok/s/cost" if counts_price else "tok/s/chip"
    width = max(len(plan.layout.title()) for plan in plans)
    lines = [
        f"{'deployment':{width}} {'dies':>4} {'batch':>6} {'T_iter':>9} {'TPOT':>9} {'tok/s':>10} "
        f"{per:>11}  bound"
    ]
    for plan in plans:
        layout = plan.layout
        share = worth(plan, True) if counts_price else 2 * plan.throughput / layout.total
        lines.append(
            f"{layout.title():{width}} {layout.total:4} {plan.requests * layout.microbatches:6} "
            f"{plan.iteration_ns / 1e6:6.2f} ms {plan.tpot_ns / 1e6:6.2f} ms {plan.throughput:10,.0f} "
            f"{share:11,.0f}"
            f"  {plan.bound}" + (f"  {EXTRAPOLATED}: {', '.join(plan.notes)}" if plan.notes else "")
        )
    lines += [
        "deployment: domains x attention dies + routed + shared expert dies, m microbatches; before a colon",
        "TEs that prefill x dies of each. batch: requests of a DP group. "
        + (PER_COST if counts_price else "tok/s/chip: of two dies"),
        f"TPOT: T_iter and the scheduler's gap of {GAP_NS / 1e6:g} ms; tok/s: by TPOT, as in sweep",
        *stops(plan.bound for plan in plans),
    ]
    if counts_price:
        named = {device for plan in plans for device in plan.layout.devices}
        lines += prices(device for name, device in ACCELERATORS.items() if name in named)
    if any(not plan.layout.routed for plan in plans):
        lines.append("m is 1 where it is not said: pipeline.microbatches=2 is not planned; sweep times it")
    return lines


def stops(bounds: Iterable[Bound]) -> list[str]:
    """Explain the words in the column of the next bound."""
    return [f"bound {bound}: {BOUNDS[bound]}" for bound in dict.fromkeys(bounds)]


def prices(devices: Iterable[Accelerator]) -> list[str]:
    """Format the unit of cost and each device's price, and which prices are assumed."""
    some = list(devices)
    names = [device.name for device in some if device.price.source.startswith("assumed")]
    lines = [f"cost: {COST_UNIT}: {', '.join(f'{each.name} {each.price.value:g}' for each in some)}"]
    return lines + (
        [f"a price of 1 is assumed for {', '.join(names)}: no price is published"] if names else []
    )


def pod_totals(profile: PodProfile, plan: LayoutPlan, counts_price: bool) -> list[str]:
    """Format a plan's totals: devices, tokens per second and GiB of each, and the prefill that it needs."""
    layout, roles = plan.layout, roles_of(profile, plan.layout)
    kv = plan.requests * layout.microbatches * profile.kv_nbytes()
    held = [f"{each.dies} {each.device} for {each.role}" for each in roles]
    chips = f" ({layout.total / 2:g} chips of two dies)" if layout.devices == HERE else ""
    cost = f", {worth(plan, True):,.0f} for a price of 1; all cost {layout.price:g}" if counts_price else ""
    memory = [
        f"{each.role} {gib(each.weights + (0 if i else kv))} of {gib(ACCELERATORS[each.device].hbm_nbytes)}"
        for i, each in enumerate(roles)
    ]
    return wrapped(
        layout.title(),
        f"{_devices(layout.total)}{chips}: {', '.join(held)}",
        f"{plan.throughput:,.0f} tokens/s, {plan.throughput / layout.total:,.0f} a device{cost}",
        f"GiB of a device for weights and KV: {', '.join(memory)}; a plan leaves {100 * (1 - USABLE):.0f} % "
        "for activations",
        _pod_prefill(profile, plan),
    )


def wrapped(*lines: str) -> list[str]:
    """Wrap long lines for a terminal."""
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def gib(nbytes: float) -> str:
    """Write bytes in GiB, with a digit after the point."""
    return f"{nbytes / 2**30:.1f}"


def about(number: float) -> str:
    """Write a rate with three digits or more, such as 584,523 or 5.84."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def prefill_need(tokens_per_s: float, demand: Demand) -> tuple[float, str]:
    """Compute the prompt tokens per second that accompany `tokens_per_s` generated ones, and describe the
    calculation."""
    requests = tokens_per_s / demand.output
    need = requests * demand.prompt
    each = f"{demand.prompt} prompt tokens"
    return need, f"{about(requests)} requests/s x {each} = {about(need)} prompt tokens/s of prefill"


def _pod_prefill(profile: PodProfile, plan: LayoutPlan) -> str:
    """Explain whether the plan counts decode alone, and how much prefill its requests need."""
    layout = plan.layout
    need, said = prefill_need(plan.throughput, profile.demand)
    if layout.prefill[0]:
        tes, dies = layout.prefill
        part = tes * profile.prefill_rate(dies) / need
        whole = f"is {100 * part:.3g} %: {about(part * plan.throughput)} tokens/s in all"
        keeps = "is enough" if part >= 1 else whole
        return (
            f"tok/s counts what decodes, which needs {said}; prefill in this plan does {about(part * need)} "
            f"(predicted, not calibrated), which {keeps}"
        )
    if layout.devices != HERE:
        return f"{DECODE_ONLY} {said}, {NOT_HERE}"
    dies = least_dies(profile)
    rate = profile.prefill_rate(dies)
    return (
        f"{DECODE_ONLY} {said}, {NOT_HERE}; about {dies * math.ceil(need / rate):,} dies more would "
        f"(predicted, not calibrated: {about(rate / dies)} prompt tokens/s a die, in TEs of {dies})"
    )


def pod_reasons(profile: PodProfile, plan: LayoutPlan, slo_ns: float) -> list[str]:
    """Format why the bounds hold for a plan."""
    layout = plan.layout
    room = max_requests(profile, layout)
    lines = [] if plan.times is None else conditions(plan.times, layout.microbatches, profile.num_moe)
    dies, top_k = layout.routed or layout.dies, profile.config.num_experts_per_tok
    near, far = layout.devices
    attention = Curve.of(ROWS, lambda rows: profile.attention(dies, rows, near))
    copies = tuple(rows * top_k for rows in ROWS)
    experts = Curve(copies, tuple(profile.other(dies, "Experts", rows, far) for rows in ROWS))
    return [
        *WORDS,
        *lines_of(attention, experts),
        *lines,
        f"(7) T_iter = {plan.iteration_ns / 1e6:.2f} ms <= {slo_ns / 1e6:g} ms",
        f"(8) {plan.requests} requests in a microbatch, of {room} that a die has room for",
        f"next bound: {plan.bound}: {BOUNDS[plan.bound]}",
    ]


def pod_sensitivity(profile: PodProfile, plan: LayoutPlan, slo_ns: float, extrapolates: bool) -> list[str]:
    """Format the same layout's results under other assumptions."""
    demand = profile.demand
    longer = PodProfile(profile.checkpoint, Demand(2 * demand.prompt, demand.output, demand.longest))
    cases = {
        "SLO 20 % shorter": (profile, 0.8 * slo_ns, 1.0),
        "SLO 20 % longer": (profile, 1.2 * slo_ns, 1.0),
        "half the memory": (profile, slo_ns, 0.5),
    }
    if longer.demand.max_len <= profile.config.max_position_embeddings:
        cases["prompts twice as long"] = (longer, slo_ns, 1.0)
    lines = []
    for name, (times, slo, memory) in cases.items():
        other = sized(times, plan.layout, slo, extrapolates, memory)
        if other is None:
            batch = batch_of(times, plan.layout, slo, extrapolates, memory)
            lines.append(f"{name:24} no plan: {batch.refusal(predict(times, plan.layout, 1))}")
            continue
        lines.append(f"{name:24} {_change(other.throughput / plan.throughput)}, next bound: {other.bound}")
    return lines


def toml(settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Write settings as a TOML file for `--deployment`, under comments."""
    tables = {key: value for key, value in settings.items() if isinstance(value, dict | list)}
    lines = [f"# {comment}" for comment in comments]
    lines += [f"{key} = {_value(value)}" for key, value in settings.items() if key not in tables]
    for key, value in tables.items():
        head = f"[{key}]" if isinstance(value, dict) else f"[[{key}]]"
        for table in [value] if isinstance(value, dict) else value:
            lines += ["", head, *(f"{k} = {_value(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """Write a setting's value. TOML writes texts and truth values as JSON does."""
    return msgspec.json.encode(value).decode()


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+z.0f} % tok/s"


# ---- devices -------------------------------------------------------------------------------------------


def device_table(found: Sequence[Pairing]) -> list[str]:
    """Format a line for each pair of devices."""
    lines = [
        f"{'attention':14} {'experts':12} {'m':>2} {'b_a':>5} {'b_e':>6} {'T_iter':>9} {'tok/s':>9} "
        f"{'tok/s/cost':>11}  next bound"
    ]
    for a, e, plan in found:
        attention, experts = f"{plan.n_a} x {plan.attention.tp} {a.name}", f"E x {plan.experts.tp} {e.name}"
        lines.append(
            f"{attention:14} {experts:12} {plan.m:2} {plan.b_a:5} {plan.b_e:6.0f} "
            f"{plan.total_ns / 1e6:6.1f} ms {plan.throughput:9,.0f} {plan.tpuc:11.0f}  {plan.bound}"
            f"  {EXTRAPOLATED}"
        )
    devices = {each.name: each for pair in found for each in pair[:2]}
    return [
        *lines,
        "attention: nodes x devices of each; experts: E nodes, an expert on each, x devices of each;",
        "m: microbatches; b_a, b_e: rows of one at a node with attention, and with an expert;",
        PER_COST,
        *stops(pair.plan.bound for pair in found),
        *prices(devices.values()),
    ]


def device_totals(shape: MoEShape, best: Pairing, demand: Demand) -> list[str]:
    """Format a pair's totals: devices, tokens per second and GiB of each, and the prefill that it needs."""
    a, e, plan = best
    counts = plan.n_a * plan.attention.tp, shape.experts * plan.experts.tp
    kv = plan.m * plan.b_a * demand.context * shape.kv_nbytes() * shape.layers
    near = shape.attention_nbytes() / plan.attention.tp + kv / shape.kv_cut(plan.attention.tp)
    far = shape.expert_nbytes() / plan.experts.tp
    return wrapped(
        f"{_devices(sum(counts))}: {counts[0]} {a.name} for attention, {counts[1]} {e.name} for experts",
        f"{plan.throughput:,.0f} tokens/s, {plan.throughput / sum(counts):,.0f} a device, "
        f"{plan.tpuc:,.0f} for a price of 1; all cost {plan.price:g}",
        f"GiB of a device for weights and KV: attention {gib(near)} of {gib(a.hbm_nbytes)}, "
        f"experts {gib(far)} of {gib(e.hbm_nbytes)}",
        f"{DECODE_ONLY} {prefill_need(plan.throughput, demand)[1]}, {NOT_HERE}",
    )


def device_reasons(shape: MoEShape, best: Pairing, context: float, slo_ns: float) -> list[str]:
    """Format why the bounds hold for a pair, and the fitted lines."""
    plan = best.plan
    (k1, _), (k3, _) = plan.attention.time.line(), plan.experts.time.line()
    balanced = k1 * shape.experts / (k3 * shape.top_k)
    token = BF16 * shape.hidden
    sent = plan.b_a * shape.top_k * token / plan.attention.tp
    received = plan.b_e * token / plan.experts.tp
    out = util(plan.attention.message, best.attention.network.value, sent)
    into = util(plan.experts.message, best.experts.network.value, received)
    return [
        *WORDS,
        *lines_of(plan.attention.time, plan.experts.time),
        f"k1 E / (k3 K) = {balanced:.1f} attention nodes balance {shape.experts} expert nodes; "
        f"{plan.n_a} were best",
        *conditions(plan.times, plan.m, shape.layers),
        f"(6) {sent / 1e6:.2g} MB sent at Util = {out:.2f}, {received / 1e6:.2g} MB received at {into:.2f}",
        f"(7) T_total = {plan.total_ns / 1e6:.1f} ms <= {slo_ns / 1e6:g} ms",
        f"(8) {plan.m * plan.b_a * context:,.0f} positions of KV on a node, which has room for "
        f"{plan.attention.max_positions:,.0f}",
        f"next bound: {plan.bound}: {BOUNDS[plan.bound]}",
    ]


def device_sensitivity(shape: MoEShape, best: Pairing, context: float, slo_ns: float) -> list[str]:
    """Format a pair's results under other assumptions."""
    a, e = best.attention, best.experts
    cases = {
        "SLO 20 % shorter": (a, e, context, 0.8 * slo_ns),
        "SLO 20 % longer": (a, e, context, 1.2 * slo_ns),
        "contexts twice as long": (a, e, 2 * context, slo_ns),
        "experts' price + 20 %": (a, cheaper(e, 1.2), context, slo_ns),
        "half the network": (slower(a, 0.5), slower(e, 0.5), context, slo_ns),
    }
    lines = []
    for name, (attention, experts, positions, slo) in cases.items():
        other, least_ns = paired(shape, attention, experts, positions, slo)
        if other is None:
            why = f"a request on each attention node takes {least_ns / 1e6:.2f} ms"
            lines.append(f"{name:24} no plan: {'it does not fit' if least_ns == math.inf else why}")
            continue
        lines.append(
            f"{name:24} {_change(other.tpuc / best.plan.tpuc)} per cost, {other.n_a} x {other.attention.tp} "
            f"and E x {other.experts.tp}, m = {other.m}, next bound: {other.bound}"
        )
    return lines
