"""Changes of roles in a serving fleet: TEs go from prefill to decode and back (CloudMatrix 4.1).

A TE that changes its role takes nothing more. A prefill TE finishes its requests. A decode TE gives them to
others, with their KV, as the engine does with a TE that is taken away. Then the TE is planned anew, gets the
weights of its new layout from another TE (NPU-fork), serves a dummy request, and joins in its new role. The
length of answers is the fleet's prediction for arriving requests. Without predictions it is that of ended
requests, which is late by the duration of an answer. A lost TE counts no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_scaling import ScaleAct, ScaleEvent
from xdeepserve.platform.fleet_words import FleetTE, ServedRequest, TERole
from xdeepserve.platform.role_ratio import RoleBounds, RoleState, Workload, next_roles, role_rates
from xdeepserve.platform.scale_up import ScaleUp
from xdeepserve.platform.service_report import Bounds
from xdeepserve.platform.traces import TracedRequest


class FleetRoles:
    """Makes the roles in a fleet follow the workload.

    `kinds` are TEs of each role, `events` the changes made.
    """

    def __init__(
        self,
        fleet: Fleet,
        kinds: dict[TERole, FleetTE],
        scale_up: ScaleUp,
        bounds: RoleBounds,
        service: Bounds,
    ) -> None:
        self.fleet, self.kinds, self.bounds, self.service = fleet, kinds, bounds, service
        self.state = RoleState(self.count("prefill"))
        steps = scale_up.steps(1, 1)[2:]  # the pod and its processes are there
        self.change_s = sum(step.seconds for step in steps)
        self.events: list[ScaleEvent] = []
        self._arrived: deque[tuple[float, int, float]] = deque()  # when, tokens of prompt, of answer if known
        self._ended: deque[tuple[float, int, float]] = deque()  # when, tokens computed, of the answer
        self.changing: dict[int, TERole] = {}  # TEs that drain, and what they will be
        self._coming = 0
        fleet.on_end = self._hear_end
        fleet.on_arrive = self._hear_arrival
        fleet.at(0.0, self._look)

    def lose(self, te: int) -> None:
        """Lose a TE and restart its requests elsewhere; the remaining TEs are split anew."""
        num = sum(each.num_tasks for each in self.fleet.steppers_of(te))
        self.fleet.lose(te)
        self._tell("lost", self.fleet.tes[te].name, f"{num} requests begin again elsewhere")

    def count(self, role: TERole) -> int:
        """Count the TEs of a role that serve."""
        return sum(self.fleet.tes[te].role == role for te in self.fleet.serving)

    def _hear_end(self, served: ServedRequest) -> None:
        computed = served.num_prompt - served.num_cached
        self._ended.append((self.fleet.now, computed, served.num_output))

    def _hear_arrival(self, request: TracedRequest) -> None:
        self._arrived.append((self.fleet.now, request.input_length, self.fleet.predict(request)))

    def _workload(self) -> Workload | None:
        since = self.fleet.now - 1e9 * self.bounds.while_s
        for heard in (self._arrived, self._ended):
            while heard and heard[0][0] < since:
                heard.popleft()
        if not self._arrived or not self._ended:
            return None
        num, ended = len(self._arrived), len(self._ended)
        seconds = min(self.bounds.while_s, max(self.bounds.every_s, self.fleet.now / 1e9))
        return Workload(
            num / seconds,
            sum(each[1] for each in self._arrived) / num,
            sorted(each[1] for each in self._arrived)[num * 19 // 20],
            sum(each[1] for each in self._ended) / ended,
            sum(each[2] for each in self._arrived) / num or sum(each[2] for each in self._ended) / ended,
        )

    def _look(self) -> None:
        fleet = self.fleet
        if not fleet.is_open:
            return
        for te in [te for te in self.changing if fleet.is_empty(te)]:
            role = self.changing.pop(te)
            if fleet.is_lost(te):
                continue
            self._coming += 1
            fleet.at(fleet.now + 1e9 * self.change_s, self._joins(te, role))
        work = self._workload()
        if work is not None and not self.changing and not self._coming and len(fleet.serving) > 1:
            self._follow(work)
        # Where nobody comes, ends or changes, nothing follows from looking again.
        again = fleet.look_at if work is None and not self.changing else fleet.at
        again(fleet.now + 1e9 * self.bounds.every_s, self._look)

    def _follow(self, work: Workload) -> None:
        """Split the present TEs between roles; some may have been lost since the last look."""
        first, second = self.kinds["prefill"], self.kinds["decode"]
        rates = role_rates(second.price, (first.limits, second.limits), work, 1e6 * self.service.tpot_ms)
        before = msgspec.structs.replace(self.state, num_prefill=self.count("prefill"))
        self.state = next_roles(
            before, self.fleet.now / 1e9, work, rates, len(self.fleet.serving), self.change_s, self.bounds
        )
        if self.state.num_prefill != before.num_prefill:
            self._change(before.num_prefill)

    def _change(self, before: int) -> None:
        wanted = self.state.num_prefill
        self._tell("wanted", "", f"{wanted} that prefill, not {before}: {self.state.reason}")
        old, new = ("decode", "prefill") if wanted > before else ("prefill", "decode")
        fleet = self.fleet
        tasks = {
            te: sum(each.num_tasks for each in fleet.steppers_of(te))
            for te in fleet.serving
            if fleet.tes[te].role == old
        }
        for te in sorted(tasks, key=lambda te: (tasks[te], te))[: abs(wanted - before)]:
            self.changing[te] = new  # type: ignore[assignment]
            if old == "decode":
                fleet.move_out(te)
                self._tell(
                    "drains", fleet.tes[te].name, f"it will {new}; others go on with {tasks[te]} requests"
                )
            else:
                fleet.drain(te)
                self._tell(
                    "drains", fleet.tes[te].name, f"it will {new}, and ends {tasks[te]} requests first"
                )

    def _joins(self, te: int, role: TERole) -> Callable[[], None]:
        def join() -> None:
            self._coming -= 1
            name = f"{role} {len(self.fleet.tes)}"
            self.fleet.join(self.kinds[role]._replace(name=name))
            was = self.fleet.tes[te].name
            self._tell("joins", name, f"it was {was}; planned and loaded anew in {self.change_s:.2f} s")

        return join

    def _tell(self, what: ScaleAct, te: str, reason: str) -> None:
        self.events.append(ScaleEvent(self.fleet.now, what, te, len(self.fleet.serving), reason))
