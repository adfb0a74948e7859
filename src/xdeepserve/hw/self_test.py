"""Self-test of dies after a failure among them, before they are used again.

Each die runs a kernel, and reads some bytes of the others. A die that does not finish in time, or does not
answer, is not well. Of two dies that cannot reach each other, the one with more such failures is not well, or
else the later one. The first bytes of each memory are overwritten.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from ..errors import HardwareError, IntegrityError
from .engines import Copy
from .memory import Address
from .pod import Pod

NBYTES = 32  # that a die reads of another
MOST_PAIRS = 64  # dies of which each looks at all others; of more, at those at distances of powers of two
PAUSE_NS = 1_000_000  # between two looks at who has ended


async def well_dies(pod: Pod, dies: Sequence[int], timeout_ns: int) -> list[int]:
    """Test unused dies known to the pod and return the well ones; for callers that are processes of the
    pod."""
    present = [die for die in dies if die not in pod.memories.silent]
    failed: set[tuple[int, int]] = set()
    tests = {die: pod.dies[die].spawn(_test(pod, die, present, failed), "self-test") for die in present}
    deadline_ns, pause_ns = pod.clock.now + timeout_ns, PAUSE_NS
    while not all(test.done() for test in tests.values()) and pod.clock.now < deadline_ns:
        await pod.clock.sleep(min(pause_ns, max(1, deadline_ns - pod.clock.now)))
        pause_ns *= 2
    late = [test for test in tests.values() if not test.done()]
    for test in late:
        test.cancel()
    for test in late:
        await pod.clock.until_ended(test)
    ended = {die: test for die, test in tests.items() if test.done() and not test.cancelled()}
    for error in [test.exception() for test in ended.values()]:  # of all: none is left for nobody to hear
        if error is not None:
            raise error
    return _without_worst([die for die, test in ended.items() if test.result()], failed)


async def _test(pod: Pod, die: int, dies: Sequence[int], failed: set[tuple[int, int]]) -> bool:
    """Whether a die runs a kernel; pairs that cannot reach each other are added to `failed`."""
    own = pod.dies[die]

    def kernel() -> Awaitable[None]:
        return own.compute("Self-test", lambda: own.memory.write(0, bytes(NBYTES)), nbytes=NBYTES)

    if not await _succeeds(kernel) or die in pod.memories.silent:
        return False
    for other in _others(die, dies):
        piece = Copy(Address(other, 0), Address(die, 0), NBYTES)
        if not await _succeeds(partial(own.dma.copy, [piece], name="self-test")):
            failed.add((die, other))
    return True


async def _succeeds(attempt: Callable[[], Awaitable[None]]) -> bool:
    """Whether an attempt succeeds within two tries, because a glitch or a flipped bit may be over."""
    for _ in range(2):
        with suppress(HardwareError, IntegrityError):
            await attempt()
            return True
    return False


def _others(die: int, dies: Sequence[int]) -> list[int]:
    if len(dies) <= MOST_PAIRS:
        return [other for other in dies if other != die]
    at = dies.index(die)
    return [dies[(at + (1 << k)) % len(dies)] for k in range((len(dies) - 1).bit_length())]


def _without_worst(well: list[int], failed: set[tuple[int, int]]) -> list[int]:
    """Leave out the dies with most failed pairs, until the rest can reach each other."""
    while pairs := [pair for pair in failed if pair[0] in well and pair[1] in well]:
        worst = max(well, key=lambda die: (sum(die in pair for pair in pairs), die))
        well = [die for die in well if die != worst]
    return well
