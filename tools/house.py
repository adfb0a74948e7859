"""The rooms of the house and its wings, what each may import, and the picture of it in docs/architecture.md.

    python -m tools.house          # writes the picture

`tests/test_layering.py` holds every file to these rules, and the picture to the table.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- tools/house.py: begin -->\n", "<!-- tools/house.py: end -->\n"


class Room(NamedTuple):
    """A package of `src/xdeepserve`, or a file beside them: what it is, and which others it may import."""

    what: str
    uses: str


# From the ground up: a room uses some of those that stand before it, and what is in COMMON.
COMMON: Final = "errors reading jit machine bf16 forks"
HOUSE: Final[Mapping[str, Room]] = {
    "errors": Room("every error that is raised on purpose", ""),
    "reading": Room("files and tables that users write, read with the line of a mistake", ""),
    "machine": Room("life cycles as tables", ""),
    "bf16": Room("bfloat16 in arrays", ""),
    "forks": Room("files that a forked child closes at once", ""),
    "parsing": Room("reasoning and tool calls out of a model's text", ""),
    "jit": Room("how kernels are compiled and kept", ""),
    "hw": Room("clock, memory, fabric, dies, faults, prices", ""),
    "model": Room("the mathematics, checkpoints, tokenizer", ""),
    "step": Room("a decoder layer as data: stages and meets", "hw model"),
    "comm": Room("XCCL and DistFlow, a folder a protocol", "hw"),
    "wings": Room("names of what wings bring, resolved on use", ""),
    "engine": Room(
        "FlowServe: dies, DP groups, task executors, recovery", "hw model step comm wings parsing"
    ),
    "compile_ahead": Room("kernels compiled while weights load", "model"),
    "progress": Room("what a command says while it works", "compile_ahead"),
    "loop": Room("the event loop of commands", ""),
    "llm": Room("the facade: LLM, SamplingParams", "hw model engine loop progress"),
    "history": Room("a pod's life as data, served and told", "hw model engine llm"),
    "golden": Room("golden vectors of the protocols", "hw model comm"),
    "verify": Room("the bit-exactness matrix", "hw model engine llm history"),
    "api": Room("the OpenAI-compatible endpoint", "hw model comm wings engine llm parsing"),
    "cli": Room(
        "the command line: a file per command, wings bring theirs",
        "hw model comm engine llm golden verify api wings loop progress",
    ),
}
# Wings use the house as they like, but for `api` and `cli`, and the wings that they name.
WINGS: Final[Mapping[str, Room]] = {
    "corpus": Room("text that the tiny models are trained and examined on", ""),
    "quant": Room("post-training quantisation to INT8", "corpus"),
    "m2n": Room("experts on other hardware, over network cards (MegaScale-Infer 5)", ""),
    "ems": Room("the memory pool: servers, ring, client, prefixes and models (CloudMatrix 4.4)", ""),
    "remote": Room("expert servers in processes of their own, also on computers under Ray (EaaS)", ""),
    "evals": Room("perplexity, agreement and task scores", "corpus quant"),
    "jobs": Room("jobs of tasks, kept on disk; members of a cluster", "evals quant"),
    "prices": Room("a step's time: run, table, formula", "m2n"),
    "planner": Room("model, latency bound, hardware -> a deployment", "prices"),
    "platform": Room("traces on many TEs, scaling (DeepServe)", "prices"),
    "page": Room("the page and its data", ""),
    "chaos": Room("faults by the hundred, and who judges", "ems"),
    "learn": Room("the course", ""),
    "bench": Room("the papers' values beside ours", "corpus evals m2n ems remote prices planner platform"),
}
DOOR: Final = ("api", "cli")  # the rooms of the house that no wing uses


def is_above(path: Path) -> bool:
    """Whether a file of a wing is one of its commands, or one of its doors, which bring routes to the
    endpoint: these stand above all rooms, `cli` and `api` included."""
    return path.stem in ("command", "door") or path.stem.endswith("_command") or path.parent.name == "door"


def allowed(room: str) -> set[str]:
    """Rooms that a room may import."""
    common = {*COMMON.split()}
    if room in WINGS:
        return common | {*HOUSE} - {*DOOR} | {*WINGS[room].uses.split()}
    below = [*HOUSE][: [*HOUSE].index(room)]
    return ({*HOUSE[room].uses.split()} | common) & {*below}


def picture() -> str:
    """Draw the house and its wings as two lists, each room above those that it uses."""
    width = max(map(len, (*HOUSE, *WINGS))) + 2

    def row(name: str, room: Room) -> str:
        uses = f"; uses {room.uses.replace(' ', ', ')}" if room.uses else ""
        return textwrap.fill(
            f"  {name:{width}}{room.what}{uses}",
            110,
            subsequent_indent=" " * (width + 4),
            break_on_hyphens=False,
        )

    lines = ["the house, from the roof down", *(row(*each) for each in reversed(HOUSE.items()))]
    lines += ["", "wings: they use the house, but for api and cli; the house knows them by name (wings.py)"]
    lines += [row(*each) for each in WINGS.items()]
    return "\n".join(["```text", *lines, "```", ""])


def drawn(page: str) -> str:
    """Put the picture into the text of the page."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{picture()}{END}{after}"


def main() -> int:
    """Write the picture into docs/architecture.md."""
    PAGE.write_text(drawn(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
