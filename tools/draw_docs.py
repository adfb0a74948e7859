"""Draw the pictures of `docs/pictures/`, and write the tables of `docs/life-of-a-token.md`, from real runs.

    python tools/draw_docs.py [DIRECTORY]

Times are virtual: the same run, the same bytes, on any computer. tests/test_docs.py makes all of it again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from token_page import (
    ATTENTION_DIE,
    handed_over_ns,
    page,
    prices,
    routings,
    sizes,
    spans_of_the_token,
    stops,
    times,
    wire,
)
from xdeepserve import LLM, SamplingParams
from xdeepserve.comm.trampoline.layout import Sides
from xdeepserve.hw.gantt import Bar, gantt, steps_of
from xdeepserve.hw.trace import Trace
from xdeepserve.llm import build_engine

DOCS = Path(__file__).parent.parent / "docs"
PAGE = "life-of-a-token.md"  # has lines `<!-- NAME -->` and `<!-- end of NAME -->`, between which tables go
PROMPTS = ["Once upon a time"] * 8
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
MICROBATCHES = ("#2f6fb0", "#e08a1e", "#4c9a4c", "#a75fb0")
GREY, INK, PALE, PAPER = "#c9ced6", "#20242b", "#e9ecf1", "#ffffff"
WIDTH, MARGIN, ROW = 1000, 210, 17  # of a picture, of the names at its left, of a row, in pixels
FONT = 'font-family="Helvetica,Arial,sans-serif"'
NUDGED = {3: -10, 6: 10, 8: -9, 9: 10, 13: -10}  # numbers that would touch others, in pixels


class Svg:
    """Lines of an SVG file. All coordinates are whole pixels."""

    def __init__(self, height: int, title: str) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" {FONT} font-size="11" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" '
            'orient="auto"><path d="M0,0L6,3L0,6z"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, fill: str, title: str = "") -> None:
        said = f"<title>{escape(title)}</title>" if title else ""
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{max(width, 1)}" height="{height}" fill="{fill}">{said}</rect>'
        )

    def text(self, x: int, y: int, text: str, anchor: str = "start", more: str = "") -> None:
        self.lines.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{escape(text)}</text>')

    def arrow(self, x1: int, y1: int, x2: int, y2: int) -> None:
        self.lines.append(
            f'<path d="M{x1},{y1}L{x2},{y2}" stroke="{INK}" fill="none" marker-end="url(#head)"/>'
        )

    def number(self, x: int, y: int, number: int) -> None:
        """A stop of the text, in a circle."""
        self.lines.append(f'<circle cx="{x}" cy="{y}" r="8" fill="{INK}"/>')
        self.text(x, y + 4, str(number), "middle", f' fill="{PAPER}" font-weight="bold"')

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


class Scale:
    """From virtual nanoseconds to pixels."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self.start_ns, self.length_ns = start_ns, end_ns - start_ns

    def x(self, at_ns: int) -> int:
        return MARGIN + (at_ns - self.start_ns) * (WIDTH - MARGIN - 20) // self.length_ns

    def axis(self, svg: Svg, y: int, top: int) -> None:
        """Time, from the start on, with a line every so many microseconds."""
        every = next(each for each in (10, 20, 50, 100, 200, 500, 1000) if self.length_ns < 12_000 * each)
        for us in range(0, self.length_ns // 1000 + 1, every):
            x = self.x(self.start_ns + 1000 * us)
            svg.box(x, top, 1, y - top, PALE)
            svg.text(x, y + 12, f"{us} us" if us else "0", "middle", ' fill="#667"')


def shade(bar: Bar) -> str:
    if bar.is_wait:
        return PALE
    return GREY if bar.microbatch is None else MICROBATCHES[bar.microbatch]


def step(trace: Trace, start_ns: int, end_ns: int) -> Svg:
    """What every die does in a decode step."""
    rows, scale = gantt(trace, start_ns, end_ns), Scale(start_ns, end_ns)
    height = 66 + ROW * len(rows) + 5 * len({row.node for row in rows})
    svg = Svg(height, "A decode step of moe-attention")
    svg.text(
        8,
        18,
        "One decode step: who works on which microbatch, and when (virtual time)",
        more=' font-size="14"',
    )
    for number, (colour, name) in enumerate(
        [(MICROBATCHES[0], "microbatch 0"), (MICROBATCHES[1], "microbatch 1"), (PALE, "waits for a peer")]
    ):
        svg.box(560 + 140 * number, 9, 12, 10, colour)
        svg.text(576 + 140 * number, 18, name)
    y, node = 30, None
    scale.axis(svg, height - 18, 30)
    for row in rows:
        if row.node != node:
            y, node = y + 5, row.node
            svg.text(8, y + 12, trace.node_names[row.node])
        svg.text(MARGIN - 6, y + 12, row.label, "end", ' fill="#667"')
        for left, right, colour in joined(row.bars, scale, start_ns, end_ns):
            svg.box(left, y + 2, right - left, ROW - 4, colour)
        y += ROW
    return svg


def joined(bars: Sequence[Bar], scale: Scale, start_ns: int, end_ns: int) -> list[tuple[int, int, str]]:
    """Left, right and colour of a row's bars, waiting first; bars of one colour that touch are one."""
    found: list[tuple[int, int, str]] = []
    for bar in sorted(bars, key=lambda bar: not bar.is_wait):
        left, right = scale.x(max(bar.start_ns, start_ns)), scale.x(min(bar.end_ns, end_ns))
        if found and found[-1][2] == shade(bar) and found[-1][0] <= left <= found[-1][1] + 1:
            left, right = found[-1][0], max(right, found.pop()[1])
        found.append((left, right, shade(bar)))
    return found


def token(trace: Trace, start_ns: int, served: Mapping[int, str]) -> Svg:
    """The way of a microbatch's rows through one layer: a line for each die, an arrow for each crossing.

    served: by expert die, whose trampoline it is.
    """
    spans = spans_of_the_token(trace, start_ns)
    nodes = sorted({span.node for span in spans}, key=lambda node: trace.node_orders[node])
    first = min(span.start_ns for span in spans if span.node == ATTENTION_DIE)
    last = max(span.end_ns for span in spans)
    scale, gap = Scale(first, last), 46
    height = 60 + gap * len(nodes)
    svg = Svg(height, "The way of a token through a layer of moe-attention")
    svg.text(
        8,
        18,
        "One token through one layer with experts (virtual time; numbers: the stops of the text)",
        more=' font-size="14"',
    )
    scale.axis(svg, height - 18, 30)
    middle = {node: 56 + gap * place for place, node in enumerate(nodes)}
    for node in nodes:
        svg.text(8, middle[node] + 4, trace.node_names[node])
        if node in served:
            svg.text(8, middle[node] + 17, served[node], more=' font-size="10" fill="#667"')
        svg.box(MARGIN, middle[node], WIDTH - MARGIN - 20, 1, PALE)
    for span in spans:
        bar = Bar(span.start_ns, span.end_ns, span.name, 0, bool((span.args or {}).get("waits")))
        left, right = scale.x(max(bar.start_ns, first)), scale.x(max(bar.end_ns, first))
        if right > MARGIN:
            said = f"{bar.name}: {(bar.end_ns - bar.start_ns) / 1000:.2f} us"
            svg.box(left, middle[span.node] - 6, right - left, 12, shade(bar), said)
    for flow in sorted(set(trace.flows)):
        crossing = flow.node in middle and flow.to_node in middle and flow.node != flow.to_node
        if crossing and any(
            span.start_ns <= flow.at_ns < span.end_ns for span in spans if span.node == flow.node
        ):
            down = 7 if middle[flow.to_node] > middle[flow.node] else -7
            to_x = min(scale.x(flow.to_ns), WIDTH - 20)
            svg.arrow(scale.x(flow.at_ns), middle[flow.node] + down, to_x, middle[flow.to_node] - down)
    for stop, _, span in stops(trace, spans):
        x = scale.x((span.start_ns + span.end_ns) // 2) + NUDGED.get(stop.number, 0)
        svg.number(x, middle[stop.node] - 14, stop.number)
    return svg


def pod(model: str, deployment: str) -> Svg:
    """Which dies a deployment has, and what each holds."""
    plan = build_engine(model, deployment, "int8", overrides=["mtp=1"]).plan
    groups: list[tuple[str, list[tuple[int, str]], str]] = []
    for te in plan.tes:
        held = dict(te.all_memories)
        attention = [(die, "KV, attention") for die in te.dies]
        experts = [
            (
                die,
                f"experts {mem.experts.start}..{mem.experts.stop - 1}"
                if len(mem.experts)
                else "shared expert",
            )
            for die, mem in held.items()
            if die not in te.dies
        ]
        name = te.sizes.place.name
        if not experts:
            text = [
                (die, f"experts {mem.experts.start}..{mem.experts.stop - 1}") for die, mem in held.items()
            ]
            groups.append((f"{name}: attention and experts", text, MICROBATCHES[2]))
        else:
            groups.append((f"{name}: attention", attention, MICROBATCHES[0]))
            groups.append((f"{name}: experts", experts, MICROBATCHES[1]))
    svg = Svg(172, f"The dies of {deployment}")
    svg.text(
        8,
        18,
        f"The pod of `xdeepserve demo`: {deployment}, {sum(len(g[1]) for g in groups)} virtual dies",
        more=' font-size="14"',
    )
    x, ends = 12, []
    for name, dies, colour in groups:
        width = 86 * ((len(dies) + 1) // 2) + 8
        svg.text(x, 44, name, more=' font-weight="bold"')
        svg.box(x, 50, width, 92, PALE)
        for place, (die, text) in enumerate(dies):
            left, top = x + 6 + 86 * (place // 2), 56 + 42 * (place % 2)
            svg.box(left, top, 82, 38, colour)
            svg.text(left + 41, top + 16, f"die {die}", "middle", f' fill="{PAPER}"')
            svg.text(left + 41, top + 30, text, "middle", f' fill="{PAPER}" font-size="10"')
        ends.append((x, x + width))
        x += width + 90
    for place, (says, back) in enumerate(
        (("KV cache", "DistFlow"), ("A2E: tokens", "E2A: answers"))[: len(ends) - 1]
    ):
        left, right = ends[place][1] + 4, ends[place + 1][0] - 4
        svg.arrow(left, 84, right, 84)
        svg.text((left + right) // 2, 78, says, "middle")
        svg.text((left + right) // 2, 112, back, "middle")
        if place:
            svg.arrow(right, 98, left, 98)
    svg.text(
        12,
        162,
        "prompts in at the left, tokens out of the attention dies: the same bits as one die, and as NumPy",
    )
    return svg


def served(sides: Sides, trace: Trace) -> dict[int, str]:
    """By expert die, whose trampoline it is, in a line."""
    found = {}
    for rank, die in enumerate(sides.experts.dies):
        names = [trace.node_names[sides.attention[each]].split(" / ")[-1] for each in sides.served(rank)]
        if names:
            found[die] = f"trampoline of {', '.join(names)}"
    return found


def main() -> None:
    """Write pictures and page into a directory, or where they belong."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    pictures = directory / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    with LLM("tiny", "moe-attention", trace=True) as llm:
        routed = routings(llm)
        llm.generate(PROMPTS, PARAMS)
        trace, (te,) = llm.engine.plan.pod.trace, llm.engine.plan.tes
        layout = te.wiring.a2e[0][0]
        start_ns, end_ns = steps_of(trace)[-1]
        experts = routed[handed_over_ns(trace, start_ns)]
        tables = {
            "sizes": sizes(llm, experts),
            "wire": wire(layout),
            "times": times(trace, start_ns),
            "prices": prices(),
        }
    drawn = {
        "pod": pod("tiny", "transformerless"),
        "step": step(trace, start_ns, end_ns),
        "token": token(trace, start_ns, served(layout.sides, trace)),
    }
    for name, svg in drawn.items():
        (pictures / f"{name}.svg").write_text(str(svg), encoding="utf-8")
    (directory / PAGE).write_text(page((DOCS / PAGE).read_text(), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
