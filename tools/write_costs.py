"""Write the tables of `docs/costs.md`: parameters, what is free, and rows beside the published values.

python -m tools.write_costs              # the tables that follow from the source
python -m tools.write_costs ROWS.json    # those of rows, too, of `xdeepserve bench papers --json`
python -m tools.write_costs --check      # whether the former are up to date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xdeepserve.bench.papers.fits import fitted_parameters
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.step.stage import FREE

PAGE = Path(__file__).parent.parent / "docs" / "costs.md"
PAPERS = {"xds": "xDeepServe", "cm": "CloudMatrix"}  # whose machine is billed


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Make a Markdown table of a head, `a | b`, and rows."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns, *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines)


def origin(param: Param) -> str:
    """Return whether a parameter is fitted, assumed, or given by a source."""
    return next((word for word in ("fitted", "assumed") if param.source.startswith(word)), "given")


def parameters() -> str:
    """List all parameters, those of benchmarks alone as well, by origin."""
    spec = Spec()
    params = {name: getattr(spec, name) for name in spec.__struct_fields__} | fitted_parameters()
    rows = [
        (f"`{name}`", f"{param.value:g} {param.unit}", origin(param), _source(param))
        for name, param in params.items()
    ]
    return table("parameter | value | origin | source", sorted(rows, key=lambda row: _ORDER.index(row[2])))


_ORDER = ("given", "fitted", "assumed")


def _source(param: Param) -> str:
    return re.sub(r"^(fitted|assumed)[,:] *", "", param.source).replace("|", "/")


def free() -> str:
    """List what costs nothing on a die, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in FREE.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    return table("operations | why they cost nothing", ((", ".join(n), why) for why, n in by_reason.items()))


def rows(found: list[dict[str, Any]]) -> str:
    """List the rows of the papers whose machine is billed."""
    lines = [
        (f"`{row['name']}`", f"{row['value']:.4g}", _published(row), _verdict(row), row["how"])
        for row in found
        if _is_listed(row) and "published" in row
    ]
    return table("row | here | published | off by | how", lines)


def broken(found: list[dict[str, Any]]) -> str:
    """List what is beyond a bound, a range or 15 %, with the cause."""
    lines = [
        (f"`{row['name']}`", f"{row['value']:.4g}", _published(row), row["why"].replace("|", "/"))
        for row in found
        if _is_listed(row) and "why" in row
    ]
    return table("row | here | published | cause", lines)


def _is_listed(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a paper whose machine is billed, and says what no other row says, or breaks a
    bound."""
    is_new = "said again" not in row["how"] or row.get("verdict") == "broken"
    return is_new and row["name"].split(".")[0] in PAPERS


def _published(row: Mapping[str, Any]) -> str:
    if "range" in row:
        return f"{row['range'][0]:g} to {row['range'][1]:g} {row['unit']}"
    return f"{row.get('bound', '')} {row['published']:g} {row['unit']}".strip()


def _verdict(row: Mapping[str, Any]) -> str:
    off = f"{row['error_pct']:+.1f} %" if "error_pct" in row else ""
    return f"{off} {row.get('verdict', '')}".strip()


def written(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with the tables between their marks."""
    for name, text in tables.items():
        begin, end = f"<!-- tools/write_costs.py: {name} -->\n", f"<!-- end of {name} -->"
        first, rest = page.split(begin)
        page = f"{first}{begin}{text}\n{end}{rest.split(end, 1)[1]}"
    return page


def main(args: list[str]) -> int:
    page = PAGE.read_text()
    tables = {"parameters": parameters(), "free": free()}
    if args and args[0] == "--check":
        return int(written(page, tables) != page)
    if args:
        found = json.loads(Path(args[0]).read_text())["rows"]
        tables |= {"rows": rows(found), "broken": broken(found)}
    PAGE.write_text(written(page, tables))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
