"""What is offered in parts: pulled as they get ready, one completion, revoked at any moment."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.comm.distflow_parts import DESTINATION, NBYTES, SOURCE, parts_of, run, span
from xdeepserve.comm.distflow import Completion, DistFlow, Endpoint
from xdeepserve.errors import DeadlineError, HardwareError, ProtocolError
from xdeepserve.hw.pod import Pod


async def completions(*endpoints: Endpoint) -> list[Completion]:
    """The next one of each."""
    found = []
    for endpoint in endpoints:
        while not (entries := endpoint.poll()):
            await endpoint.pod.clock.sleep(1000)
        found += entries
    assert len(found) == len(endpoints)
    return found


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.lists(st.integers(0, 200_000), min_size=6, max_size=6),
    st.integers(0, 400_000),
    st.integers(0, 99),
)
def test_parts_move_as_they_get_ready_and_only_then(
    sizes: list[int], waits: list[int], want_ns: int, seed: int
) -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        clock, total = pod.clock, sum(sizes)
        content = bytes(pod.memory(SOURCE).buffer)
        num_ready = 0

        async def owner() -> None:
            nonlocal num_ready
            one.send_in_parts(1, "decode", parts_of(sizes))
            for wait in waits[: len(sizes)]:
                await clock.sleep(wait)
                num_ready += 1
                one.ready(1, "decode", num_ready)

        async def watch() -> None:
            while two.num_open or clock.now < want_ns:
                may = 32 * sum(sizes[:num_ready])
                arrived = bytes(pod.memory(DESTINATION).buffer)
                assert arrived[may:] == bytes(NBYTES - may)
                await clock.sleep(5_000)

        async def want() -> None:
            await clock.sleep(want_ns)
            two.receive(1, "prefill", [span(DESTINATION, 0, total)])

        await clock.gather(owner(), want(), watch())
        at_two, at_one = await completions(two, one)
        assert (at_one.error, at_two.error, at_one.is_revoked, at_two.is_revoked) == (
            None,
            None,
            False,
            False,
        )
        assert at_one.nbytes == at_two.nbytes == 32 * total
        assert bytes(pod.memory(DESTINATION).buffer)[: 32 * total] == content[: 32 * total]
        assert (one.poll(), two.poll()) == ([], [])

    run(program, seed)


def test_a_part_moves_while_the_next_is_made() -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send_in_parts(1, "decode", parts_of([8, 8, 0]))
        two.receive(1, "prefill", [span(DESTINATION, 0, 16)])
        for num_ready in (1, 2):
            one.ready(1, "decode", num_ready)
            await pod.clock.sleep(1_000_000)
        assert bytes(pod.memory(DESTINATION).buffer)[:512] == bytes(pod.memory(SOURCE).buffer)[:512]
        assert one.poll() == two.poll() == []  # the last part, which is empty, may be a word of its own
        one.ready(1, "decode", 3)
        assert [entry.error for entry in await completions(two, one)] == [None, None]
        moves = [each for each in pod.trace.spans if each.name == "DistFlow 1"]
        assert len(moves) == 2

    run(program)


@given(st.integers(0, 3), st.integers(0, 60_000), st.booleans(), st.integers(0, 99))
@example(0, 2000, True, 3)  # as it is wanted: the words of both come at one time
def test_an_offer_can_be_revoked_at_any_moment(num_ready: int, wait_ns: int, wanted: bool, seed: int) -> None:
    """Nothing moves after the completions, and bytes that were not ready never do."""

    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send_in_parts(1, "decode", parts_of([4, 4, 4, 4]))
        if wanted:
            two.receive(1, "prefill", [span(DESTINATION, 0, 16)])
        one.ready(1, "decode", num_ready)
        await pod.clock.sleep(wait_ns)
        one.revoke(1, "decode")
        one.revoke(1, "decode")
        one.ready(1, "decode", 4)  # too late
        if not wanted:
            two.receive(1, "prefill", [span(DESTINATION, 0, 16)])
        for entry in await completions(two, one):
            assert (entry.error, entry.is_revoked) == (None, True)
        arrived = bytes(pod.memory(DESTINATION).buffer)
        assert arrived[128 * num_ready :] == bytes(NBYTES - 128 * num_ready)
        one.revoke(1, "decode")  # nothing is left of it
        one.ready(1, "decode", 4)
        await pod.clock.sleep(10**9)
        assert bytes(pod.memory(DESTINATION).buffer) == arrived

    run(program, seed)


def test_what_is_all_ready_is_not_revoked() -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send_in_parts(1, "decode", parts_of([4, 4]))
        two.receive(1, "prefill", [span(DESTINATION, 0, 8)])
        one.ready(1, "decode", 2)
        one.revoke(1, "decode")
        for entry in await completions(two, one):
            assert (entry.error, entry.is_revoked) == (None, False)
        with pytest.raises(ProtocolError, match="prefill offers nothing to decode under tag 1"):
            one.cancel(1, "decode")

    run(program)


def test_parts_do_not_become_fewer_nor_more_than_there_are() -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send_in_parts(1, "decode", parts_of([4, 4, 4]))
        one.ready(1, "decode", 2)
        for wrong in (1, 4):
            with pytest.raises(ProtocolError, match=f"has 2 of 3 parts of tag 1 ready: not {wrong}"):
                one.ready(1, "decode", wrong)
        one.cancel(1, "decode")

    run(program)


def test_a_part_that_never_comes_ends_at_a_deadline_on_both_sides() -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send_in_parts(1, "decode", parts_of([4, 4]))
        two.receive(1, "prefill", [span(DESTINATION, 0, 8)])
        one.ready(1, "decode", 1)
        for entry, op in zip(await completions(one, two), ("send", "receive"), strict=True):
            assert isinstance(entry.error, DeadlineError)
            assert (entry.error.op, entry.error.field) == (op, "further part of tag 1")
            assert 1_000_000 <= entry.at_ns < 1_100_000

    run(program, part_timeout_ns=1_000_000)


@pytest.mark.parametrize("dies", ["source", "destination"])
@pytest.mark.parametrize("after_ns", [0, 1_000, 5_000, 500_000])
def test_a_side_that_dies_between_parts_is_noticed_at_a_deadline(dies: str, after_ns: int) -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send_in_parts(1, "decode", parts_of([4, 4]))
        two.receive(1, "prefill", [span(DESTINATION, 0, 8)])
        one.ready(1, "decode", 1)
        await pod.clock.sleep(after_ns)
        dead, left = (one, two) if dies == "source" else (two, one)
        dead.stop()
        if left is one:
            one.ready(1, "decode", 2)
        (entry,) = await completions(left)
        assert isinstance(entry.error, DeadlineError)
        assert entry.at_ns <= 3_100_000
        dead.sources.clear()
        dead.destinations.clear()

    run(program, timeout_ns=1_000_000, part_timeout_ns=2_000_000, offer_timeout_ns=3_000_000)


class BreaksAfterOne:
    """A backend that moves one batch, and then no more."""

    name = "breaks"

    def __init__(self) -> None:
        self.num_moves = 0

    def check_path(self, src: int, dst: int) -> None:
        pass

    async def move(self, copies: Any, name: str) -> None:
        self.num_moves += 1
        if self.num_moves > 1:
            raise OSError("fabric gone")


@pytest.mark.parametrize("is_revoked", [False, True])
def test_a_backend_that_fails_with_a_later_part_fails_both_sides(is_revoked: bool) -> None:
    async def program(pod: Pod, flow: DistFlow, one: Endpoint, two: Endpoint) -> None:
        one.send_in_parts(1, "decode", parts_of([4, 4, 4]))
        two.receive(1, "prefill", [span(DESTINATION, 0, 12)])
        for num_ready in (1, 2):
            one.ready(1, "decode", num_ready)
            await pod.clock.sleep(10_000 if num_ready == 1 else pod.spec.command_ns())
        if is_revoked:  # it crosses the news of the failure
            one.revoke(1, "decode")
        one.ready(1, "decode", 3)
        at_two, at_one = await completions(two, one)
        assert isinstance(at_two.error, HardwareError)
        assert str(at_one.error) == f"send: decode refused tag 1: {at_two.error}"

    run(program, backend=BreaksAfterOne())
