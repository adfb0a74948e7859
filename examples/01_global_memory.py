"""Walkthrough 1: one address space over many dies.

What makes a SuperPod more than a cluster: every die can read and write every other die's memory, through
engines whose cost we know. This script builds four dies, moves bytes between them, and waits for flags, first
successfully, then in vain. All times are virtual: run it twice and compare.

    python examples/01_global_memory.py
"""

from __future__ import annotations

import asyncio
import struct
import textwrap

import numpy as np

from xdeepserve.errors import AddressError, DeadlineError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod

DIES = [0, 1, 2, 16]  # 0 and 1 share a chip, 2 is on the next chip, 16 in the next server
KV_NBYTES = 2 << 20
FLAG = struct.Struct("<QQ16x")  # a 32-byte field: event ID, number of bytes


def title(text: str) -> None:
    print(f"\n--- {text}")


def build() -> Pod:
    """Plan first, allocate after: only then does anything cost real memory."""
    pod = Pod()
    for node in DIES:
        plan = pod.plan(node)
        plan.metadata.alloc("flag", FLAG.size)
        plan.app.alloc("kv", KV_NBYTES)
    print(f"planned {pod.memories.nbytes:,} bytes for {len(DIES)} dies; allocating")
    pod.materialise(limit=64 << 20)
    for node in DIES:
        memory = pod.memory(node)
        areas = ", ".join(
            f"{a.name} [{a.base}, {a.end})" for a in (memory.metadata, memory.managed, memory.app)
        )
        print(f"  node {node:2d} is {pod.topology.name(node)}: {areas}")
    return pod


def kv(pod: Pod, node: int, offset: int = 0) -> Address:
    return pod.memory(node).app.regions["kv"].address.plus(offset)


async def remote_access(die: Die, pod: Pod) -> None:
    title("Step 1: a remote write and a remote read, byte for byte")
    text = b"hello from die 0"
    await die.mte.store([(kv(pod, 16), text)])
    print(f"die 0 stored {len(text)} bytes at (16, {kv(pod, 16).offset}); now {pod.clock.now} ns")
    print(f"  die 16's own memory says: {bytes(pod.memory(16).read(kv(pod, 16).offset, len(text)))!r}")
    (loaded,) = await die.mte.load([(kv(pod, 16), len(text))])
    print(f"die 0 loaded them back: {loaded!r}; now {pod.clock.now} ns")
    view = pod.memory(16).view(pod.memory(16).app.regions["kv"], np.uint8, 5)
    view[:] = list(b"HELLO")
    (loaded,) = await die.mte.load([(kv(pod, 16), len(text))])
    print(f"die 16 changed its bytes through a NumPy view; die 0 loads: {loaded!r}")


async def ping_pong(die: Die, pod: Pod) -> None:
    title("Step 2: MTE2 and MTE3 in ping-pong")
    print("A copy goes memory -> unified buffer (MTE2) -> memory (MTE3), in chunks of half a buffer for each")
    print("AIV core. MTE3 stores chunk i while MTE2 loads chunk i + 1, so n chunks take n + 1 steps, not 2n.")
    half = int(die.spec.unified_buffer.value) // 2
    print(f"{'bytes':>9} {'cores':>5} {'chunks':>6} {'ns':>8} {'without overlap':>16}")
    for nbytes, cores in [
        (half, 1),
        (2 * half, 1),
        (8 * half, 1),
        (16 * half, 1),
        (16 * half, 2),
        (16 * half, 16),
    ]:
        start = pod.clock.now
        await die.mte.copy([Copy(kv(pod, 0), kv(pod, 2), nbytes)], cores=cores)
        took = pod.clock.now - start
        fixed = die.spec.startup_ns("mte") + die.spec.pieces_ns(1, cores)
        serial = fixed + round(2 * die.spec.link_ns(0, nbytes, 0, cores))
        print(f"{nbytes:9d} {cores:5d} {-(-nbytes // (half * cores)):6d} {took:8d} {serial:16d}")


async def engines(die: Die, pod: Pod) -> None:
    title("Step 3: which engine for which size, and how far")
    print(f"{'bytes':>9} {'MTE':>8} {'URMA':>8} {'DMA':>8}   to the next server, by MTE")
    for nbytes in (1 << 10, 64 << 10, 2 << 20):
        times = []
        for engine, node in [(die.mte, 2), (die.urma, 2), (die.dma, 2), (die.mte, 16)]:
            start = pod.clock.now
            await engine.copy([Copy(kv(pod, 0), kv(pod, node), nbytes)])
            times.append(pod.clock.now - start)
        print(
            f"{nbytes:9d} {times[0]:8d} {times[1]:8d} {times[2]:8d}   {times[3]} (+{times[3] - times[0]} ns)"
        )


async def wait_for_flag(die: Die, event_id: int, timeout_ns: int) -> None:
    """Poll this die's flag until it carries `event_id`."""
    memory = die.memory
    flag = memory.metadata.regions["flag"]

    def seen() -> int:
        return FLAG.unpack(memory.read(flag.offset, FLAG.size))[0]

    await die.wait_fields(
        flag.offset,
        flag.nbytes,
        lambda offset, nbytes: seen() == event_id,
        deadline_ns=die.clock.now + timeout_ns,
        describe=lambda: Waiting("receive", die.index, 0, "event ID", event_id, seen()),
    )


async def sender(die: Die, pod: Pod) -> None:
    payload = b"the KV cache of a request"
    await die.mte.store([(kv(pod, 1), payload)])
    print(f"{pod.clock.now:7d} ns  die 0: data is in die 1's memory; now the flag, after the data")
    flag = pod.memory(1).metadata.regions["flag"].address
    await die.mte.store([(flag, FLAG.pack(1, len(payload)))])
    print(f"{pod.clock.now:7d} ns  die 0: flag stored")


async def receiver(die: Die, pod: Pod) -> None:
    print(f"{pod.clock.now:7d} ns  die 1: waits for event 1")
    await wait_for_flag(die, 1, timeout_ns=1_000_000)
    flag = die.memory.metadata.regions["flag"]
    raw = bytes(die.memory.read(flag.offset, FLAG.size))
    event_id, nbytes = FLAG.unpack(raw)
    print(f"{pod.clock.now:7d} ns  die 1: flag bytes {raw[:16].hex(' ')}")
    print(f"           = event {event_id}, {nbytes} bytes: {bytes(pod.memories.read(kv(pod, 1), nbytes))!r}")


async def main() -> None:
    title("Step 0: the address space")
    pod = build()
    zero, one = pod.dies[0], pod.dies[1]
    await zero.spawn(remote_access(zero, pod))
    await zero.spawn(ping_pong(zero, pod))
    await zero.spawn(engines(zero, pod))

    title("Step 4: a flag tells that data has arrived")
    await asyncio.gather(one.spawn(receiver(one, pod)), zero.spawn(sender(zero, pod)))

    title("Step 5: what goes wrong says so")
    try:
        await zero.spawn(zero.mte.store([(kv(pod, 16, KV_NBYTES - 4), b"too far!")]))
    except AddressError as error:
        print(textwrap.fill(f"AddressError: {error}", 100, subsequent_indent="    "))
    try:
        await one.spawn(wait_for_flag(one, event_id=2, timeout_ns=100_000))
    except DeadlineError as error:
        print(textwrap.fill(f"DeadlineError: {error}", 100, subsequent_indent="    "))


if __name__ == "__main__":
    asyncio.run(main())
