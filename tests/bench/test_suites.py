"""Tables of suites: their modules are there, take the options by name, and stand in two rooms."""

import importlib
import inspect

from tests.sources import SRC
from xdeepserve.bench.command import INSTEAD, ROWS_INSTEAD, SUITES, TABLES_INSTEAD


def test_each_suite_takes_its_options_by_name() -> None:
    for suite in SUITES.values():
        module = importlib.import_module(f"xdeepserve.bench.{suite.module}")
        assert {*inspect.signature(module.all_rows).parameters} == {*suite.options} - {"plot", *INSTEAD}
        assert hasattr(module, "plot") == ("plot" in suite.options)


def test_what_is_shown_instead_is_there() -> None:
    for name in ROWS_INSTEAD.values():
        assert callable(importlib.import_module(f"xdeepserve.bench.{name}").all_rows)
    for name in TABLES_INSTEAD.values():
        assert (
            "is_json"
            in inspect.signature(importlib.import_module(f"xdeepserve.bench.{name}").tell).parameters
        )


def test_papers_and_wall_stand_apart() -> None:
    """What both use is beside them, and uses neither."""
    for room, other in ("papers", "wall"), ("wall", "papers"):
        for path in (SRC / "bench" / room).glob("*.py"):
            assert f"xdeepserve.bench.{other}" not in path.read_text(), path
    for name in "report.py", "meanings.py":
        text = (SRC / "bench" / name).read_text()
        assert "xdeepserve.bench.papers" not in text
        assert "xdeepserve.bench.wall" not in text
