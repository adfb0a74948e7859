"""Repairs on a TE's dies: what drivers have reported is put right before steps run again (XDS 6.2).

Of a lost page of HBM:

    weights      are read again from storage, as far as a page touches them (`build.PodPlan.mend`)
    KV           see `dp.lost_blocks`
    replicas     of experts are dropped: EPLB may bring others; the maps that lead to them are sent again
    metadata     cannot be restored, since dies and other TEs agree by it: the whole TE is given up
    all else     belongs to a step that was rolled back and runs again; the host knows what the step needs of
                 the previous one

"CANN remaps virtual memory, masks the region": a page that was lost can be used at once, with other content.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import DriverReport, LostDieError, PageLostError
from xdeepserve.hw.memory import MemoryPlan

Mend = Callable[[TEPlan, Sequence[PageLostError]], Awaitable[None]]
"""Function that reads a TE's weights in lost pages again."""


class Repairs:
    """Reports by drivers of a TE's dies that nothing has put right yet, and how they are put right."""

    def __init__(
        self,
        plan: TEPlan,
        groups: Sequence[DPGroup],
        reconfiguration: Reconfiguration | None,
        mend: Mend,
    ) -> None:
        self._plan, self._groups, self._reconfiguration, self._mend = plan, groups, reconfiguration, mend
        self._group_of = {die.index: group for group in groups for die in group.dies}
        self.pending: list[DriverReport] = []

    def check(self) -> None:
        """Raise the first report, if there is any."""
        if self.pending:
            raise self.pending[0]

    @property
    def _mems(self) -> dict[int, DieMemory | ExpertMemory]:
        """Memories of the TE's dies, by die."""
        return dict(self._plan.all_memories)

    @staticmethod
    def has_metadata(memory: MemoryPlan, start: int) -> bool:
        """Whether the page at an offset holds metadata; the area has its place before memory is real."""
        return start < memory.ends[0]

    def is_beyond(self, report: DriverReport) -> bool:
        """Whether nothing can put a report right."""
        memories = self._plan.pod.memories
        return isinstance(report, PageLostError) and self.has_metadata(
            memories.plans[report.die], report.offset
        )

    def note(self, report: DriverReport) -> None:
        """Record a report at its moment, and mark KV blocks that are moving from or to a lost page."""
        self.pending.append(report)
        group = self._group_of.get(report.die)
        if group is None or not isinstance(report, PageLostError):
            return
        mem = self._mems[report.die]
        assert isinstance(mem, DieMemory)
        slots = mem.kv.slots_at(report.offset, report.stop)
        if slots:
            group.lost_blocks.note(slots, report)

    def note_unused(self, report: DriverReport) -> None:
        """Record a report about a die that loads: a page is as in a memory that is new, whatever it held, and
        `mend` brings weights that were there already."""
        if isinstance(report, PageLostError):
            page = slice(report.offset, report.stop)
            self._plan.pod.memory(report.die).buffer[page] = bytes(report.nbytes)
        self.note(report)

    def _names(self, error: PageLostError) -> list[str]:
        """Return the names of regions with bytes in a page."""
        memory = self._plan.pod.memory(error.die)
        return [region.name for region in memory.regions_at(error.offset, error.stop)]

    async def mend(self) -> None:
        """Put everything right that was reported, from within a process and while no step runs.

        Reports that come meanwhile are put right, too.
        """
        pod = self._plan.pod
        if not self.pending:
            return
        while self.pending:
            reports, self.pending = self.pending, []
            pages = [report for report in reports if isinstance(report, PageLostError)]
            await self._mend(self._plan, pages)
            for page in pages:
                if page.die in pod.lost:
                    raise LostDieError(f"die {page.die} is lost: its memory does not answer")
                self._restore(page)
        for group in self._groups:
            group.drop_lost()
        for die in self._mems:
            pod.memories.bad_pages.pop(die, None)

    def _restore(self, page: PageLostError) -> None:
        """Restore contents of a page that the host knows, or can do without."""
        mem, names = self._mems[page.die], self._names(page)
        if mem.redundant is not None and any(name == "slot_expert" or ".experts." in name for name in names):
            if self._reconfiguration is None:
                mem.redundant.begin()
            else:
                mem.redundant.empty()
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
