"""Replay of a trace on the TEs of a cluster, time only; repeatable with other counts or choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from xdeepserve.engine.balance.heat_map import HeatMap
from xdeepserve.platform.bound_watch import BoundWatch
from xdeepserve.platform.cluster import (
    Cluster,
    FleetChange,
    PricedKind,
    fleet_tes,
    pool_of,
    scaler_of,
)
from xdeepserve.platform.fleet import Fleet, Predict
from xdeepserve.platform.fleet_scaling import ScaleEvent
from xdeepserve.platform.fleet_words import Decision, FleetTE, ServedRequest
from xdeepserve.platform.service_report import (
    Bounds,
    MissedBound,
    Outcome,
    ServiceReport,
    StoppedReplay,
    missed_bounds,
    report,
)
from xdeepserve.platform.traces import TracedRequest
from xdeepserve.prices.step_price import Progress

LATER_NS = 10**15  # when a TE that has had one request is idle again


class ClusterServed(NamedTuple):
    """Results of a replay: the TEs, requests in the order of their ends with their outcomes, the report,
    decisions if they were asked for, and events of TEs by time."""

    tes: list[FleetTE]
    served: list[ServedRequest]
    outcomes: list[Outcome]
    report: ServiceReport
    decisions: list[Decision]
    events: list[ScaleEvent]


class ClusterReplay:
    """Replays of the same requests on clusters of TEs of `kinds`."""

    def __init__(
        self,
        requests: Sequence[TracedRequest],
        kinds: Sequence[PricedKind],
        heat: HeatMap | None,
        predict: Predict,
        bounds: Bounds,
    ) -> None:
        self.requests, self._kinds, self._heat = requests, kinds, heat
        self._predict, self._bounds = predict, bounds

    def fleet(
        self,
        cluster: Cluster,
        decisions: list[Decision] | None = None,
        forced: Mapping[int, int] = MappingProxyType({}),
    ) -> tuple[Fleet, list[FleetChange]]:
        """Make the fleet of a cluster, without requests, and the scalers of its TEs and its pool."""
        stale_ns = round(1e6 * cluster.stale_ms)
        tes = fleet_tes(cluster, self._kinds)
        explain = None if decisions is None else decisions.append
        fleet = Fleet(tes, cluster.policy, self._heat, self._predict, stale_ns, explain, forced)
        changes = scaler_of(cluster, self._kinds, fleet, self._bounds), pool_of(cluster, fleet)
        return fleet, [each for each in changes if each is not None]

    def missed(self, cluster: Cluster, served: ClusterServed) -> list[MissedBound]:
        """Find the bounds that requests missed on a cluster of equal TEs, and what an idle TE could do."""
        one = msgspec.structs.replace(cluster, te=(msgspec.structs.replace(cluster.te[0], count=1),))
        block = self._kinds[0].limits.block

        def alone(number: int) -> Outcome:
            """Serve a request on an idle TE, whose cache has as much of the prompt as there was."""
            late = served.served[number]
            request, cached = self.requests[late.number], late.num_cached
            before = request._replace(
                at_ns=0, input_length=cached, output_length=1, blocks=request.blocks[: cached // block]
            )
            run = [before] * (cached > 0) + [request._replace(at_ns=LATER_NS)]
            return self.fleet(one)[0].run(run)[-1].outcome()

        return missed_bounds(served.outcomes, self._bounds, alone)

    def serve(self, cluster: Cluster, explains: bool, progress: Progress) -> ClusterServed:
        """Serve all requests on a cluster, and report."""
        found = self.tried(cluster, explains, progress, 0.0)
        assert isinstance(found, ClusterServed)
        return found

    def tried(
        self, cluster: Cluster, explains: bool, progress: Progress, least: float
    ) -> ClusterServed | StoppedReplay:
        """Serve all requests, or stop when fewer than the share `least` of them can keep their bounds."""
        decisions: list[Decision] = []
        fleet, changes = self.fleet(cluster, decisions if explains else None)
        watch = BoundWatch(fleet, self.requests, self._bounds, least)
        outcomes = [each.outcome() for each in fleet.run(self.requests, progress)]
        if watch.stopped is not None:
            return watch.stopped
        found = report(outcomes, [te.name for te in fleet.tes], self._bounds, fleet.busy_ns())
        events = sorted((event for each in changes for event in each.events), key=lambda event: event.at_ns)
        return ClusterServed(fleet.tes, fleet.served, outcomes, found, decisions, events)
