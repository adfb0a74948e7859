"""Dies of a TE, and their division into DP groups and domains."""

from __future__ import annotations

from xdeepserve.engine.deploy.sizes import Sizes
from xdeepserve.hw.pod import Pod
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import Recipe


class Team:
    """Dies of a TE: each `groups.tp` neighbours of `dies` are a DP group.

    Where experts have dies of their own, `expert_at` has these by number; expert servers come and go.
    """

    def __init__(self, pod: Pod, config: ModelConfig, recipe: Recipe, sizes: Sizes) -> None:
        self.pod, self.config, self.recipe, self.sizes = pod, config, recipe, sizes
        self.dies = sizes.place.dies
        is_outside = sizes.walk.transport != "pod"  # then each of these is a process of its own
        self.expert_at = {
            number: die
            for number, die in enumerate(sizes.place.expert_dies)
            if number not in sizes.experts.vacant and not is_outside
        }

    @property
    def expert_dies(self) -> tuple[int, ...]:
        """Dies with experts alone, except vacant seats and servers outside the pod."""
        return tuple(self.expert_at.values())

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the dies of the DP group that a rank belongs to."""
        first = rank - rank % self.sizes.groups.tp
        return self.dies[first : first + self.sizes.groups.tp]

    def sharing(self, rank: int) -> tuple[int, ...]:
        """Return the dies sharing projections with a rank, itself included.

        They are the dies of its DP group, or of several DP groups of one die each.
        """
        size = self.sizes.groups.num_sharing
        first = rank - rank % size
        return self.dies[first : first + size]

    @property
    def dies_per_domain(self) -> int:
        """Number of attention dies in a DP domain."""
        return self.sizes.place.num_dies // self.sizes.walk.num_domains

    def domain(self, number: int) -> tuple[int, ...]:
        """Return the attention dies of a DP domain."""
        return self.dies[number * self.dies_per_domain : (number + 1) * self.dies_per_domain]

    def shared_expert(self, rank: int) -> int | None:
        """Return the physical number of the shared expert for a rank's tokens; None if it is on the same
        die."""
        return self.sizes.experts.shared_expert(rank)
