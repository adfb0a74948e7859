"""A deployment's memory pool, as its engine uses it: opened with the pod; its caches outlive TEs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from xdeepserve.ems.context_cache import ContextCache, root_of
from xdeepserve.ems.dram import HIGH
from xdeepserve.ems.memory_pool import MemoryPool
from xdeepserve.ems.model_cache import NAMESPACE as MODELS
from xdeepserve.ems.model_cache import ModelCache
from xdeepserve.ems.mp_server import Lease, MPServer
from xdeepserve.ems.pool_prefixes import PoolPrefixes
from xdeepserve.ems.pool_weights import PoolWeights
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import CopyDone, PoolReady, StepFailed
from xdeepserve.engine.te.te_plan import MakeTier, TEPlan
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.volume import Key


class PoolUse:
    """The pool and, from `start` on, the caches of prefixes and of models that TEs have there.

    A guest deployment shares the pool of its host's pod. A byte of a value stands for `weight` bytes.
    Raises InputError for an unusable directory.
    """

    def __init__(self, pod: Pod, deployment: Deployment, is_guest: bool, weight: float = 1.0) -> None:
        self.deployment, self.is_guest = deployment, is_guest
        self.contexts: ContextCache | None = None
        self.models: ModelCache | None = None
        ems = deployment.ems
        assert ems.path is not None
        quotas = {ems.namespace: None if ems.quota_mb is None else ems.quota_mb << 20, MODELS: None}
        path = Path(ems.path).absolute()
        service = f"memory pool {path}"
        self.pool: MemoryPool
        if service in pod.services:
            self.pool = pod.services[service]
            self.pool.share(quotas)
            return
        if is_guest:
            raise DeploymentError(
                f"deployment {deployment.name}: a pod has a pool (ems.path) from its start or none"
            )
        sizes = ems.dram_mb << 20, ems.volume_mb << 20
        self.pool = pod.services[service] = MemoryPool(pod, path, ems.servers, *sizes, quotas, weight)

    def open(self) -> None:
        """Lock the directory, before memory is allocated."""
        if not self.is_guest:
            self.pool.open()

    def start(self, tes: Sequence[TEPlan]) -> None:
        """Give task executors (TEs) access to the pool; memory and directory are ready."""
        if not self.is_guest:
            self.pool.start()
        te, ems = tes[0], self.deployment.ems
        sizes, mem = te.sizes, te.memories[0]
        layout = [(name, nbytes // sizes.kv.block_size) for name, nbytes in mem.kv.block_parts]
        # States that the second draft goes on from are one to a KV block, whatever its size.
        tail = sizes.kv.block_size if sizes.steps.mtp > 1 else 0
        drafts = f"{sizes.steps.mtp} by {sizes.steps.num_mtp_layers}, {tail}"
        self._digest = te.checkpoint.digest()
        precision = f"{te.recipe}, INT8 answers" if te.config.int8_answers else te.recipe
        root = root_of(self._digest, precision, layout, ems.block_size, drafts)
        nbytes = mem.kv.block_nbytes * (ems.block_size // sizes.kv.block_size)
        client, by_cards = self.pool.client(), ems.fabric == "vpc"
        self.contexts = ContextCache(client, ems.namespace, root, ems.block_size, nbytes, by_cards)
        self.models = self.pool.models()
        for each in tes:
            each.make_tier = self.make_tier

    @property
    def make_tier(self) -> MakeTier | None:
        """Factory of a DP group's tier of prefixes; None before `start`."""
        return None if self.contexts is None else self._tier

    def _tier(
        self, group: DPGroup, report: Callable[[PoolReady | CopyDone | StepFailed], None]
    ) -> PoolPrefixes:
        assert self.contexts is not None
        return PoolPrefixes(group.rank, group.dies, group.mems, group.rtc, self.contexts, report)

    def weights(self, te: TEPlan) -> PoolWeights:
        """Make the weights of another task executor (TE), by way of the pool."""
        assert self.models is not None
        return PoolWeights(te, self.models, self._digest)

    def crowd(self) -> None:
        """Fill the pool up, so any new value evicts others."""
        crowd(self.pool, self.deployment.ems.namespace)

    def close(self) -> None:
        """Unlock the directory. Harmless when repeated."""
        if not self.is_guest:
            self.pool.close()


NBYTES = 8192  # of each value that is in the way; as much as a slot of DRAM, so both tiers fill alike


def crowd(pool: MemoryPool, namespace: str) -> None:
    """Fill every server up to where eviction begins, with values that are older than those that it has: what
    comes next has them evicted from both tiers. DRAM lags behind by what was on the volume alone: somebody
    writes so much there, and comes to no end.
    """
    for server in pool.servers:
        allocator, volume, before = server.dram.allocator, server.volume, [*server.volume.rows]
        mine = (key for key in _keys(namespace) if server.ring.owner(key) == server.name)
        while volume.nbytes.total() + NBYTES <= HIGH * server.volume_nbytes:
            server.end([_begun(server, next(mine))])
        while allocator.num_used + NBYTES <= HIGH * allocator.capacity:
            _begun(server, next(mine))
        for key in before:
            server.touch(key)


def _begun(server: MPServer, key: Key) -> Lease:
    lease = server.begin(key, NBYTES)
    assert lease is not None
    return lease


def _keys(namespace: str) -> Iterator[Key]:
    return (Key(namespace, number.to_bytes(16, "big")) for number in count())
