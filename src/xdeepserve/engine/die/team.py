"""Dies of a TE, and their division into DP groups and domains."""

from __future__ import annotations

from dataclasses import dataclass

from xdeepserve.comm.exchange.layout import Group
from xdeepserve.engine.deploy.sizes import Sizes
from xdeepserve.engine.numbers import DieRank
from xdeepserve.hw.accelerators import SERVER
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Topology
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import Recipe


@dataclass(eq=False)
class Team:
    """Dies of a TE and all its sizes: whoever builds something for the TE takes the team, and reads a part.

    Each `groups.tp` neighbours of `dies` are a DP group. Where experts have dies of their own, `expert_at`
    has these by number, as they are when the TE begins; expert servers come and go (`te.members`). TEs that
    share expert servers have a `number` each, and one of them brings the servers' dies into the pod.
    """

    pod: Pod
    config: ModelConfig
    recipe: Recipe
    sizes: Sizes
    number: int = 0
    brings_servers: bool = True

    def __post_init__(self) -> None:
        place = self.sizes.place
        self.dies = place.dies
        self.expert_at = {
            number: die
            for number, die in enumerate(place.expert_dies)
            if number not in self.vacant and not self.has_servers_outside
        }

    @property
    def expert_dies(self) -> tuple[int, ...]:
        """Dies with experts alone when the TE begins, except vacant seats and servers outside the pod."""
        return tuple(self.expert_at.values())

    @property
    def has_servers_outside(self) -> bool:
        """Whether each expert server is a process of its own, outside of the pod."""
        return self.sizes.place.has_servers_outside

    @property
    def num_tes(self) -> int:
        """Number of TEs that share expert servers, this one included, when all are there."""
        return self.sizes.groups.num_tes

    def client(self, rank: DieRank) -> int:
        """Return the number of an attention die among all clients of its expert servers."""
        return self.number * len(self.dies) + rank

    @property
    def topology(self) -> Topology:
        """Topology that prices of transfers between the dies assume."""
        return Topology() if self.sizes.place.hardware == "cm384" else SERVER

    @property
    def vacant(self) -> range:
        """Numbers of the expert dies reserved for expert servers that may join."""
        return self.sizes.place.vacant

    @property
    def holders(self) -> Group:
        """Dies that may have experts, vacant seats included, with the experts of each."""
        placed = self.sizes.experts
        dies = self.sizes.place.expert_dies if placed.where == "away" else self.dies
        return Group(dies=dies, expert_rank=placed.expert_rank)

    @property
    def num_copies(self) -> int:
        """Number of experts that a token goes to: the shared one counts if it has dies of its own."""
        return self.config.num_experts_per_tok + (self.sizes.experts.num_shared_dies > 0)

    @property
    def ranks(self) -> list[DieRank]:
        """Ranks of all dies with DP groups."""
        return [DieRank(rank) for rank in range(len(self.dies))]

    @property
    def group_ranks(self) -> list[list[DieRank]]:
        """Ranks of the dies of each DP group."""
        ranks, tp = self.ranks, self.sizes.groups.tp
        return [ranks[first : first + tp] for first in range(0, len(ranks), tp)]

    def group_of(self, rank: DieRank) -> tuple[int, ...]:
        """Return the dies of the DP group that a rank belongs to."""
        first = rank - rank % self.sizes.groups.tp
        return self.dies[first : first + self.sizes.groups.tp]

    def sharing(self, rank: DieRank) -> tuple[int, ...]:
        """Return the dies sharing projections with a rank, itself included.

        They are the dies of its DP group, or of several DP groups of one die each.
        """
        size = self.sizes.groups.num_sharing
        first = rank - rank % size
        return self.dies[first : first + size]

    @property
    def dies_per_domain(self) -> int:
        """Number of attention dies in a DP domain."""
        return self.sizes.place.dies_per_domain

    def domain(self, number: int) -> tuple[int, ...]:
        """Return the attention dies of a DP domain."""
        return self.dies[number * self.dies_per_domain : (number + 1) * self.dies_per_domain]

    def shared_expert(self, rank: int) -> int | None:
        """Return the physical number of the shared expert for a rank's tokens; None if it is on the same
        die."""
        return self.sizes.experts.shared_expert(rank)
