"""The glossary has the words that a reader of the code meets, in order, and names classes that exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.sources import SRC, tree_of

ROOT = Path(__file__).parent.parent
ENTRY = re.compile(r"- \*\*(.+?)\*\*: .+\.")
LINES = (ROOT / "docs" / "glossary.md").read_text().splitlines()
ENTRIES = [line for line in LINES if line.startswith("- ")]
TERMS = [match[1] for line in ENTRIES if (match := ENTRY.fullmatch(line))]
NEEDED = (
    *(
        "Program",
        "Stage",
        "Meet",
        "Op",
        "Frame",
        "Runner",
        "Pace",
        "Wiring",
        "Team",
        "Visit",
        "Traversal",
    ),
    *("Tally", "Work", "JE", "TE", "TE-shell", "DP group", "DP domain", "Executor", "RTC", "DistFlow"),
    *("XCCL", "A2E", "E2A", "Trampoline", "Dispatch", "Combine", "EPLB", "MTP", "MLA", "KV block", "Die"),
    *("MTE", "DMA", "URMA", "UB", "Event ID", "Ring buffer", "TTFT", "TPOT", "Twin", "Lockstep", "Dataflow"),
)


def classes() -> set[str]:
    trees = [tree_of(path) for path in SRC.rglob("*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def test_every_entry_is_a_line_in_alphabetical_order() -> None:
    assert len(TERMS) == len(ENTRIES), set(ENTRIES) - {line for line in ENTRIES if ENTRY.fullmatch(line)}
    keys = [re.sub(r"[^a-z0-9]", " ", term.lower()) for term in TERMS]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("term", NEEDED)
def test_the_main_terms_have_an_entry(term: str) -> None:
    assert term in TERMS


def test_classes_that_are_named_exist() -> None:
    named = {name for line in LINES for name in re.findall(r"`([A-Z]\w*)`", line)}
    assert named
    assert not named - classes()
