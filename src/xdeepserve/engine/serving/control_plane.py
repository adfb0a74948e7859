"""First tier of heartbeats: the control plane asks TE-shells, which are loops on hosts (xDeepServe 6.1).

The second tier, TE-shell to DP groups, is `engine/te/heartbeat.py`, with a period of its own. The control
plane stands outside of the pod. A question and its answer travel through the hosts' network stacks, and a
shell answers when its loop turns: a host that stands still is silent.

    healthy   it has answered what it was asked
    suspect   it has not answered for `beat_s`; others get new work
    lost      it has not answered for `shell_lost_s`: its TE is given up

No heartbeat is sent on a pod on which nothing happens: virtual time does not pass for the sake of a
heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from xdeepserve.engine.deploy.deployment import HealthConfig
from xdeepserve.engine.messages import Beat
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import DeadlineError
from xdeepserve.hw.clock import Hears
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.queue import Queue


class ControlPlane:
    """Sends heartbeats to an engine's TE-shells, and tells each TE whose shell is lost.

    `hears` is told of an error in the control plane itself.
    """

    def __init__(
        self,
        pod: Pod,
        config: HealthConfig,
        tes: Callable[[], Sequence[TE]],
        hears: Hears,
    ) -> None:
        self._clock, self._tes, self._hears = pod.clock, tes, hears
        self.beat_ns, self.lost_ns = round(1e9 * config.beat_s), round(1e9 * config.shell_lost_s)
        self.travel_ns = math.ceil(1e9 * pod.spec.vpc_startup.value)
        self._answers: Queue[str] = Queue(pod.clock, "answers to the control plane")
        self._asked_ns: dict[str, int] = {}  # what has not been answered, by TE: the oldest question
        self._is_over = False

    def start(self) -> None:
        """Start to send heartbeats, the first after a period of virtual time."""
        self._clock.at(self._clock.now + self.beat_ns, self._beat, self._hears)

    def end(self) -> None:
        """Stop sending heartbeats to TE-shells."""
        self._is_over = True

    async def _beat(self) -> None:
        """Mark TE-shells by how long their answers are overdue, then send new heartbeats."""
        if self._is_over:
            return
        running = [te for te in self._tes() if te.is_running]
        names = {te.sizes.place.name for te in running}
        self._asked_ns = {name: asked_ns for name, asked_ns in self._asked_ns.items() if name in names}
        for te in running:
            silent = self._silent_ns(te)
            if silent:
                te.health.shell = "suspect"
            if silent >= self.lost_ns and te.is_running:  # else another shell's loss has ended the engine
                te.health.shell = "lost"
                te.lose(Loss("shell", te.plan.name, (), self._error(te, silent)))
        self.start()
        asked = [te for te in running if te.is_running]
        for te in asked:
            self._asked_ns.setdefault(te.sizes.place.name, self._clock.now)
        await self._clock.sleep(self.travel_ns)
        for te in asked:
            te.inbox.put(Beat(te.sizes.place.name, self._answers, self.travel_ns))
        self._clock.detach(self._hear(), "control plane", self._hears)

    async def _hear(self) -> None:
        """Collect heartbeat answers until the next question is due."""
        deadline_ns = self._clock.now + self.beat_ns - self.travel_ns
        while self._asked_ns:
            try:
                name = await self._answers.get(deadline_ns)
            except DeadlineError:
                return
            self._asked_ns.pop(name, None)
            for te in self._tes():
                if te.sizes.place.name == name:
                    te.health.shell = "healthy"

    def _silent_ns(self, te: TE) -> int:
        asked_ns = self._asked_ns.get(te.sizes.place.name)
        return 0 if asked_ns is None else self._clock.now - asked_ns

    def _error(self, te: TE, silent_ns: int) -> DeadlineError:
        del self._asked_ns[te.sizes.place.name]
        return DeadlineError(
            op="heartbeat, tier 1",
            rank="control plane",
            peer=f"TE-shell of {te.sizes.place.name}",
            field="answer",
            expected=f"one within {self.lost_ns / 1e9:g} s",
            seen=f"silence for {silent_ns / 1e9:g} s",
            at_ns=self._clock.now,
        )
