"""Place of a rank in the group of a fused exchange: its experts, and its and its peers' regions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.board import Board
from xdeepserve.comm.checks import check_rank
from xdeepserve.comm.exchange.handle import Titles
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address, Region


class FusedPlace:
    """Knowledge of the group behind FusedDispatch and FusedCombine, and the regions that they write."""

    def __init__(self, die: Die, rank: int, group: Group, layout: FusedLayout, titles: Titles) -> None:
        self.die, self.layout, self.titles = die, layout, titles
        self.join(rank, group)
        self.board = Board(die, group.dies, layout.region("flags"), layout.board)

    def join(self, rank: int, group: Group) -> None:
        """Become `rank` of a group. Raises DeploymentError if the layout has no room for the group."""
        layout, die = self.layout, self.die.index
        check_rank(die, rank, group.dies, where="the group of dies")
        if group.num_ranks > layout.num_ranks or group.max_experts_per_rank > layout.experts_per_rank:
            raise DeploymentError(
                f"the layout is for {layout.num_ranks} ranks of {layout.experts_per_rank} experts, the group "
                f"has {group.num_ranks} of up to {group.max_experts_per_rank}"
            )
        self.rank, self.group = rank, group
        self.expert_rank = np.asarray(group.expert_rank, np.int64)
        self.own_experts = np.flatnonzero(self.expert_rank == rank)
        # An expert's number among those of its rank.
        self.local_idx = np.zeros(len(group.expert_rank), np.int64)
        for peer in range(group.num_ranks):
            mine = self.expert_rank == peer
            self.local_idx[mine] = np.arange(mine.sum())

    def crossing(self, counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the receiving dies, and the number of messages for each; counts: [R]."""
        gets = counts > 0
        return np.asarray(self.group.dies, np.int64)[gets], counts[gets]

    def region(self, part: str, die: int | None = None) -> Region:
        """Return a region of the rank, or of another die of the group: flags, dispatch, output ..."""
        memory = self.die.fabric.memories[self.die.index if die is None else die]
        name = self.layout.region(part)
        for area in (memory.metadata, memory.managed, memory.app):
            if name in area.regions:
                return area.regions[name]
        raise DeploymentError(f"die {memory.node} has not planned the fused layout '{self.layout.name}'")

    def answer_address(self, source_rank: int, batch_slot: int, key_offset: int) -> Address:
        """Compute the address for the answer to a received token, from the routing that came with it."""
        block = self.region("combine", self.group.dies[source_rank]).address
        return block.plus(self.layout.combine_offset(batch_slot, key_offset))

    def clear_token_flags(self) -> None:
        """Clear the token flags, so that all own tokens are unanswered again."""
        region = self.region("token_flags")
        self.die.memory.write(region.offset, bytes(region.nbytes))
