"""Restores lost pages of HBM on a TE's dies, before steps run again (XDS 6.2).

    weights      are read again, as far as a page touches them, from storage (`build.PodPlan.mend`)
    KV           `dp.lost_blocks`
    replicas     of experts are no more: EPLB may bring others; the maps that lead to them are sent again
    metadata     is what dies, and other TEs, agree by: without it the whole TE is given up
    all else     is of a step, which is run again, and was rolled back; what it would find there of the step
                 before, the host knows

"CANN remaps virtual memory, masks the region": a page that was lost can be used at once, with other content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import LostDieError, PageLostError
from xdeepserve.hw.memory import MemoryPlan

Mend = Callable[[TEPlan, Sequence[PageLostError]], Awaitable[None]]
"""Read again what weights of a TE lay in pages."""


class LostPages:
    """Pages lost by a TE's dies and not restored yet."""

    def __init__(
        self,
        plan: TEPlan,
        groups: Sequence[DPGroup],
        reconfiguration: Reconfiguration | None,
        mend: Mend,
    ) -> None:
        self._plan, self._groups, self._reconfiguration, self._mend = plan, groups, reconfiguration, mend
        self._group_of = {die.index: group for group in groups for die in group.dies}
        self.pending: list[PageLostError] = []  # not put right yet

    def check(self) -> None:
        """Raise the error of the first lost page, if there is any."""
        if self.pending:
            raise self.pending[0]

    @property
    def _mems(self) -> dict[int, DieMemory | ExpertMemory]:
        """Memories of the TE's dies, by die."""
        return dict(self._plan.all_memories)

    @staticmethod
    def is_fatal(memory: MemoryPlan, start: int) -> bool:
        """Whether the page at an offset holds metadata; the area has its place before memory is real."""
        return start < memory.ends[0]

    def note(self, error: PageLostError) -> None:
        """Record a page at the moment of its loss, and mark KV blocks that are moving from or to it."""
        self.pending.append(error)
        group = self._group_of.get(error.die)
        if group is None:
            return
        mem = self._mems[error.die]
        assert isinstance(mem, DieMemory)
        slots = mem.kv.slots_at(error.offset, error.stop)
        if slots:
            group.lost_blocks.note(slots, error)

    def _names(self, error: PageLostError) -> list[str]:
        """Return the names of regions with bytes in a page."""
        memory = self._plan.pod.memory(error.die)
        return [region.name for region in memory.regions_at(error.offset, error.stop)]

    async def mend(self) -> None:
        """Restore all lost pages, from within a process and while no step runs.

        Pages that are lost meanwhile are restored, too.
        """
        pod = self._plan.pod
        if not self.pending:
            return
        while self.pending:
            pages, self.pending = self.pending, []
            await self._mend(self._plan, pages)
            for page in pages:
                if page.die in pod.lost:
                    raise LostDieError(f"die {page.die} is lost: its memory does not answer")
                self._put_right(page)
        for group in self._groups:
            group.drop_lost()
        for die in self._mems:
            pod.memories.bad_pages.pop(die, None)

    def _put_right(self, page: PageLostError) -> None:
        """Restore contents of a page that the host knows, or can do without."""
        mem, names = self._mems[page.die], self._names(page)
        if mem.redundant is not None and any(name == "slot_expert" or ".experts." in name for name in names):
            mem.redundant.begin()
            if self._reconfiguration is not None:
                self._reconfiguration.lose_slots(page.die)
        replicas = mem.replicas if isinstance(mem, DieMemory) else None
        if replicas is not None and not {"log2phy", "logcnt", "load", "reported_load"}.isdisjoint(names):
            if self._reconfiguration is None:
                replicas.begin()
            else:
                replicas.set_map(self._reconfiguration.phy2log)
            replicas.forget_load()
        if mem.redundant is not None and "num_rows" in names:
            mem.redundant.num_rows[:] = 0
