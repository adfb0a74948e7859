"""Dies that are taken and given back."""

from __future__ import annotations

import asyncio

import pytest

from xdeepserve.errors import AddressError, DeploymentError, HardwareError
from xdeepserve.hw.pod import Pod
from xdeepserve.loop import run


def test_dies_are_free_held_or_lost() -> None:
    pod = Pod()
    assert pod.find_free(4) == range(4)
    pod.hold(range(4), "te")
    assert pod.find_free(4) == range(4, 8)
    with pytest.raises(DeploymentError, match="other cannot have die 3, which is held by te"):
        pod.hold([8, 3], "other")
    assert 8 not in pod.holders
    for die in range(4):
        pod.plan(die).app.alloc("x", 64)
    pod.materialise()
    view = pod.memory(2).buffer
    pod.lose([2])
    assert set(bytes(view)) == {0xDB}
    pod.release([0, 1, 3])
    assert pod.find_free(2) == range(2)
    assert pod.find_free(3) == range(3, 6)
    with pytest.raises(DeploymentError, match="cannot have die 2, which is lost"):
        pod.hold([2], "other")
    with pytest.raises(DeploymentError, match="no 768 free dies side by side: 767 of 768 are free"):
        pod.find_free(768)
    with pytest.raises(AddressError, match="node 0 has no memory"):
        pod.memory(0)


def test_dies_that_were_never_planned_can_be_given_back() -> None:
    pod = Pod()
    pod.hold(range(4), "te")
    pod.plan(0).app.alloc("x", 64)
    pod.release(range(4))
    assert pod.holders == {}
    assert 0 not in pod.memories.plans


def test_a_die_with_a_process_is_not_given_back() -> None:
    async def main() -> None:
        pod = Pod()
        pod.hold([0], "te")
        pod.plan(0).app.alloc("x", 64)
        pod.materialise()
        process = pod.dies[0].spawn(pod.dies[0].next_command(), "waits for work")
        await asyncio.sleep(0)
        with pytest.raises(
            HardwareError, match=r"die 0 cannot be given back: .* waits for work still run there"
        ):
            pod.release([0])
        assert 0 in pod.holders
        process.cancel()
        await asyncio.gather(process, return_exceptions=True)
        pod.release([0])
        assert pod.holders == {}

    run(main())


def test_a_die_that_nobody_has_may_fail() -> None:
    pod = Pod()
    pod.hold([0], "te")
    pod.plan(0).app.alloc("x", 64)
    pod.materialise()
    pod.release([0])
    pod.break_die(0)
    assert pod.find_free(1) == range(1, 2)
