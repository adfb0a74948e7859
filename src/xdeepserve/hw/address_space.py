"""The global address space: all memories of a pod, read and written by address (node, offset)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import AddressError, DeploymentError, HardwareError, LostDieError, PageLostError
from .memory import Address, Memory, MemoryPlan
from .traffic import FEW, Integers


class AddressSpace:
    """All memories of a pod, accessed by node and offset."""

    def __init__(self) -> None:
        self.plans: dict[int, MemoryPlan] = {}
        self._memories: dict[int, Memory] = {}
        # Where each node's areas end, for checks of many accesses at once; -1: the node has no memory.
        self._area_ends = np.full((1, 3), -1, np.int64)
        self._offsets: dict[tuple[str, str], Integers] = {}
        self.silent: set[int] = set()  # nodes whose memory does not answer; what is written there is lost
        self.on_silence: dict[object, Callable[[int], None]] = {}  # told when somebody has found one out
        self.bad_pages: dict[int, list[PageLostError]] = {}  # by node, until somebody has put them right

    def plan(self, node: int, capacity: int | None = None) -> MemoryPlan:
        """Return the memory plan of a node, made at first use; `capacity` is the size (bytes) of its physical
        memory."""
        if node not in self.plans:
            self.plans[node] = MemoryPlan(node, capacity)
        return self.plans[node]

    @property
    def nbytes(self) -> int:
        """Number of bytes mapped by `materialise`, before or after the call. As much real memory is needed
        once all of it is written."""
        return sum(plan.nbytes for plan in self.plans.values())

    def check(self, limit: int | None = None) -> None:
        """Check sizes. Raises DeploymentError, with every reason, if a node exceeds its capacity or the sum
        exceeds `limit`.

        The sum counts planned bytes, whether or not they will be written: a pod under the limit can never run
        the computer out of memory halfway. Callers that know most pages stay untouched give no limit.
        """
        reasons = [
            f"node {plan.node} needs {plan.nbytes:,} bytes of memory but has {plan.capacity:,}"
            for plan in self.plans.values()
            if plan.capacity is not None and plan.nbytes > plan.capacity
        ]
        if limit is not None and self.nbytes > limit:
            total = f"{self.nbytes:,} bytes"
            reasons.append(f"the pod's {len(self.plans)} memories add up to {total}; the limit is {limit:,}")
        if reasons:
            raise DeploymentError("; ".join(reasons))

    def materialise(self, limit: int | None = None) -> Mapping[int, Memory]:
        """Map every planned memory, after `check`. Raises OutOfMemoryError if the computer refuses one."""
        self.check(limit)
        for node, plan in self.plans.items():
            if node not in self._memories:
                self._memories[node] = Memory(plan)
        self._find_areas()
        return self._memories

    def give_back(self) -> None:
        """Give the pages of all nodes back to the system, after the pod has ended and nothing reads them any
        more."""
        for memory in self._memories.values():
            memory.give_back()

    def release(self, node: int) -> None:
        """Take back the memory of a node and its plan; another plan may then be materialised.

        Raises HardwareError, with nothing changed, while a process waits for a write to it or a transfer is
        under way.
        """
        if node not in self._memories:  # planned, and no more
            del self.plans[node]
            return
        memory = self._memories[node]
        if self.is_in_use(node):
            raise HardwareError(
                f"node {node} cannot give its memory back: {len(memory.watches)} waits and "
                f"{len(memory.claims)} transfers are at it"
            )
        memory.scribble()
        self.bad_pages.pop(node, None)
        del self._memories[node], self.plans[node]
        self._find_areas()

    def is_materialised(self, node: int) -> bool:
        """Whether a node has memory: planned and mapped, and not yet released."""
        return node in self._memories

    def is_in_use(self, node: int) -> bool:
        """Whether a process waits for a write to a node's memory, or a transfer reads or writes it."""
        memory = self._memories.get(node)
        return memory is not None and bool(memory.watches or len(memory.claims))

    def _find_areas(self) -> None:
        """Rebuild the table of area ends after nodes have come or gone."""
        self._offsets.clear()
        self._area_ends = np.full((max(self._memories, default=0) + 1, 3), -1, np.int64)
        for node, memory in self._memories.items():
            self._area_ends[node] = [area.end for area in (memory.metadata, memory.managed, memory.app)]

    def __getitem__(self, node: int) -> Memory:
        try:
            return self._memories[node]
        except KeyError:
            raise AddressError(
                f"node {node} has no memory: {len(self._memories)} nodes are materialised"
            ) from None

    def offsets_of(self, area: Literal["metadata", "managed", "app"], name: str) -> Integers:
        """Return the offset of the region of that name by node; -1 where a node has none."""
        if (area, name) not in self._offsets:
            offsets = np.full(len(self._area_ends), -1, np.int64)
            for node, memory in self._memories.items():
                region = getattr(memory, area).regions.get(name)
                if region is not None:
                    offsets[node] = region.offset
            self._offsets[area, name] = offsets
        return self._offsets[area, name]

    def write_many(self, nodes: Sequence[int], offsets: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Write row i of data [N, size] to nodes[i], offsets[i], and call watches on each. Bounds were
        checked before."""
        memories, size = self._memories, data.shape[1]
        rows = data.tobytes()
        raw = [rows[at : at + size] for at in range(0, len(rows), size)]
        for node, offset, row in zip(nodes, offsets, raw, strict=True):
            memory = memories[node]
            end = offset + size
            memory.buffer[offset:end] = row
            for watch in memory.watches:
                if watch.start < end and offset < watch.stop:
                    watch.on_write(offset, size)

    def lose_page(self, error: PageLostError) -> None:
        """Mark a page's content as lost: gathers from it raise this error until the page is repaired."""
        self.bad_pages.setdefault(error.die, []).append(error)

    def check_sound(self, nodes: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise the error of a lost page if one of these pieces overlaps it."""
        for node, offset, nbytes in zip(nodes, offsets, sizes, strict=True):
            for error in self.bad_pages.get(node, ()):
                if error.offset < offset + nbytes and offset < error.stop:
                    raise error

    def gather(self, nodes: Integers, offsets: Integers, sizes: Integers, target: memoryview) -> None:
        """Copy pieces of other memories, one after another, into `target`. Bounds were checked before."""
        memories, at = self._memories, 0
        if self.silent:
            self.check_alive(nodes.tolist())
        if self.bad_pages:
            self.check_sound(nodes.tolist(), offsets.tolist(), sizes.tolist())
        for node, offset, nbytes in zip(nodes.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
            target[at : at + nbytes] = memories[node].buffer[offset : offset + nbytes]
            at += nbytes

    def check_alive(self, nodes: Sequence[int]) -> None:
        """Check for silent nodes. Raises LostDieError for the first one, after listeners have been told."""
        for node in nodes:
            if node in self.silent:
                for tell in self.on_silence.values():
                    tell(node)
                raise LostDieError(f"die {node} is lost: its memory does not answer")

    def check_many(self, nodes: Integers, offsets: Integers, sizes: Integers | int) -> None:
        """Check bounds: each [offset, offset + size) must lie within one area. Raises AddressError about the
        first bad one."""
        nodes, offsets = np.asarray(nodes, np.int64), np.asarray(offsets, np.int64)
        sizes = index(sizes) if np.ndim(sizes) == 0 else np.asarray(sizes, np.int64)
        if len(nodes) <= FEW:
            all_sizes = [sizes] * len(nodes) if isinstance(sizes, int) else sizes.tolist()
            for node, offset, size in zip(nodes.tolist(), offsets.tolist(), all_sizes, strict=True):
                self[node].check(offset, size)
            return
        num_nodes = len(self._area_ends)
        known = self._area_ends[np.clip(nodes, 0, num_nodes - 1)]
        ends = offsets + sizes
        starts_after = (offsets[:, None] >= known[:, :2]).sum(1)
        area_end = np.take_along_axis(known, starts_after[:, None], 1)[:, 0]
        is_bad = (nodes < 0) | (nodes >= num_nodes) | (offsets < 0) | (ends < offsets) | (ends > area_end)
        if is_bad.any():
            first = int(is_bad.argmax())
            size = sizes if isinstance(sizes, int) else int(sizes[first])
            self[int(nodes[first])].check(int(offsets[first]), size)

    def read(self, address: Address, nbytes: int) -> memoryview:
        if self.silent:
            self.check_alive([address.node])
        return self[address.node].read(address.offset, nbytes)

    def write(self, address: Address, data: bytes | bytearray | memoryview) -> None:
        self[address.node].write(address.offset, data)
