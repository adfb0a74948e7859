"""Loads weights to the dies of TEs: before the clock starts, or in virtual time while others serve.

    storage   from the object store with the checkpoint, over the VPC card of each server (CloudMatrix 5.4.3)
    host      from the page cache of servers that have read it before, over UB by the dies' DMA
    peer      from a TE of the same shape: die to die over UB, all dies at once, along a chain (npu_fork.py)
    pool      from the memory pool, if there is one, and from storage by way of it (CloudMatrix 4.4.3)

The bytes are the same from every source (`weight_digests.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.npu_fork import BrokenForkError, Fork, copy_ns
from xdeepserve.engine.te.reports import TEReport
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import DeploymentError, HardwareError, LostDieError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.pages import SharedPages, prefer_huge_pages
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.sharding import WHOLE
from xdeepserve.model.weights import Recipe, Store, fill, is_routed, iter_weights, weight_specs

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Source = Literal["auto", "storage", "host", "peer", "pool"]
SOURCES: tuple[Source, ...] = ("auto", "storage", "host", "peer", "pool")
Holder = DieMemory | ExpertMemory


class PoolSource(Protocol):
    """Weights of a TE in the memory pool (ems/pool_weights.py)."""

    @property
    def is_complete(self) -> bool:
        """Whether the pool has all of the weights."""

    @property
    def share(self) -> float:
        """Share of the weights loaded so far, 0 to 1."""

    async def load(self) -> None:
        """Load the weights from the pool to the dies."""


def read_weights(tes: Sequence[TEPlan]) -> Iterator[tuple[int, int]]:
    """Read the checkpoint into the memories of TEs of the same model, array by array.

    Yields bytes done and bytes in all.
    """
    first, stores = tes[0], []
    for te in tes:
        for _, mem in te.all_memories:
            shard = mem.shard if isinstance(mem, DieMemory) else WHOLE
            stores.append(Store(mem.weights(), mem.held, shard))
    config, recipe, sizes = first.config, first.recipe, first.sizes
    specs = weight_specs(config, recipe, sizes.steps.max_model_len, num_mtp=sizes.steps.num_mtp_layers)
    total, done = sum(spec.prepared_nbytes for spec in specs.values()), 0
    weights = iter_weights(first.checkpoint, recipe, sizes.steps.max_model_len, sizes.steps.num_mtp_layers)
    if len(stores) == 1:
        prefer_huge_pages(list(stores[0].arrays.values()))
    # What several dies hold is in this computer's memory once (hw/pages.py).
    place = SharedPages().place
    for nbytes in fill(stores, weights, lambda name, array: specs[name].pack(array), place):
        done += nbytes
        yield done, total


def read_experts(checkpoint: Checkpoint, recipe: Recipe, mem: ExpertMemory) -> None:
    """Read the weights of an expert die from the checkpoint, and no others."""
    store, num_mtp = Store(mem.weights(), mem.held, WHOLE), mem.placed.num_mtp_layers
    specs = weight_specs(mem.config, recipe, 1, num_mtp=num_mtp)
    weights = iter_weights(checkpoint, recipe, 1, num_mtp, set(store.arrays))
    for _ in fill([store], weights, lambda name, array: specs[name].pack(array)):
        pass


class Piece(NamedTuple):
    """Array of a die's weights that other dies may hold alike: its name, and which part of it."""

    name: str
    experts: tuple[int, ...]
    shard: object


def load_ns(te: TEPlan, source: Source) -> int:
    """Return the virtual time in ns until all dies of a TE have loaded their weights side by side."""
    topology = te.pod.topology
    if source != "storage":
        return copy_ns(te.spec, most_nbytes(te))
    of_server: dict[int, list[tuple[int, Holder]]] = {}
    for die, mem in te.all_memories:
        of_server.setdefault(topology.server_of(die), []).append((die, mem))
    return _storage_ns(te, [sum(distinct_pieces(each).values()) for each in of_server.values()])


def most_nbytes(te: TEPlan) -> int:
    """Return the bytes of weights on the die with most of them."""
    return max(sum(nbytes for _, nbytes in own_arrays(mem)) for _, mem in te.all_memories)


def distinct_pieces(memories: Sequence[tuple[int, Holder]]) -> dict[Piece, int]:
    """Return the distinct pieces of weights on these dies, with their bytes."""
    pieces: dict[Piece, int] = {}
    for _, mem in memories:
        shard = mem.shard if isinstance(mem, DieMemory) else WHOLE
        for name, nbytes in own_arrays(mem):
            experts = tuple(mem.held) if is_routed(name) else ()
            pieces[Piece(name, experts, shard.of(name) if shard is not WHOLE else WHOLE)] = nbytes
    return pieces


def _storage_ns(te: TEPlan, sums: Sequence[int]) -> int:
    """Return the virtual time in ns to read weights from storage; `sums` has the bytes of each server."""
    spec = te.spec
    storage, card = sum(sums) / spec.storage_bandwidth.value, max(sums) / spec.vpc_bandwidth.value
    # Read, sent and stored piece by piece: the slowest of the three is what takes the time.
    return math.ceil(1e9 * (spec.vpc_startup.value + max(storage, card))) + spec.startup_ns("dma")


async def read_again(
    te: TEPlan, memories: Sequence[tuple[int, Holder]], lost: Mapping[int, Collection[str]]
) -> None:
    """Read lost arrays of weights again from storage, in virtual time; `lost` names them by die."""
    of_server: dict[int, int] = {}
    stores, names = [], {name for each in lost.values() for name in each}
    for die, mem in memories:
        arrays = {name: array for name, array in mem.weights().items() if name in lost.get(die, ())}
        if not arrays:
            continue
        shard = mem.shard if isinstance(mem, DieMemory) else WHOLE
        stores.append(Store(arrays, mem.held, shard))
        server = te.pod.topology.server_of(die)
        nbytes = sum(nbytes for name, nbytes in own_arrays(mem) if name in arrays)
        of_server[server] = of_server.get(server, 0) + nbytes
    if not stores:
        return
    await te.pod.clock.sleep(_storage_ns(te, list(of_server.values())))
    specs = weight_specs(
        te.config, te.recipe, te.sizes.steps.max_model_len, num_mtp=te.sizes.steps.num_mtp_layers
    )
    weights = iter_weights(
        te.checkpoint, te.recipe, te.sizes.steps.max_model_len, te.sizes.steps.num_mtp_layers, names
    )
    for _ in fill(stores, weights, lambda name, array: specs[name].pack(array)):
        pass


class Loading:
    """Loads the weights of a joining TE; `done` and `total` tell the progress in bytes."""

    def __init__(
        self,
        te: TEPlan,
        source: Source,
        peers: Callable[[], Sequence[TEPlan]],
        cached: set[int],
        pool: PoolSource | None = None,
        beside: Mapping[str, Loading] = MappingProxyType({}),
    ) -> None:
        """Choose the sources to load from; DeploymentError if `source` cannot be used.

        `peers` returns the TEs of the model that are ready. `cached` are the servers with the model in their
        page cache. `beside` are all loads under way, in the order in which they began.
        """
        self.te, self.done, self.total, self._peers, self._pool = te, 0, 0, peers, pool
        self._beside, self.fork = beside, Fork(te.sizes.place.name, te.pod, 0)  # the last that it has begun
        self._failed: list[TEPlan] = []  # peers that others may not know yet to be lost
        missing = {te.pod.topology.server_of(die) for die, _ in te.all_memories} - cached
        if source == "pool" and pool is None:
            raise DeploymentError(
                f"{te.sizes.place.name} cannot load from a memory pool: there is none (ems.path)"
            )
        if source == "peer" and self._peer() is None:
            raise DeploymentError(f"{te.sizes.place.name} cannot load from a peer: no TE like it is ready")
        if source == "host" and missing:
            where = ", ".join(map(str, sorted(missing)))
            raise DeploymentError(f"{te.sizes.place.name} cannot load from hosts: server {where} has none")
        self._sources: list[Source] = [source]
        if source == "auto":
            in_pool = pool is not None and pool.is_complete
            has: dict[Source, bool] = {"peer": self._peer() is not None, "host": not missing, "pool": in_pool}
            self._sources = [*(each for each, is_there in has.items() if is_there), "storage"]
        self.source: Source = self._sources[0]

    def report(self) -> TEReport:
        """Report the TE as loading, with the source and the loaded share."""
        sizes, share = self.te.sizes, self.done / max(1, self.total)
        return TEReport(
            name=sizes.place.name,
            role=sizes.place.role,
            life="loading",
            dies=self.te.every_die,
            source=self.source,
            loaded=self._pool.share if self.source == "pool" and self._pool is not None else share,
        )

    async def run(self, is_timing_only: bool) -> None:
        """Load the weights; with "auto", from the next best source if the peers are lost meanwhile.

        HardwareError if no source is left.
        """
        for source in self._sources:
            self.source = source
            if source == "peer":
                if not await self._find_peer(is_timing_only):
                    continue
            elif is_timing_only:
                await self.te.pod.clock.sleep(load_ns(self.te, source))
            elif source == "pool":
                assert self._pool is not None
                await self._pool.load()
            else:
                await self._read()
            return
        raise HardwareError(
            f"{self.te.sizes.place.name} cannot load from a peer: those that were ready are lost"
        )

    def give_up(self) -> None:
        """End a failed load: TEs that read from this one look for another source."""
        self.fork.break_off()

    async def _read(self) -> None:
        """Read the weights from storage or page caches."""
        clock = self.te.pod.clock
        start, duration = clock.now, load_ns(self.te, self.source)
        for done, total in read_weights([self.te]):
            self.done, self.total = done, total
            await clock.sleep_until(start + duration * done // total)

    def _peer(self) -> tuple[TEPlan, Fork | None] | None:
        """Choose the TE to read from: a ready one, or one that loads, with its fork.

        First choice is a ready TE without readers, then the last TE of the shortest chain, then any ready TE.
        Only TEs with the same layout and without lost pages count, and none that failed as a source before.
        """
        good = [te for te in self._peers() if self._can_read(te)]
        for te in good:
            if not te.num_readers:
                return te, None
        earlier = itertools.takewhile(lambda each: each is not self, self._beside.values())
        chain = [each for each in earlier if each.fork.can_be_read and self._can_read(each.te)]
        if chain:
            last = min(chain, key=lambda each: each.fork.hops)
            return last.te, last.fork
        return (good[0], None) if good else None

    def _can_read(self, te: TEPlan) -> bool:
        if te.sizes.experts.first_of:
            return False  # EPLB may have replaced what the slots were loaded with
        return te not in self._failed and not te.has_bad_pages and _is_alike(te, self.te)

    async def _find_peer(self, is_timing_only: bool) -> bool:
        """Read from peers in turn until all weights have come; False if no peer is left."""
        while (found := self._peer()) is not None:
            peer, before = found
            num_reports = peer.num_reports
            with suppress(LostDieError, BrokenForkError):  # its memory does not answer
                await self._read_peer(peer, before, is_timing_only)
                if not peer.is_given_up and peer.num_reports == num_reports:
                    return True
            self.fork.break_off()
            self._failed.append(peer)
        return False

    async def _read_peer(self, peer: TEPlan, before: Fork | None, is_timing_only: bool) -> None:
        """Copy the weights of a peer, with each die's own DMA."""
        te, pairs = self.te, zip(peer.all_memories, self.te.all_memories, strict=True)
        self.fork = fork = Fork(te.sizes.place.name, te.pod, len(te.all_memories), before)
        peer.num_readers += 1
        try:
            if is_timing_only:
                await fork.pass_time(most_nbytes(te))
                te.pod.memories.check_alive(peer.every_die)  # as the DMA does when bytes move
                return
            pieces = {die: _copies(theirs, mine) for (_, theirs), (die, mine) in pairs}
            self.done, self.total = 0, sum(each.nbytes for copies in pieces.values() for each in copies)
            await fork.copy(pieces, self._add)
        finally:
            peer.num_readers -= 1

    def _add(self, nbytes: int) -> None:
        self.done += nbytes


def _copies(source: Holder, target: Holder) -> list[Copy]:
    """List the copies for a die from its peer's weights."""
    at, to = source.workspace.address, target.workspace.address
    arrays = own_arrays(target)
    return [Copy(at(f"weights/{name}"), to(f"weights/{name}"), nbytes) for name, nbytes in arrays]


def own_arrays(mem: Holder) -> list[tuple[str, int]]:
    """List names and bytes of a die's weights.

    Of a stack of routed experts only the die's own count, which come first; redundant slots do not.
    """
    return [
        (name, spec.nbytes * len(mem.held) // max(1, spec.shape[0]) if is_routed(name) else spec.nbytes)
        for name, spec in mem.specs.items()
    ]


def _is_alike(peer: TEPlan, te: TEPlan) -> bool:
    """Whether two TEs hold the same weights, die by die."""
    return [_holding(mem) for _, mem in peer.all_memories] == [_holding(mem) for _, mem in te.all_memories]


def _holding(mem: Holder) -> list[object]:
    shard = mem.shard if isinstance(mem, DieMemory) else WHOLE
    return [tuple(mem.held), shard, *mem.specs.items()]
