"""Ways to experts on dies of their own: one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from xdeepserve import wings
from xdeepserve.comm.cost import CommCost
from xdeepserve.engine.deploy.sizes import WalkSizes
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.engine.ways.flow.clock import FlowClock
from xdeepserve.engine.ways.flow.real import Flows
from xdeepserve.engine.ways.routing import PlacedRouting, TimingConfig
from xdeepserve.engine.ways.services.real import Services
from xdeepserve.engine.ways.trampolines.clock import TrampolinesClock
from xdeepserve.engine.ways.trampolines.real import Trampolines

RealWay: TypeAlias = Trampolines | Services
ClockWay: TypeAlias = TrampolinesClock | FlowClock


class Way(NamedTuple):
    """Makers of a way: of its half with real bytes, which plans its buffers, and of its half with virtual
    time alone."""

    real: Callable[[Team, list[list[Tally]]], RealWay]
    clock: Callable[[Team, CommCost, TimingConfig, Sequence[PlacedRouting]], ClockWay]


def _over_cards(half: str) -> Callable[..., Any]:
    """Return the maker of the way over network cards, which a wing brings."""
    return lambda *args: wings.part(half)(*args)


WAYS: Final[Mapping[str, Way]] = {  # by the turns of a TE
    "away-and-back": Way(Trampolines, TrampolinesClock),
    "dataflow": Way(Flows, FlowClock),
    "services": Way(Services, FlowClock),
    "cards": Way(_over_cards("way over cards"), _over_cards("clock way over cards")),
}


def way_of(walk: WalkSizes) -> Way:
    """Return the way of a TE."""
    return WAYS["cards" if walk.carrier == "rdma" else walk.turns]
