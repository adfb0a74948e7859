"""Who would receive how many tokens, and which drafts would be accepted: seeded stand-ins."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.errors import DeploymentError


class TimingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a timing-only run cannot compute and must be told.

    acceptance   probability that a draft of MTP is accepted
    skew         of expert popularity: the i-th most popular slot is chosen in proportion to i ** -skew
    seed         of both
    of_dies      bill exchanges and experts as if the DP groups were a sample of a pod of so many dies
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
        """[slots]: copies that each receives. A function of the arguments and the seed.

        Which slots are popular changes from event to event, as it does from layer to layer.
        """
        rng = generator(self._seed, stream, event)
        return rng.multinomial(num_copies, rng.permutation(self._popularity))


def generator(seed: int, stream: int, event: int) -> np.random.Generator:
    """Counter-based random numbers of one event."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, stream], counter=[event, 0, 0, 0]))
