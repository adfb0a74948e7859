"""`xdeepserve settings`: list the settings that --set changes."""

from __future__ import annotations

import argparse

from xdeepserve.cli.options import Parser


def add_options(parser: Parser) -> None:
    """Add the option: a key or section; by default all."""
    parser.add_argument("key", nargs="?", metavar="KEY", help="only this one, or those of this section")


def run(args: argparse.Namespace) -> int:
    """Print keys with meaning, type and default."""
    from xdeepserve.engine.deploy.settings import help_text

    print(help_text(args.key))
    return 0
