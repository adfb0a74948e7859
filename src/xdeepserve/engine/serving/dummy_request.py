"""The dummy request: what a TE that joins serves before anybody else's (DeepServe 6, TE-Post-Load).

Its weights have been compared by digest then; that all of it works together shows when it runs. Bits depend
on no TE, so all that join have to answer with the same token.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import Events
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.te.te import TE
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import HardwareError, XDeepServeError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.queue import Queue

PROMPT = (0, 0)


class Trials:
    """Dummy requests of the TEs that join one engine, numbered from -1 downwards."""

    def __init__(self, clock: Clock, tell: Events, is_timing_only: bool) -> None:
        self._clock, self._tell, self._is_timing_only = clock, tell, is_timing_only
        self._numbers = itertools.count(-1, -1)
        self._answers: dict[TE, Queue[int | Exception]] = {}
        self._token: int | None = None  # that the first one has answered with

    async def run(self, te: TE) -> None:
        """From within a process: start a TE, which is in no list yet, and have it serve one. Its error, if it
        fails; HardwareError for another token than that of others."""
        answers: Queue[int | Exception] = Queue(self._clock, f"dummy request of {te.sizes.name}")
        self._answers[te] = answers
        seq = self._dummy(answers)
        te.start("try")
        try:
            te.te_shell.dispatch([seq])
            te.wake()
            # Who of it is lost is found out before that: by an exchange, or by heartbeats.
            longest_ns = 2 * max(te.sizes.exchange_timeout_ns, te.health.lost_ns)
            found = await answers.get(self._clock.now + longest_ns)
        finally:
            del self._answers[te]
        if isinstance(found, Exception):
            raise found
        te.te_shell.forget(seq)
        self._tell(events.Ended(seq.seq_id))
        if self._token is None:
            self._token = found
        if found != self._token and not self._is_timing_only:
            raise HardwareError(
                f"{te.sizes.name} answers its dummy request with token {found}, and others with {self._token}"
            )

    async def end(self, te: TE, until_unused: Callable[[TEPlan], Awaitable[None]]) -> None:
        """From within a process: a TE that was to join does not. On return nothing of it runs."""
        if te.life == "trying":
            te.kill()
            await until_unused(te.plan)
        te.end_life()

    def fail(self, te: TE, error: Exception) -> bool:
        """A TE has failed; whether it was at its dummy request, which ends with the error."""
        answers = self._answers.get(te)
        if answers is not None:
            is_named = isinstance(error, XDeepServeError)
            answers.put(error if is_named else XDeepServeError(f"{te.sizes.name}: {error!r}"))
        return answers is not None

    def _dummy(self, answers: Queue[int | Exception]) -> Sequence:
        def take(seq: Sequence, rows: list[SampledToken]) -> bool:
            answers.put(rows[-1].token_id)
            return True

        return Sequence(
            seq_id=next(self._numbers),
            choice=0,
            token_ids=list(PROMPT),
            num_prompt=len(PROMPT),
            max_tokens=1,
            params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            seed=0,
            on_tokens=take,
            on_failed=answers.put,
            arrival_ns=self._clock.now,
        )
