"""Digests of weights, to check that every load brings the same bytes as the first."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.loading import Holder, Piece, Source
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import HardwareError
from xdeepserve.model.sharding import WHOLE, Shard
from xdeepserve.model.weights import is_routed

Key = tuple[Piece, np.dtype, tuple[int, ...]]  # which array, and which part of it


class WeightDigests:
    """Digests of weight arrays, by array and by the part of it that a die holds."""

    def __init__(self) -> None:
        self._known: dict[Key, str] = {}

    def learn(self, tes: Sequence[TEPlan]) -> None:
        """Record the digests of the first TEs to load."""
        for te in tes:
            # Hundreds of dies of a TE hold the same: one of them is asked.
            alike = {(_shard(mem), tuple(mem.held), tuple(mem.specs)): mem for _, mem in te.all_memories}
            for mem in alike.values():
                for _, key, array in _own(mem):
                    if key not in self._known:
                        self._known[key] = _digest(array)

    def check(self, te: TEPlan, source: Source) -> None:
        """Check a TE's weights after loading from `source`; HardwareError names die and array if bytes
        differ.

        An array without a known digest is recorded, not refused.
        """
        self.check_arrays(te.all_memories, source, {die: mem.specs for die, mem in te.all_memories})

    def check_arrays(
        self, memories: Sequence[tuple[int, Holder]], source: Source, names: Mapping[int, Collection[str]]
    ) -> None:
        """Check some arrays of weights by die, as `check` does for a whole TE."""
        for die, mem in memories:
            for name, key, array in _own(mem):
                if name not in names.get(die, ()):
                    continue
                found = _digest(array)
                wanted = self._known.setdefault(key, found)
                if found != wanted:
                    where, what = f"die {die}: weights from {source}", f"{found}, expected {wanted}"
                    raise HardwareError(f"{where} came with digest {what}: {name}")


def digests(mem: Holder) -> dict[str, str]:
    """Return the digests of a die's own weights, by name, without the contents of redundant slots."""
    return {name: _digest(array) for name, _, array in _own(mem)}


def _own(mem: Holder) -> Iterator[tuple[str, Key, np.ndarray]]:
    """Yield a die's own weights: their names, the keys of their digests, and the arrays."""
    shard = _shard(mem)
    for name, array in mem.weights().items():
        experts = tuple(mem.held) if is_routed(name) else ()
        piece = Piece(name, experts, shard.of(name) if shard is not WHOLE else WHOLE)
        own = array[: len(mem.held)] if is_routed(name) else array
        yield name, (piece, own.dtype, own.shape), own


def _shard(mem: Holder) -> Shard:
    return mem.shard if isinstance(mem, DieMemory) else WHOLE


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()
