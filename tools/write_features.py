"""Write `docs/features.md` from what the deployments' checks say.

python tools/write_features.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from xdeepserve.model.presets import resolve_model
from xdeepserve.verify.features import FEATURES, MODES, cells

FILE = Path(__file__).parent.parent / "docs" / "features.md"
HEAD = """# What goes together

Each feature in each mode. *yes* serves, with the digest of one die: `tests/test_features.py` runs every such
cell. A dash says that the mode has no such dies, so that there is nothing to set. A number is a reason, below
the table, in the words of the refusal. Time only is a run that computes nothing (`--timing-only`). This page
is made by `tools/write_features.py`, from the checks that refuse a deployment.
"""
NO_SUCH_DIES = "is no setting of", "no effect: "  # what such a reason has in it


def page() -> str:
    """A table, and its notes in the order in which they come."""
    notes: dict[str, int] = {}
    row_of = {feature.name: [feature.name] for feature in FEATURES}
    for cell in cells(resolve_model("tiny-random").config):
        if not cell.reason:
            text = "yes"
        elif any(mark in cell.reason for mark in NO_SUCH_DIES):
            text = "-"
        else:
            text = str(notes.setdefault(cell.reason, len(notes) + 1))
        row_of[cell.feature.name].append(text)
    lines = ["| | " + " | ".join(mode.name for mode in MODES) + " |", "|---" * (1 + len(MODES)) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in row_of.values()]
    reasons = [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([HEAD, *lines, "", *reasons, ""])


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).write_text(page(), encoding="utf-8")
