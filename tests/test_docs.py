"""The documents name files that exist, and everything in them that can be run or drawn is."""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.samples import (
    BLOCK,
    DOCUMENTS,
    PAGES,
    ROOT,
    TOKEN_PAGE,
    Sample,
    Started,
    agree,
    check,
    run,
    samples_of,
    written,
)
from tests.sources import tree_of
from xdeepserve.cli import docs as documents_command
from xdeepserve.cli import main
from xdeepserve.errors import InputError
from xdeepserve.planner.sweep import Point, measure

SRC = ROOT / "src" / "xdeepserve"

NAMED = re.compile(r"`((?:\w+/)+[\w.]*)`")  # a path of at least one folder, in backticks
LINK = re.compile(r"\]\((?!http)([^)#]+)(?:#([\w-]+))?\)")
IDS = [path.name for path in DOCUMENTS]

# By the row of the table in planning.md that is its outcome.
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
    "xdeepserve sweep --deployment colocated --set dies=32 --set pipeline.microbatches=1,2 --batch 32,64",
    # Without its output, as the same with `shm`, which is tried; tests/engine have servers by TCP.
    'xdeepserve generate --deployment eaas --set experts.transport=tcp --prompt "Once upon a time" '
    "--max-tokens 8",
    "xdeepserve quantize tiny OUT --method rtn",
    "xdeepserve golden write DIR",
    "xdeepserve golden check DIR",
    *SWEEPS,
}
# Run by the test of the command, which compares what the pages show, too.
ELSEWHERE = {"xdeepserve bench papers --fits", "xdeepserve demo"}


SAMPLES = [sample for page in PAGES for sample in samples_of(page)]
COMMANDS = list(dict.fromkeys(each.text for each in SAMPLES if not each.is_script and not each.server))
SERVERS = list(dict.fromkeys(each.server for each in SAMPLES if each.server))


def blocks(kind: str, page: str) -> list[str]:
    """Blocks of a language on a page."""
    return [text for name, text in BLOCK.findall((ROOT / "docs" / page).read_text()) if name == kind]


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_documents_name_files_that_exist(document: Path) -> None:
    named = {name for name in NAMED.findall(document.read_text()) if "NAME" not in name}
    missing = {
        name
        for name in named
        if not any((base / name).exists() for base in (ROOT / "src" / "xdeepserve", ROOT))
    }
    assert not missing


def defined(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names that the body of a module or class defines."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id, node


CLASSES = {
    name: node
    for path in SRC.rglob("*.py")
    for name, node in defined(tree_of(path))
    if isinstance(node, ast.ClassDef)
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_documents_name_functions_that_exist(document: Path) -> None:
    """`path/file.py:Class.function`, and `Class.function` alone."""
    text = document.read_text()
    for path, names in re.findall(r"`((?:\w+/)*\w+\.py):([\w.]+)`", text):
        node: ast.AST = tree_of(SRC / path)
        for name in names.split("."):
            found = dict(defined(node))
            assert name in found, (path, names)
            node = found[name]
    for name, function in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
        if name in CLASSES:
            written = ast.unparse(CLASSES[name])
            assert function in dict(defined(CLASSES[name])) or f"self.{function}" in written, (name, function)


def test_the_tests_that_hold_kinds_of_faults_exist() -> None:
    rows = [line for line in (ROOT / "docs" / "input-faults.md").read_text().splitlines() if "::" in line]
    assert len(rows) > 20
    for row in rows:
        assert row.startswith("| ")
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row):
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (
                path,
                name,
            )


def test_the_readme_leads_to_the_documents() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"docs/{document.name}" in readme for document in DOCUMENTS)


POINTER = re.compile(r"xdeepserve docs ([\w-]+)")


def test_what_users_read_points_to_pages_that_a_wheel_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Help, messages and docstrings name no file of a checkout, and each page that they name is there."""
    pointers = set()
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        pointers |= {(name, path.name) for name in POINTER.findall(text)}
        lines = text.partition('"""')[2].partition('"""')[2]  # the module's own docstring is for developers
        assert not re.search(r"docs/[\w-]+\.md", lines), path
    assert len({name for name, _ in pointers}) > 4
    for name, where in sorted(pointers):
        assert main(["docs", name, "--path"]) == 0, where
        assert Path(capsys.readouterr().out.strip()) == ROOT / "docs" / f"{name}.md"


def test_documents_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^  {path.stem} +\S", listed, re.MULTILINE) for path in DOCUMENTS)
    assert main(["docs", "docs/tour.md"]) == 0
    tour = ROOT / "docs" / "tour.md"
    assert capsys.readouterr().out.strip() == f"{tour}\n\n{tour.read_text()}".strip()
    assert main(["docs", "tuor"]) == 2
    assert "no page 'tuor' (did you mean tour?); for a list: xdeepserve docs" in capsys.readouterr().err


def test_documents_are_found_in_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr("xdeepserve.cli.docs.resources.files", lambda _: tmp_path)
    with pytest.raises(InputError, match="came without its documents"):
        documents_command.run(argparse.Namespace(page=None, path=False))
    (tmp_path / "docs" / "getting-started.md").write_text("# Getting started\n")
    assert documents_command.documents() == {"getting-started": tmp_path / "docs" / "getting-started.md"}
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert included["wheel"]["force-include"] == {"docs": "xdeepserve/docs"}


def test_what_tests_are_skipped_without_is_of_an_extra() -> None:
    """A module that no extra brings would be missing everywhere, and its tests skipped unseen."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {re.split("[<>=;~ ]", each)[0] for group in extras.values() for each in group}
    fixed = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    modules = {name for text in sources for name in re.findall(r'importorskip\(\s*"(\w+)', text)}
    assert "anthropic" in modules
    assert modules <= wanted | fixed
    assert {re.split("[<>=]", each)[0] for each in extras["dev"]} <= fixed


def test_the_readme_is_a_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 700
    assert "](docs/screens/" in readme
    assert len(re.findall(r"\]\(https://arxiv.org/abs/\d{4}\.\d{5}\)", readme)) == 5, "a link for each paper"
    assert "    make demo" in readme
    assert "    make test" in readme


def test_the_papers_are_named_and_linked() -> None:
    """README and CITATION.cff name the same five, and the latter their titles and authors."""
    links = re.compile(r"https://arxiv.org/abs/[\d.]+\d")
    citation = (ROOT / "CITATION.cff").read_text()
    assert set(links.findall((ROOT / "README.md").read_text())) == set(links.findall(citation))
    for reference in citation.split("  - type: article\n")[1:]:
        assert "    title: " in reference
        assert re.search(r"name(s)?: \S", reference)
        assert "others" not in reference


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


def test_the_ideas_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.ideas", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run python -m tools.ideas"


def marked(command: str) -> object:
    return pytest.param(command, marks=pytest.mark.campaign) if command in SLOW else command


def test_slow_commands_are_in_the_documents() -> None:
    assert set(COMMANDS) >= SLOW | ELSEWHERE


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


MADE_BY = {  # files that other commands read
    "DIR": "xdeepserve golden write DIR",
    "plan.toml": "xdeepserve plan --model tiny --slo-ms 2 --dies 8 -o plan.toml",
}


@pytest.mark.always
@pytest.mark.thin(8)
@pytest.mark.parametrize("command", [marked(each) for each in COMMANDS if each not in ELSEWHERE])
def test_commands(command: str, scratch: Path) -> None:
    """They run, and print what pages show."""
    asked = [each for each in SAMPLES if each.text == command]
    for name, maker in MADE_BY.items():
        if name in command.split() and command != maker and not (scratch / name).exists():
            run(next(each for each in SAMPLES if each.text == maker), scratch)
    (scratch / "faults.toml").write_text(blocks("toml", "faults.md")[0])
    printed = run(asked[0], scratch)
    assert printed.strip()
    for sample in asked:
        check(sample, printed)
    if command in SWEEPS:
        best = re.findall(r"^best at .*microbatches=(\d): .* (\d+) tokens/s per chip$", printed, re.MULTILINE)
        assert swept()[SWEEPS[command]] == [f"{m}: {tokens}" for m, tokens in best]


def swept() -> dict[str, list[str]]:
    """The table of best numbers of microbatches and their tokens per second, by its first column."""
    lines = (ROOT / "docs" / "planning.md").read_text().splitlines()
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


DOORS = {  # what is there with which option
    "/v1/models": ("", b"tiny"),
    "/admin/tes": ("--admin", b"decode"),
    "/v1/fine_tuning/jobs": ("--state", b'"data":[]'),
}


@pytest.mark.always
@pytest.mark.thin(4)
@pytest.mark.parametrize("command", SERVERS)
def test_servers(command: str, tmp_path: Path) -> None:
    """They start, and print and answer what pages show."""
    with Started(command, tmp_path) as server:
        for path, (option, part) in DOORS.items():
            if option in command:
                with urllib.request.urlopen(f"http://{server.address}{path}") as answer:
                    assert part in answer.read()
        for sample in (each for each in SAMPLES if each.server == command):
            check(sample, server.printed if sample.is_endless else run(sample, tmp_path, server.address))


def test_the_script_of_a_token_prints_every_stop(tmp_path: Path) -> None:
    """Those of the page's table, when and for how long the table says."""
    (script,) = blocks("python", TOKEN_PAGE)
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    line = re.compile(r" *(-?[\d.]+) us +([\d.]+) us  (.{30}) (.*?) ?(?:waits)?")
    spans: dict[tuple[str, str], tuple[float, float]] = {}
    for begin, takes, die, name in (line.fullmatch(each).groups() for each in done.stdout.splitlines()):
        spans[die.strip(), name.strip()] = float(begin), float(takes)
    _, _, table = (ROOT / "docs" / TOKEN_PAGE).read_text().partition("<!-- times -->")
    rows = re.findall(r"^\| \d+ \| (.*) \| (.*) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert len(rows) == 13
    for die, names, begins, takes in rows:
        first, last = names.split(" .. ")[0], names.split(" .. ")[-1]
        end = sum(spans[die, last])
        assert spans[die, first][0] == pytest.approx(float(begins), abs=0.02), names
        assert end - spans[die, first][0] == pytest.approx(float(takes), abs=0.02), names
    assert ("experts 0 (routed)", "A2E 5") in spans  # a wait that has begun in an earlier step


SCRIPTS = [each for each in SAMPLES if each.is_script and not each.server and each.page.name != TOKEN_PAGE]


def test_outputs_are_compared_and_written(tmp_path: Path) -> None:
    shown = "one 1\n…\ntwo …, three\n"
    assert agree(shown, "one 1\nmore\nand more\ntwo 2, three\n")
    assert agree(shown, "one 1\ntwo , three  \n\n")
    assert not agree(shown, "one 2\ntwo 2, three\n")
    assert not agree(shown, "one 1\ntwo 2, three\nfour\n")
    assert agree("yes (8.5 s in all)", "yes (61.0 s in all, kernels compiled)")
    assert not agree("297.58 ms", "297.59 ms")
    assert written(shown, "one 1\nmore\ntwo 2, three\n") == shown
    assert written(shown, "one 2\nmore\ntwo 2, three\n") == "one 2\n…\ntwo …, three\n"
    assert written("old\n\n", "new\nlines\n") == "new\nlines\n\n"
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ xdeepserve serve --port 8000\nlistening\n$ curl \\\n  127.0.0.1:8000\n```\n"
        "```python\nprint(1)\n```\n\n```text\n1\n```\n"
    )
    server, curl, script = samples_of(page)
    assert (server.shown, server.server, curl.server) == ("listening\n", *["xdeepserve serve"] * 2)
    assert (curl.text.split(), curl.shown) == (["curl", "127.0.0.1:8000"], "")
    assert (script.text, script.shown, script.server) == ("print(1)\n", "1\n", "")
    check(script, run(script, tmp_path))
    with pytest.raises(AssertionError, match="but it prints"):
        check(script, "2\n")
    with pytest.raises(AssertionError, match="does not show what a script prints"):
        check(script._replace(shown="", span=None), "1\n")


NUMBERS = [sum(other.page == each.page for other in SCRIPTS[:i]) for i, each in enumerate(SCRIPTS)]
IDS_OF_SCRIPTS = [f"{each.page.name}-{number}" for each, number in zip(SCRIPTS, NUMBERS, strict=True)]


@pytest.mark.parametrize("sample", SCRIPTS, ids=IDS_OF_SCRIPTS)
def test_python(sample: Sample, tmp_path: Path) -> None:
    check(sample, run(sample, tmp_path))
