"""Write the outputs of commands and scripts in README.md and `docs/` anew, as they are printed now.

    PYTHONPATH=. python tools/write_samples.py [PAGE ...]

Without names: all pages. What a page shows an output of is run, each command once, in a minute or two.
`tests/samples.py` says how outputs are marked; `tests/test_docs.py` compares them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.samples import PAGES, Sample, Started, run, samples_of, written


def printed_by(samples: list[Sample], folder: Path) -> dict[tuple[str, str], str]:
    """What each prints, by its server and text; a server is started once for all who ask it."""
    found: dict[tuple[str, str], str] = {}
    for server in sorted({each.server for each in samples}):
        mine = {(server, each.text): each for each in samples if each.server == server}
        if not server:
            found |= {key: run(sample, folder) for key, sample in mine.items()}
            continue
        with Started(server, folder) as started:
            asking = {key: sample for key, sample in mine.items() if not sample.is_endless}
            found |= {key: run(sample, folder, started.address) for key, sample in asking.items()}
            found |= dict.fromkeys(mine.keys() - asking.keys(), started.printed)
    return found


def main(names: list[str]) -> None:
    pages = [page for page in PAGES if not names or page.name in names or page.stem in names]
    samples = [each for page in pages for each in samples_of(page) if each.shown.strip()]
    with tempfile.TemporaryDirectory() as folder:
        found = printed_by(samples, Path(folder))
    for page in pages:
        text = before = page.read_text()
        for sample in reversed([each for each in samples if each.page == page]):
            assert sample.span is not None
            start, stop = sample.span
            text = text[:start] + written(sample.shown, found[sample.server, sample.text]) + text[stop:]
        if text != before:
            page.write_text(text)
            print(f"{page.name}: written")
    print(f"{len(found)} commands and scripts were run")


if __name__ == "__main__":
    main(sys.argv[1:])
