"""New replicas for a TE in four phases, while its steps go on (xDeepServe 4.5, step 3).

    1 prefetch   bring the experts' weights from storage to the memory of the hosts
    2 disable    send every die a map without the redundant slots that will change, before the same step
    3 load       copy experts from the hosts to the slots, beside the steps, when all steps with the old map
                 have ended
    4 restore    send every die the new map before the same step, when all slots are loaded

Commands and plans reach a die in the order in which they are sent. So a map that goes to all dies ahead of
step n is in force for step n on each of them, and for no earlier step. A slot is loaded only between two
steps: the last that could use its old expert, and the first that may use its new one. In dataflow mode each
DP group has steps of its own, and may change maps before another one does. There the steps to wait for are
those that run when the map without the slots is sent.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from xdeepserve.engine.balance.eplb import Counts, Holdings
from xdeepserve.engine.balance.trigger import EPLBTrigger, Skew
from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.replicas import NOTHING, RedundantSlots, first_map, replica_tables
from xdeepserve.engine.messages import (
    CollectLoad,
    ExpertsLoaded,
    LoadCollected,
    LoadExperts,
    SetExpertMap,
    StepFailed,
)
from xdeepserve.engine.numbers import DieNumber
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import Recipe, TensorSource, iter_expert, weight_specs

Phase = Literal["idle", "prefetching", "prefetched", "draining", "loading", "loaded"]
SPANS = {  # what a trace calls the phases, each until the moment when the next one begins
    "prefetching": "1 prefetch",
    "prefetched": "2 disable, with the next step",
    "draining": "2 disable, until older steps have ended",
    "loading": "3 load",
    "loaded": "4 restore, with the next step",
}


class Prefetched(msgspec.Struct, frozen=True):
    """Reports when the weights of all new replicas are in the hosts' memories."""


Report = LoadCollected | ExpertsLoaded | Prefetched


class Change(NamedTuple):
    """Change of a redundant slot to another expert, or to none."""

    layer: int  # among those with experts
    holder: int  # among the dies with routed experts
    slot: int
    expert: int  # or NOTHING


class ExpertStorage:
    """Reads routed experts of the layers that a TE uses from the checkpoint, expert by expert, in the form in
    which dies hold them. Replicas come from there."""

    def __init__(self, source: TensorSource, recipe: Recipe, experts: ExpertSizes) -> None:
        self.config: ModelConfig = source.config
        self._source, self._recipe = source, recipe
        self.layers = list(experts.layers)  # those with experts
        self._specs = weight_specs(source.config, recipe, 1)

    def read(self, number: int, expert: int) -> list[Array]:
        """Return the packed arrays of an expert of MoE layer `number`, in the order of a slot's arrays."""
        arrays = {
            name: self._specs[name].pack(array)
            for name, _, array in iter_expert(self._source, self._recipe, self.layers[number], expert)
        }
        return [arrays[name] for name in self._specs if name in arrays]


class Reconfiguration:
    """Host's part of EPLB for a TE: collects the load, and carries out the trigger's decisions.

    `gates` are the memories of the dies that route tokens. `holders` are the memories of the dies with routed
    experts. Each comes with its die; those with a number that
    `is_out` get no replicas. Dies' reports arrive through `take`; `reports` is the queue that they
    come from. `on_change` is called for each change that is in force, with the number of its slots.
    """

    def __init__(
        self,
        pod: Pod,
        experts: ExpertSizes,
        gates: Sequence[tuple[int, DieMemory]],
        holders: Sequence[tuple[int, DieMemory | ExpertMemory]],
        storage: ExpertStorage,
        trigger: EPLBTrigger,
        reports: Queue[msgspec.Struct],
        is_out: Callable[[int], bool],
        on_change: Callable[[int], None],
    ) -> None:
        self._on_change = on_change
        self.pod, self.experts, self.gates, self.holders = pod, experts, gates, list(holders)
        self._is_out = is_out
        self.storage, self.trigger, self._reports = storage, trigger, reports
        self._free_slots = experts.free_slots
        self.phy2log = first_map(experts)  # in force for the latest step
        self._target: list[list[int]] = []  # after this reconfiguration
        self._changes: list[Change] = []
        self.phase: Phase = "idle"
        self._since_ns = 0
        self.num_done = 0  # reconfigurations
        self._prefetch: asyncio.Task[None] | None = None
        self._running: set[Hashable] = set()  # steps
        self._with_slots: set[Hashable] = set()  # of these, those that may still use the slots that change
        self._num_waiting = 0  # dies whose load has not come
        self._loading: set[int] = set()  # dies
        self._slice_ns = max(1, experts.balance_interval_ns // experts.balance_slices)
        self._next_slice_ns: int | None = None

    # ---- between steps ------------------------------------------------------------------------------------

    def before_step(self, step: Hashable) -> None:
        """Prepare for the next step, just before its plans go to the dies.

        The step belongs to all DP groups, or to one where each has steps of its own.
        """
        self._collect()
        if self.phase == "prefetched":  # phase 2
            changed = {(change.layer, self._physical(change)) for change in self._changes}
            self.set_map(
                [
                    [NOTHING if (layer, physical) in changed else e for physical, e in enumerate(row)]
                    for layer, row in enumerate(self.phy2log)
                ]
            )
            self._with_slots = set(self._running)
            self._enter("draining")
            self.load_if_drained()
        elif self.phase == "loaded":  # phase 4
            self.set_map(self._target)
            self.num_done += 1
            self._on_change(len(self._changes))
            self._enter("idle")
        self._running.add(step)

    def after_step(self, step: Hashable) -> None:
        """Note the end of a step on all its dies."""
        self._running.discard(step)
        self._with_slots.discard(step)
        self.load_if_drained()

    def take(self, report: Report) -> None:
        """Act on a report of a die or of the prefetch."""
        match report:
            case LoadCollected():
                self._num_waiting -= 1
                if not self._num_waiting:
                    self.trigger.add_slice(self.collected())
                    self._decide()
            case Prefetched():
                self._enter("prefetched")
            case ExpertsLoaded(die=die) if die in self._loading:
                self._loaded(die)

    def lose_slots(self, die: int) -> None:
        """Forget the contents of a die's redundant slots, between steps, because they are lost.

        No token goes there until new replicas have been loaded. Replicas that the load under way has brought,
        or may have brought, are not used.
        """
        holder = next(holder for holder, (each, _) in enumerate(self.holders) if each == die)
        self._lose_slots_of(holder)

    def _lose_slots_of(self, holder: int) -> None:
        coming = {(each.layer, self._physical(each)) for each in self._changes}
        if self.phase in ("loading", "loaded"):  # what has been loaded so far may be lost with the slots
            coming = set()
        for physical in self._free_slots[holder]:
            for layer, row in enumerate(self.phy2log):
                row[physical] = NOTHING
                if self._target and (layer, physical) not in coming:
                    self._target[layer][physical] = NOTHING
        self.set_map(self.phy2log)

    def _loaded(self, die: int) -> None:
        self._loading.discard(die)
        if self.phase == "loading" and not self._loading:
            self._enter("loaded")

    def leave_out(self, holder: int) -> None:
        """Take the replicas from a holder that is out now, at any moment.

        Tokens that were routed to its slots go to a primary. When it, or another die in its place, is no
        longer out, its redundant slots are empty.
        """
        if holder >= len(self.holders):
            return
        self._changes = [change for change in self._changes if change.holder != holder]
        self._lose_slots_of(holder)
        self._loaded(self.holders[holder][0])

    def replace(self, holder: int, die: int, mem: ExpertMemory) -> None:
        """Replace the die of a holder by another die."""
        if holder < len(self.holders):
            self.holders[holder] = die, mem

    def stop(self) -> None:
        """Cancel the prefetch under way, because the TE ends."""
        if self._prefetch is not None:
            self._prefetch.cancel()

    # ---- load ---------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Ask all dies for load counts when a time slice has ended."""
        now = self.pod.clock.now
        if self._next_slice_ns is None:
            self._next_slice_ns = now + self._slice_ns
        if not self.experts.balance_interval_ns or now < self._next_slice_ns or self._num_waiting:
            return
        self._next_slice_ns = now + self._slice_ns
        self._num_waiting = len(self.gates)
        for die, _ in self.gates:
            self.pod.dies[die].put(CollectLoad())

    def collected(self) -> Counts:
        """Sum the load [layers, E] over all dies' last reports."""
        parts = [mem.replicas.reported for _, mem in self.gates if mem.replicas is not None]
        return np.sum(parts, axis=0, dtype=np.int64)

    @property
    def holdings(self) -> list[Holdings]:
        """Experts in the redundant slots in use, by layer and die."""
        made = []
        for row in self.phy2log:
            held = [self._redundant(row, holder) for holder in range(len(self.holders))]
            made.append([[e for e in slots if e != NOTHING] for slots in held])
        return made

    @property
    def layers(self) -> list[int]:
        """Indices of the model's layers with experts."""
        return self.storage.layers

    @property
    def skews(self) -> list[Skew]:
        """Skew of each layer's load in the latest time slice."""
        return self.trigger.skews(self.holdings)

    def _redundant(self, row: Sequence[int], holder: int) -> Sequence[int]:
        """Return a holder's redundant slots from a layer's row of phy2log."""
        slots = self._free_slots[holder]
        return row[slots.start : slots.stop]

    def _physical(self, change: Change) -> int:
        return self._free_slots[change.holder][change.slot]

    def _decide(self) -> None:
        """Start a reconfiguration at the end of an interval, if the trigger asks for one.

        Nothing happens while new replicas are on their way.
        """
        if self.phase != "idle" or not self.trigger.is_due:
            return
        target = self.trigger.decide([[sorted(h) for h in held] for held in self.holdings])
        if target is not None:
            self._begin(target)

    # ---- the phases ---------------------------------------------------------------------------------------

    def _begin(self, target: Sequence[Holdings]) -> None:
        """Begin phase 1: list the slots to change, and start the prefetch.

        An expert that stays on a die stays in its slot.
        """
        self._changes = []
        for layer, (row, wanted_by_die) in enumerate(zip(self.phy2log, target, strict=True)):
            for holder, planned in enumerate(wanted_by_die):
                held, wanted = self._redundant(row, holder), [] if self._is_out(holder) else planned
                new = [e for e in wanted if e not in held]
                for slot, expert in enumerate(held):
                    if expert not in wanted:
                        expert_then = new.pop(0) if new else NOTHING
                        if expert_then != expert:
                            self._changes.append(Change(layer, holder, slot, expert_then))
        self._target = [list(row) for row in self.phy2log]
        for change in self._changes:
            self._target[change.layer][self._physical(change)] = change.expert
        self._enter("prefetching")
        self._prefetch = self.pod.clock.detach(self._fetch(), "prefetch of experts", self._fail)

    @property
    def loads(self) -> list[Change]:
        """Changes of slots to an expert; all other changes only empty a slot."""
        return [change for change in self._changes if change.expert != NOTHING]

    async def _fetch(self) -> None:
        """Fetch the new experts' weights from storage to the hosts' memories.

        They come over the VPC card of each server, all servers side by side.
        """
        pieces = Counter[int]()
        for change in self.loads:
            for address, nbytes in self.redundant_slots(change.holder).staged(change.layer, change.slot):
                pieces[address.node] += nbytes
        clock, spec, end = self.pod.clock, self.pod.spec, self.pod.clock.now
        for node, nbytes in sorted(pieces.items()):
            took = spec.vpc_startup.value + nbytes / spec.vpc_bandwidth.value
            arrived = clock.now + round(1e9 * took)
            self.pod.trace.span(node, "VPC", "prefetch experts", clock.now, arrived)
            end = max(end, arrived)
        await clock.sleep_until(end)
        for layer, changes in groupby(self.loads, key=lambda change: change.layer):
            read = functools.cache(functools.partial(self.storage.read, layer))  # once for all replicas
            for change in changes:
                arrays = functools.partial(read, change.expert)
                self.redundant_slots(change.holder).stage(self.pod.memories, layer, change.slot, arrays)
                await asyncio.sleep(0)  # no virtual time, but a turn for the front end
        self._reports.put(Prefetched())

    def _fail(self, error: Exception) -> None:
        self._reports.put(StepFailed(DieNumber(self.holders[0][0]), error))

    def redundant_slots(self, holder: int) -> RedundantSlots:
        """Return the redundant slots of a holder; it must have some."""
        redundant = self.holders[holder][1].redundant
        assert redundant is not None
        return redundant

    def set_map(self, phy2log: list[list[int]]) -> None:
        """Send all dies the same map of replicas, before the same step (phases 2 and 4)."""
        self.phy2log = phy2log
        tables = replica_tables(self.storage.config, self.experts, phy2log)
        for die, _ in self.gates:
            self.pod.dies[die].put(SetExpertMap(phy2log, *tables))

    def load_if_drained(self) -> None:
        """Have dies load new experts as soon as no step can use their slots (phase 3)."""
        if self.phase != "draining" or self._with_slots:
            return
        self._enter("loading")
        by_die: dict[int, list[tuple[int, int, int]]] = {}
        for change in self.loads:
            die = self.holders[change.holder][0]
            by_die.setdefault(die, []).append((change.layer, change.slot, change.expert))
        self._loading = set(by_die)
        for die, loads in by_die.items():
            self.pod.dies[die].put(LoadExperts(loads))
        if not by_die:  # slots were only emptied
            self._enter("loaded")

    def _enter(self, phase: Phase) -> None:
        now, host = self.pod.clock.now, self.pod.topology.server_of(self.gates[0][0])
        if self.phase in SPANS:
            node = self.pod.topology.host(host)
            self.pod.trace.span(node, "EPLB", SPANS[self.phase], self._since_ns, now)
        self.phase, self._since_ns = phase, now
