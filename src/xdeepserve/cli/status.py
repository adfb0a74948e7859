"""A status line on the terminal while a command works."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xdeepserve.engine.build import Progress

COMPILES = "the first run also compiles the kernels"


@contextlib.contextmanager
def working(text: str, note: str = COMPILES) -> Iterator[Progress]:
    """A status line on the terminal's stderr while work goes on; silent where stderr is no terminal.

    `note` says what to expect.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{text} ({note}) ...") as status:
        yield lambda done, total: status.update(f"{text}: {100 * done // max(total, 1)} % ...")
