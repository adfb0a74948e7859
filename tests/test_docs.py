"""The documents name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
NAMED = re.compile(r"`((?:\w+/)+[\w.]*)`")  # a path of at least one folder, in backticks


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
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
