"""Link probing with dummy payloads, which tells a link fault from a saturated decode side (xDeepServe 6.1).

    well       they come as soon as they should
    delayed    they come later, in time: something queues, or hangs for a while
    blocked    they come too late, or not at all: the link is at fault
    lost       a die at the other end does not answer: its TE is at fault, which is then known

A dummy payload goes the way of KV, by the backend of its link, from and to a region of each die that is for
nothing else; so it needs no KV block, and says nothing of whether decode has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

from xdeepserve.comm.distflow.backends import Backend
from xdeepserve.errors import LostDieError, XDeepServeError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address, MemoryPlan
from xdeepserve.hw.pod import Pod

Verdict: TypeAlias = Literal["well", "delayed", "blocked", "lost"]
NAME, PAYLOAD = "link.probe", bytes(range(32))  # its region has a second half, where payloads come
DELAYED_NS = 100_000  # what a payload takes on an idle link is far below, on any plane


def plan_link_probe(plan: MemoryPlan) -> None:
    """Reserve a die's region for dummy payloads. Raises OutOfMemoryError if there is no room."""
    plan.app.alloc(NAME, 2 * len(PAYLOAD))


async def probe(pod: Pod, backend: Backend, pairs: Sequence[tuple[int, int]], timeout_ns: int) -> Verdict:
    """Send a payload from each first to each second die, one after the other, until one does not arrive
    within `timeout_ns`. For callers that are processes of the pod."""
    is_delayed = False
    for src, dst in pairs:
        begun_ns = pod.clock.now
        found = await _probe_one(pod, backend, src, dst, timeout_ns)
        if found != "well":
            return found
        is_delayed |= pod.clock.now - begun_ns > DELAYED_NS
    return "delayed" if is_delayed else "well"


async def _probe_one(pod: Pod, backend: Backend, src: int, dst: int, timeout_ns: int) -> Verdict:
    """Send a payload between two dies and return the verdict."""
    if not _are_there(pod, src, dst):
        return "lost"
    source, target = (pod.memory(die).app.regions[NAME].offset for die in (src, dst))
    pod.memory(src).write(source, PAYLOAD)  # the same bytes for each link: another one may be on its way
    copy = Copy(Address(src, source), Address(dst, target + len(PAYLOAD)), len(PAYLOAD))
    sending = pod.clock.spawn(backend.move([copy], "dummy payload"), name="dummy payload")
    has_come = False
    with suppress(XDeepServeError, OSError):  # a look at both ends tells whether they are there
        await pod.clock.join(sending, pod.clock.now + timeout_ns)
        has_come = True
    sending.cancel()
    if not _are_there(pod, src, dst):
        return "lost"
    return "well" if has_come and pod.memory(dst).read(copy.dst.offset, copy.nbytes) == PAYLOAD else "blocked"


def _are_there(pod: Pod, *dies: int) -> bool:
    """Whether dies answer and have memory, which they give back when their TE is given up."""
    try:
        for die in dies:
            pod.dies[die].check_alive()
    except LostDieError:
        return False
    return all(map(pod.memories.is_materialised, dies))
