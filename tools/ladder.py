"""Tables in docs/faults.md: losses and rungs of `engine/recovery/ladder.py`, kinds of `hw/fault_kinds.py`.

    python -m tools.ladder          # writes the tables

`tests/engine/test_ladder.py` holds the page to the rows.
"""

from __future__ import annotations

from pathlib import Path

from xdeepserve.engine.recovery.ladder import LADDER, LOSSES
from xdeepserve.hw.fault_kinds import RULES, Place, Rule

PAGE = Path(__file__).parent.parent / "docs" / "faults.md"
RUNS = {"loop": "in the TE's loop", "TE": "at one moment, on the TE", "group": "at one moment, on all TEs"}


def losses_and_rungs() -> list[str]:
    """Return the lines of two tables: what may be lost, and what each rung does about it."""
    lines = ["| loss | how it is noticed | rungs, in this order |", "|---|---|---|"]
    for kind, noticed in LOSSES.items():
        names = (f"*{rung.name}*" for rung in LADDER if kind in rung.kinds)
        lines.append(f"| `{kind}` | {noticed} | {', '.join(names)} |")
    lines += ["", "| rung | runs | what it does | it cannot help if |", "|---|---|---|---|"]
    return lines + [
        f"| *{rung.name}* | {RUNS[rung.runs]} | {rung.mends} | {rung.cannot} |" for rung in LADDER
    ]


def faults() -> list[str]:
    """Return the lines of the table of faults: each kind at each place."""
    lines, shown = ["| place | kind | what happens | says | on the page |", "|---|---|---|---|---|"], ""
    for (place, kind), rule in RULES.items():
        first = "" if place == shown else _example(place)
        button = f"*{rule.button}*" if rule.button else ""
        row = f"| {first} | `{kind}` | {rule.meaning} | {_says(rule)} | {button} |"
        lines.append(row.replace("|  |", "| |"))
        shown = place
    return lines


def _example(place: Place) -> str:
    return f"`{place} = {'[0, 2]' if place == 'link' else 3 if place == 'die' else 0}`"


def _says(rule: Rule) -> str:
    needs, may = (", ".join(f"`{field}`" for field in fields) for fields in (rule.needs, rule.may))
    return "; ".join(part for part in (needs, may and f"may: {may}") if part)


TABLES = (  # the marks of each place on the page, and what stands between them
    ("<!-- tools/ladder.py: begin -->\n", "<!-- tools/ladder.py: end -->\n", losses_and_rungs),
    ("<!-- tools/ladder.py: faults -->\n", "<!-- tools/ladder.py: end of faults -->\n", faults),
)


def drawn(text: str) -> str:
    """Return a page's text with new tables between their marks."""
    for begin, end, lines in TABLES:
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = "".join([before, begin, *(f"{line}\n" for line in lines()), end, after])
    return text


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
