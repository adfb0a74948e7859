"""One side of a transfer is given up, words are lost, bytes never come: both sides are free, and stay so."""

import asyncio
from typing import Any

import pytest

from tests.comm.distflow_parts import DESTINATION, parts_of, run, span
from xdeepserve.comm.distflow import DistFlow, Endpoint
from xdeepserve.comm.distflow.rules import Cause
from xdeepserve.errors import DeadlineError
from xdeepserve.hw.pod import Pod

ROOM = [span(DESTINATION, 0, 12)]
FILLED = b"\xaa" * 32 * 12


def fill(pod: Pod) -> None:
    pod.memory(DESTINATION).buffer[: len(FILLED)] = FILLED


@pytest.mark.parametrize("after_ns", [0, 1_000, 2_500, 4_500, 5_000, 9_000])
@pytest.mark.parametrize("first", ["source", "destination"])
def test_a_transfer_is_given_up_at_any_moment_and_made_again(after_ns: int, first: str) -> None:
    """Nothing is written after that, nothing is completed, and stale words harm nobody."""

    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        fill(pod)
        one.send(1, "decode", parts_of([12])[0])
        two.receive(1, "prefill", ROOM)
        await pod.clock.sleep(after_ns)
        if first == "source":
            assert one.abort_send(1, "decode")
            assert two.abort_receive(1, "prefill")
        else:
            assert two.abort_receive(1, "prefill")
            assert one.abort_send(1, "decode")
        assert (one.num_open, two.num_open) == (0, 0)
        await pod.clock.sleep(1_000_000)
        assert (one.poll(), two.poll()) == ([], [])
        assert pod.memory(DESTINATION).buffer[: len(FILLED)] == FILLED
        one.send(1, "decode", parts_of([12])[0])
        two.receive(1, "prefill", ROOM)
        await pod.clock.sleep(1_000_000)
        assert [done.error for done in one.poll() + two.poll()] == [None, None]
        assert pod.memory(DESTINATION).buffer[: len(FILLED)] == pod.memory(0).buffer[: len(FILLED)]

    run(program)


def test_what_has_arrived_cannot_be_given_up_and_a_failure_that_nobody_has_seen_can() -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send(1, "decode", parts_of([12])[0])
        two.receive(1, "prefill", ROOM)
        await pod.clock.sleep(1_000_000)
        assert not two.abort_receive(1, "prefill")
        assert not one.abort_send(1, "decode")
        assert [done.error for done in two.poll() + one.poll()] == [None, None]
        two.receive(2, "prefill", ROOM)
        await pod.clock.sleep(20_000_000_000)
        assert two.abort_receive(2, "prefill")  # it has failed at its deadline
        assert two.poll() == []

    run(program)


def test_bytes_that_never_come_are_given_up_at_the_deadline_and_never_written() -> None:
    class Stuck:
        name = "stuck"

        def __init__(self, pod: Pod | None = None) -> None:
            self.pod, self.was_cancelled = pod, False

        def check_path(self, src: int, dst: int) -> None:
            pass

        async def move(self, copies: Any, name: str) -> None:
            assert self.pod is not None
            try:
                await self.pod.clock.sleep(10**15)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise

    backend = Stuck()

    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        backend.pod = pod
        one.send(1, "decode", parts_of([12])[0])
        two.receive(1, "prefill", ROOM)
        await pod.clock.sleep(1_100_000)
        (at_two,), (at_one,) = two.poll(), one.poll()
        assert isinstance(at_two.error, DeadlineError)
        assert at_two.error.field == "bytes of tag 1"
        assert at_one.error is not None
        assert backend.was_cancelled
        assert at_two.at_ns < 1_010_000

    run(program, backend=backend, timeout_ns=1_000_000)


def test_a_part_is_ready_whose_offer_was_lost() -> None:
    """The endpoint goes on: the transfer fails at its deadline, and the next one does not."""

    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        put, is_lossy = two.inbox.put, True

        def filtered(message: Any, delay_ns: int = 0) -> None:
            if not (is_lossy and message.kind is Cause.OFFER):
                put(message, delay_ns=delay_ns)

        two.inbox.put = filtered  # type: ignore[method-assign]
        one.send_in_parts(1, "decode", parts_of([4, 4, 4]))
        two.receive(1, "prefill", ROOM)
        await pod.clock.sleep(100_000)
        one.ready(1, "decode", 1)
        await pod.clock.sleep(1_000_000)
        (at_two,) = two.poll()
        assert isinstance(at_two.error, DeadlineError)
        is_lossy = False
        one.abort_send(1, "decode")
        one.send(2, "decode", parts_of([12])[0])
        two.receive(2, "prefill", ROOM)
        await pod.clock.sleep(1_000_000)
        assert [done.error for done in one.poll() + two.poll()] == [None, None]

    run(program, timeout_ns=1_000_000)


def test_without_a_deadline_an_offer_waits_until_it_is_wanted_or_taken_back() -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send(1, "decode", parts_of([12])[0])
        one.send(2, "decode", parts_of([12])[0])
        await pod.clock.sleep(10**16)
        two.receive(1, "prefill", ROOM)
        one.cancel(2, "decode")
        await pod.clock.sleep(1_000_000)
        assert [done.error for done in one.poll() + two.poll()] == [None, None]

    run(program, offer_timeout_ns=None)
