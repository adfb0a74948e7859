"""Watch an engine: take frames at a bounded rate, and give each watcher the latest.

A part that has not changed is not sent again. A watcher has no queue: it gets what has changed since it last
came. A watcher that never comes back costs nothing, and no other waits for it. Without watchers, the engine
is not looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import msgspec

from xdeepserve import __version__
from xdeepserve.engine.dp.events import GroupId
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.page.happenings import Happenings
from xdeepserve.page.parts import PageHello, Part, PodPart
from xdeepserve.page.pod_look import groups_part, now_part, pod_part, pool_part
from xdeepserve.page.step_look import StepLook

LEAST_PAUSE_S = 0.1  # between two looks, of wall time
STEP_PAUSE_S = 1.0  # between two steps that are drawn
MAX_BYTES_PER_S = 150_000
COST_FACTOR = 100  # looking takes at most one part in so many of the time
SIGN_OF_LIFE_S = 5.0

_ENCODER = msgspec.json.Encoder()
HELLO = _ENCODER.encode(PageHello(__version__))


class Frames:
    """Parts of the latest look, each encoded once, with the number of the look that changed it."""

    def __init__(self) -> None:
        self.number = 0
        self._parts: dict[str, tuple[int, bytes]] = {}

    def take(self, parts: dict[str, Part | None]) -> int:
        """Keep the parts of a look, and return the number of new bytes."""
        number, nbytes = self.number + 1, 0
        for name, part in parts.items():
            if part is None:
                continue
            data = _ENCODER.encode(part)
            if self._parts.get(name, (0, b""))[1] != data:
                self._parts[name] = number, data
                self.number = number
                nbytes += len(data)
        return nbytes

    def since(self, number: int) -> bytes:
        """Encode as JSON the parts changed since look `number`; 0: all parts."""
        changed = [
            b'"%s":%s' % (name.encode(), data) for name, (at, data) in self._parts.items() if at > number
        ]
        return b'{"frame":%d,"parts":{%s}}' % (self.number, b",".join(changed))


class Look:
    """All parts of an engine, kept up to date between `begin` and `end`."""

    def __init__(self, engine: Engine, no_kill: str | None = None) -> None:
        self._engine, self._no_kill = engine, no_kill
        self.frames = Frames()
        self.happenings = Happenings(lambda: engine.plan.pod.clock.now)
        self.step = StepLook(engine)

    def begin(self) -> None:
        self._engine.observe(self.happenings.see)
        self._engine.observe(self.step.see)

    def end(self) -> None:
        """Stop observing, and leave the engine as if it had not been watched."""
        self._engine.ignore(self.happenings.see)
        self._engine.ignore(self.step.see)
        self.happenings.forget_open()
        self.step.drop()

    def look(self) -> int:
        """Look at everything, and return the number of new bytes."""
        engine, happened = self._engine, self.happenings
        pod = pod_part(engine, self._no_kill)
        parts: dict[str, Part | None] = {
            "pod": pod,
            "now": now_part(engine, happened.num_tokens),
            "groups": groups_part(engine),
            "requests": happened.requests_part(_places(pod)),
            "events": happened.events_part(),
            "pool": pool_part(engine),
        }
        if self.step.caught is not None:
            parts |= self.step.parts(pod.dies)
        return self.frames.take(parts)


def _places(pod: PodPart) -> Callable[[GroupId], int]:
    """Make a function to count DP groups as GroupsPart does; -1 for a group of a TE that is gone."""
    firsts, first = {}, 0
    for te in pod.tes:
        firsts[te.name] = first
        first += te.num_groups
    return lambda group: firsts[group.te] + group.rank if group.te in firsts else -1


class PodWatch:
    """Looks at an engine for all its watchers, in a task that runs while there are any."""

    def __init__(self, engine: Engine, no_kill: str | None = None) -> None:
        self._look = Look(engine, no_kill)
        self._num_watchers = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield frames for a watcher, as JSON, for as long as the watcher asks for more.

        An empty frame says that nothing is new. An error while looking ends the frames of all watchers.
        """
        self._enter()
        number = 0
        try:
            while True:
                if self._look.frames.number > number:
                    data, number = self._look.frames.since(number), self._look.frames.number
                    yield data
                    continue
                try:
                    async with asyncio.timeout(SIGN_OF_LIFE_S):
                        await self._news.wait()
                except TimeoutError:
                    yield b""
                if self._task is not None and self._task.done():
                    self._task.result()
                    return
        finally:
            self._leave()

    @property
    def num_watchers(self) -> int:
        return self._num_watchers

    def _enter(self) -> None:
        self._num_watchers += 1
        if self._task is None or self._task.done():
            self._look.begin()
            self._look.look()
            self._task = asyncio.create_task(self._run(), name="watch")

    def _leave(self) -> None:
        self._num_watchers -= 1
        if not self._num_watchers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._look.end()

    async def _run(self) -> None:
        """Look again and again, with pauses in proportion to the last look's bytes and to its time."""
        step, next_step = self._look.step, 0.0
        try:
            while True:
                began = time.monotonic()
                has_step = step.caught is not None
                number = self._look.frames.number
                nbytes = self._look.look()
                # By the clock on the wall: a pod that gets little of a busy machine gives no larger part.
                cost = time.monotonic() - began
                if has_step:  # drawing it took about as long as looking at it
                    next_step = began + max(STEP_PAUSE_S, 2 * COST_FACTOR * cost)
                if not step.wants and began >= next_step:
                    step.want()
                if self._look.frames.number > number:
                    self._tell()
                await asyncio.sleep(max(LEAST_PAUSE_S, nbytes / MAX_BYTES_PER_S, COST_FACTOR * cost))
        finally:
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
