"""A server process's talk with the monitor, in a thread beside its loop: registration, beats, and leaving.

A beat proves that the loop turns, not only that this thread runs. The thread rings the bell in the server's
memory, as the monitor of a pod does, and sends a beat when the loop has answered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from xdeepserve.errors import DeploymentError, ProtocolError, XDeepServeError
from xdeepserve.remote.handshake import PATIENCE_S, split
from xdeepserve.remote.monitor_service import check_reachable, dial, hear, say
from xdeepserve.remote.seat_list import Go, Leave, LoopTurns, Ready, Refused, Register, Seated, ToServer

AGAIN_S = 0.2


class Enlisted:
    """Membership of a server process with the monitor, kept up in a thread.

    `seated` is the seat and its epoch, or why there is none. `tell` is told what the monitor says later;
    `gone` is called from this thread when the server may go, or with the error that has ended the thread.
    """

    def __init__(
        self,
        monitor: str,
        token: str,
        asked: Register,
        tell: Callable[[str], None],
        gone: Callable[[Exception | None], None],
    ) -> None:
        self._monitor, self._token, self._asked = monitor, token, asked
        self._tell, self._gone = tell, gone
        self.seated: Future[Seated] = Future()
        self.ring: Callable[[int], int] | None = None
        self._leaves = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._run()), name="monitor", daemon=True).start()

    def serve(self, ring: Callable[[int], int]) -> None:
        """Report to the monitor: the server's experts are loaded and it serves. `ring(n)` asks the server's
        loop question n and returns the number of the last answered question."""
        self.ring = ring
        self._loop.call_soon_threadsafe(self._serves.set)

    def leave(self) -> None:
        """Ask the monitor for permission to leave."""
        self._leaves.set()

    async def _run(self) -> None:
        """Register, and register again whenever the connection ends, until the server ends or is refused."""
        self._loop, self._serves = asyncio.get_running_loop(), asyncio.Event()
        while True:
            try:
                await self._talk()
            except (OSError, TimeoutError, ProtocolError) as error:
                if not self.seated.done():
                    self.seated.set_exception(check_reachable(self._monitor, error))
                    return
            except XDeepServeError as error:
                if not self.seated.done():
                    self.seated.set_exception(error)
                else:
                    self._tell(str(error))
                    self._gone(None)
                return
            except Exception as error:
                if not self.seated.done():
                    self.seated.set_exception(error)
                else:
                    self._gone(error)
                return
            await asyncio.sleep(AGAIN_S)

    async def _talk(self) -> None:
        """Talk to the monitor over a single connection until the connection ends."""
        reader, writer = await dial(*split(self._monitor), self._token)
        try:
            say(writer, self._asked)
            async with asyncio.timeout(PATIENCE_S):
                seated = await hear(reader, ToServer, "the monitor")
            if isinstance(seated, Refused):
                raise DeploymentError(f"the monitor at {self._monitor} refuses: {seated.why}")
            if not isinstance(seated, Seated):
                raise ProtocolError(f"it says {seated}")
            # Should it have to register anew, it is still the one that it was.
            self._asked.seat, self._asked.epoch = seated.seat, seated.epoch
            if not self.seated.done():
                self.seated.set_result(seated)
            beats = asyncio.ensure_future(self._beat(writer, seated.beat_s))
            beats.add_done_callback(
                lambda _: reader.feed_eof()
            )  # beats end only by an error, or with the talk
            try:
                while (said := await hear(reader, ToServer, "the monitor")) is not None:
                    if isinstance(said, Go):
                        self._gone(None)
                    elif isinstance(said, Refused):
                        self._tell(said.why)
                if beats.done():
                    beats.result()
            finally:
                beats.cancel()
        finally:
            writer.close()

    async def _beat(self, writer: asyncio.StreamWriter, beat_s: float) -> None:
        await self._serves.wait()
        assert self.ring is not None
        say(writer, Ready())
        count = 0
        while True:
            if self.ring(count + 1) >= count:
                say(writer, LoopTurns())
                count += 1
            if self._leaves.is_set():
                self._leaves.clear()
                say(writer, Leave())
            await asyncio.sleep(min(beat_s, 0.1))
