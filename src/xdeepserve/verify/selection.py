"""Which rows of the matrix a model allows, and why not the others."""

from __future__ import annotations

import msgspec

from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import PRESETS, resolve
from xdeepserve.errors import DeploymentError
from xdeepserve.model.config import ModelConfig
from xdeepserve.verify.case import Case, Subject
from xdeepserve.verify.ways import all_cases


class LeftOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows of a deployment that a model does not allow; without `variants`, it allows none."""

    deployment: str
    reason: str
    variants: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = f" without {'; '.join(self.variants)}" if self.variants else ""
        return f"{self.deployment}{rows}: {self.reason}"


def cases(config: ModelConfig, subject: Subject = "plain") -> list[Case]:
    """Every row of a matrix that this model allows."""
    return [case for case in _all(config, subject) if _reason_against(case, config) is None]


def left_out(config: ModelConfig, subject: Subject = "plain") -> list[LeftOut]:
    """Deployments and single rows that there would be, but for this model, and why not."""
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
    """Why a case cannot be built. Cases are fixed, so it is a reason of the model."""
    try:
        fit(resolve(case.deployment, case.overrides), config)
    except DeploymentError as error:
        return "not for this model: " + str(error).removeprefix(f"deployment {case.deployment}: ")
    return None
