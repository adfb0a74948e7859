"""Write `docs/settings.md` from the structs of a deployment.

python tools/write_settings.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from xdeepserve.engine.deploy.settings import Setting, settings

FILE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

What `--set key=value` changes, in every command that builds a pod; a `.toml` file with the same keys is a
deployment of your own (`--deployment FILE.toml`). `xdeepserve settings [KEY]` prints the same, as does
`--help settings` behind such a command. A misspelt setting is answered with the nearest ones, and a wrong
value with what would work; in a file, a misspelt field or a value of a wrong type with its line. A
setting that has no effect where it is given is named in a note. This page is made by
`tools/write_settings.py`.

Three things belong to this computer and not to the pod, and none changes a bit. `XDEEPSERVE_THREADS` is the
default of `threads`, `XDEEPSERVE_INVARIANTS` that of `invariants`. `XDEEPSERVE_KERNELS` says by which
instructions INT8 and BF16 are multiplied: `amx` insists on the matrix unit of Intel's server CPUs, `vnni` on
AVX-512 VNNI without it, `portable` does without both and AVX-512 BF16; by default whatever is fastest is used
of what the CPU has and the system permits. """


UNLESS_SET = {"threads": "1", "invariants": "`false`"}


def page() -> str:
    """A table for each section, in the order of the structs."""
    sections: dict[str, list[Setting]] = {}
    for setting in settings():
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    return "\n".join([HEAD, *(_section(name, found) for name, found in sections.items())])


def _section(name: str, found: list[Setting]) -> str:
    lines = [
        f"## {f'`{name}`' if name else 'The pod'}",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for each in found:
        kind, meaning = (text.replace("|", "\\|") for text in (each.kind, each.meaning))
        lines.append(f"| `{each.key}` | {kind} | {_default(each)} | {meaning} |")
    return "\n".join([*lines, ""])


def _default(setting: Setting) -> str:
    if setting.key in UNLESS_SET:
        return UNLESS_SET[setting.key]  # whatever this computer's environment says
    return "" if setting.default is None else f"`{str(setting.default).lower()}`"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).write_text(page(), encoding="utf-8")
