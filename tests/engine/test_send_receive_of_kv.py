"""KV from prefill to decode by XCCL's send and receive: the same bits, named errors, nothing left behind.

Through rings, or from where it lies.
"""

import asyncio
from contextlib import suppress
from typing import Any, Literal

import pytest

from tests.engine.links import MANY, ONE_EACH, PARAMS, PROMPTS, TWO_BY_TWO, WAYS, count_moves
from tests.engine.remains import check_nothing_is_left, settled
from tests.tools import one_die
from xdeepserve import LLM
from xdeepserve.comm.distflow.channels import Channel, Channels, channel_layout, plan_channels
from xdeepserve.comm.distflow.send_receive import SendReceiveBackend
from xdeepserve.comm.p2p.layout import RING_FIELD, RingField, RingLayout
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.events import Event, StepEnded
from xdeepserve.engine.dp.group import TransferEnded
from xdeepserve.engine.job.links import PDLink
from xdeepserve.errors import DeadlineError, DeploymentError, FieldError, ProtocolError, TransferError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.pod import Pod
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint, resolve_model

OVER = "transfer_over=send-receive"
BOTH = (OVER, "transfer_over=zero-copy")


@pytest.fixture(scope="module", params=["int8", "fp32"])
def expected(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param, digest(one_die(PROMPTS, PARAMS, request.param))


def channels_of(llm: LLM) -> Channels:
    found = llm.engine.je.carriage.channels
    assert found is not None
    return found


def fields(llm: LLM, die: int, part: Literal["tails", "acks"]) -> list[RingField]:
    """Those of all channels of a die that say something."""
    return [field for field in channels_of(llm).fields(die, part) if field.event_id]


@pytest.mark.thin(5)
@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("over", BOTH)
def test_bits_are_those_of_one_die(
    tiny: TinyCheckpoint,
    expected: tuple[str, str],
    over: str,
    tp: int,
    transfer: str,
) -> None:
    """TP groups to groups of one die, while decode has room and while it has not."""
    precision, wanted = expected
    shape = [f"prefill.dies={tp}", f"prefill.tp={tp}", "decode.dies=2", "max_model_len=128"]
    for blocks in (32, 8):
        settings = [*shape, f"cache.num_blocks={blocks}", over, f"transfer={transfer}"]
        with LLM(tiny, "pd", precision, overrides=settings) as llm:
            assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == wanted
            llm.run(settled(llm.engine))
            check_nothing_is_left(llm.engine)
            (link,) = llm.engine.je.links
            assert link.flow.backend.name == "send-receive"
            # What was sent has been received and acknowledged, and nothing else is in any field.
            prefill, decode = ([d.index for g in te.groups for d in g.dies] for te in llm.engine.je.tes)
            sent = {f.event_id for die in decode for f in fields(llm, die, "tails")}
            acknowledged = {f.event_id for die in prefill for f in fields(llm, die, "acks")}
            assert sent
            assert max(sent) == max(acknowledged) == channels_of(llm).num_messages
            assert not [f for die in prefill for f in fields(llm, die, "tails")]
            assert not [f for die in decode for f in fields(llm, die, "acks")]


# ---- fields that lie --------------------------------------------------------------------------------

LIES: dict[str, dict[str, int]] = {
    "a later event": {"event_id": 10**6},
    "an event long ago": {"event_id": 0},
    "a chunk too many": {"chunk_id": 10**6},
    "another place in the ring": {"pointer": 3},
    "other bytes": {"nbytes": 32},
    "other cores": {"num_cores": 3},
    "no such mode": {"mode": 7},
}


def corrupt(link: PDLink, part: str, lie: dict[str, int]) -> list[int]:
    """The first field that a message of this link stores is not what was stored. Where that was."""
    pod, hit = link.flow.pod, list[int]()
    te = link.tes[1 if part == "tails" else 0]
    for die in (die for group in te.groups for die in group.dies):
        memory = pod.memory(die.index)
        region = memory.metadata.regions[f"kv.{part}"]

        def on_write(offset: int, nbytes: int, memory: Any = memory) -> None:
            raw = memory.buffer[offset : offset + RING_FIELD.size]
            field = RingField(*RING_FIELD.unpack(raw))
            if field.event_id and not hit:
                hit.append(offset)
                raw[:] = RING_FIELD.pack(*field._replace(**lie))

        memory.watch(region.offset, region.nbytes, on_write)
    return hit


def errors_of_transfers(llm: LLM) -> list[BaseException]:
    """Return a list to which the error of each transfer that fails from now on is added."""
    errors: list[BaseException] = []

    def see(event: Event | StepEnded) -> None:
        if isinstance(event, TransferEnded) and event.completion.error is not None:
            errors.append(event.completion.error)

    llm.engine.observe(see)
    return errors


@pytest.mark.thin(3)
@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("part", ["tails", "acks"])
@pytest.mark.parametrize("lie", LIES)
def test_a_field_that_lies_is_a_named_error_of_its_request_alone(
    tiny: TinyCheckpoint,
    expected: tuple[str, str],
    lie: str,
    part: str,
    transfer: str,
) -> None:
    """There is no other decode TE, so one request ends; the others are served, and so is the next."""
    precision, wanted = expected
    if precision == "fp32":
        pytest.skip("the fields are the same")
    with LLM(tiny, "pd", precision, overrides=[*ONE_EACH, OVER, f"transfer={transfer}"]) as llm:
        ended = errors_of_transfers(llm)
        (link,) = llm.engine.je.links
        hit = corrupt(link, part, LIES[lie])

        async def main() -> list[str]:
            requests = [llm.engine.submit(p, PARAMS, str(i)) for i, p in enumerate(PROMPTS)]
            failures = []
            for request in requests:
                try:
                    assert len([t async for delta in request for t in delta.token_ids]) == 8
                except TransferError as error:
                    failures.append(str(error))
            await settled(llm.engine)
            return failures

        failures = llm.run(main())
        assert len(hit) == 1
        # By layer the blocks go again, by request: the link had failed once, and is tried since it is alone.
        assert len(failures) <= 1
        if transfer == "request":  # a wait until its deadline may be over when a dummy payload comes through
            assert len(failures) == (lie != "an event long ago")
        op, kind = ("receive", "tail") if part == "tails" else ("send", "ack")
        first = next(error for error in ended if isinstance(error, FieldError | DeadlineError))
        if lie != "other cores" or part == "acks":  # a receiver believes it, and the sender sees its answer
            assert first.op == op
            assert kind in first.field
        assert first.rank in (0, 1)
        assert first.peer == 1 - first.rank
        assert first.expected != first.seen
        assert all(str(first) in failure for failure in failures)
        check_nothing_is_left(llm.engine)
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == wanted
        check_nothing_is_left(llm.engine)


@pytest.mark.parametrize("transfer", WAYS)
def test_blocks_are_not_taken_from_another_place_than_was_agreed(tiny: TinyCheckpoint, transfer: str) -> None:
    """Zero copy: a field whose offset is not that of the handshake is an error, and nothing is read."""
    with LLM(tiny, "pd", overrides=[*ONE_EACH, BOTH[1], f"transfer={transfer}"]) as llm:
        wanted = digest(llm.generate(PROMPTS, PARAMS, keep_logits=True))
        ended = errors_of_transfers(llm)
        (link,) = llm.engine.je.links
        hit = corrupt(link, "tails", {"pointer": 0})
        with suppress(TransferError):  # there is no other decode TE
            llm.generate([[9] * 40], PARAMS)
        assert hit
        first = next(error for error in ended if isinstance(error, FieldError))
        assert (first.op, first.field, first.seen) == ("receive", "tail pointer, core 0", 0)
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == wanted


@pytest.mark.thin(3)
@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("part", ["tails", "acks"])
def test_with_two_decode_tes_the_request_goes_to_the_other(
    tiny: TinyCheckpoint,
    expected: tuple[str, str],
    part: str,
    transfer: str,
) -> None:
    precision, wanted = expected
    overrides = [*TWO_BY_TWO, OVER, f"transfer={transfer}"]
    with LLM(tiny, "pd", precision, overrides=overrides) as llm:
        counts = {link: count_moves(link) for link in llm.engine.je.links}
        assert digest(llm.generate(*MANY, keep_logits=True)[: len(PROMPTS)]) == wanted
        broken = max(counts, key=lambda link: len(counts[link]))
        hit = corrupt(broken, part, LIES["a chunk too many"])
        outputs = llm.generate(*MANY, keep_logits=True)
        assert digest(outputs[: len(PROMPTS)]) == digest(outputs[len(PROMPTS) :]) == wanted
        assert hit
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)


@pytest.mark.parametrize("over", BOTH)
def test_a_request_that_is_aborted_while_its_blocks_are_sent_leaves_nothing(
    tiny: TinyCheckpoint, over: str
) -> None:
    with LLM(tiny, "pd", overrides=[*ONE_EACH, over]) as llm:

        async def main(after_ns: int) -> None:
            engine = llm.engine
            request = engine.submit([5] * 90, PARAMS, "one")
            other = engine.submit([8] * 90, PARAMS, "two")
            clock = engine.plan.pod.clock
            await clock.spawn(clock.sleep(after_ns))
            request.abort()
            assert len([t async for delta in other for t in delta.token_ids]) == 8
            await settled(engine)
            check_nothing_is_left(engine)

        for after_ns in range(0, 12_000_000, 400_000):
            llm.run(main(after_ns))


# ---- one clock --------------------------------------------------------------------------------------


def time_of(pieces: list[int], layout: RingLayout) -> tuple[int, int]:
    """Two transfers of these pieces between dies of two servers, each byte standing for so many: ns of
    each.
    """

    async def main() -> tuple[int, int]:
        pod, dies, weight = Pod(), (0, 16), int(layout.weight)
        for die in dies:
            plan_channels(pod.plan(die), layout, 1)
            pod.plan(die).app.alloc("kv", sum(pieces) // weight)
        pod.materialise()
        backend = SendReceiveBackend(Channels(pod, layout), 10**9)
        src, dst = (pod.memory(die).app.regions["kv"].address for die in dies)
        at = [sum(pieces[:i]) // weight for i in range(len(pieces))]
        copies = [
            Copy(src.plus(offset), dst.plus(offset), n // weight)
            for offset, n in zip(at, pieces, strict=True)
        ]
        times = []
        for _ in range(2):
            begins = pod.clock.now
            await pod.clock.spawn(backend.move(copies, "kv"))
            times.append(pod.clock.now - begins)
        return times[0], times[1]

    return asyncio.run(main())


@pytest.mark.parametrize("pieces", [[512], [8192], [8192 * 3 + 512], [4096, 512] * 700, [1 << 20] * 5])
@pytest.mark.parametrize("has_rings", [True, False])
def test_a_run_that_only_takes_time_bills_it_the_same(pieces: list[int], has_rings: bool) -> None:
    """A message takes as long where there are few bytes, each of which stands for 16, and none moves."""
    few, all_of_them = (channel_layout(weight, has_rings) for weight in (16.0, 1.0))
    assert time_of(pieces, few) == time_of(pieces, all_of_them)


@pytest.mark.parametrize("transfer", WAYS)
@pytest.mark.parametrize("over", BOTH)
def test_a_run_that_only_takes_time_sends_and_receives(over: str, transfer: str) -> None:
    settings = [*ONE_EACH, over, f"transfer={transfer}"]
    with LLM("tiny-random", "pd", overrides=settings, timing_only=True) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * len(PROMPTS)
        assert channels_of(llm).num_messages >= len(PROMPTS)
        llm.run(settled(llm.engine))
        check_nothing_is_left(llm.engine)


# ---- channels ---------------------------------------------------------------------------------------


def channels_between(*dies: int, num_peers: int) -> Channels:
    """Channels of a pod whose dies have places for so many pairs."""
    pod, layout = Pod(), channel_layout()
    for die in dies:
        plan_channels(pod.plan(die), layout, num_peers)
    pod.materialise()
    return Channels(pod, layout)


def test_each_pair_has_a_ring_and_its_messages_take_turns() -> None:
    """Messages of other pairs do not wait, and fields of one pair are not those of another."""

    async def main() -> None:
        channels, order = channels_between(0, 1, 8, 9, num_peers=2), list[str]()
        clock = channels.pod.clock

        async def hold(name: str, src: int, dst: int, ns: int) -> None:
            channel = await channels.take(src, dst, 1_000_000)
            order.append(name)
            await clock.sleep(ns)
            channels.give_back(channel)

        asks = [("a", 0, 9, 100), ("b", 0, 9, 10), ("c", 0, 8, 10), ("d", 1, 9, 10), ("e", 1, 8, 10)]
        for each in [clock.spawn(hold(*each)) for each in asks]:
            await each
        assert order == ["a", "c", "d", "e", "b"]
        assert sorted(channels.places) == [0, 1, 8, 9]
        assert all(sorted(places.values()) == [0, 1] for places in channels.places.values())
        channels.check_integrity()

    asyncio.run(main())


def test_channels_are_given_in_order_and_nobody_waits_for_ever() -> None:
    """With a place for one pair on each die: an idle pair gives way, and one in use is waited for."""

    async def main() -> None:
        channels, order = channels_between(0, 1, 7, 8, 9, num_peers=1), list[str]()
        pod, clock = channels.pod, channels.pod.clock

        async def hold(name: str, src: int, dst: int, ns: int) -> None:
            channel = await channels.take(src, dst, 1_000_000)
            order.append(name)
            await clock.sleep(ns)
            channels.give_back(channel)

        asks = [("a", 0, 9, 100), ("b", 0, 8, 300), ("c", 1, 8, 10), ("d", 0, 8, 10), ("e", 1, 7, 10)]
        held = [clock.spawn(hold(*each)) for each in asks]
        for each in held:
            await each
        assert order == ["a", "b", "c", "d", "e"]  # c and e might have gone at once, but for b and c before
        channels.check_integrity()
        stuck = [clock.spawn(hold("x", 0, 9, 10**9))]
        with pytest.raises(DeadlineError, match="XCCL channel") as late:
            await clock.spawn(hold("z", 0, 9, 0))
        assert (late.value.rank, late.value.peer) == ("die 0", "die 9")
        given_up = clock.spawn(hold("w", 0, 9, 0))
        await asyncio.sleep(0)
        given_up.cancel()
        for each in stuck:
            await each
        await asyncio.gather(given_up, return_exceptions=True)
        channels.check_integrity()
        channels.forget([9])
        assert not channels.places[0]
        await clock.spawn(channels.take(0, 9, 1))
        with pytest.raises(ProtocolError, match="XCCL channels"):
            channels.check_integrity()
        pod.memory(9).write(pod.memory(9).metadata.regions["kv.tails"].offset, b"\x05")
        channels.give_back(Channel(0, 9))
        with pytest.raises(ProtocolError, match="fields of die 9 say event 5, the last was 0"):
            channels.check_integrity()

    asyncio.run(main())


def test_what_cannot_be_is_refused() -> None:
    for deployment, settings, reason in (
        ("colocated", [], r"is for pods whose prefill has TEs of its own \(pd, transformerless, mixed\)"),
        ("pd", ["fabric=roce"], "goes over ub, not over fabric=roce"),
        ("pd", ["prefill.hardware=910b"], "goes over ub, which 910b prefill is not on"),
        ("superpod", [], "goes over ub, which does not lead from prefill beside the SuperPod to decode"),
    ):
        for over in BOTH:
            with pytest.raises(DeploymentError, match=reason):
                fit(resolve(deployment, [*settings, over]), resolve_model("tiny-r1").config)
