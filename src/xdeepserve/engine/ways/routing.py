"""Seeded stand-ins for results missing in timing-only runs: tokens by expert, and accepted drafts."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cost import CommCost
from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.engine.die.replicas import first_tables
from xdeepserve.errors import DeploymentError
from xdeepserve.model.config import ModelConfig

POPULARITY = 1 << 33  # the stream of random numbers that says which experts are popular


class TimingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings in place of computed facts, for a timing-only run.

    acceptance   probability that a draft of MTP is accepted
    skew         of expert popularity: the i-th most popular slot is chosen in proportion to i ** -skew
    seed         of both
    of_dies      bill exchanges and experts as if dies were a sample of a pod in which so many have experts
    routed_dies  how many of those dies hold routed experts, and nothing else; by default all hold some,
                 beside a copy of the shared expert in a redundant slot if need be
    """

    acceptance: float = 0.9
    skew: float = 0.0
    seed: int = 0
    of_dies: int | None = None
    routed_dies: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise DeploymentError(f"timing: acceptance must lie in [0, 1], found {self.acceptance}")
        if not 0 <= self.skew <= 8:
            raise DeploymentError(f"timing: skew must lie in [0, 8], found {self.skew}")
        if self.of_dies is not None and self.of_dies < 1:
            raise DeploymentError(f"timing: of_dies must be at least 1, found {self.of_dies}")
        if self.routed_dies is not None and self.routed_dies < 1:
            raise DeploymentError(f"timing: routed_dies must be at least 1, found {self.routed_dies}")


class Routing:
    """Seeded routing of token copies to the slots of routed experts, one slot on each of `num_slots` dies."""

    def __init__(self, num_slots: int, skew: float, seed: int) -> None:
        popularity = np.arange(1, num_slots + 1, dtype=np.float64) ** -skew
        self._popularity = popularity / popularity.sum()
        self._seed = seed

    def counts(self, event: int, stream: int, num_copies: int) -> npt.NDArray[np.int64]:
        """Draw how many copies each slot receives, [slots], from the arguments and the seed alone.

        Which slots are popular changes from event to event, as it does from layer to layer.
        """
        rng = generator(self._seed, stream, event)
        return rng.multinomial(num_copies, rng.permutation(self._popularity))

    def collect(self, event: int, stream: int, num_copies: int) -> None:
        """Do nothing: no load is collected without placed experts."""


def busiest(num_slots: int, num_copies: float) -> float:
    """Return the copies in the busiest slot on average, if all slots are equally popular.

    The counts are treated as normally distributed.
    """
    mean = num_copies / num_slots
    return mean * CommCost().busiest(num_slots, mean)


class PlacedRouting:
    """Seeded routing of token copies to logical experts, and from there to the dies of their replicas.

    Which experts are popular differs from layer to layer, and does not change over time: EPLB depends on
    that. Replicas at `vacant` seats, where expert servers may join later, get no token.
    """

    def __init__(
        self, config: ModelConfig, experts: ExpertSizes, timing: TimingConfig, vacant: range
    ) -> None:
        num_layers, num_experts = len(experts.layers), config.n_routed_experts
        popularity = np.arange(1, num_experts + 1, dtype=np.float64) ** -timing.skew
        popularity /= popularity.sum()
        self._seed = timing.seed
        self._popularity = [
            generator(timing.seed, POPULARITY, layer).permutation(popularity) for layer in range(num_layers)
        ]
        self._layers = experts.order  # of the events of a step
        self._holder = np.array(experts.expert_rank)  # of each physical expert
        self._num_holders = len(experts.experts_of)
        self._is_vacant = np.isin(np.arange(self._num_holders), vacant)
        self._load = np.zeros((num_layers, num_experts), np.int32)
        self.set_tables(*first_tables(config, experts))

    def set_tables(self, log2phy: npt.NDArray[np.int32], logcnt: npt.NDArray[np.int32]) -> None:
        """Set the replicas of all experts, as tables of engine/die/replicas.py."""
        is_there = np.arange(log2phy.shape[-1]) < logcnt[..., None]
        is_there &= ~self._is_vacant[self._holder[log2phy]]
        first_there = np.argsort(~is_there, axis=-1, kind="stable")
        self._log2phy = np.take_along_axis(log2phy, first_there, axis=-1)
        self._logcnt = is_there.sum(-1)

    def counts(self, event: int, stream: int, num_copies: int) -> npt.NDArray[np.int64]:
        """Draw how many copies each die with experts receives; an expert's are spread evenly over its
        replicas."""
        layer, chosen = self._layer(event), self._chosen(event, stream, num_copies)
        log2phy, logcnt = self._log2phy[layer], self._logcnt[layer][:, None]
        replica = np.arange(log2phy.shape[1])
        share = chosen[:, None] // logcnt + (replica < chosen[:, None] % logcnt)
        is_there = replica < logcnt
        received = np.zeros(self._num_holders, np.int64)
        np.add.at(received, self._holder[log2phy[is_there]], share[is_there])
        return received

    def collect(self, event: int, stream: int, num_copies: int) -> None:
        """Add the copies sent in an event to the load."""
        self._load[self._layer(event)] += self._chosen(event, stream, num_copies).astype(np.int32)

    def take_load(self) -> npt.NDArray[np.int32]:
        """Return the copies by layer and expert since the last call, [layers, experts]."""
        load, self._load = self._load, np.zeros_like(self._load)
        return load

    def _layer(self, event: int) -> int:
        """Return the layer of an event; events count the MoE layers of all steps, from 1."""
        return self._layers[(event - 1) % len(self._layers)]

    def _chosen(self, event: int, stream: int, num_copies: int) -> npt.NDArray[np.int64]:
        rng = generator(self._seed, stream, event)
        return rng.multinomial(num_copies, self._popularity[self._layer(event)])


def generator(seed: int, stream: int, event: int) -> np.random.Generator:
    """Return the counter-based random generator of an event."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, stream], counter=[event, 0, 0, 0]))
