"""Golden cases of transfers from memory to memory: send and receive, and DistFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.comm.cells import Cells
from xdeepserve.comm.distflow import DistFlow, Span
from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.comm.p2p.layout import RingLayout
from xdeepserve.comm.p2p.message_end import Engine
from xdeepserve.golden.expected import transfers, verified
from xdeepserve.golden.harness import Done, rng_of, run_case
from xdeepserve.golden.recorder import Arrays, Recorder
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address, MemoryPlan

EVENT_ID = 7
OVER_NS = 1_000_000_000  # of virtual time; the transfers take some microseconds


def send_receive(seed: int | None, engine: Engine = "mte", *, zero_copy: bool = False) -> Done:
    """Record three messages of a chunk each over a ring of two slots, with one step complete at a time."""
    dies, sizes = (0, 16), (64, 40, 64)
    layout = RingLayout(num_ranks=2, num_cores=2, slot_nbytes=64, num_slots=2)
    inputs: Arrays = {
        f"rank0.message{i}": rng_of(20 + i).integers(0, 256, nbytes, np.uint8)
        for i, nbytes in enumerate(sizes)
    }
    buffer = Cells(np.dtype(np.uint8), (("byte", 64),))

    async def sender(p2p: PointToPoint) -> Arrays:
        memory = p2p.die.memory
        buffer = memory.app.regions["buffer"]
        for i, nbytes in enumerate(sizes):
            memory.write(buffer.offset, inputs[f"rank0.message{i}"].tobytes())
            await p2p.send(
                buffer.offset, nbytes, 1, EVENT_ID + i, cores=2, engine=engine, zero_copy=zero_copy
            )
        return {}

    async def receiver(p2p: PointToPoint) -> Arrays:
        memory, found = p2p.die.memory, {}
        buffer = memory.app.regions["buffer"]
        for i, nbytes in enumerate(sizes):
            await p2p.receive(buffer.offset, nbytes, 0, EVENT_ID + i, cores=2, engine=engine)
            found[f"message{i}"] = memory.view(buffer, np.uint8, nbytes).copy()
        return found

    async def program(die: Die, rank: int, recorder: Recorder) -> Arrays:
        p2p = PointToPoint(die, rank, dies, layout, on_step=recorder.snapshot)
        return await (receiver if rank else sender)(p2p)

    def plan(_: int, memory: MemoryPlan) -> None:
        layout.plan(memory)
        memory.app.alloc("buffer", 64)

    cells = layout.cells() | {"buffer": buffer}
    parameters: dict[str, Any] = {"event_id": EVENT_ID}
    if engine != "mte" or zero_copy:
        parameters |= {"engine": engine, "zero_copy": zero_copy}
    done = run_case(layout, dies, cells, inputs, program, seed, parameters, plan=plan)
    arrived = {f"rank1.message{i}": inputs[f"rank0.message{i}"] for i in range(len(sizes))}
    return verified(done, arrived)


# From sources to destinations, in order: (rank, offset in the rank's buffer, bytes). The cuts differ.
OFFERED = (((0, 0, 96), (1, 32, 64)), ((1, 128, 32),))
WANTED = (((2, 32, 64), (3, 0, 64), (2, 128, 32)), ((3, 96, 32),))
MOVED = (((0, 96, 64),), ((2, 0, 32), (3, 160, 32)))


def distflow(seed: int | None) -> Done:
    """Record transfers from dies 0 and 1 to dies 16 and 17: by tags, then one call that knows both sides."""
    dies, nbytes = (0, 1, 16, 17), 192
    inputs: Arrays = {
        f"rank{rank}.buffer": rng_of(30 + rank).integers(0, 256, nbytes, np.uint8)
        for rank in range(len(dies))
    }

    async def program(die: Die, rank: int, recorder: Recorder) -> Arrays:
        pod, clock = recorder.pod, die.clock
        buffers = [pod.memory(die).app.regions["buffer"] for die in dies]

        def spans(pieces: tuple[tuple[int, int, int], ...]) -> list[Span]:
            return [Span(Address(dies[rank], buffers[rank].offset + at), size) for rank, at, size in pieces]

        async def drive() -> None:
            for rank, die in enumerate(dies):
                pod.memory(die).write(buffers[rank].offset, inputs[f"rank{rank}.buffer"].tobytes())
            flow = DistFlow(pod)
            source, destination = flow.link_cluster({"source": dies[:2], "destination": dies[2:]})
            for tag, (offered, wanted) in enumerate(zip(OFFERED, WANTED, strict=True), start=1):
                source.send(tag, "destination", spans(offered))
                recorder.snapshot("offer", tag)
                destination.receive(tag, "source", spans(wanted))
                while source.num_open + destination.num_open:
                    await clock.sleep(1000)
                for completion in (*source.poll(), *destination.poll()):
                    if completion.error is not None:
                        raise completion.error
                recorder.snapshot("receive", tag)
            await flow.transfer(*(spans(side) for side in MOVED))
            recorder.snapshot("transfer", 1)
            flow.close()

        # The first die acts for all; the others look at their buffers when all is over.
        await (clock.sleep_until(OVER_NS) if rank else drive())
        return {"buffer": die.memory.view(buffers[rank], np.uint8, nbytes).copy()}

    def plan(_: int, memory: MemoryPlan) -> None:
        memory.app.alloc("buffer", nbytes)

    cells = {"buffer": Cells(np.dtype(np.uint8), (("byte", nbytes),))}
    parameters = {"offered": OFFERED, "wanted": WANTED, "moved": MOVED}
    done = run_case(parameters, dies, cells, inputs, program, seed, {}, plan=plan)
    return verified(done, transfers(inputs, [*zip(OFFERED, WANTED, strict=True), MOVED]))
