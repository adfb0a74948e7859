"""Link probing with dummy payloads, which tells a link fault from a saturated decode side (xDeepServe 6.1).

    well       they come as soon as they should
    delayed    they come later, in time: something queues, or hangs for a while
    slow       its bytes take several times as long as on an idle link: the link is at fault
    blocked    they come too late, or not at all: the link is at fault
    lost       a die at the other end does not answer: its TE is at fault, which is then known

Two payloads are sent at once. The first waits behind the link's traffic; the second waits for the first
alone, so the time between their arrivals is what a payload takes by itself.

A dummy payload has the size of a KV block, or more where that would not show beside what it takes to start a
transfer, and goes the way of KV, by the backend of its link, from and to a region of each die that is for
nothing else; so it needs no KV block, and says nothing of whether decode has any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, TypeAlias

from xdeepserve.comm.distflow.backends import Backend
from xdeepserve.errors import LostDieError, XDeepServeError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import ALIGNMENT, Address, MemoryPlan
from xdeepserve.hw.pod import Pod

Verdict: TypeAlias = Literal["well", "delayed", "slow", "blocked", "lost"]
NAME = "link.probe"  # a region, of which the second half is where payloads come
DELAYED_NS = 100_000  # behind other traffic
SLOW = 4  # times what a payload's bytes take on an idle link; checksums and other kernels cost less
LEAST_NBYTES = 256 * 1024


def plan_link_probe(plan: MemoryPlan, block_nbytes: int, weight: float = 1.0) -> None:
    """Reserve a die's region for dummy payloads, each of whose bytes stands for `weight` bytes of KV. Raises
    OutOfMemoryError if there is no room."""
    nbytes = max(block_nbytes, math.ceil(LEAST_NBYTES / weight))
    plan.app.alloc(NAME, 2 * ALIGNMENT * -(-nbytes // ALIGNMENT))


async def probe(pod: Pod, backend: Backend, pairs: Iterable[tuple[int, int]], timeout_ns: int) -> Verdict:
    """Send payloads from each first to each second die, one pair after the other, until some do not arrive
    within `timeout_ns`. For callers that are processes of the pod."""
    worst: Verdict = "well"
    for src, dst in pairs:
        found = await _probe_one(pod, backend, src, dst, timeout_ns)
        if found in ("blocked", "lost"):
            return found
        worst = max(worst, found, key=("well", "delayed", "slow").index)
    return worst


async def _probe_one(pod: Pod, backend: Backend, src: int, dst: int, timeout_ns: int) -> Verdict:
    """Send two payloads between two dies and return the verdict."""
    if not _are_there(pod, src, dst):
        return "lost"
    source, target = (pod.memory(die).app.regions[NAME] for die in (src, dst))
    nbytes, begun_ns = min(source.nbytes, target.nbytes) // 2, pod.clock.now
    # The same for each link, since others may be on their way; zeros, since time-only kernels move no bytes.
    payload = bytes(nbytes)
    pod.memory(src).write(source.offset, payload)
    copy = Copy(Address(src, source.offset), Address(dst, target.offset + nbytes), nbytes)
    came_ns: list[int] = []

    async def send() -> None:
        await backend.move([copy], "dummy payload")
        came_ns.append(pod.clock.now)

    sending = pod.clock.spawn(pod.clock.gather(send(), send()), name="dummy payloads")
    with suppress(XDeepServeError, OSError):  # a look at both ends tells whether they are there
        await pod.clock.join(sending, begun_ns + timeout_ns)
    sending.cancel()
    if not _are_there(pod, src, dst):
        return "lost"
    if len(came_ns) < 2 or pod.memory(dst).read(copy.dst.offset, nbytes) != payload:
        return "blocked"
    first_ns, alone_ns = came_ns[0] - begun_ns, came_ns[1] - came_ns[0]
    start_ns = backend.idle_ns(src, dst, 0)
    if alone_ns - start_ns > SLOW * (backend.idle_ns(src, dst, nbytes) - start_ns):
        return "slow"
    return "delayed" if first_ns - alone_ns > DELAYED_NS else "well"


def _are_there(pod: Pod, *dies: int) -> bool:
    """Whether dies answer and have memory, which they give back when their TE is given up."""
    try:
        for die in dies:
            pod.dies[die].check_alive()
    except LostDieError:
        return False
    return all(map(pod.memories.is_materialised, dies))
