"""The tables of losses and of the ladder's rungs in docs/faults.md, from `engine/recovery/ladder.py`.

    python -m tools.ladder          # writes the tables

`tests/engine/test_ladder.py` holds the page to the rows.
"""

from __future__ import annotations

from pathlib import Path

from xdeepserve.engine.recovery.ladder import LADDER, LOSSES

PAGE = Path(__file__).parent.parent / "docs" / "faults.md"
BEGIN, END = "<!-- tools/ladder.py: begin -->\n", "<!-- tools/ladder.py: end -->\n"
RUNS = {"loop": "in the TE's loop", "TE": "at one moment, on the TE", "group": "at one moment, on all TEs"}


def tables() -> str:
    """Return both tables in Markdown: what may be lost, and what each rung does about it."""
    lines = ["| loss | how it is noticed | rungs, in this order |", "|---|---|---|"]
    for kind, noticed in LOSSES.items():
        names = (f"*{rung.name}*" for rung in LADDER if kind in rung.kinds)
        lines.append(f"| `{kind}` | {noticed} | {', '.join(names)} |")
    lines += ["", "| rung | runs | what it does | it cannot help if |", "|---|---|---|---|"]
    lines += [f"| *{rung.name}* | {RUNS[rung.runs]} | {rung.mends} | {rung.cannot} |" for rung in LADDER]
    return "".join(f"{line}\n" for line in lines)


def drawn(text: str) -> str:
    """Return a page's text with new tables between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
