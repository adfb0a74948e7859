"""Table of `xdeepserve eval`: a row for each figure, a column for each recipe, as CloudMatrix384's Table
5."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from xdeepserve.corpus import EXAMINED
from xdeepserve.evals.run import DRAFTING, DomainResult, Result


def rows(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Return the table's rows: (name, a text for each result)."""
    table = [
        ("perplexity, all domains", [f"{result.perplexity:.4f}" for result in results]),
        ("top-1 agreement, all domains", [_percent(result.agreement) for result in results]),
    ]
    for field, name in (
        ("weights", "rounded weights"),
        ("activations", "rounded activations"),
        ("both", "both"),
        ("original", "all layers up to it"),
    ):
        if any(result.errors for result in results):
            errors = [f"{result.errors[field] * 1e6:.1f}" if result.errors else "-" for result in results]
            table.append((f"error of outputs from {name}, x 1e-6", errors))
    figures: tuple[tuple[str, Callable[[DomainResult], str | None]], ...] = (
        ("perplexity", lambda d: f"{d.perplexity:.4f}"),
        ("right answers", lambda d: _percent(d.score)),
        ("valid JSON", lambda d: _percent(d.valid_json)),
        ("MTP acceptance", lambda d: _percent(d.acceptance)),
        *((f"tokens per step, {way}", partial(_tokens_per_step, way=way)) for way in DRAFTING),
    )
    for number, domain in enumerate(results[0].domains if results else ()):
        for name, figure in figures:
            values = [figure(result.domains[number]) for result in results]
            if any(value not in (None, "-") for value in values):
                table.append((f"{domain.domain}: {name}", [value or "-" for value in values]))
    return table


def print_table(model: str, results: Sequence[Result]) -> None:
    """Print the table for people."""
    from rich.console import Console
    from rich.table import Table

    domains = results[0].domains
    text = f"held-out text, {domains[0].num_samples} samples a domain"
    if domains[0].domain not in EXAMINED:
        text = f"{domains[0].num_samples} samples of {domains[0].domain}"
    table = Table(title=f"{model} on {text}", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.title, justify="right")
    for name, values in rows(results):
        table.add_row(name, *values)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _tokens_per_step(domain: DomainResult, way: str) -> str | None:
    found = (domain.tokens_per_step or {}).get(way)
    return None if found is None else f"{found:.3f}"
