"""Bounds of the number of TEs, for the AutoScaler (`balance/auto_scaler.py`)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from xdeepserve.engine.deploy.policies import SCALING, Scaling
from xdeepserve.errors import InputError


class ScaleBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the number of TEs and of their load, and times between changes."""

    FEWEST: ClassVar[int] = 1  # that `least` may be

    least: Annotated[int, "TEs, at least"] = 1
    most: Annotated[int, "TEs, at most"] = 64
    low: Annotated[float, "a TE goes if the others then have at most this load"] = 0.4
    aim: Annotated[float, "load of a TE after others have come"] = 0.5
    high: Annotated[float, "load of a TE above which more TEs come"] = 0.8
    within: Annotated[float, "share of requests that are to keep their bounds of TTFT and TPOT"] = 0.9
    every_s: Annotated[float, "between two looks"] = 1.0
    up_s: Annotated[float, "so long load is high, or the level missed, before more TEs come"] = 2.0
    down_s: Annotated[float, "so long load is as low as it has to be before a TE goes"] = 60.0
    calm_s: Annotated[float, "after a change, before another"] = 10.0
    forget_s: Annotated[float, "so long it counts that the level was missed"] = 600.0
    policy: Annotated[Scaling, SCALING.meaning] = "load"

    def wrong(self) -> list[str]:
        """List every contradiction in the bounds."""
        found = []
        if not self.FEWEST <= self.least <= self.most <= 4096:
            found.append(f"scale: {self.FEWEST} <= least <= most <= 4096, found {self.least} and {self.most}")
        if not self.most >= 1:
            found.append(f"scale: most must be at least 1, found {self.most}")
        if not 0 < self.low <= self.aim < self.high <= 10:
            found.append(f"scale: 0 < low <= aim < high, found {self.low:g}, {self.aim:g}, {self.high:g}")
        if not 0 <= self.within <= 1:
            found.append(f"scale: within must lie in [0, 1], found {self.within:g}")
        if not 1e-5 <= self.every_s <= 1e6:
            found.append(f"scale: every_s must lie in [1e-5, 1e6], found {self.every_s:g}")
        if reason := SCALING.wrong(self.policy):
            found.append(f"scale: policy {self.policy} {reason}")
        for name in ("up_s", "down_s", "calm_s", "forget_s"):
            if not 0 <= getattr(self, name) <= 1e9:
                found.append(f"scale: {name} must be 0 or more, found {getattr(self, name):g}")
        return found

    def check(self) -> None:
        """Raise InputError with every contradiction in the bounds."""
        if wrong := self.wrong():
            raise InputError("; ".join(wrong))
