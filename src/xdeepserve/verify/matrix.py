"""Run the matrix: compare each row's digest with the NumPy reference's, and print the table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec

from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import PRESETS, resolve
from xdeepserve.errors import DeploymentError, InputError, meant
from xdeepserve.history import Told
from xdeepserve.llm import digest
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.weights import RECIPES, Recipe
from xdeepserve.verify.case import Case, Subject
from xdeepserve.verify.forms import is_spelt
from xdeepserve.verify.outputs import SECOND_MODEL, reference_outputs, run_case, second_alone
from xdeepserve.verify.ways import all_cases

# Which rows of the matrix a model allows, and why not the others.


class LeftOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows of a deployment ruled out by the model, with the reason.

    Without `variants`, the whole deployment is out.
    """

    deployment: str
    reason: str
    variants: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = f" without {'; '.join(self.variants)}" if self.variants else ""
        return f"{self.deployment}{rows}: {self.reason}"


def cases(config: ModelConfig, subject: Subject = "plain") -> list[Case]:
    """List every row of a matrix that the model allows."""
    return [case for case in _all(config, subject) if _reason_against(case, config) is None]


def left_out(config: ModelConfig, subject: Subject = "plain") -> list[LeftOut]:
    """List the deployments and single rows that the model does not allow, with the reasons."""
    present = {case.deployment for case in cases(config, subject)}
    found = [
        LeftOut(name, _reason_against(Case(name, ""), config) or "not for this model: no row fits it")
        for name in PRESETS
        if name not in present
    ]
    variants: dict[tuple[str, str], list[str]] = {}
    for case in _all(config, subject):
        reason = _reason_against(case, config)
        if reason is not None and case.deployment in present:
            variants.setdefault((case.deployment, reason), []).append(case.variant)
    return found + [LeftOut(name, reason, tuple(rows)) for (name, reason), rows in variants.items()]


def _all(config: ModelConfig, subject: Subject) -> list[Case]:
    return [case for case in all_cases(config) if case.subject == subject]


def _reason_against(case: Case, config: ModelConfig) -> str | None:
    """Return why the model does not allow a case, or None.

    Cases are fixed, so the reason is always the model's.
    """
    try:
        fit(resolve(case.deployment, case.overrides), config)
    except DeploymentError as error:
        return "not for this model: " + str(error).removeprefix(f"deployment {case.deployment}: ")
    return None


class MatrixRow(msgspec.Struct, frozen=True, omit_defaults=True, rename={"is_equal": "equal"}):
    """A line of the matrix: a case, its digest, and whether the digest equals the reference's."""

    precision: str
    deployment: str
    variant: str
    digest: str
    is_equal: bool
    missing: str = ""  # what was to happen on the way, and did not

    @property
    def holds(self) -> bool:
        """Whether the bits are equal and every event that the case asks for has happened."""
        return self.is_equal and not self.missing

    def __str__(self) -> str:
        verdict = "equal" if self.is_equal else "DIFFERENT"
        but = f"{', but' if self.is_equal else ':'} {self.missing}" if self.missing else ""
        return f"{self.precision} {self.deployment}, {self.variant}: {verdict}{but}"


def verify(
    model: str | Checkpoint,
    deployments: Sequence[str] | None = None,
    report: Callable[[MatrixRow, int, int], None] = lambda row, done, total: None,
    subject: Subject = "plain",
    begins: Callable[[str, int, int], None] = lambda case, done, total: None,
    *,
    precision: Recipe | None = None,
    is_quick: bool = False,
) -> list[MatrixRow]:
    """Run the matrix for `deployments` (default all) in one precision, or in all.

    `subject` "structured": answers are JSON of a schema, which needs a model with a tokenizer. `subject`
    "int8-combine": expert outputs come back in INT8, which needs the precision int8. With `is_quick`, each
    deployment has one row, the first with the fewest settings. `begins` gets the name of each case as it
    begins, `report` gets each row as it ends; both also get the number of rows done and in all. InputError
    for an unknown name.
    """
    checkpoint = model if isinstance(model, Checkpoint) else resolve_model(model)
    for name in deployments or ():
        if name not in PRESETS:
            known = ", ".join(PRESETS)
            raise DeploymentError(f"unknown deployment '{name}'{meant(name, PRESETS)}: known are {known}")
    config = checkpoint.config
    if subject == "structured" and not is_spelt(checkpoint):
        raise InputError(f"{checkpoint.directory.name} has no tokenizer, which answers with a form need")
    every = cases(config, subject)
    chosen = [case for case in every if deployments is None or case.deployment in deployments]
    for without in left_out(config, subject):
        if without.deployment in (deployments or ()) and not without.variants:
            raise DeploymentError(f"deployment {without}")
    rows: list[MatrixRow] = []
    if is_quick:
        plainest: dict[str, Case] = {}
        for case in sorted(chosen, key=lambda case: len(case.overrides)):
            plainest.setdefault(case.deployment, case)
        chosen = [case for case in chosen if case is plainest[case.deployment]]
    possible: tuple[Recipe, ...] = ("int8",) if subject == "int8-combine" else RECIPES
    recipes = [recipe for recipe in possible if precision in (None, recipe)]
    if not recipes:
        raise InputError(f"combine=int8 is for int8, not for {precision}")
    total = len(recipes) * (len(chosen) + 1)
    for recipe in recipes:
        expected = ""
        for case in chosen:
            begins(f"{recipe} {case.deployment}, {case.variant}", len(rows), total)
            told, second = run_case(checkpoint, recipe, case)
            if not expected:
                expected = digest(reference_outputs(checkpoint, recipe, told.outputs, subject))
                rows.append(MatrixRow(recipe, "reference", "NumPy, no batch, no cache", expected, True))
            rows.append(_row(recipe, case, told, second, expected))
            report(rows[-1], len(rows), total)
    return rows


def _row(recipe: Recipe, case: Case, told: Told, second: str | None, expected: str) -> MatrixRow:
    """Make the line of a case: compare its bits with the reference's, its second model's with that model
    alone, and its counts with what the case asks for."""
    value, stats = told.digest, told.stats
    is_equal, missing = value == expected, ""
    alive = [te for te in stats.health if te.life != "lost"]
    num_masked = sum(len(te.lost_servers) for te in alive)
    num_missed = sum(len(te.lost_groups) for te in alive)
    if second is not None and second != second_alone():
        is_equal, missing = False, f"{SECOND_MODEL} beside it does not answer as it does alone"
    elif stats.num_reconfigurations < case.reconfigurations:
        missing = f"{stats.num_reconfigurations} of {case.reconfigurations} reconfigurations"
    elif case.pool is not None and not stats.pool_hits:
        missing = "nothing came from the memory pool"
    elif case.evicts and not stats.pool.get("dram evictions"):
        missing = "nothing was evicted from the memory pool"
    elif num_masked != (num_out := case.servers_lost - case.servers_back):
        missing = f"the monitor holds {num_masked} servers for lost, not {num_out}"
    elif num_missed != case.clients_lost:
        missing = f"{num_missed} clients were lost, not {case.clients_lost}"
    elif len(told.lost) != (losses := case.num_lost - case.servers_lost - case.clients_lost):
        missing = f"{len(told.lost)} TEs were lost with {losses} dies"
    elif stats.num_recoveries["3"] < case.rollbacks:
        missing = f"steps were run again {stats.num_recoveries['3']} of {case.rollbacks} times"
    return MatrixRow(recipe, case.deployment, case.variant, value, is_equal, missing)


def print_matrix(
    model: str, rows: Sequence[MatrixRow], without: Sequence[LeftOut], is_whole: bool = True
) -> None:
    """Print the matrix as a table, with the rows left out; only a whole matrix gets a verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bit-exactness of {model}", title_justify="left")
    for column in ("precision", "deployment", "variant", "digest", "equal"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(
            row.precision, row.deployment, row.variant, row.digest[7:23], "yes" if row.is_equal else "NO"
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    for each in without:
        print(each)
    for row in rows:
        if row.missing:
            print(f"not shown: {row}")
    different = sum(not row.is_equal for row in rows)
    if not is_whole:
        print(f"interrupted after {len(rows)} rows, of which {different} differ")
        return
    print(f"bit-exact: {'yes' if not different else f'no, {different} of {len(rows)} rows differ'}")
