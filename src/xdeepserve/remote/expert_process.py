"""The process of an expert server: a die of its own, whose memory begins with a buffer that clients map.

The process plans the same layout as its clients, and runs the program of a pod's expert die on a clock of its
own. It registers before it loads and serves when its kernels are compiled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from xdeepserve.comm.means import Means
from xdeepserve.comm.services.layout import BELL
from xdeepserve.comm.services.rules import SlotEvent, SlotState
from xdeepserve.comm.services.server import Batching, ServiceServer
from xdeepserve.engine.build import pod_for, with_answers
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.fitting import with_servers_outside
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.loading import read_experts
from xdeepserve.engine.messages import StepFailed
from xdeepserve.engine.recovery.rollback_field import plan_rollback_field
from xdeepserve.engine.walk.runner import Computing
from xdeepserve.engine.ways.arithmetic import quantize_rows
from xdeepserve.engine.ways.services.real import experts_held, identity, service_layout
from xdeepserve.errors import DeadlineError, XDeepServeError
from xdeepserve.hw.queue import Queue
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.weights import Recipe
from xdeepserve.remote.children import ServerTask
from xdeepserve.remote.enlisted import Enlisted
from xdeepserve.remote.handshake import listen
from xdeepserve.remote.network_card import Nic
from xdeepserve.remote.outside_reach import nap
from xdeepserve.remote.registered import SharedBuffer, fence, windows
from xdeepserve.remote.seat_list import Register
from xdeepserve.step.linear import Threads

QUIET_S = 5.0  # until clients have read what is there, when it leaves
Tell = Callable[[str], None]


class ExpertProcess:
    """Process of an expert server, from registration to end.

    Every XDeepServeError is raised before the server serves, except the failure of its program.
    """

    def __init__(self, task: ServerTask, checkpoint: Checkpoint, recipe: Recipe, tell: Tell) -> None:
        self._task, self._checkpoint, self._recipe, self._tell = task, checkpoint, recipe, tell
        self._deployment = msgspec.convert(task.deployment, Deployment)
        config = with_answers(checkpoint.config, self._deployment, recipe)
        sizes = with_servers_outside(self._deployment, config)
        # Its place in the pod of its clients: addresses, and nothing else of that pod is here.
        self._pod = pod_for([sizes.place])
        self._team = Team(self._pod, config, recipe, sizes)
        self._layout, self._placed = service_layout(self._team), sizes.experts
        self._identity = identity(self._layout, self._placed, recipe, checkpoint.digest())

    async def run(self) -> None:
        """Register, load experts, and serve until the monitor lets the server go."""
        listener, address = self._listen()
        with listener:
            await self._serve(listener, address)

    async def _serve(self, listener: socket.socket, address: str) -> None:
        ends, loop = asyncio.Event(), asyncio.get_running_loop()

        def end(error: Exception | None) -> None:
            self._failure = self._failure or error
            ends.set()

        def let_go(error: Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended by itself, and its loop is closed
                loop.call_soon_threadsafe(end, error)

        name = self._task.name or f"{os.uname().nodename}-{os.getpid()}"
        asked = Register(name, self._identity, address, experts_held(self._placed), self._task.seat)
        enlisted = Enlisted(
            self._task.monitor,
            self._task.token,
            asked,
            self._tell,
            let_go,
        )
        seated = await asyncio.wrap_future(enlisted.seated)
        seat = seated.seat
        self._tell(f"{name} has seat {seat}, experts {list(experts_held(self._placed)[seat])}, at {address}")
        program, buffer = self._build(seat, seated.epoch)
        await self._pod.clock.spawn(program.warm_up(), name="warm up")
        known = windows(self._layout, program.die.memory)
        nic = Nic(listener, buffer, known, self._identity, self._task.token, let_go)
        running = program.die.detach(program.run(), "experts", end)
        watching = self._pod.clock.detach(self._hear_reports(end), "reports", end)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, enlisted, ends)
        enlisted.serve(lambda count: self._ring(program, count))
        self._tell(f"{name} serves")
        await ends.wait()
        await self._quiet(program, nic)
        nic.close()
        for process in (running, watching):
            process.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    _failure: Exception | None = None
    _num_signals = 0

    def _listen(self) -> tuple[socket.socket, str]:
        try:
            return listen(self._task.address)
        except OSError as error:
            raise XDeepServeError(f"{self._task.address}: cannot listen there: {error.strerror}") from None

    def _build(self, seat: int, epoch: int) -> tuple[ExpertServerProgram, SharedBuffer]:
        """Build the die of a seat: plan its memory, load its weights, and make its program."""
        team, node = self._team, self._layout.servers.dies[seat]
        walk = team.sizes.walk
        plan = self._pod.plan(node)
        self._layout.plan_server(plan)
        max_rows = len(team.dies) * self._layout.rows_per_slot
        mem = ExpertMemory(
            *(plan, team.config, self._recipe, self._placed, seat, walk.num_items),
            max_rows=max_rows,
            is_flow=walk.flows,
        )
        plan_rollback_field(plan)
        buffer = SharedBuffer(plan.ends[-1])
        plan.provide = lambda nbytes: buffer.view
        self._pod.materialise()
        mem.materialise(self._pod.memory(node))
        read_experts(self._checkpoint, self._recipe, mem)
        assert walk.services is not None
        die, times = self._pod.dies[node], walk.services
        batching = Batching(times.batch_clients, round(1e3 * times.batch_timeout_us))
        num_layers = len(self._placed.order)
        server = OutsideServer(
            *(die, seat, self._layout, num_layers, batching, quantize_rows, Means()), generation=epoch - 1
        )
        self._reports: Queue[msgspec.Struct] = Queue(self._pod.clock, "reports")
        threads = Threads(self._deployment.threads)
        return ExpertServerProgram(die, mem, server, threads, Computing(die), self._reports), buffer

    async def _hear_reports(self, end: Callable[[Exception], None]) -> None:
        """End the process when a kernel of the die has failed."""
        while True:
            report = await self._reports.get()
            if isinstance(report, StepFailed):
                end(report.error)

    def _signalled(self, enlisted: Enlisted, ends: asyncio.Event) -> None:
        """Handle a signal: the first asks the monitor for permission to leave, the second ends the
        process."""
        self._num_signals += 1
        if self._num_signals > 1:
            ends.set()
        enlisted.leave()

    def _ring(self, program: ExpertServerProgram, count: int) -> int:
        """Ring the loop's bell from another thread, and return the number of the last answered question."""
        assert isinstance(program.server, OutsideServer)
        memory, at = program.die.memory, program.server.bell
        answered: int = BELL.unpack(memory.read(at, BELL.size))[1]
        memory.write(at, BELL.pack(count, answered))
        return answered

    async def _quiet(self, program: ExpertServerProgram, nic: Nic) -> None:
        """Wait until clients have read all answers, for at most `QUIET_S` seconds."""
        server = program.server
        assert isinstance(server, OutsideServer)
        try:
            async with asyncio.timeout(QUIET_S):
                while nic.has_client and not server.is_quiet and self._num_signals < 2:
                    if self._failure is not None:
                        return
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self._tell("it goes, though a client has not read its answers")


def end_with_parent() -> None:
    """End the process when standard input is closed, that is, when its parent has ended."""

    def wait() -> None:
        code = 1
        try:
            while os.read(0, 4096):  # not by sys.stdin, whose lock an end of the process would wait for
                pass
            code = 0
        except Exception as error:
            print(f"xdeepserve: the parent cannot be watched: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    threading.Thread(target=wait, name="parent", daemon=True).start()


class OutsideServer(ServiceServer):
    """A server's end in a process of its own: polls memory that others write to while it looks elsewhere.

    It waits in this computer's time. Where the die's memory begins, a buffer is that others have mapped.
    """

    num_served = 0  # requests

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns()

    @property
    def is_quiet(self) -> bool:
        """Whether every request has been answered and every answer read."""
        return not bool((self._states == SlotState.WRITTEN).any() or (self._states == SlotState.DONE).any())

    async def _wait(self, deadline_ns: int | None) -> None:
        num_looks = 0
        while not self._has_news:
            if deadline_ns is not None and self.now_ns >= deadline_ns:
                raise DeadlineError(**self._describe()._asdict(), at_ns=self.die.clock.now)
            await nap(num_looks)
            num_looks += 1
        fence()

    def _set(self, number: int, event: SlotEvent) -> None:
        fence()  # answers before the state that says so
        self.num_served += event is SlotEvent.ANSWER
        super()._set(number, event)
