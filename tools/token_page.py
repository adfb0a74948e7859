"""The tables of `docs/life-of-a-token.md`: the token's dies and stops, the bytes on the wire, prices.

`draw_docs` writes these tables between the marks of the page, and draws the same stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xdeepserve import LLM
from xdeepserve.comm.cells import members
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.comm.wire import Blocks
from xdeepserve.hw.fault_kinds import Moment
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.trace import Trace, TraceSpan

LAYER, ATTENTION_DIE = 1, 0  # whose token is followed: of the last step's first layer with experts

# Prices that hold for a model of any size: a parameter of the table, and where it is met.
PRICES = (
    (
        "small_kernels",
        "norms, residuals and other small kernels of a layer: half in MLAProlog, half in OProj",
    ),
    ("gate", "Gate"),
    (
        "kernel_overhead",
        "a kernel without its work: step 1 of A2E, A2E', E2A; each small kernel around a pass",
    ),
    (
        "core_meeting",
        "the cores of an operator meet: before it posts fields, and in dispatch with all counts",
    ),
    ("piece_overhead", "a core posts one field"),
    ("field_poll", "a core takes note of one field that has come"),
    ("poll_latency", "a look at a field: what a wait that is over at once takes"),
)


class Stop(NamedTuple):
    """A place on the token's way: its number in the text, and on a die the spans from `first` to `name`."""

    number: int
    node: int
    first: str
    name: str


def spans_of_the_token(trace: Trace, start_ns: int) -> list[TraceSpan]:
    """What happens to the rows of microbatch 0 of domain 0 in the layer that is drawn, in the last step."""
    lanes = {"AIC", "AIV", "XCCL", "A2E receive: steps", "E2A send: steps"}
    wanted = {"layer": LAYER, "microbatch": 0, "domain": 0}
    found = [
        span
        for span in trace.spans
        if span.lane in lanes
        and span.start_ns >= start_ns
        and {key: (span.args or {}).get(key) for key in wanted} == wanted
    ]
    others = {node for node, name in trace.node_names.items() if "attention die" in name} - {ATTENTION_DIE}
    return [span for span in found if span.node not in others and span.end_ns > span.start_ns]


def stops(trace: Trace, spans: Sequence[TraceSpan]) -> Iterator[tuple[Stop, TraceSpan, TraceSpan]]:
    """The numbered places of the text, each with its first and its last span."""
    trampoline = next(node for node, name in trace.node_names.items() if name.startswith("experts 0"))
    other = next(node for node, name in trace.node_names.items() if name.startswith("experts 1"))
    listed = (
        Stop(1, ATTENTION_DIE, "MLAProlog", "MLAProlog"),
        Stop(2, ATTENTION_DIE, "OProj", "OProj"),
        Stop(3, ATTENTION_DIE, "Gate", "Gate"),
        Stop(4, ATTENTION_DIE, "A2E 1", "A2E 1"),
        Stop(5, ATTENTION_DIE, "A2E 4", "A2E 4"),
        Stop(6, trampoline, "A2E 6-7", "A2E 6-7"),
        Stop(7, trampoline, "A2E' 1", "A2E' 4"),
        Stop(8, other, "A2E' 5", "A2E' 6-7"),
        Stop(9, other, "Experts", "Experts"),
        Stop(10, other, "E2A 1", "E2A 4"),
        Stop(11, trampoline, "E2A 5", "E2A 6-7"),
        Stop(12, trampoline, "E2A' 2", "E2A' 4"),
        Stop(13, ATTENTION_DIE, "E2A' 5", "E2A' 6-7"),
    )
    for stop in listed:
        here = {span.name: span for span in reversed(spans) if span.node == stop.node}
        yield stop, here[stop.first], here[stop.name]


def handed_over_ns(trace: Trace, start_ns: int) -> int:
    """When the token's field has been posted at its trampoline."""
    return next(
        last.end_ns
        for stop, _, last in stops(trace, spans_of_the_token(trace, start_ns))
        if stop.name == "A2E 4"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


class Leg(NamedTuple):
    """One of the four stages: who keeps rows and posts a field, who looks at it and pulls them."""

    stage: str
    writer: str
    reader: str
    blocks: Blocks
    num_fields: int  # for the tokens of a domain and microbatch


def legs(layout: A2ELayout) -> tuple[Leg, ...]:
    """The four, in the order in which a token takes them."""
    num_attention, experts = len(layout.sides.attention), layout.experts
    among = experts.dispatch.num_readers * experts.dispatch.num_writers
    return (
        Leg("A2E", "attention die", "its trampoline", layout.tokens, num_attention),
        Leg("A2E'", "every expert die (rows: trampolines)", "every expert die", experts.dispatch, among),
        Leg("E2A", "every expert die", "every expert die (rows: trampolines)", experts.combine, among),
        Leg("E2A'", "trampoline", "its attention dies", layout.answers, num_attention),
    )


def parts(row: np.dtype[np.void]) -> tuple[str, str]:
    """What a row or field has at which byte, and how long it is."""
    said, used = [], 0
    for name, (each, at) in members(row).items():
        kind = "BF16" if each.base == np.uint16 else str(each.base)
        said.append(f"{at}: `{name}`, {f'{each.shape[0]} ' if each.shape else ''}{kind}")
        used = at + each.itemsize
    return "; ".join(said), f"{used}, padded to {row.itemsize}" if used < row.itemsize else str(used)


def wire(layout: A2ELayout) -> str:
    """The bytes of each stage, as the layouts of the run have them."""
    cells = layout.cells()
    rows = [
        (
            leg.stage,
            leg.writer,
            leg.reader,
            *parts(cells[leg.blocks.region("rows")].dtype),
            f"{leg.num_fields}",
        )
        for leg in legs(layout)
    ]
    rows.append(
        ("each field", "as above", "as above", *parts(cells[layout.tokens.region("fields")].dtype), "")
    )
    head = (
        "stage",
        "keeps rows, pushes a field",
        "looks at its fields, pulls rows",
        "at byte: what",
        "bytes",
    )
    return table((*head, "fields"), rows)


def routings(llm: LLM) -> dict[int, list[int]]:
    """The experts of the row that the attention die hands over, by the moment: filled by a run."""
    pod, (te,) = llm.engine.plan.pod, llm.engine.plan.tes
    layout, die, found = te.wiring.a2e[0][0], te.dies[ATTENTION_DIE], {}

    def note() -> None:
        memory = pod.memories[die]
        region = memory.managed.regions[layout.tokens.region("blocks")]
        found[pod.clock.now] = memory.view(region, layout.token_dtype, 1)[0]["topk_idx"].tolist()

    for event in range(1, 100):  # more than there are
        pod.fabric.moments.at(Moment("A2E", 4, event, die), note)
    return found


def sizes(llm: LLM, experts: Sequence[int]) -> str:
    """The dies of the run, and which of them this token meets."""
    (te,), trace = llm.engine.plan.tes, llm.engine.plan.pod.trace
    config, sides = te.config, te.wiring.a2e[0][0].sides
    held = dict(te.all_memories)
    first, *others = (trace.node_names[die] for die in te.dies)
    rows = [(str(te.dies[0]), first, "KV cache of its requests", "begins and ends here")]
    rows.append((f"{te.dies[1]} to {te.dies[-1]}", ", ".join(others), "the same", ""))
    for rank, die in enumerate(sides.experts.dies):
        mine = held[die].experts
        says = [f"expert {expert}" for expert in experts if sides.experts.expert_rank[expert] == rank]
        if not len(mine):
            says = ["the shared expert"]
        if ATTENTION_DIE in sides.served(rank):
            says.insert(0, "its trampoline")
        served = ", ".join(f"attention die {each} of each domain" for each in sides.served(rank))
        holds = f"experts {mine.start} to {mine.stop - 1}" if len(mine) else "the shared expert"
        name = trace.node_names[die] + (f", trampoline of {served}" if served else "")
        rows.append((str(die), name, holds, ", ".join(says)))
    said = (
        f"`tiny`: rows of {config.hidden_size} numbers; {config.n_routed_experts} routed experts in "
        f"{config.n_group} groups of {config.n_routed_experts // config.n_group}; "
        f"a token takes {config.num_experts_per_tok} experts, out of at most {config.topk_group} groups."
    )
    return f"{said}\n\n{table(('die', 'called', 'holds', 'this token'), rows)}"


def times(trace: Trace, start_ns: int) -> str:
    """When the token is at each stop, and for how long, in microseconds from the first."""
    spans = spans_of_the_token(trace, start_ns)
    begin = min(span.start_ns for span in spans if span.node == ATTENTION_DIE)
    rows = [
        (
            str(stop.number),
            trace.node_names[stop.node],
            stop.name if stop.first == stop.name else f"{stop.first} .. {stop.name}",
            f"{(first.start_ns - begin) / 1000:.2f}",
            f"{(last.end_ns - first.start_ns) / 1000:.2f}",
        )
        for stop, first, last in stops(trace, spans)
    ]
    return table(("stop", "die", "in a trace", "begins at, us", "takes, us"), rows)


def prices() -> str:
    """The parameters that such small a model's times are made of."""
    rows = []
    for name, where in PRICES:
        param = getattr(Spec(), name)
        rows.append((f"{param.value * 1e6:g}", f"`{name}`", where, param.source.split(":")[0].split(",")[0]))
    return table(("us", "in `hw/spec.py`", "where", "fitted or assumed"), rows)


def page(text: str, tables: Mapping[str, str]) -> str:
    """A page with tables put between their marks."""
    for name, rows in tables.items():
        head, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- end of {name} -->\n")
        text = f"{head}{begin}\n{rows}\n\n{end}{tail}"
    return text
