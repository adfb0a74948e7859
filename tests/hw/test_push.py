"""What FusedDispatch and FusedCombine need of the engines: pipelined pushes and atomic additions."""

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.errors import AddressError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.die import Die
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import Topology


async def test_atomic_additions_of_many_dies_lose_nothing() -> None:
    pod = Pod(Topology(servers=2, chips_per_server=2), clock=Clock(seed=3))
    counters = pod.plan(0).metadata.alloc("counters", 64)
    for die in range(1, 8):
        pod.plan(die)
    pod.materialise()

    async def program(die: Die) -> None:
        for _ in range(3):
            await die.mte.atomic_add([(counters.address.plus(4 * i), die.index << i) for i in range(4)])

    await asyncio.gather(*[pod.dies[die].spawn(program(pod.dies[die])) for die in range(1, 8)])
    values = pod.memory(0).view(counters, np.uint32, 5).tolist()
    assert values == [3 * 28 << i for i in range(4)] + [0]


async def test_atomic_additions_wrap_and_must_be_aligned() -> None:
    pod = Pod()
    region = pod.plan(0).metadata.alloc("counters", 64)
    pod.materialise()
    mte = pod.dies[0].mte

    async def program() -> None:
        await mte.atomic_add([(region.address, 0xFFFFFFFF), (region.address, 3)])
        with pytest.raises(AddressError, match="atomic add at offset 2: no multiple of 4"):
            await mte.atomic_add([(region.address, 1), (region.address.plus(2), 1)])
        with pytest.raises(AddressError, match="do not lie within one area"):
            await mte.atomic_add([(region.address, 1), (region.address.plus(64), 1)])

    await pod.dies[0].spawn(program())
    assert pod.memory(0).view(region, np.uint32, 1)[0] == 2


def simulated_pipeline(stages: list[float], rounds: int) -> tuple[float, float, float, float]:
    """One core's steps, one by one through three stages."""
    end = [0.0, 0.0, 0.0]
    start_of_third = 0.0
    for step in range(rounds):
        before = 0.0
        for stage in range(3):
            start = max(before, end[stage])
            if step == 0 and stage == 2:
                start_of_third = start
            before = end[stage] = start + stages[stage] / rounds
    return end[0], end[1], start_of_third, end[2]


@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=3), st.integers(0, 200), st.integers(1, 48))
def test_the_pipeline_is_what_its_steps_give(stages: list[int], num_steps: int, cores: int) -> None:
    times = Spec().pipeline_ns([float(stage) for stage in stages], num_steps, cores)
    if num_steps == 0:
        assert times == (0, 0, 0, 0)
        return
    expected = simulated_pipeline([float(s) for s in stages], math.ceil(num_steps / cores))
    for found, exact in zip(times, expected, strict=True):
        assert exact - 1e-3 <= found <= exact + 1 + 1e-3


async def test_a_push_overlaps_its_stages_and_shows_its_bytes_at_the_end() -> None:
    pod = Pod()
    src, far = pod.plan(0), pod.plan(16)
    src.app.alloc("x", 4800)
    target = far.managed.alloc("target", 4800)
    pod.materialise()
    die, spec = pod.dies[0], pod.spec

    async def program() -> None:
        await die.mte.push(
            [(target.address, bytes([7]) * 4800)], load_nbytes=4800, work_ns=96, num_steps=96, name="push"
        )

    task = die.spawn(program())
    await task
    load, store = spec.link_ns(4800, 0, 0, 48), spec.link_ns(0, 0, 4800, 48) + spec.pieces_ns(96, 48)
    _, _, _, end = spec.pipeline_ns([load, 96, store], 96, 48)
    assert pod.clock.now == spec.startup_ns("mte") + end + spec.far_latency_ns()
    assert bytes(pod.memory(16).read(target.offset, 4800)) == bytes([7]) * 4800
