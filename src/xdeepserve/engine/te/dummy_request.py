"""The dummy request of a TE that has loaded (DeepServe 6, TE-Post-Load): each DP group computes one token.

Weights, kernels, exchanges and the host all run once before a user depends on them. A failure here is the
TE's own: it has no requests yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.hw.clock import Waiting

if TYPE_CHECKING:
    from xdeepserve.engine.te.te import TE

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


async def serve_dummy(te: TE, timeout_ns: int) -> None:
    """Compute a token on each DP group of a running TE, from within a process.

    Raises the first failure; DeadlineError after `timeout_ns`.
    """
    clock, missing = te.plan.pod.clock, {group.rank for group in te.groups}

    def awaited() -> Waiting:
        names = ", ".join(f"DP group {rank}" for rank in sorted(missing)[:4])
        peers = f"{names} ..." if len(missing) > 4 else names
        count = len(te.groups)
        return Waiting("dummy request", te.sizes.place.name, peers, "groups", count, count - len(missing))

    waiter = clock.waiter(awaited)

    def end(seq: Sequence, _: list[SampledToken]) -> bool:
        missing.discard(-1 - seq.seq_id)
        if not missing:
            waiter.wake()
        return True

    failures: list[Exception] = []  # also of the moment in which the last group ended

    def fail(_: TE, error: Exception) -> None:
        failures.append(error)
        waiter.fail(error)

    on_failure, te.on_failure = te.on_failure, fail
    try:
        for group in te.groups:
            seq_id = -1 - group.rank  # the engine's begin at 0
            group.places.move(Sequence(seq_id, 0, [0], 1, 1, PARAMS, 0, end), "add")
        te.wake()
        await clock.wait(waiter, clock.now + timeout_ns)
        if failures:
            raise failures[0]
    finally:
        te.on_failure = on_failure
