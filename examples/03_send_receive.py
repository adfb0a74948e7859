"""Walkthrough 3: send and receive, the eight steps of XCCL's point-to-point transfer over real bytes.

Two dies of different servers. A message goes chunk by chunk through a ring buffer in the receiver's memory,
guarded by 32-byte fields: tails that the sender writes, acks that the receiver writes. At every step this
script reads the dies' memories and shows what is there.

    python examples/03_send_receive.py
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Coroutine
from typing import Any

from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.comm.p2p.layout import RING_FIELD, RingLayout
from xdeepserve.errors import AddressError, DeadlineError, ProtocolError
from xdeepserve.hw.pod import Pod

DIES = (0, 16)
LAYOUT = RingLayout(num_ranks=2, num_cores=2, slot_nbytes=32, num_slots=3)
MESSAGE = (
    b"The KV cache of a request, which the prefill die has filled, goes to the decode die by way of a ring."
)
CURVE_LAYOUT = RingLayout(num_ranks=2)


def title(text: str) -> None:
    print(f"\n--- {text}")


def build(layout: RingLayout, nbytes: int, **options: Any) -> tuple[Pod, list[PointToPoint]]:
    pod = Pod()
    for die in DIES:
        plan = pod.plan(die)
        layout.plan(plan)
        plan.app.alloc("kv", nbytes)
    pod.materialise()
    return pod, [PointToPoint(pod.dies[die], rank, DIES, layout, **options) for rank, die in enumerate(DIES)]


def kv(p2p: PointToPoint) -> int:
    return p2p.die.memory.app.regions["kv"].offset


async def run(*pairs: tuple[PointToPoint, Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*[p2p.die.spawn(program) for p2p, program in pairs])


def show_fields(p2p: PointToPoint, area: int, name: str) -> None:
    for core in range(LAYOUT.num_cores):
        offset = area + LAYOUT.field(1 - p2p.rank, core)
        raw = bytes(p2p.die.memory.read(offset, RING_FIELD.size))
        field = p2p.memory.fields(area, 1 - p2p.rank, LAYOUT.num_cores)[core]
        print(f"    {name} of core {core}: {raw[:24].hex(' ', 8)} {raw[24:].hex(' ', 4)}")
        print(
            f"      = event {field.event_id}, chunk {field.chunk_id}, position {field.pointer}, "
            f"message of {field.nbytes} bytes by {field.num_cores} core(s)"
        )


def show_ring(receiver: PointToPoint) -> None:
    for slot in range(LAYOUT.num_slots):
        offset = receiver.memory.rings.offset + slot * LAYOUT.slot_nbytes
        held = bytes(receiver.die.memory.read(offset, LAYOUT.slot_nbytes))
        print(f"    slot {slot}: {held!r}" if any(held) else f"    slot {slot}: {len(held)} zeros")


def narrate(sender: PointToPoint, receiver: PointToPoint) -> None:
    """Say what each step has done."""

    def at(text: str) -> None:
        print(textwrap.fill(f"{sender.die.clock.now:6d} ns  {text}", 100, subsequent_indent=" " * 11))

    def on_send(op: str, step: int) -> None:
        if step == 1:
            at("send step 1: MTE2 has loaded the next chunks into the unified buffers, one for each core")
        elif step == 2:
            at("send step 2: MTE3 has stored them in free slots of the receiver's ring, which holds")
            show_ring(receiver)
        elif step == 3:
            at("send step 3: and then the tails, in the receiver's metadata")
            show_fields(receiver, receiver.memory.tails.offset, "tail")
        elif step == 4:
            at("send step 4: all is written; the sender polls its own metadata for the last ack")
        else:
            at("send step 8: the last ack is there; send returns")

    def on_receive(op: str, step: int) -> None:
        if step == 5:
            at("receive step 5: polling its metadata, the receiver has found new chunks")
        elif step == 6:
            at(f"receive step 6: ring -> app area, which holds {bytes(app).rstrip(bytes(1))!r}")
        else:
            at("receive step 7: acks, in the sender's metadata; these slots are free again")
            show_fields(sender, sender.memory.acks.offset, "ack")

    app = receiver.die.memory.read(kv(receiver), len(MESSAGE))
    sender.steps.on_step, receiver.steps.on_step = on_send, on_receive


async def one_message() -> None:
    title("One message, step by step")
    pod, (sender, receiver) = build(LAYOUT, 128)
    pod.memory(DIES[0]).write(kv(sender), MESSAGE)
    print(
        f"{len(MESSAGE)} bytes = {LAYOUT.num_chunks(len(MESSAGE))} chunks of {LAYOUT.slot_nbytes}; "
        f"a ring of {LAYOUT.num_slots} slots; {LAYOUT.num_cores} AIV cores: chunk i by core i mod 2\n"
    )
    narrate(sender, receiver)
    await run(
        (sender, sender.send(kv(sender), len(MESSAGE), peer=1, event_id=7)),
        (receiver, receiver.receive(kv(receiver), len(MESSAGE), peer=0, event_id=7)),
    )
    print(f"equal: {bytes(pod.memory(DIES[1]).read(kv(receiver), len(MESSAGE))) == MESSAGE}")


async def zero_copy() -> None:
    title("Zero copy: the tail says where the bytes lie in the sender's app area; no ring")
    pod, (sender, receiver) = build(LAYOUT, 128)
    pod.memory(DIES[0]).write(kv(sender), MESSAGE)
    await run(
        (sender, sender.send(kv(sender), len(MESSAGE), peer=1, event_id=1, zero_copy=True)),
        (receiver, receiver.receive(kv(receiver), len(MESSAGE), peer=0, event_id=1)),
    )
    (field, _) = receiver.memory.fields(receiver.memory.tails.offset, 0, 2)
    print(f"tail: event {field.event_id}, pointer {field.pointer} = the sender's kv region at {kv(sender)}")
    equal = bytes(pod.memory(DIES[1]).read(kv(receiver), len(MESSAGE))) == MESSAGE
    ring = pod.memory(DIES[1]).read(receiver.memory.rings.offset, 96)
    print(f"equal: {equal}; ring untouched: {not any(ring)}")


async def asynchronous() -> None:
    title("Asynchronous: nobody polls; completion is looked up later")
    pod, (sender, receiver) = build(LAYOUT, 128)
    pod.memory(DIES[0]).write(kv(sender), MESSAGE)

    async def send() -> None:
        sending = await sender.send_async(kv(sender), 64, peer=1, event_id=1)
        print(f"{pod.clock.now:6d} ns  send_async has returned; acknowledged: {await sending.look()}")
        await pod.clock.sleep(20_000)
        print(f"{pod.clock.now:6d} ns  the sender looks again; acknowledged: {await sending.look()}")

    async def receive() -> None:
        receiving = await receiver.receive_async(kv(receiver), 64, peer=0, event_id=1)
        print(f"{pod.clock.now:6d} ns  receive_async has returned; arrived: {await receiving.look()}")
        await pod.clock.sleep(10_000)
        print(f"{pod.clock.now:6d} ns  the receiver looks again; arrived: {await receiving.look()}")

    await run((sender, send()), (receiver, receive()))


async def curve() -> None:
    title("Latency in us over size and AIV cores, from the start of send to its end (XDS Figure 5)")
    sizes = [(4 << 10, "4 KB"), (64 << 10, "64 KB"), (1 << 20, "1 MB"), (9 << 20, "9 MB")]
    print(" " * 12 + "".join(f"{name:>9}" for _, name in sizes))
    for name, cores, engine in [("MTE,  2 AIV", 2, "mte"), ("MTE, 48 AIV", 48, "mte"), ("DMA", 1, "dma")]:
        times = []
        for nbytes, _ in sizes:
            pod, (sender, receiver) = build(CURVE_LAYOUT, nbytes)
            options: dict[str, Any] = {"cores": cores, "engine": engine}
            await run(
                (sender, sender.send(kv(sender), nbytes, 1, 1, **options)),
                (receiver, receiver.receive(kv(receiver), nbytes, 0, 1, **options)),
            )
            times.append(pod.clock.now / 1000)
        print(f"{name:12}" + "".join(f"{time:9.1f}" for time in times))


async def failures() -> None:
    title("What goes wrong says so")
    _, (sender, receiver) = build(LAYOUT, 128, timeout_ns=100_000)
    try:
        await run((sender, sender.send(kv(sender), 256, peer=1, event_id=1)))
    except AddressError as error:
        print(textwrap.fill(f"AddressError: {error}", 100, subsequent_indent="    "))
    try:
        await run((sender, sender.send(kv(sender), 128, peer=1, event_id=1)))
    except DeadlineError as error:
        print(textwrap.fill(f"DeadlineError: {error}", 100, subsequent_indent="    "))
    print("both ends forget the failed transfer, then the sender goes on with event 4, the receiver with 3")
    sender.reset(1)
    receiver.reset(0)
    await run((sender, sender.send_async(kv(sender), 64, peer=1, event_id=4)))
    try:
        await run((receiver, receiver.receive(kv(receiver), 64, peer=0, event_id=3)))
    except ProtocolError as error:
        print(textwrap.fill(f"ProtocolError: {error}", 100, subsequent_indent="    "))


async def main() -> None:
    await one_message()
    await zero_copy()
    await asynchronous()
    await curve()
    await failures()


if __name__ == "__main__":
    asyncio.run(main())
