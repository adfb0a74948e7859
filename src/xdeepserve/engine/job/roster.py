"""The TEs that a job executor gives requests to, and who of them can do what."""

from __future__ import annotations

from collections.abc import Iterable

from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.te.te import TE
from xdeepserve.engine.te.te_plan import TEPlan


class Roster(list[TE]):
    """In the order in which they came."""

    def ready(self, *roles: Role) -> list[TE]:
        """Those of these roles that take new work."""
        return [te for te in self if te.life == "ready" and te.sizes.place.role in roles]

    @property
    def beginners(self) -> list[TE]:
        """Those that new requests may go to; without decode nobody prefills."""
        return self.ready("both", "prefill") if self.ready("decode") else self.ready("both")

    def successors(self, te: TE) -> list[TE]:
        """Who goes on, from the tokens, with what a TE had: others of its role, or else whoever can begin."""
        able = [other for other in [*self.beginners, *self.ready("decode")] if other is not te]
        alike = [other for other in able if other.sizes.place.role == te.sizes.place.role]
        return alike or [other for other in able if other.sizes.place.role != "decode"]


def can_serve(tes: Iterable[TE | TEPlan]) -> bool:
    """Whether these could serve a request between them."""
    roles = {te.sizes.place.role for te in tes}
    return "both" in roles or roles >= {"prefill", "decode"}


def ask_suspects(tes: Iterable[TE]) -> None:
    """TEs that get no work are not heard of by themselves: ask those that were silent."""
    for te in tes:
        if te.is_suspect:
            te.prober.ask_again()
