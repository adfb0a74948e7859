"""Costs of collectives by formula, beside the simulated ones of `collectives/handle.py`.

A round has four steps (`collectives/handle.py`): stage, tell, wait, pull. The terms here are those of its
engine operations, with the same parameters; the tests compare both. All ranks are assumed to arrive at the
same time. Times are ns.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.comm.collectives.layout import COLLECTIVE_FIELD
from xdeepserve.comm.collectives.reduction import segment
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import Topology


class CollectiveCost(msgspec.Struct, frozen=True):
    """Costs of collectives in a group of `dies`, in rank order, each with all its AIV cores."""

    dies: tuple[int, ...]
    spec: Spec = Spec()
    topology: Topology = Topology()

    @property
    def num_ranks(self) -> int:
        return len(self.dies)

    def all_gather_ns(self, nbytes: int) -> float:
        """Time (ns) of an all-gather in which each rank has `nbytes`."""
        return self._round_ns([nbytes], [[nbytes] * self.num_ranks] * self.num_ranks)

    def broadcast_ns(self, nbytes: int, root: int = 0) -> float:
        """Time (ns) of a broadcast of `nbytes` from `root`. Ranks that pull at the same time do not slow each
        other down."""
        pulled = [nbytes if rank == root else 0 for rank in range(self.num_ranks)]
        return self._round_ns([nbytes] if nbytes else [], [pulled] * self.num_ranks)

    def all_to_all_ns(self, sent: Sequence[Sequence[int]]) -> float:
        """Time (ns) of an all-to-all in which rank s has sent[s][r] bytes for rank r."""
        pulled = [[sizes[rank] for sizes in sent] for rank in range(self.num_ranks)]
        return max(self._round_ns([n for n in sizes if n], pulled) for sizes in sent)

    def all_reduce_ns(self, num_elements: int, itemsize: int = 4) -> float:
        """Time (ns) of an all-reduce of `num_elements`: reduce-scatter, then all-gather."""
        parts = [hi - lo for lo, hi in self._segments(num_elements)]
        sizes = [count * itemsize for count in parts]
        gather = self._round_ns([max(sizes)], [sizes] * self.num_ranks, is_running=True)
        return self.reduce_scatter_ns(parts, itemsize) + gather

    def reduce_scatter_ns(self, counts: Sequence[int], itemsize: int = 4) -> float:
        """Time (ns) of a reduce-scatter after which rank r has the reduction of counts[r] elements."""
        sizes = [count * itemsize for count in counts]
        scatter = self._round_ns([n for n in sizes if n], [[n] * self.num_ranks for n in sizes])
        most = max(counts)
        return scatter + self.spec.kernel_ns(
            most * (self.num_ranks - 1), most * itemsize * (self.num_ranks + 1), "aiv", is_fused=True
        )

    def _segments(self, length: int) -> list[tuple[int, int]]:
        return [segment(length, self.num_ranks, rank) for rank in range(self.num_ranks)]

    def _round_ns(
        self, staged: Sequence[int], pulled: Sequence[Sequence[int]], is_running: bool = False
    ) -> float:
        """Time (ns) of a round: a rank stages pieces of these sizes; rank r pulls pulled[r][s] bytes of rank
        s."""
        spec, cores = self.spec, self.spec.num_cores("aiv")
        launch = 0.0 if is_running else float(spec.kernel_ns(0, 0))
        stage = 0.0
        if any(staged):
            copy = spec.link_ns(sum(staged), 0, 0, cores)
            stage = self._fixed_ns(1) + self._fixed_ns(len(staged)) + 2 * copy
        tell = max(
            self._fixed_ns(self.num_ranks) + self._link(rank, [COLLECTIVE_FIELD.itemsize] * self.num_ranks)
            for rank in range(self.num_ranks)
        )
        pull = max(self._pull_ns(rank, sizes) for rank, sizes in enumerate(pulled))
        return launch + stage + tell + spec.poll_ns() + pull

    def _pull_ns(self, rank: int, sizes: Sequence[int]) -> float:
        """Time (ns) of a pull through the unified buffers: MTE2 loads from everywhere while MTE3 stores
        here."""
        spec, cores, total = self.spec, self.spec.num_cores("aiv"), sum(sizes)
        if not total:
            return 0.0
        load, store = self._link(rank, sizes), spec.link_ns(total, 0, 0, cores)
        return self._fixed_ns(sum(n > 0 for n in sizes)) + spec.ping_pong_ns(load, store, total, cores)[2]

    def _link(self, rank: int, sizes: Sequence[int]) -> float:
        """Time (ns) of `sizes[s]` bytes between a rank and rank s, with the latency of the farthest."""
        server = self.topology.server_of
        own, near, far = 0, 0, 0
        for peer, nbytes in zip(self.dies, sizes, strict=True):
            if peer == self.dies[rank]:
                own += nbytes
            elif server(peer) == server(self.dies[rank]):
                near += nbytes
            else:
                far += nbytes
        latency = self.spec.far_latency_ns() if far else 0
        return latency + self.spec.link_ns(own, near, far, self.spec.num_cores("aiv"))

    def _fixed_ns(self, num_pieces: int) -> int:
        """Startup and issue time (ns) of an operation of the AIV cores."""
        return self.spec.startup_ns("mte") + self.spec.pieces_ns(num_pieces, self.spec.num_cores("aiv"))
