"""Samples: what a page shows that a command or a script prints, and what it prints now.

In a block of `console` a command begins with `$ `, and the lines below it are what it prints. A block of
`text` right behind one of `python` is what that script prints. `…` stands for what is left out: alone for
lines (at one place of an output), else for a part of a line. What changes from run to run (`SHAPES`) is
compared by its form. `tools/write_samples.py` writes all outputs anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from xdeepserve.cli import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCUMENTS]
BLOCK = re.compile(r"^```(\w+)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
ENDLESS = ("xdeepserve serve", "xdeepserve cluster")  # until a signal
ADDRESS = "127.0.0.1:8000"  # what pages call a server's
TOKEN_PAGE = "life-of-a-token.md"  # its script prints a table that has a test of its own
SHAPES = re.compile(
    r"\d+\.\d+ s in all(?:, kernels compiled)?"
    r'|"created": ?\d+'
    r"|\b(?:cmpl|chatcmpl|resp)-[\w-]+"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d"
)


class Sample(NamedTuple):
    """A command line or a Python script of a page, and what the page shows of its output.

    `span` is where in the page the output stands, or None where a script shows none.
    """

    page: Path
    text: str
    shown: str
    span: tuple[int, int] | None
    is_script: bool
    server: str  # the command of the server that it starts or asks, without the port, or ""

    @property
    def is_endless(self) -> bool:
        """Whether it is a server, which runs until a signal."""
        return self.text.startswith(ENDLESS)


def samples_of(page: Path) -> list[Sample]:
    """Find all commands and scripts of a page, in order."""
    found: list[Sample] = []
    text = page.read_text()
    server = "xdeepserve serve"
    blocks = [*BLOCK.finditer(text), None]
    for block, behind in pairwise(blocks):
        assert block is not None
        if block[1] == "python":
            shown, span = "", None
            if behind and behind[1] == "text" and not text[block.end() : behind.start()].strip():
                shown, span = behind[2], behind.span(2)
            found.append(Sample(page, block[2], shown, span, True, server if ADDRESS in block[2] else ""))
        for command in COMMAND.finditer(block[2]) if block[1] == "console" else ():
            start = block.start(2)
            span = (start + command.start(2), start + command.end(2))
            line = command[1].replace("\\\n", " ")
            if line.startswith(ENDLESS):
                server = line.replace(" --port 8000", "")  # one server, on whatever page
            asks = ADDRESS in line or line.startswith(ENDLESS)
            found.append(Sample(page, line, command[2], span, False, server if asks else ""))
    return found


# ---- run ---------------------------------------------------------------------------------------------------


class Started:
    """A server as a document starts it, but for the port, in a `with` block."""

    def __init__(self, command: str, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        head, *rest = command.split(" -- ", 1)
        arguments = shlex.split(" -- ".join([f"{head} --port {self.port}", *rest]))[1:]
        self.file = directory / "printed.txt"
        with self.file.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "xdeepserve", *arguments], cwd=directory, stdout=out
            )

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def printed(self) -> str:
        """What the server has printed so far."""
        return self.file.read_text().replace(self.address, ADDRESS)

    def __enter__(self) -> Started:
        for _ in range(600):
            assert self.process.poll() is None
            try:
                with urllib.request.urlopen(f"http://{self.address}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError("the server does not answer")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def run(sample: Sample, directory: Path, address: str = ADDRESS) -> str:
    """Run a command or script in a folder, with the server at an address; return what it prints.

    Scripts and the project's own commands run in this process, where kernels are loaded already.
    """
    text = sample.text.replace(ADDRESS, address)
    name, *arguments = [""] if sample.is_script else shlex.split(text)
    if name in ("", "xdeepserve"):
        with contextlib.chdir(directory), contextlib.redirect_stdout(io.StringIO()) as printed:
            if sample.is_script:
                exec(compile(text, sample.page, "exec"), {"__name__": "__main__"})
            else:
                assert main(arguments) == 0, text
        return printed.getvalue().replace(address, ADDRESS)
    done = subprocess.run(
        [sys.executable if name == "python" else name, *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=3000,
    )
    assert done.returncode == 0, f"{sample.text}\n{done.stderr}"
    return done.stdout.replace(address, ADDRESS)


# ---- compare and write -------------------------------------------------------------------------------------


def tidy(text: str) -> str:
    """Lines without blanks at their ends, and no empty ones around them."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def agree(shown: str, printed: str) -> bool:
    """Whether a page shows what is printed, but for what it leaves out and what changes from run to run."""
    pattern = re.escape(SHAPES.sub("\0", tidy(shown))).replace("\\\n", "\n")
    pattern = re.sub(r"^…\n", lambda _: "(?:.*\n)*?", pattern, flags=re.MULTILINE).replace("…", ".*")
    return re.fullmatch(pattern, SHAPES.sub("\0", tidy(printed))) is not None


def written(shown: str, printed: str) -> str:
    """Return the output as the page would show it now: cut as before, lines that agree as they are."""
    if agree(shown, printed):
        return shown
    old, new = tidy(shown).splitlines(), tidy(printed).splitlines()
    if "…" in old:
        assert old.count("…") == 1, f"lines are left out at one place of an output, not at {old.count('…')}"
        head = old.index("…")
        tail = len(old) - head - 1
        new = [*new[:head], "…", *new[len(new) - tail :]]
    kept = [was if is_ and agree(was, is_) else is_ for was, is_ in zip_longest(old, new, fillvalue="")]
    end = "\n\n" if shown.endswith("\n\n") else "\n"  # an empty line before the next command
    return "\n".join(kept[: len(new)]) + end


def check_all(command: str, printed: str) -> None:
    """Fail where any page shows for a command something else than what it prints."""
    asked = [each for page in PAGES for each in samples_of(page) if each.text == command]
    assert asked, f"no page has {command}"
    for sample in asked:
        check(sample, printed)


def check(sample: Sample, printed: str) -> None:
    """Fail where a page shows something else than what is printed, or nothing for what a script prints."""
    if sample.is_script and sample.page.name != TOKEN_PAGE and not sample.shown:
        assert not printed, f"{sample.page.name} does not show what a script prints: {printed}"
    if sample.shown.strip():
        assert agree(sample.shown, printed), (
            f"{sample.page.name} shows for {sample.text!r}\n{sample.shown}\nbut it prints\n{printed}\n"
            "(python tools/write_samples.py writes all outputs anew)"
        )
