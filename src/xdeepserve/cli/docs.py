"""`xdeepserve docs`: the documents of this version, from a wheel as from a checkout."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from xdeepserve.cli.options import Parser
from xdeepserve.errors import InputError, meant


def add_options(parser: Parser) -> None:
    """Add the options: the page, and whether to print its text or its place."""
    parser.add_argument("page", nargs="?", metavar="PAGE", help="print this one; without it: list them all")
    parser.add_argument("--path", action="store_true", help="print only where it is, to open it elsewhere")


def documents() -> dict[str, Path]:
    """Find the documents' files, by the names that `xdeepserve docs` takes."""
    package = Path(str(resources.files("xdeepserve")))
    folders = (package / "docs", package.parent.parent / "docs")  # as a wheel has them; as a checkout does
    folder = next((each for each in folders if (each / "getting-started.md").exists()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.md"))}


def run(args: argparse.Namespace) -> int:
    """Print the list, a page, or a place. Raises InputError for a page that does not exist."""
    pages = documents()
    if not pages:
        raise InputError("this installation came without its documents: install xdeepserve again")
    if args.page is None:
        if args.path:
            print(pages["getting-started"].parent)
            return 0
        for name, path in pages.items():
            print(f"  {name:<16} {title(path)}")
        print("\nRead one with: xdeepserve docs getting-started")
        return 0
    name = args.page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        raise InputError(f"there is no page {args.page!r}{meant(name, pages)}; for a list: xdeepserve docs")
    if args.path:
        print(pages[name])
    else:
        import pydoc

        pydoc.pager(f"{pages[name]}\n\n{pages[name].read_text(encoding='utf-8')}")
    return 0


def title(path: Path) -> str:
    """Return the heading of a page, without marks of code."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").replace("`", "")
