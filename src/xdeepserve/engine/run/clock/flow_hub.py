"""Ways without barriers in timing-only runs: dataflow (xDeepServe 5.3) and expert services (EaaS 3).

An attention die sends the tokens of a microbatch, and expert dies serve the tokens that have come. A sending
is back when all expert dies with its rows have answered; it waits for no other die. No row moves: how many go
where is drawn, by a seed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.run.clock.flow_costs import Errand, WayCost
from xdeepserve.hw.clock import Clock, Waiter, Waiting

Counts = npt.NDArray[np.int64]


class FlowHub:
    """All sendings of a TE. Lane `lane_of(rank, microbatch)` has at most one under way.

    rows[:, e, lane]   rows of the sending for expert die e: for routed experts, and for the shared one
    here[e, lane]      rows have arrived there and have not been taken
    heard[e, lane]     rows have arrived, or, if clients announce that, it is known that there are none
    open[e, lane]      rows have not been answered
    """

    def __init__(
        self,
        clock: Clock,
        cost: WayCost,
        num_attention: int,
        num_microbatches: int,
        num_experts: int,
        announces: bool = False,
    ) -> None:
        self.clock, self.cost, self.num_microbatches = clock, cost, num_microbatches
        self.announces = announces
        self.num_attention, self.num_experts = num_attention, num_experts
        num_lanes = num_attention * num_microbatches
        self.rows = np.zeros((2, num_experts, num_lanes), np.int64)
        self.here = np.zeros((num_experts, num_lanes), bool)
        self.heard, self.open = self.here.copy(), self.here.copy()
        self.events, self.came_ns = np.zeros(num_lanes, np.int64), np.zeros(num_lanes, np.int64)
        self.back_share = np.ones(num_lanes)  # rows that come back for each that goes there
        self._sent: list[Errand | None] = [None] * num_lanes
        self._back_ns: list[int | None] = [None] * num_lanes  # when it is back, once all have answered
        self._waiters: dict[int, Waiter] = {}
        self._idle: dict[int, Waiter] = {}  # expert dies that wait for something to come

    def lane_of(self, rank: DieRank, microbatch: int) -> int:
        """Return the lane number of an attention die's microbatch."""
        return rank * self.num_microbatches + microbatch

    # ---- there --------------------------------------------------------------------------------------

    def send(self, lane: int, event: int, sent: Errand, rows: Counts) -> None:
        """Send tokens from an attention die now, with `rows` [2, experts]."""
        self.rows[:, :, lane], self.open[:, lane], self.events[lane] = rows, rows.any(0), event
        self._sent[lane], self._back_ns[lane] = sent, None
        self.back_share[lane] = self.cost.back_share(sent)
        self.clock.detach(self._carry(lane, sent), f"tokens of lane {lane}")

    async def _carry(self, lane: int, sent: Errand) -> None:
        await self.clock.sleep(round(self.cost.there_ns(sent)))
        if self._sent[lane] is not sent:
            return  # it was called back
        has_rows = self.open[:, lane].copy()
        self.here[:, lane], self.heard[:, lane], self.came_ns[lane] = has_rows, has_rows, self.clock.now
        if self.announces:
            self.heard[:, lane] = True
        if not sent.num_experts:
            self._end(lane)
        for expert in np.flatnonzero(self.heard[:, lane]).tolist():
            if expert in self._idle:
                self._idle.pop(expert).wake()

    def forget(self, lane: int) -> None:
        """Forget the sending under way on a lane, as if it had not been sent."""
        self.here[:, lane], self.open[:, lane], self._sent[lane] = False, False, None

    # ---- served -------------------------------------------------------------------------------------

    async def news(self, expert: int, deadline_ns: int | None) -> None:
        """Wait until an expert die hears of tokens; DeadlineError if it does not."""
        waiter = self._idle[expert] = self.clock.waiter(
            lambda: Waiting("A2E", f"expert {expert}", "any attention die", "tokens", "some", "none")
        )
        try:
            await self.clock.wait(waiter, deadline_ns, idle=deadline_ns is None)
        finally:
            if self._idle.get(expert) is waiter:
                del self._idle[expert]

    def answered(self, expert: int, lanes: Counts) -> None:
        """Note an expert die's answers to the sendings of these lanes."""
        self.open[expert, lanes] = False
        for lane in lanes[~self.open[:, lanes].any(0)].tolist():
            self._end(lane)

    def _end(self, lane: int) -> None:
        sent = self._sent[lane]
        if sent is None:
            return
        delay = round(self.cost.back_ns(sent))
        self._back_ns[lane] = self.clock.now + delay
        if lane in self._waiters:
            self._waiters.pop(lane).wake(delay_ns=delay)

    # ---- and back -----------------------------------------------------------------------------------

    async def back(self, lane: int, timeout_ns: int) -> None:
        """Wait until all answers to a lane's sending are summed; DeadlineError names the silent expert
        dies."""
        end = self._back_ns[lane]
        if end is not None:
            await self.clock.sleep_until(end)
            return
        waiter = self._waiters[lane] = self.clock.waiter(lambda: self._describe(lane))
        try:
            await self.clock.wait(waiter, self.clock.now + timeout_ns)
        finally:
            if self._waiters.get(lane) is waiter:
                del self._waiters[lane]

    def _describe(self, lane: int) -> Waiting:
        rank, microbatch = divmod(lane, self.num_microbatches)
        late = np.flatnonzero(self.open[:, lane]).tolist()
        names, total = (
            ", ".join(f"expert {expert}" for expert in late[:8]),
            self.rows[:, :, lane].any(0).sum(),
        )
        who, event = f"attention {rank}, microbatch {microbatch}", f"answers of event {self.events[lane]}"
        return Waiting("E2A", who, names, event, total, total - len(late))
