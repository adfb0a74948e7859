"""A die with memory, cores, engines and command queue, as a die program sees them.

A *die program* is an `async def program(die, ...)` spawned on the clock. It reads its own memory directly,
other memories through the engines, and launches kernels on views of its memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from ..errors import GlitchError, HardwareError, PageLostError
from .clock import Hears, Process, Waiting
from .dma import DMA
from .engines import Fabric
from .fault_kinds import ERROR_CODES, PAGE_LOST
from .gate import Gate
from .hbm import SharedHBM
from .memory import Address, Memory
from .mte import MTE
from .queue import Queue
from .spec import Core

T = TypeVar("T")


class Cores:
    """AIC or AIV cores of a die.

    A kernel takes the `n` cores that are free first, all from the same instant on.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free_at = [0] * total  # ascending

    def reserve(self, now: int, num_cores: int, duration_ns: int) -> tuple[int, int]:
        """Book cores for a kernel that asks now; return its start and end (ns)."""
        start = max(now, self._free_at[num_cores - 1])
        end = start + duration_ns
        self._free_at[:num_cores] = [end] * num_cores
        if num_cores < self.total:
            self._free_at.sort()
        return start, end


class Die:
    """NPU die with memory, cores and engines; made by `Pod`."""

    def __init__(self, index: int, fabric: Fabric) -> None:
        self.index = index
        self.name = fabric.topology.name(index)
        self.fabric, self.clock, self.spec, self.trace = fabric, fabric.clock, fabric.spec, fabric.trace
        self.cores: dict[Core, Cores] = {
            "aic": Cores(self.spec.num_cores("aic")),
            "aiv": Cores(self.spec.num_cores("aiv")),
        }
        self.hbm = SharedHBM(fabric.clock)
        self.gate = Gate(fabric.clock)
        self.mte = MTE(fabric, index, self.gate)
        self.dma = DMA(fabric, index, "dma", self.gate)
        self.urma = DMA(fabric, index, "urma", self.gate)
        self.commands: Queue[msgspec.Struct] = Queue(fabric.clock, f"commands of die {index}")
        self._processes: list[asyncio.Task[Any]] = []
        self._slow_factor, self._slow_until = 1.0, 0

    @property
    def memory(self) -> Memory:
        """Memory (HBM) of the die."""
        return self.fabric.memories[self.index]

    def check_alive(self) -> None:
        """Check the die. Raises LostDieError if it is lost."""
        if self.fabric.memories.silent:
            self.fabric.memories.check_alive([self.index])

    def spawn(self, coro: Any, name: str = "program") -> asyncio.Task[Any]:
        """Run a die program on this die."""
        process = self.clock.spawn(coro, name=f"{self.name} {name}")
        self._processes = [*self.running, process]
        return process

    def detach(self, coro: Coroutine[Any, Any, object], name: str, hears: Hears) -> asyncio.Task[None]:
        """Run a die program that nobody awaits; `hears` is told of the error that ends it."""
        process = self.clock.detach(coro, f"{self.name} {name}", hears)
        self._processes = [*self.running, process]
        return process

    @property
    def running(self) -> list[asyncio.Task[Any]]:
        """Processes of the die, without those that have ended."""
        return [process for process in self._processes if not process.done()]

    # ---- commands -----------------------------------------------------------------------------------

    def put(self, command: msgspec.Struct, delay_ns: int = 0) -> None:
        """Host side: queue a typed message; the die sees it `delay_ns` and the command latency later."""
        if not isinstance(command, msgspec.Struct):
            raise HardwareError(f"a command is a msgspec Struct, not {type(command).__name__}")
        self.commands.put(command, delay_ns=delay_ns + self.spec.command_ns())

    async def next_command(self) -> msgspec.Struct:
        """Die side: wait for the next message, in order, as long as it takes."""
        return await self.commands.get()

    # ---- kernels ------------------------------------------------------------------------------------

    async def compute(
        self,
        name: str,
        fn: Callable[[], T],
        *,
        flops: float = 0,
        nbytes: float = 0,
        core: Core = "aic",
        cores: int | None = None,
        is_fused: bool = False,
        args: dict[str, Any] | None = None,
    ) -> T:
        """Launch a kernel: run `fn` on views of HBM, then let its virtual time pass.

        `flops` operations and `nbytes` of HBM traffic give the time (`Spec.kernel_ns`); `cores` is the
        kernel's share of the cores (all by default). Kernels that do not fit side by side queue up. A part
        that is fused into a running kernel has no launch overhead. `args` is what a trace tells of it.
        """
        return await self.run(
            name, fn, self.spec.kernel_ns(flops, nbytes, core, cores, is_fused=is_fused), core, cores, args
        )

    async def run(
        self,
        name: str,
        fn: Callable[[], T],
        duration_ns: int,
        core: Core = "aic",
        cores: int | None = None,
        args: dict[str, Any] | None = None,
    ) -> T:
        """Launch a kernel for `duration_ns` of `cores` cores (all by default), once they are free."""
        all_cores = self.cores[core]
        total = all_cores.total
        if cores is not None and not 1 <= cores <= total:
            raise HardwareError(f"die {self.index}: kernel {name} asks for {cores} of {total} {core} cores")
        if self.gate.is_shut:
            await self.gate.passed()
        now = self.clock.now
        if now < self._slow_until:
            duration_ns = round(duration_ns * self.slowness)
        start, end = all_cores.reserve(now, cores or total, duration_ns)
        if self.trace.is_on:
            self.trace.span(self.index, core.upper(), name, start, end, args)
        result = fn()
        if end > now:  # else hundreds of dies would wait for each other's kernels of no time
            await self.clock.sleep_until(end)
        return result

    def draw(self, lane: str, name: str, start_ns: int, more: dict[str, Any] | None = None) -> None:
        """Draw a span from `start_ns` until now, with the running process's place and `more` as arguments."""
        if self.trace.is_on:
            place = self.trace.place
            args = {**place, **more} if more else place
            self.trace.span(self.index, lane, name, start_ns, self.clock.now, args)

    def slow(self, factor: float, duration_ns: int) -> None:
        """Make kernels take `factor` times as long, if they begin within `duration_ns`."""
        self._slow_factor, self._slow_until = factor, self.clock.now + duration_ns

    @property
    def slowness(self) -> float:
        """Factor on the time of kernels that begin now; 1.0 if the die is not slow."""
        return self._slow_factor if self.clock.now < self._slow_until else 1.0

    def glitch(self, code: str) -> None:
        """End all kernels, transfers and waits for fields of this die with an error code. Memory stays, and
        programs that wait for work are not affected."""
        self._end_with(GlitchError(self.index, code, ERROR_CODES[code].meaning))

    def lose_page(self, offset: int, nbytes: int) -> None:
        """Scribble over a page of this die's memory and end its work as after a glitch; the driver reports
        which bytes are lost."""
        self.memory.scribble(offset, offset + nbytes)
        error = PageLostError(self.index, PAGE_LOST, ERROR_CODES[PAGE_LOST].meaning, offset, nbytes)
        self._end_with(error)
        self.fabric.memories.lose_page(error)
        self.fabric.report(error)

    def _end_with(self, error: GlitchError) -> None:
        for process in self.running:
            if isinstance(process, Process) and not process.is_idle:
                process.interrupt(error)

    # ---- flags --------------------------------------------------------------------------------------

    async def wait_fields(
        self,
        start: int,
        nbytes: int,
        observe: Callable[[int, int], bool],
        *,
        deadline_ns: int | None,
        describe: Callable[[], Waiting],
        idle: bool = False,
    ) -> None:
        """Poll [start, start + nbytes) of the die's own memory until `observe` is satisfied.

        `observe(offset, nbytes)` looks at the bytes that may have changed and says whether the wait is over.
        It is called first for all bytes, then for those touched by each write; polls in between would see
        nothing new, so they cost no events. Its errors are raised here. The poll latency passes after the
        write that ends the wait. Raises DeadlineError or DeadlockError as `describe` words it; a wait for
        work, `idle` and without deadline, may last for ever. Raises LostDieError if this die is lost, before
        or meanwhile, because its bytes are then no valid field.
        """
        waiter = self.clock.waiter(describe)
        poll_ns = self.spec.poll_ns()

        def on_write(offset: int, nbytes: int) -> None:
            try:
                self.check_alive()  # it may have been lost meanwhile
                is_over = observe(offset, nbytes)
            except Exception as error:
                waiter.fail(error, poll_ns)
            else:
                if is_over and waiter.wake(delay_ns=poll_ns):
                    self.memory.unwatch(watch)

        watch = self.memory.watch(start, nbytes, on_write)
        on_write(start, nbytes)
        try:
            await self.clock.wait(waiter, deadline_ns, idle=idle)
        finally:
            self.memory.unwatch(watch)
        self.check_alive()  # it may have been lost within the poll's latency

    async def poll(
        self,
        places: Sequence[tuple[Address, int]],
        observe: Callable[[], bool],
        *,
        deadline_ns: int | None,
        describe: Callable[[], Waiting],
    ) -> None:
        """Poll bytes of other memories, or of this die's own, by reads until `observe` is satisfied.

        `observe` is called at once, and then whenever one of the places (address, size) has been written to;
        more reads would see nothing new. The read that ends the wait takes its time. A lost die answers no
        read, so its bytes seem unchanged. Raises errors as `wait_fields` does.
        """
        waiter = self.clock.waiter(describe)
        read_ns = self.spec.startup_ns("urma") + self.spec.pieces_ns(1, 1) + self.spec.far_latency_ns()

        def on_write(offset: int, nbytes: int) -> None:
            try:
                self.check_alive()
                is_over = observe()
            except Exception as error:
                waiter.fail(error, read_ns)
            else:
                if is_over:
                    waiter.wake(delay_ns=read_ns)

        memories = [self.fabric.memories[address.node] for address, _ in places]
        watches = [
            memory.watch(address.offset, nbytes, on_write)
            for memory, (address, nbytes) in zip(memories, places, strict=True)
        ]
        on_write(0, 0)
        try:
            await self.clock.wait(waiter, deadline_ns)
        finally:
            for memory, watch in zip(memories, watches, strict=True):
                memory.unwatch(watch)
        self.check_alive()
