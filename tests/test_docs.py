"""The documents name files that exist, and everything in them that can be run or drawn is."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from xdeepserve.bench.sweep import Point, measure

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCUMENTS]
NAMED = re.compile(r"`((?:\w+/)+[\w.]*)`")  # a path of at least one folder, in backticks
LINK = re.compile(r"\]\((?!http)([^)#]+)(?:#([\w-]+))?\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IDS = [path.name for path in DOCUMENTS]

# By the row of the table in costs.md that is its outcome.
MOE = (
    "xdeepserve sweep --set attention.domains={} --set attention.dies={} --set experts.routed_dies=32 "
    "--set experts.shared_dies=2 --set attention.microbatches=1,2,3 --batch 32,96 --context 2048,4096"
)
SWEEPS = {
    MOE.format(2, 15) + " --csv sweep.csv": "2 x 15 + 32 + 2",
    MOE.format(1, 30): "1 x 30 + 32 + 2",
    "xdeepserve sweep --set dies=64 --set pipeline.microbatches=1,2 --deployment colocated --batch 32,96 "
    "--context 2048,4096": "`colocated`",
}
# Minutes each: for `make campaign`.
SLOW = {
    "xdeepserve chaos --schedules 20",
    "xdeepserve verify",
    "xdeepserve bench comm --ranks",
    "xdeepserve bench superpod",
    "xdeepserve bench superpod --steps",
    "xdeepserve bench engine",
    "xdeepserve bench kernels",
    "xdeepserve bench decode",
    "xdeepserve bench prefill",
    "xdeepserve bench startup",
    "xdeepserve bench plan",
    "xdeepserve plan --model deepseek-r1 --slo-ms 50 --dies 768",
    "xdeepserve bench comm",
    "xdeepserve bench comm --full",
    "xdeepserve eval --samples 4",
    "xdeepserve bench papers",
    "xdeepserve bench papers --ablations",
    "xdeepserve quantize tiny OUT --method rtn",
    "xdeepserve golden write DIR",
    "xdeepserve golden check DIR",
    *SWEEPS,
}


def blocks(kind: str) -> dict[str, list[str]]:
    """Blocks of a language, by page."""
    return {
        page.name: [text for name, text in BLOCK.findall(page.read_text()) if name == kind] for page in PAGES
    }


def commands() -> list[str]:
    """Lines after a `$`, each once."""
    lines = [line for texts in blocks("console").values() for text in texts for line in text.splitlines()]
    assert all(line.startswith("$ ") for line in lines), lines
    return list(dict.fromkeys(line.removeprefix("$ ") for line in lines))


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_documents_name_files_that_exist(document: Path) -> None:
    named = {name for name in NAMED.findall(document.read_text()) if "NAME" not in name}
    missing = {
        name
        for name in named
        if not any((base / name).exists() for base in (ROOT / "src" / "xdeepserve", ROOT))
    }
    assert not missing


def test_the_readme_leads_to_the_documents() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"docs/{document.name}" in readme for document in DOCUMENTS)


def test_the_readme_is_a_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) < 750
    assert "docs/pictures/" in readme
    assert "    make demo" in readme
    assert "    make test" in readme


def anchors(page: Path) -> set[str]:
    """What GitHub calls a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        path = page.parent / target
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_lines_are_short() -> None:
    for page in PAGES:
        if page.name not in ("features.md", "glossary.md", "settings.md"):
            for line in page.read_text().splitlines():
                assert len(line) <= 125 or line.startswith(("|", "$ ")), f"{page.name}: {line}"


def test_pictures_and_times_are_made_again_alike(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "draw_docs.py", tmp_path], check=True, timeout=300)
    made, docs = tmp_path, ROOT / "docs"
    assert (made / "life-of-a-token.md").exists()
    assert {path.name for path in made.glob("pictures/*")} == {path.name for path in docs.glob("pictures/*")}
    for path in (*made.glob("pictures/*"), *made.glob("*.md")):
        assert path.read_bytes() == (docs / path.relative_to(made)).read_bytes(), path.name


def test_the_settings_are_up_to_date(tmp_path: Path) -> None:
    file = tmp_path / "settings.md"
    subprocess.run([sys.executable, ROOT / "tools" / "write_settings.py", file], check=True)
    assert file.read_text() == (ROOT / "docs" / "settings.md").read_text(), "run tools/write_settings.py"


def marked(command: str) -> object:
    return pytest.param(command, marks=pytest.mark.campaign) if command in SLOW else command


ENDLESS = ("xdeepserve serve", "xdeepserve cluster")  # until a signal
RUNNABLE = [command for command in commands() if not command.startswith(ENDLESS)]


def test_slow_commands_are_in_the_documents() -> None:
    assert set(commands()) >= SLOW


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


MADE_BY = {  # files that other commands read
    "DIR": "xdeepserve golden write DIR",
    "plan.toml": "xdeepserve plan --model tiny --slo-ms 2 --dies 8 -o plan.toml",
}


@pytest.mark.always
@pytest.mark.thin(8)
@pytest.mark.parametrize("command", [marked(command) for command in RUNNABLE])
def test_commands(command: str, scratch: Path) -> None:
    for name, maker in MADE_BY.items():
        if name in command.split() and command != maker and not (scratch / name).exists():
            xdeepserve(maker, scratch)
    (scratch / "faults.toml").write_text(blocks("toml")["faults.md"][0])
    printed = xdeepserve(command, scratch)
    assert printed.strip()
    if command in SWEEPS:
        best = re.findall(r"^best at .*microbatches=(\d): .* (\d+) tokens/s per chip$", printed, re.MULTILINE)
        assert swept()[SWEEPS[command]] == [f"{m}: {tokens}" for m, tokens in best]


def swept() -> dict[str, list[str]]:
    """The table of best numbers of microbatches and their tokens per second, by its first column."""
    lines = (ROOT / "docs" / "costs.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {name: cells for name, *cells in rows if name in SWEEPS.values()}


def test_the_table_of_sweeps_is_what_they_find() -> None:
    """Two cells, which show that another context has another best number. The commands look at all."""
    of_dies = [
        Point("deepseek-r1", "colocated", ("dies=64", f"pipeline.microbatches={m}"), 96, 2048) for m in (1, 2)
    ]
    one, two = (measure(point).tokens_per_s_chip for point in of_dies)
    assert one > two
    assert swept()["`colocated`"][2] == f"1: {one:.0f}"
    assert swept()["`colocated`"][3].startswith("2: ")


def xdeepserve(command: str, directory: Path) -> str:
    """What a command prints; it must succeed."""
    name, *arguments = shlex.split(command)
    assert name == "xdeepserve"
    done = subprocess.run(
        [sys.executable, "-m", "xdeepserve.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SERVERS = [command for command in commands() if command.startswith(ENDLESS)]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Where the first server of the documents listens, on a port that is free."""
    with started(SERVERS[0]) as base:
        yield base


class started:
    """A server as a document starts it, but for the port, in a `with` block: its address."""

    def __init__(self, command: str, directory: Path | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = shlex.split(command.replace("--port 8000", f"--port {self.port}"))[1:]
        self.process = subprocess.Popen([sys.executable, "-m", "xdeepserve.cli", *arguments], cwd=directory)

    def __enter__(self) -> str:
        base = f"http://127.0.0.1:{self.port}"
        for _ in range(600):
            assert self.process.poll() is None
            try:
                with urllib.request.urlopen(f"{base}/health", timeout=5):
                    return base
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError("the server does not answer")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@pytest.mark.always
@pytest.mark.thin(4)
@pytest.mark.parametrize("command", SERVERS[1:])
def test_servers_start(command: str, tmp_path: Path) -> None:
    with started(command, tmp_path) as base, urllib.request.urlopen(f"{base}/v1/models") as answer:
        assert answer.status == 200
        if "--admin" in command:
            with urllib.request.urlopen(f"{base}/admin/tes") as listed:
                assert b"decode" in listed.read()
        if "--state" in command:
            with urllib.request.urlopen(f"{base}/v1/fine_tuning/jobs") as listed:
                assert b'"data":[]' in listed.read()


OF_A_TOKEN = "life-of-a-token.md"


def test_the_script_of_a_token_prints_every_stop(tmp_path: Path) -> None:
    """Those of the page's table, when and for how long the table says."""
    (script,) = blocks("python")[OF_A_TOKEN]
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    line = re.compile(r" *(-?[\d.]+) us +([\d.]+) us  (.{30}) (.*?) ?(?:waits)?")
    spans: dict[tuple[str, str], tuple[float, float]] = {}
    for begin, takes, die, name in (line.fullmatch(each).groups() for each in done.stdout.splitlines()):
        spans[die.strip(), name.strip()] = float(begin), float(takes)
    _, _, table = (ROOT / "docs" / OF_A_TOKEN).read_text().partition("<!-- times -->")
    rows = re.findall(r"^\| \d+ \| (.*) \| (.*) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert len(rows) == 13
    for die, names, begins, takes in rows:
        first, last = names.split(" .. ")[0], names.split(" .. ")[-1]
        end = sum(spans[die, last])
        assert spans[die, first][0] == pytest.approx(float(begins), abs=0.02), names
        assert end - spans[die, first][0] == pytest.approx(float(takes), abs=0.02), names
    assert ("experts 0 (routed)", "A2E 5") in spans  # a wait that has begun in an earlier step


PYTHON = [(page, text) for page, texts in blocks("python").items() for text in texts if page != OF_A_TOKEN]


@pytest.mark.parametrize(("page", "text"), PYTHON, ids=[f"{page}-{i}" for i, (page, _) in enumerate(PYTHON)])
def test_python(page: str, text: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "127.0.0.1:8000" in text:
        text = text.replace("http://127.0.0.1:8000", request.getfixturevalue("server"))
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    subprocess.run([sys.executable, "-c", text], check=True, cwd=tmp_path, env=environment, timeout=300)
