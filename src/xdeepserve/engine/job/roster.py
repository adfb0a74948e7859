"""List of the TEs to which a job executor gives requests, by what they can do."""

from __future__ import annotations

from collections.abc import Iterable

from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.te.te import TE
from xdeepserve.engine.te.te_plan import TEPlan


class Roster(list[TE]):
    """List of TEs, in the order in which they came."""

    def ready(self, *roles: Role) -> list[TE]:
        """List TEs of given roles that take new work."""
        return [te for te in self if te.life == "ready" and te.sizes.place.role in roles]

    @property
    def beginners(self) -> list[TE]:
        """List TEs for new requests; prefill TEs only if a decode TE takes new work."""
        return self.ready("both", "prefill") if self.ready("decode") else self.ready("both")

    def successors(self, te: TE) -> list[TE]:
        """List TEs able to continue a TE's sequences from their tokens: its own role first, else any that can
        begin."""
        able = [other for other in [*self.beginners, *self.ready("decode")] if other is not te]
        alike = [other for other in able if other.sizes.place.role == te.sizes.place.role]
        return alike or [other for other in able if other.sizes.place.role != "decode"]


def can_serve(tes: Iterable[TE | TEPlan]) -> bool:
    """Whether the given TEs could together serve a request."""
    roles = {te.sizes.place.role for te in tes}
    return "both" in roles or roles >= {"prefill", "decode"}


def ask_suspects(tes: Iterable[TE]) -> None:
    """Probe suspect TEs, because TEs without work show no sign of life by themselves."""
    for te in tes:
        if te.is_suspect:
            te.prober.ask_again()
