"""The papers' mechanisms: a preset uses each of them, or a row says why none does."""

import subprocess
import sys
from pathlib import Path

import pytest
from tools.write_mechanisms import MECHANISMS, MODEL, SEEN, Mechanism, presets_with

from tests import evidence
from xdeepserve.engine.deploy.settings import settings
from xdeepserve.model.presets import resolve_model

ROOT = Path(__file__).parent.parent
CONFIG = resolve_model(MODEL).config


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    file = tmp_path / "mechanisms.md"
    subprocess.run([sys.executable, ROOT / "tools" / "write_mechanisms.py", file], check=True)
    assert file.read_text() == (ROOT / "docs" / "mechanisms.md").read_text(), "run tools/write_mechanisms.py"


@pytest.mark.parametrize("row", MECHANISMS, ids=[row.name for row in MECHANISMS])
def test_a_preset_uses_each_mechanism_or_the_row_says_why_none_does(row: Mechanism) -> None:
    found = presets_with(row, CONFIG)
    assert bool(found) != bool(row.why), found
    assert row.key.startswith("te.") or row.key in {setting.key for setting in settings()}
    assert (ROOT / "src" / "xdeepserve" / row.file).is_file()
    assert (ROOT / "tests" / row.test).is_file()
    assert len({each.name for each in MECHANISMS}) == len(MECHANISMS)


def test_what_is_said_to_be_seen_is_looked_for_in_a_run_of_a_preset_that_has_it() -> None:
    rows = {row.name: row for row in MECHANISMS}
    assert evidence.SEEN.keys() == SEEN.keys() <= rows.keys()
    for name, seen in evidence.SEEN.items():
        assert rows[name].why or seen.asked.preset in presets_with(rows[name], CONFIG), name


@pytest.mark.always
@pytest.mark.parametrize("name", evidence.SEEN)
def test_a_run_shows_the_mechanism_and_one_without_it_does_not(name: str) -> None:
    asked, look, without = evidence.SEEN[name]
    assert look(evidence.ran(asked))
    assert not look(evidence.ran(without))


def test_a_mechanism_that_no_preset_switches_on_is_found_out() -> None:
    """A default where it is idle, and a value that no preset has, are no uses."""
    row = MECHANISMS[0]
    assert "monolithic" not in presets_with(row, CONFIG)  # it exchanges nothing
    assert presets_with(row._replace(setting="mtp=2"), CONFIG) == []
