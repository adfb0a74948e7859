"""What every protocol of `comm` promises: a row each for the seven properties of `test_contract`.

A row opens scenes: ranks on a pod of their own with one call a turn, and what an oracle expects of it. The
properties know nothing of protocols, and a row knows only what is its own: sizes, arguments, whom a rank that
is missing keeps waiting, and in which words the others say so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tests.comm.outside import linked_servers
from tests.comm.services import LAYERS, serve
from tests.comm.tools import expert, quantize
from xdeepserve.comm import oracles
from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.layout import CollectiveLayout
from xdeepserve.comm.distflow import DistFlow, Endpoint, Span
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.exchange_choices import EXCHANGES
from xdeepserve.comm.means import Means
from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.comm.p2p.layout import RingLayout
from xdeepserve.comm.services.client import Patience, ServiceClient
from xdeepserve.comm.services.known_servers import KnownServers
from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.comm.services.reach import OverURMA, Reach
from xdeepserve.comm.services.server import Batching, ServiceServer
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.trampoline.naive import NaiveAttentionSide, NaiveExpertSide
from xdeepserve.engine.ways.among.real import ENDS
from xdeepserve.errors import AddressError, DeploymentError, HardwareError, ProtocolError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.rdma import RDMANetwork
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace
from xdeepserve.m2n.layout import M2NLayout
from xdeepserve.m2n.sides import M2NAttention, M2NExpert, M2NMesh
from xdeepserve.remote.outside_reach import OutsideReach

US, MS = 1_000, 1_000_000

# ---- scenes -----------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """One side of a protocol on a die; `name` is what errors call it."""

    name: object
    die: Die
    call: Callable[[int, int], Awaitable[Any]]
    """Its part of a turn, counted from 0, under an event ID: what it has got, copied."""
    reset: Callable[[], None]
    handle: Any
    serves: bool = False  # without end, for whoever comes
    is_real: bool = False  # waits in this computer's time

    async def wait(self, wait_ns: int) -> None:
        await (asyncio.sleep(wait_ns / 1e9) if self.is_real else self.die.clock.sleep(wait_ns))

    def break_at(self, op: str, step: int) -> None:
        """Let the rank end, as if its die had lost power, when it has passed a step; without `op` the nth."""
        count = itertools.count(1)

        def observe(op_now: str, step_now: int) -> None:
            if (op_now, step_now) == (op, step) or (not op and next(count) == step):
                raise RuntimeError("lost power")

        self.handle.steps.on_step = observe

    def mend(self) -> None:
        self.handle.steps.on_step = None


class Refused(NamedTuple):
    """A call that is refused before a byte moves."""

    call: Callable[[], Awaitable[Any]]
    error: type[Exception]
    message: str


class Scene(NamedTuple):
    """Ranks on a pod; `expected(turn, index)` is what the oracle says of a rank's part."""

    pod: Pod
    ranks: list[Rank]
    expected: Callable[[int, int], Any]
    refused: Callable[[], list[Refused]]
    look: Callable[[int], None] = lambda last_event: None
    """Looks, when all is over, at what is left in fields and states."""
    without: Callable[[int], Scene] | None = None
    """The scene of those who go on when a rank is lost for good."""


class Ended(NamedTuple):
    """What a rank got in its turns, and what ended it before the last."""

    results: list[Any]
    error: Exception | None = None


async def run(
    scene: Scene,
    turns: int,
    first_event: int = 1,
    wait_ns: Callable[[int, int], int] = lambda index, turn: 0,
    events: Mapping[int, int] | None = None,
    order: Iterable[int] | None = None,
) -> list[Ended]:
    """Run all ranks, or those in `order`, each of which waits before a turn; servers serve until others have
    ended."""

    async def program(index: int, rank: Rank, event: int) -> Ended:
        results: list[Any] = []
        try:
            for turn in range(turns):
                await rank.wait(wait_ns(index, turn))
                results.append(await rank.call(turn, event + turn))
        except Exception as error:
            return Ended(results, error)
        return Ended(results)

    tasks = {}
    for index in range(len(scene.ranks)) if order is None else order:
        rank, event = scene.ranks[index], (events or {}).get(index, first_event)
        tasks[index] = rank.die.spawn(program(index, rank, event))
    async with asyncio.timeout(60):
        await asyncio.gather(*(task for index, task in tasks.items() if not scene.ranks[index].serves))
    for index, task in tasks.items():
        if scene.ranks[index].serves:
            task.cancel()
    ends = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
    found = [ends.get(index, Ended([])) for index in range(len(scene.ranks))]
    assert all(isinstance(end, Ended | asyncio.CancelledError) for end in found), found
    return [end if isinstance(end, Ended) else Ended([]) for end in found]


def same(found: Any, expected: Any) -> bool:
    """Whether all bits are the same, and types and shapes of arrays."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, np.ndarray):
        kinds = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        return kinds and found.tobytes() == expected.tobytes()
    return bool(found == expected)


def opened(
    scenes: Callable[..., AbstractAsyncContextManager[Scene]],
    body: Callable[[Scene], Coroutine[Any, Any, Any]],
    *where: object,
    **how: Any,
) -> Any:
    """Run a body on a scene of its own; how, and `where`, is said with its error."""

    async def main() -> Any:
        async with scenes(**how) as scene:
            return await body(scene)

    try:
        return asyncio.run(main())
    except Exception as error:
        error.add_note(f"{scenes.__name__}: {how} {where}")
        raise


class Wait(NamedTuple):
    """What those say who wait for a missing rank; None is not compared.

    `seen` may be a function of who waits and of its error.
    """

    op: str
    field: str
    waiting: Sequence[int]
    expected: Any = None
    seen: Any = None


Way = Mapping[str, Any]
Words = tuple[dict[int, int], dict[int, str]]


class Protocol(NamedTuple):
    """A row. `random` draws the sizes of scenes for the oracle, `big` those of the campaign over them, and
    `small` is a scene in which every rank is waited for; `ways` are kinds of it."""

    name: str
    open: Callable[..., AbstractAsyncContextManager[Scene]]
    random: Mapping[str, st.SearchStrategy[Any]]
    big: Mapping[str, st.SearchStrategy[Any]]
    small: Way
    steps: Callable[[Scene, Way, int], Sequence[tuple[str, int]]]
    """Steps at which a rank may die."""
    missing: Callable[[Scene, Way, int, str, int], Wait | None]
    """Who first waits for a rank that has passed a step and no other; None if nobody ever does."""
    disagree: Callable[[Scene], Words]
    """Gives ranks another event than 4, and says what others say of it."""
    ways: Sequence[Way] = ({},)
    timeout_ns: int = 500 * US
    late_ns: int = 100 * US  # not too late
    num_examples: int = 40
    failed: str | None = "while failed"
    """What a call says before the reset; None if there is none to wait for."""
    notes: Mapping[str, str] = {}
    """By property, what is promised instead, or not, and why."""


class Options(SimpleNamespace):
    """Sizes and kinds of a scene: what a row draws, over what is usual."""

    seed, clock, turns, timeout_ns = 0, None, 2, 10**9
    cores, carrier, way = None, "mte", "pull"
    is_full, one_target, reduce = False, False, True
    losses, acks_first = 0.0, False
    slot, ring, by, zero_copy = 64, 2, ({}, {}), False
    total, units, is_raw = 12, 64, False
    num_slots, announces, batching, kind = 1, False, Batching(), "unix"
    top_k, num_experts = 1, 1

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.rng = np.random.default_rng(self.seed)
        self.means = Means(self.cores, self.carrier, self.timeout_ns)
        self.top_k = min(self.top_k, self.num_experts)

    def pod(self, plans: Mapping[int, Callable[[Any], None]], **how: Any) -> Pod:
        pod = Pod(clock=Clock(self.clock), trace=Trace(is_on=False), **how)
        for die, plan in plans.items():
            plan(pod.plan(die))
        pod.materialise()
        return pod

    def group(self, dies: Sequence[int]) -> Group:
        """Experts on these dies: in turn if `is_full`, all on the last if `one_target`, else anywhere."""
        last, count = len(dies) - 1, self.num_experts
        homes = self.rng.integers(0, len(dies), count).tolist()
        homes = [e % len(dies) for e in range(count)] if self.is_full else homes
        return Group(tuple(dies), tuple([last] * count if self.one_target else homes))

    def batches(self, ranks: int) -> list[list[Batch]]:
        """By turn and rank, up to `max_tokens`, or if `is_full` exactly as many."""
        least = self.max_tokens if self.is_full else 0
        counts = self.rng.integers(least, self.max_tokens + 1, (self.turns, ranks)).tolist()
        return [
            [batch(self.rng, n, self.hidden, self.top_k, self.num_experts) for n in row] for row in counts
        ]


Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def batch(rng: np.random.Generator, count: int, hidden: int, top_k: int, num_experts: int) -> Batch:
    """Tokens [T, H], experts [T, K] of which a token has none twice, and weights [T, K]."""
    topk = np.array([rng.permutation(num_experts)[:top_k] for _ in range(count)], np.int32)
    return (
        rng.standard_normal((count, hidden)).astype(np.float32),
        topk.reshape(count, top_k),
        rng.random((count, top_k)).astype(np.float32),
    )


def answers(got: Any, compute: Callable[[int, np.ndarray], np.ndarray] = expert) -> np.ndarray:
    """What the experts of a rank make of the rows that it has received."""
    x = (got.payload * got.scale[:, None]).astype(np.float32)
    rows = [compute(e, row) for e, row in zip(got.expert_idx, x, strict=True)]
    return np.array(rows, np.float32).reshape(x.shape)


def copied(got: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in got._asdict().items()}


def kept(rows: Sequence[Sequence[Any]], lost: int) -> list[list[Any]]:
    """Without one rank's."""
    return [[each for rank, each in enumerate(row) if rank != lost] for row in rows]


def one_token(layout: Any) -> Batch:
    topk = np.arange(layout.top_k, dtype=np.int32)[None]
    return np.ones((1, layout.hidden), np.float32), topk, np.ones(topk.shape, np.float32)


def refused_tokens(
    op: str, call: Callable[..., Awaitable[Any]], layout: Any, num_experts: int
) -> list[Refused]:
    """Tokens that no layout holds; `call(x, topk)`."""
    (x, e, _), k = one_token(layout), layout.top_k
    x, e = np.repeat(x, 2, 0), np.repeat(e, 2, 0)
    outside = rf"{op}: topk_idx has values outside the physical experts 0\.\.{num_experts - 1}"
    rows = [
        (x.astype(np.float64), e, f"{op}: x must be contiguous float32"),
        (x[:, :0], e, f"{op}: x must be contiguous float32"),
        (x.tolist(), e, f"{op}: x must be a NumPy array, not list"),
        (None, e, f"{op}: x must be a NumPy array, not NoneType"),
        (x, e.tolist(), f"{op}: topk_idx must be a NumPy array, not list"),
        (x, None, f"{op}: topk_idx must be a NumPy array, not NoneType"),
        (np.repeat(x, 20, 0), np.repeat(e, 20, 0), r"40 tokens exceed the layout's (batch of )?\d"),
        (x, e.astype(np.int64), rf"{op}: topk_idx must be int32 \[2, {k}\], not int64"),
        (x, e[:1], rf"{op}: topk_idx must be int32 \[2, {k}\]"),
        (x, e - 1, outside),
        (x, e + num_experts, outside),
        (x, e * np.int32([[1], [0]]), r"1 goes to an expert twice: \[0, 0|experts must be different"),
    ]
    return [Refused(lambda x=x, e=e: call(x, e), AddressError, said) for x, e, said in rows]


def refused_events(call: Callable[[Any], Awaitable[Any]]) -> list[Refused]:
    said = r"event IDs are integers from 1 to 2\*\*64 - 1"
    return [Refused(lambda e=e: call(e), ProtocolError, said) for e in (0, -1, 2**64, 1.5, "1", True, None)]


def refused_batches(op: str, side: Any, layout: Any, num_experts: int) -> list[Refused]:
    """What `a2e` refuses on a die that keeps the weights of its tokens."""
    x, topk, weights = one_token(layout)

    def call(x: Any, topk: Any) -> Awaitable[Any]:
        return side.a2e(x, topk, np.ones((2, layout.top_k), np.float32), 1)

    said = f"{op}: topk_weights must be (float32|a NumPy array)"
    return [
        *refused_tokens(op, call, layout, num_experts),
        *refused_events(lambda event: side.a2e(x, topk, weights, event)),
        *(
            Refused(lambda w=w: side.a2e(x, topk, w, 1), AddressError, said)
            for w in (weights[:, :0], weights.astype(np.float64), weights.tolist())
        ),
    ]


def others(scene: Scene, index: int) -> list[int]:
    return [each for each in range(len(scene.ranks)) if each != index]


def one_is_ahead(op: str, first: int = 0) -> Callable[[Scene], Words]:
    """Rank 1 has event 5: those who hear of it say so, and it says so of the first of them."""

    def disagree(scene: Scene) -> Words:
        said = "{0}: rank {1} expects event {2}, but peer {3} is {4}: its field says event {5}"
        ahead = {i: said.format(op, rank.name, 4, 1, "ahead", 5) for i, rank in enumerate(scene.ranks)}
        return {1: 5}, ahead | {1: said.format(op, 1, 5, ".*", "behind", 4)}

    return disagree


# ---- dispatch and combine, by each exchange ---------------------------------------------------------


class AmongRow(NamedTuple):
    """What an exchange of `ENDS` leaves when all is over, and its difference from dispatch and combine."""

    look: Callable[[Sequence[Any], int], None]
    receive: Callable[..., Any] = oracles.dispatch
    joins: bool = False  # a handle is reset for a smaller group; else there are new ones
    extra: Callable[[int, Batch], Mapping[str, Any]] = lambda number, batch: {}
    """Arguments of combine that no other exchange has, by a number that changes from call to call."""


def fields_of_all(handles: Sequence[Any], last_event: int) -> None:
    for xccl, op in itertools.product(handles, ("dispatch", "combine")):
        fields = xccl.fields(op)
        assert [field.event_id for field in fields] == [last_event] * len(handles)
        assert [f.pointer for f in fields] == [peer.block_offset(op, xccl.rank) for peer in handles]


def clean_flags(handles: Sequence[Any], last_event: int) -> None:
    for xccl in handles:
        flags = xccl.region("token_flags")
        assert not any(xccl.die.memory.read(flags.offset, flags.nbytes)), "flags are clean afterwards"


def shared_output(number: int, batch: Batch) -> Mapping[str, Any]:
    """The shared expert's, in every other call."""
    return {"shared": None if number % 2 else batch[0] * np.float32(0.5)}


AMONG = {
    "pull": AmongRow(fields_of_all),
    "push": AmongRow(clean_flags, oracles.fused_dispatch, joins=True, extra=shared_output),
}


@asynccontextmanager
async def exchange(**given: Any) -> AsyncIterator[Scene]:
    o = Options(**given)
    o.group_of_all = o.group(o.rng.permutation(32)[: o.num_ranks].tolist())
    most = o.num_experts if o.is_full else o.group_of_all.max_experts_per_rank
    o.layout = ENDS[o.way].layout(o.num_ranks, o.max_tokens, o.top_k, o.hidden, most, o.quantized)
    work = o.batches(o.num_ranks)
    pod = o.pod(
        dict.fromkeys(o.group_of_all.dies, o.layout.plan), topology=Topology(servers=4, chips_per_server=4)
    )
    yield among(o, pod, o.group_of_all, work)


def among(o: Options, pod: Pod, group: Group, work: list[list[Batch]], handles: Sequence[Any] = ()) -> Scene:
    """`handles` go on in the group; else there are new ones."""
    layout, quantizer, make = o.layout, quantize if o.quantized else None, ENDS[o.way].handle
    row, traits = AMONG[o.way], EXCHANGES[o.way]
    handles = handles or [
        make(pod.dies[die], rank, group, layout, quantize, o.means) for rank, die in enumerate(group.dies)
    ]

    def rank_of(rank: int, xccl: Any) -> Rank:
        async def call(turn: int, event: int) -> Any:
            x, topk, weights = work[turn][rank]
            got = await xccl.dispatch(x, topk, event)
            received, out = copied(got), answers(got)
            more = {"topk_weights": weights, "event_id": event} | row.extra(turn + rank, work[turn][rank])
            return received | {"result": (await xccl.combine(out, **more)).copy()}

        return Rank(rank, xccl.die, call, (lambda: xccl.reset(group)) if row.joins else xccl.reset, xccl)

    def expected(turn: int, rank: int) -> Any:
        tokens, topk, weights = zip(*work[turn], strict=True)
        out = oracles.combine(tokens[rank], topk[rank], expert, quantizer)
        if traits.sums:
            out = oracles.fused_combine(out, weights[rank], **row.extra(turn + rank, work[turn][rank]))
        return row.receive(tokens, topk, group.expert_rank, rank, quantizer) | {"result": out}

    def refused() -> list[Refused]:
        xccl, (x, topk, weights) = handles[0], one_token(layout)
        early = partial(xccl.combine, x, topk_weights=weights, event_id=1)
        return [
            *refused_tokens(
                f"{traits.prefix}dispatch", lambda x, e: xccl.dispatch(x, e, 1), layout, o.num_experts
            ),
            *refused_events(lambda event: xccl.dispatch(x, topk, event)),
            Refused(early, ProtocolError, f"rank 0 cannot {traits.prefix}combine while ready"),
        ]

    def without(lost: int) -> Scene:
        (dies,), (left,) = kept([group.dies], lost), kept([handles], lost)
        smaller = Group(tuple(dies), tuple(e % len(dies) for e in range(o.num_experts)))
        return among(o, pod, smaller, kept(work, lost), left if row.joins else ())

    ranks, look = [rank_of(*each) for each in enumerate(handles)], partial(row.look, handles)
    return Scene(pod, ranks, expected, refused, look, without)


def steps_of(*ops: str, steps: Sequence[int]) -> Callable[..., list[tuple[str, int]]]:
    return lambda scene, way, index: [(op, step) for op in ops for step in steps]


def missing_in_exchange(scene: Scene, way: Way, index: int, op: str, step: int) -> Wait:
    has_posted, is_last = step >= 4, op == "combine" and step >= 4
    waits_in = "dispatch" if is_last or (op == "dispatch" and not has_posted) else "combine"
    return Wait(waits_in, "event ID", others(scene, index), 1 + is_last, {index: int(is_last)})


def missing_in_fused(scene: Scene, way: Way, index: int, op: str, step: int) -> Wait:
    """Each token is for all experts, one on each rank, so that each has a key for the missing one."""
    if (op == "fused dispatch" and step >= 2) or (op == "fused combine" and step == 1):

        def seen(rank: Rank, error: Any) -> bool:
            rows = enumerate(rank.handle.topk_idx.tolist())
            flags = {token: sum(1 << key for key, e in enumerate(row) if e != index) for token, row in rows}
            return error.seen == {token: f"{flag:#b}" for token, flag in flags.items()}

        return Wait("fused combine", "token flag", others(scene, index), "0b111", seen)
    return Wait("fused dispatch", "event ID", others(scene, index), 1 + (op == "fused combine"), {index: 0})


# ---- collectives ------------------------------------------------------------------------------------

COLLECTIVES = ("barrier", "broadcast", "all_gather", "all_to_all", "reduce_scatter", "all_reduce")


def contributions(rng: np.random.Generator, op: str, num_ranks: int, dtype: str) -> list[Any]:
    """For each rank an array, or for all-to-all one for each rank."""
    shape = tuple(rng.integers(0, 6, rng.integers(1, 3)).tolist())

    def array(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 9, shape)
        return (values if dtype == "float32" else rng.integers(-(2**31), 2**31, shape)).astype(dtype)

    if op == "all_to_all":
        row = int(rng.integers(1, 5))
        return [[array((int(rng.integers(0, 4)), row)) for _ in range(num_ranks)] for _ in range(num_ranks)]
    return [array(shape) for _ in range(num_ranks)]


async def collective(
    rank: Collectives, op: str, x: Any, event: int, reduction: Any = "sum", root: int = 0
) -> Any:
    """A collective of any kind; a copy of its result."""
    if op == "barrier":
        return await rank.barrier(event)
    if op == "broadcast":
        return (await rank.broadcast(x, root, event)).copy()
    more = (reduction,) if op in ("reduce_scatter", "all_reduce") else ()
    found = await getattr(rank, op)(x, event, *more)
    return [part.copy() for part in found] if op == "all_to_all" else found.copy()


@asynccontextmanager
async def collectives(**given: Any) -> AsyncIterator[Scene]:
    o = Options(**given)
    o.ops = [o.ops[turn % len(o.ops)] for turn in range(o.turns)]
    dies = tuple(o.rng.permutation(32)[: o.num_ranks].tolist())
    layout = CollectiveLayout(o.num_ranks, 2**14)
    pod = o.pod(dict.fromkeys(dies, layout.plan), topology=Topology(servers=4, chips_per_server=4))
    yield collecting(o, pod, [Collectives(pod.dies[die], dies, layout, o.means) for die in dies])


def collecting(o: Options, pod: Pod, handles: list[Collectives]) -> Scene:
    dies, num = tuple(rank.die.index for rank in handles), len(handles)
    inputs = [contributions(o.rng, op, num, o.dtype) for op in o.ops]

    def rank_of(index: int, rank: Collectives) -> Rank:
        async def call(turn: int, event: int) -> Any:
            return await collective(rank, o.ops[turn], inputs[turn][index], event, o.reduction, turn % num)

        return Rank(index, rank.die, call, lambda: rank.reset(dies), rank)

    def expected(turn: int, index: int) -> Any:
        found = oracles.collective(o.ops[turn], inputs[turn], index, o.reduction, turn % num)
        return np.asarray(found) if isinstance(found, np.generic) else found

    def refused() -> list[Refused]:
        r, ones, big = handles[0], np.ones(4, np.float32), np.ones(2**12 + 1, np.float32)
        rows: list[tuple[Callable[[], Awaitable[Any]], str]] = [
            (lambda: r.all_gather(np.ones((4, 4), np.float32)[:, 0], 1), "all-gather: arrays must be contig"),
            (lambda: r.all_gather(big, 1), "all-gather: 16388 bytes exceed the layout's 16384"),
            (lambda: r.broadcast(big, 0, 1), "broadcast: 16388 bytes exceed the layout's 16384"),
            (lambda: r.all_to_all([big[:, None]] * num, 1), "16388 bytes exceed the layout's 16384"),
            (lambda: r.all_to_all([big[:2050, None]] * num, 1), f"{8200 * num} bytes exceed the layout's"),
            (lambda: r.all_reduce(np.ones(4), 1), "cannot reduce float64, only float32 and int32"),
            (lambda: r.reduce_scatter(np.float32(1).reshape(()), 1), "x must have rows to scatter"),
            (lambda: r.all_reduce(ones, 1, "prod"), "no reduction 'prod': there are sum and"),
            (lambda: r.reduce_scatter(ones, 1, "min"), "no reduction 'min': there are sum and"),
            (lambda: r.reduce_scatter(ones, 1, counts=[3]), r"4 rows cannot be cut in \[3\] for"),
            (
                lambda: r.reduce_scatter(ones, 1, counts=[5, -1] + [0] * (num - 2)),
                r"cannot be cut in \[5, -1",
            ),
            (
                lambda: r.all_reduce(np.ones(4, ">f4"), 1),
                "all-reduce: cannot send >f4, only float32, int32, b",
            ),
            (
                lambda: r.all_gather(np.array(["a"]), 1),
                "all-gather: cannot send <U1, only float32, int32, bool",
            ),
            (
                lambda: r.all_to_all([np.ones((3, 0), np.int8)] * num, 1),
                r"rows of int8 \(0,\) have no elements",
            ),
            (lambda: r.all_gather([1, 2], 1), "all-gather: what it sends must be a NumPy array, not list"),
            (lambda: r.all_reduce(None, 1), "all-reduce: what it sends must be a NumPy array, not NoneType"),
            (lambda: r.all_to_all(None, 1), "all-to-all: parts must be a list of arrays, not NoneType"),
            (
                lambda: r.all_to_all([[1]] * num, 1),
                "all-to-all: what it sends must be a NumPy array, not list",
            ),
            (lambda: r.all_to_all([], 1), f"all-to-all: 0 parts for {num} ranks"),
            (lambda: r.all_to_all([np.float32(1).reshape(())] * num, 1), "all-to-all: parts differ"),
            *(
                (
                    lambda root=root: r.broadcast(ones, root, 1),
                    r"broadcast: (the root is one of ranks 0\.\.3|root must)",
                )
                for root in (-1, num, 0.5, True, "0")
            ),
        ]
        return [*(Refused(call, AddressError, said) for call, said in rows), *refused_events(r.barrier)]

    def without(lost: int) -> Scene:
        return collecting(o, pod, kept([handles], lost)[0])

    ranks = [rank_of(*each) for each in enumerate(handles)]
    return Scene(pod, ranks, expected, refused, without=without)


def steps_of_collective(scene: Scene, way: Way, index: int) -> list[tuple[str, int]]:
    """Of one rank, as all are alike: all steps of a turn, counted on over the rounds of an all-reduce."""
    num_steps = {"reduce_scatter": 5, "all_reduce": 9}.get(way["ops"][0], 4)
    return [("", nth) for nth in range(1, 1 + num_steps)] if index == 2 else []


def missing_in_collective(scene: Scene, way: Way, index: int, op: str, nth: int) -> Wait:
    (name,) = way["ops"]
    is_last = nth >= (7 if name == "all_reduce" else 2)  # when it has posted in the last round
    return Wait(name.replace("_", "-"), "event ID", others(scene, index), 1 + is_last)


# ---- A2E and E2A, and M2N ---------------------------------------------------------------------------


def between(
    pod: Pod,
    sides: Sequence[list[Any]],
    group: Group,
    work: list[list[Batch]],
    ops: tuple[str, str],
    **more: Any,
) -> Scene:
    """Attention dies send tokens of `work` to expert dies, which answer."""
    is_direct = ops[0] == "M2N"  # then rows come in the order of attention dies and their tokens
    attention, experts = sides
    layout = attention[0].layout
    quantizer, is_reduced = quantize if layout.quantize else None, getattr(layout, "reduce", True)

    def of_attention(side: Any) -> Rank:
        async def call(turn: int, event: int) -> Any:
            await side.a2e(*work[turn][side.rank], event)
            return (await side.e2a(event)).copy()

        return Rank(f"attention {side.rank}", side.die, call, side.reset, side)

    def of_experts(side: Any) -> Rank:
        async def call(turn: int, event: int) -> Any:
            got = await side.a2e(event)
            is_pulled = isinstance(got, Received)
            counts = got.num_tokens_per_rank if is_pulled else got.num_tokens_per_expert
            slots, token = (
                (got.slot if is_pulled else got.key_offset),
                got.token_idx if is_direct else got.expert_idx,
            )
            assert counts.sum() == len(got)
            rows = list(zip(got.expert_idx.tolist(), token.tolist(), slots.tolist(), strict=True))
            await side.e2a(answers(got), event)
            return rows if is_direct else sorted(rows)

        return Rank(f"expert {side.rank}", side.die, call, side.reset, side)

    def expected(turn: int, index: int) -> Any:
        if index < len(attention):
            x, topk, weights = work[turn][index]
            slots = oracles.combine(x, topk, expert, quantizer)
            return oracles.weighted_sum(slots, weights) if is_reduced else slots
        rank = index - len(attention)  # every copy comes to the rank of its expert, once
        rows = [
            (e, token if is_direct else e, k)
            for _, topk, _ in work[turn]
            for token, row in enumerate(topk.tolist())
            for k, e in enumerate(row)
            if group.expert_rank[e] == rank
        ]
        return rows if is_direct else sorted(rows)

    def refused() -> list[Refused]:
        side, there = attention[0], experts[0]
        return [
            *refused_batches(ops[0], side, layout, len(group.expert_rank)),
            *refused_events(there.a2e),
            Refused(lambda: side.e2a(1), ProtocolError, f"rank attention 0 cannot {ops[1]} while ready"),
            Refused(
                lambda: there.e2a(one_token(layout)[0], 1), ProtocolError, f"cannot {ops[1]} while ready"
            ),
        ]

    return Scene(pod, [*map(of_attention, attention), *map(of_experts, experts)], expected, refused, **more)


@asynccontextmanager
async def a2e(**given: Any) -> AsyncIterator[Scene]:
    o = Options(**given)
    dies = o.rng.permutation(48)[: o.attention + o.experts].tolist()
    sides = Sides(tuple(dies[: o.attention]), o.group(dies[o.attention :]))
    # Room for any expert on any die, if dies are to be lost.
    planned = Sides(sides.attention, Group(sides.experts.dies, (0,) * o.num_experts)) if o.is_full else sides
    sizes = o.max_tokens, o.top_k, o.hidden, o.quantized, o.reduce
    layout = A2ELayout(planned, *sizes, pushes=o.way == "push" and o.reduce)
    plans = layout.plan_attention, layout.plan_expert
    if o.way == "naive":
        plans = layout.plan_naive_attention, layout.plan_naive_expert
    work = o.batches(o.attention)
    pod = o.pod(dict.fromkeys(sides.attention, plans[0]) | dict.fromkeys(sides.experts.dies, plans[1]))
    yield by_trampolines(o, pod, sides, layout, work)


def by_trampolines(o: Options, pod: Pod, sides: Sides, layout: A2ELayout, work: list[list[Batch]]) -> Scene:
    kinds = (NaiveAttentionSide, NaiveExpertSide) if o.way == "naive" else (AttentionSide, ExpertSide)
    made = [
        [kind(pod.dies[d], rank, layout, quantize, o.means, sides=sides) for rank, d in enumerate(dies)]
        for kind, dies in zip(kinds, (sides.attention, sides.experts.dies), strict=True)
    ]

    def look(last_event: int) -> None:
        for side in (*made[0], *made[1]):
            assert {field.event_id for field in side.inbox.fields()} <= {last_event}

    def without(lost: int) -> Scene:
        gone = [*sides.attention, *sides.experts.dies][lost]
        left, dies = (
            tuple(die for die in each if die != gone) for each in (sides.attention, sides.experts.dies)
        )
        group = Group(dies, tuple(e % len(dies) for e in range(o.num_experts)))
        return by_trampolines(o, pod, Sides(left, group), layout, kept(work, lost))

    return between(pod, made, sides.experts, work, ("A2E", "E2A"), look=look, without=without)


def num_attention(scene: Scene) -> int:
    return sum(str(rank.name).startswith("attention") for rank in scene.ranks)


def steps_of_a2e(scene: Scene, way: Way, index: int) -> list[tuple[str, int]]:
    is_attention = index < num_attention(scene)
    if way["way"] == "naive":
        ops = {"A2E": (1, 2, 3, 4), "E2A": (5, 7)} if is_attention else {"A2E": (5, 7), "E2A": (1, 2, 3, 4)}
    elif is_attention:
        ops = {"A2E": (1, 2, 3, 4), "E2A'": (5, 7)}
    else:
        ops = {"A2E'": (1, 2, 3, 4, 5, 7), "E2A": (1, 2, 3, 4, 5, 7)}
        if index < 2 * num_attention(scene):  # a trampoline
            ops |= {"A2E": (5, 7), "E2A'": (2, 3, 4)}
    return [(op, step) for op, steps in ops.items() for step in steps]


def missing_in_a2e(scene: Scene, way: Way, index: int, op: str, step: int) -> Wait:
    """With trampolines expert dies wait for each other, and attention dies for theirs."""
    count, has_posted = num_attention(scene), step >= 4
    attention, experts = list(range(count)), list(range(count, len(scene.ranks)))
    peers = [each for each in experts if each != index]
    if way["way"] == "naive":
        waits_in, waiting = ("A2E", experts) if index < count else ("E2A", attention)
        is_next = (op == waits_in and has_posted) or (op == "E2A" and index < count)
    elif index < count:
        waits_in, waiting, is_next = "A2E", [count + index], op == "E2A'" or has_posted
    elif op == "A2E" or (op == "A2E'" and not has_posted):
        waits_in, waiting, is_next = "A2E'", peers, False
    elif op == "A2E'" or (op == "E2A" and not has_posted):
        waits_in, waiting, is_next = "E2A", peers, False
    elif index < 2 * count and not (op == "E2A'" and has_posted):
        waits_in, waiting, is_next = "E2A'", [index - count], False
    else:
        waits_in, waiting, is_next = "A2E'", peers, True
    return Wait(waits_in, "event ID", waiting, 1 + is_next, {scene.ranks[index].name: int(is_next)})


def attention_is_ahead(op: str) -> Callable[[Scene], Words]:
    """Attention die 1 has event 5, and expert die 1 hears of it first."""
    said = f"{op}: rank expert 1 expects event 4, but peer attention 1 is ahead: its field says event 5"
    return lambda scene: ({1: 5}, {num_attention(scene) + 1: said})


@asynccontextmanager
async def m2n(**given: Any) -> AsyncIterator[Scene]:
    o = Options(**given)
    dies = o.rng.permutation(64)[: o.attention + o.experts].tolist()
    group = o.group(dies[o.attention :])
    sizes = o.max_tokens, o.top_k, o.hidden, o.quantized
    layout = M2NLayout(tuple(dies[: o.attention]), group, *sizes)
    work, lost = o.batches(o.attention), np.random.default_rng(o.seed)
    plans = dict.fromkeys(layout.attention, layout.plan_attention)
    pod = o.pod(plans | dict.fromkeys(group.dies, layout.plan_expert))
    how = {"is_lost": lambda *_: bool(lost.random() < o.losses)} if o.losses else {}
    mesh = M2NMesh(RDMANetwork(pod.fabric, pod.spec_of, acks_first=o.acks_first, **how), layout)
    made = [
        [kind(pod.dies[die], rank, mesh, quantize, o.means) for rank, die in enumerate(each)]
        for kind, each in ((M2NAttention, layout.attention), (M2NExpert, group.dies))
    ]
    yield between(pod, made, group, work, ("M2N", "N2M"))


def steps_of_m2n(scene: Scene, way: Way, index: int) -> list[tuple[str, int]]:
    sends, receives = ("M2N", "N2M") if index < num_attention(scene) else ("N2M", "M2N")
    sending = [(f"{sends} send", step) for step in (2, 3, 4, 5, 6)]
    return sending + [(f"{receives} receive", step) for step in (3, 4, 5, 6)]


def missing_in_m2n(scene: Scene, way: Way, index: int, op: str, step: int) -> Wait:
    """From step 4 of sending on the cards go on without the die."""
    count = num_attention(scene)
    attention, experts = list(range(count)), list(range(count, len(scene.ranks)))
    is_next = "send" in op and step >= 4
    if index < count:
        event = 1 + (is_next or op == "N2M receive")
        seen = f"{count - 1} completions"
        return Wait("M2N receive", "completion", experts, f"event {event} of {count}", seen)
    seen, of = f"{len(experts) - 1} completions", f"event {1 + is_next} of {len(experts)}"
    return Wait("N2M receive", "completion", attention, of, seen)


# ---- send and receive -------------------------------------------------------------------------------


@asynccontextmanager
async def send_receive(**given: Any) -> AsyncIterator[Scene]:
    """Rank 0 sends to rank 1, a message a turn; rank 2 is there for who is left alone."""
    o, dies = Options(**given), (3, 40, 17)
    layout = RingLayout(3, num_cores=6, slot_nbytes=o.slot, num_slots=o.ring)
    o.messages = [o.rng.bytes(o.sizes[turn % len(o.sizes)]) for turn in range(o.turns)]

    def plan(memory: Any) -> None:
        layout.plan(memory)
        for name in ("out", "in"):
            memory.app.alloc(name, 8192)

    pod = o.pod(dict.fromkeys(dies, plan))
    handles = [PointToPoint(pod.dies[d], rank, dies, layout, o.timeout_ns) for rank, d in enumerate(dies)]
    yield pair_of(o, pod, handles, 0, 1)


def pair_of(o: Options, pod: Pod, handles: list[PointToPoint], source: int, target: int) -> Scene:
    one, two, layout = handles[source], handles[target], handles[0].layout
    out, into = (p2p.die.memory.app.regions[name].offset for p2p, name in ((one, "out"), (two, "in")))

    async def send(turn: int, event: int) -> None:
        message = o.messages[turn]
        one.die.memory.write(out, message)
        await one.send(out, len(message), target, event, zero_copy=o.zero_copy, **o.by[0])

    async def receive(turn: int, event: int) -> bytes:
        nbytes = len(o.messages[turn])
        await two.receive(into, nbytes, source, event, **o.by[1])
        return bytes(two.die.memory.read(into, nbytes))

    def look(last_event: int) -> None:
        """Both ends are idle at one position, the last tail and the last ack say the same, and the ring holds
        what the oracle says."""
        tails = two.memory.fields(two.memory.tails.offset, source, layout.num_cores)
        acks = one.memory.fields(one.memory.acks.offset, target, layout.num_cores)
        assert one.memory.in_use == two.memory.in_use == {}
        assert not len(one.die.memory.claims) + len(two.die.memory.claims)
        ends = one.sides["send"][target], two.sides["receive"][source]
        assert len({(end.state, end.position, end.last_event_id) for end in ends}) == 1
        if o.zero_copy:
            assert not any(two.die.memory.read(two.memory.rings.offset, two.memory.rings.nbytes))
            return
        assert tails == acks
        assert max(field.pointer for field in tails) == ends[0].position
        if last_event == o.turns:  # from the ring's start
            at = two.memory.rings.offset + source * layout.ring_nbytes
            ring = bytes(two.die.memory.read(at, layout.ring_nbytes))
            for number, content in enumerate(oracles.ring(o.messages, layout.slot_nbytes, layout.num_slots)):
                assert ring[number * layout.slot_nbytes :].startswith(content)

    def refused() -> list[Refused]:
        found = []
        for change, error, said in REFUSED_MESSAGES:
            asked = {"nbytes": 64, "peer": 1, "event_id": 1} | change
            at = out + asked.pop("shift", 0)
            for call in (one.send, one.receive, one.send_async, one.receive_async):
                found.append(Refused(lambda c=call, at=at, a=asked: c(at, **a), error, said))
        return found

    def without(lost: int) -> Scene:
        """Who is left goes on with rank 2, as sender or as receiver."""
        return pair_of(o, pod, handles, *((0, 2) if lost else (2, 1)))

    ranks = [
        Rank(source, one.die, send, lambda: one.reset(target), one),
        Rank(target, two.die, receive, lambda: two.reset(source), two),
    ]
    return Scene(pod, ranks, lambda turn, i: o.messages[turn] if i else None, refused, look, without)


REFUSED_MESSAGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"shift": 8}, AddressError, "is not a multiple of 32"),
    ({"shift": -32 * 10**6}, AddressError, "leaves the app area"),
    ({"nbytes": 10**8}, AddressError, "leaves the app area"),
    ({"nbytes": -1}, AddressError, "a message has 0..4294967295 bytes, not -1"),
    ({"nbytes": 2**32}, AddressError, "a message has 0..4294967295 bytes, not 4294967296"),
    ({"nbytes": 64.0}, AddressError, "bytes must be an integer, not 64.0"),
    ({"peer": 0}, ProtocolError, "rank 0 has peers 0..2 but itself, not 0"),
    ({"peer": 3}, ProtocolError, "rank 0 has peers 0..2 but itself, not 3"),
    ({"peer": True}, AddressError, "peer must be an integer, not True"),
    ({"cores": 0}, AddressError, "the layout is for 1..6 AIV cores, not 0"),
    ({"cores": 7}, AddressError, "the layout is for 1..6 AIV cores, not 7"),
    ({"cores": 1.0}, AddressError, "cores must be an integer, not 1.0"),
    ({"engine": "rdma"}, AddressError, "the engine is mte, dma or urma, not 'rdma'"),
    *(
        ({"event_id": e}, ProtocolError, f"was given event {e}: event IDs are integers")
        for e in (0, 2**64, 1.5)
    ),
]


def steps_of_message(scene: Scene, way: Way, index: int) -> list[tuple[str, int]]:
    of_sender = (2, 3, 4, 8) if way["zero_copy"] else (1, 2, 3, 4, 8)  # or it moves nothing
    return [("receive", step) for step in (5, 6, 7)] if index else [("send", step) for step in of_sender]


def missing_in_message(scene: Scene, way: Way, index: int, op: str, step: int) -> Wait:
    """A message has four chunks; without copies one, whose first tail and first ack are the last."""
    is_next = (op, step) in {("send", 4), ("send", 8)}
    is_next |= way["zero_copy"] and (op, step) in {("send", 3), ("receive", 7)}
    other, what = ("send", "ack") if index else ("receive", "tail")
    seen = lambda rank, error: 0 <= error.seen < error.expected  # noqa: E731
    return Wait(other, f"{what} chunk ID of event {1 + is_next}", [1 - index], seen=seen)


# ---- DistFlow ---------------------------------------------------------------------------------------

UNIT = 32
FLOW_NODES = {"ub": ((0, 1), (5, 8, 9)), "roce": ((0, 1), (5, 6)), "vpc": ((0, 1), (5, 9))}


def spans(*pieces: tuple[int, int, int]) -> list[Span]:
    """From (node, first unit of 32 bytes, number of units)."""
    return [Span(Address(node, UNIT * first), UNIT * count) for node, first, count in pieces]


def cut_in_spans(rng: np.random.Generator, nodes: Sequence[int], total: int, first: int) -> list[Span]:
    """`total` units, in spans of some on any of the nodes, from unit `first` on, in any order."""
    at, found = dict.fromkeys(nodes, first), []
    while total:
        node, count = int(rng.choice(nodes)), min(total, int(rng.integers(1, 7)))
        found += spans((node, at[node], count))
        at[node], total = at[node] + count + int(rng.integers(0, 2)), total - count
    return [found[place] for place in rng.permutation(len(found))]


class FlowEnds:
    """A flow and its two endpoints, made anew when one has ended, as TEs do; it is each one's handle, too,
    since endpoints have no steps to look at."""

    def __init__(self, pod: Pod, nodes: Sequence[Sequence[int]], *how: Any) -> None:
        self.pod, self.nodes, self._how = pod, nodes, how
        self.observers = [SimpleNamespace(on_step=None), SimpleNamespace(on_step=None)]
        self.link()

    def link(self) -> None:
        self.flow = DistFlow(self.pod, *self._how)
        self.ends = self.flow.link_cluster(dict(zip(("prefill", "decode"), self.nodes, strict=True)))

    def reset(self) -> None:
        if any(end.is_stopped for end in self.ends):
            self.flow.close()
            self.link()
        for end in self.ends:
            for peer, tag in list(end.sources):
                end.abort_send(tag, peer)
            for peer, tag in list(end.destinations):
                end.abort_receive(tag, peer)

    async def passed(self, op: str, step: int, after_ns: int = 0) -> None:
        """A moment at which an end may be stopped, `after_ns` later if somebody looks at it."""
        index = int(op == "receive")
        if (observe := self.observers[index].on_step) is not None:
            await self.pod.clock.sleep(after_ns)
            try:
                observe(op, step)
            except RuntimeError:
                self.ends[index].stop()
                raise


@asynccontextmanager
async def distflow(**given: Any) -> AsyncIterator[Scene]:
    o = Options(**given)
    nodes, topology = FLOW_NODES[o.backend], Topology(servers=2, chips_per_server=2)
    every = range(topology.num_nodes)  # dies 0 to 7, hosts 8 and 9

    def plan(memory: Any) -> None:
        memory.growth = 1  # hosts, too, hold this and no more
        memory.app.alloc("data", UNIT * o.units)

    pod = o.pod(dict.fromkeys(every, plan), topology=topology)
    for node in every:
        pod.memory(node).buffer[:] = o.rng.bytes(UNIT * o.units)
    # One side that knows all the addresses may move from any node to any, itself included.
    sides = [(side, 0) for side in nodes]
    if o.is_raw:
        sides = [(nodes[0] + nodes[1], first) for first in (0, o.units // 2)]
    work = [[cut_in_spans(o.rng, side, o.total, first) for side, first in sides] for _ in range(o.turns)]
    linked = FlowEnds(pod, nodes, o.backend, o.timeout_ns, o.timeout_ns)

    def apart_from(where: Sequence[Span]) -> list[bytes]:
        """The bytes of all nodes, those of some spans as zeros."""
        found = [bytearray(pod.memory(node).buffer) for node in every]
        for (node, offset), nbytes in where:
            found[node][offset : offset + nbytes] = bytes(nbytes)
        return [bytes(each) for each in found]

    async def completion(end: Endpoint) -> None:
        while not (found := end.poll()):
            await pod.clock.sleep(US)
        (entry,) = found
        if entry.error is not None:
            raise entry.error
        assert entry.nbytes == UNIT * o.total

    async def send(turn: int, event: int) -> None:
        if not o.is_raw:
            await linked.passed("send", 0)
            linked.ends[0].send(event, "decode", work[turn][0])
            await linked.passed("send", 1)
            await completion(linked.ends[0])
            await linked.passed("send", 2)

    async def receive(turn: int, event: int) -> bytes:
        src, dst = work[turn]
        before = apart_from(dst)
        if o.is_raw:
            assert await linked.flow.transfer(src, dst) == UNIT * o.total
        else:
            command_ns = pod.spec.command_ns()
            await linked.passed("receive", 0)
            linked.ends[1].receive(event, "prefill", dst)
            await linked.passed("receive", 1)
            await linked.passed("receive", 2, command_ns)
            await linked.passed("receive", 3, command_ns + US)
            await completion(linked.ends[1])
            await linked.passed("receive", 4, command_ns)  # its word has come
        assert apart_from(dst) == before
        return b"".join(bytes(pod.memories.read(span.address, span.nbytes)) for span in dst)

    def expected(turn: int, index: int) -> Any:
        buffers = [bytearray(pod.memory(node).buffer) for node in every]
        sides = [[(node, at, size) for (node, at), size in side] for side in work[turn]]
        oracles.transfer(buffers, *sides)
        return (
            b"".join(bytes(buffers[node][at : at + size]) for node, at, size in sides[1]) if index else None
        )

    def look(last_event: int) -> None:
        assert [end.num_open for end in linked.ends] == [0, 0]
        assert not any(len(pod.memory(node).claims) for node in every)

    def refused() -> list[Refused]:
        flow, one = linked.flow, linked.ends[0]

        async def call(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
            function(*arguments)

        rows: list[tuple[Any, Sequence[Any], type[Exception], str]] = [
            *((flow.transfer, sides, AddressError, said) for *sides, said in REFUSED_TRANSFERS),
            *((getattr(one, name), (1, *of), error, said) for name, *of, error, said in REFUSED_OFFERS),
        ]
        for piece in NO_SPANS:
            uses = (flow.transfer, ([piece], spans((1, 0, 2)))), (flow.transfer, (spans((1, 0, 2)), [piece]))
            for use in (*uses, (one.send, (1, "decode", [piece])), (one.receive, (1, "decode", [piece]))):
                rows.append((*use, AddressError, "span is an Address and a size, in whole numbers, not"))
        return [Refused(lambda f=f, of=of: call(f, of), error, said) for f, of, error, said in rows]

    ranks = [
        Rank(name, pod.dies[side[0]], call, linked.reset, SimpleNamespace(steps=observer))
        for name, side, call, observer in zip(
            ("prefill", "decode"), nodes, (send, receive), linked.observers, strict=True
        )
    ]
    yield Scene(pod, ranks, expected, refused, look)
    linked.flow.close()


REFUSED_TRANSFERS: list[tuple[list[Span], list[Span], str]] = [
    (spans((0, 0, 2)), spans((1, 0, 3)), "the source has 64 bytes, the destination 96"),
    ([Span(Address(0, 8), 32)], spans((1, 0, 1)), "source span of 32 bytes at offset 8 of node 0: both must"),
    ([Span(Address(0, 0), 8)], [Span(Address(1, 0), 8)], "source span of 8 bytes at offset 0 of node 0"),
    (spans((0, 0, 1)), [Span(Address(1, 4), 32)], "destination span of 32 bytes at offset 4 of node 1"),
    ([Span(Address(0, 0), 0)], [Span(Address(1, 0), 0)], "source span of 0 bytes"),
    (spans((0, 0, 2)), spans((0, 1, 2)), "destination span of 64 bytes at offset 32 of node 0 overlaps a so"),
    (spans((0, 1, 2)), spans((0, 0, 2)), "source span of 64 bytes at offset 32 of node 0 overlaps a destin"),
    (spans((0, 0, 4)), spans((1, 2, 2), (1, 1, 2)), "overlaps a destination span"),
    (spans((0, 0, 8), (0, 9, 1)), spans((1, 0, 8), (0, 7, 1)), "overlaps a source span"),
    # A source within a source does not hide the rest of the larger one.
    (spans((0, 0, 8), (0, 1, 1)), spans((0, 4, 2), (1, 0, 7)), "offset 128 of node 0 overlaps a source"),
    (spans((0, 63, 2)), spans((1, 0, 2)), "64 bytes at offset 2016 do not lie within one area"),
    (spans((0, 0, 2)), spans((1, 63, 2)), "64 bytes at offset 2016 do not lie within one area"),
]
REFUSED_OFFERS: list[tuple[str, str, list[Span], type[Exception], str]] = [
    ("send", "moon", spans((0, 0, 1)), DeploymentError, "prefill is not linked to 'moon'"),
    ("send", "decode", spans((5, 0, 1)), HardwareError, r"node 5 is not one of prefill's \[0, 1\]"),
    ("send", "decode", spans((0, 64, 1)), AddressError, "do not lie within one area"),
    ("send", "decode", [Span(Address(0, 0), 4)], AddressError, "source span of 4 bytes"),
    ("receive", "decode", [Span(Address(0, 0), 4)], AddressError, "destination span of 4 bytes"),
]
NO_SPANS: list[Any] = [
    *[(Address(0, 0), 64.0), (Address(0, 32.0), 64), (Address(0.0, 32), 64)],
    *[(0, 64), (Address(0, 0), None), (Address(0, 0), 64, 1)],
]


def steps_of_flow(scene: Scene, way: Way, index: int) -> list[tuple[str, int]]:
    return [("receive", step) for step in range(5)] if index else [("send", step) for step in range(3)]


def missing_in_flow(scene: Scene, way: Way, index: int, op: str, step: int) -> Wait:
    if op == "receive" and step in (1, 2, 3):
        return Wait("send", "done of tag 1", [0], "done", "nothing while sending")
    tag = 1 + (step == (4 if index else 2))
    if index:
        return Wait("send", f"want of tag {tag}", [0], "want", "nothing while offered")
    return Wait("receive", f"offer of tag {tag}", [1], "offer", "nothing while wanted")


# ---- experts as services, in the pod and in other processes -----------------------------------------


@asynccontextmanager
async def services(**given: Any) -> AsyncIterator[Scene]:
    o = Options(**given)
    layout = service_layout(o)
    plans = dict.fromkeys(layout.clients, layout.plan_client)
    pod = o.pod(plans | dict.fromkeys(layout.servers.dies, layout.plan_server))
    made = [
        ServiceServer(pod.dies[die], index, layout, LAYERS, o.batching, quantize)
        for index, die in enumerate(layout.servers.dies)
    ]
    yield asking(o, pod, layout, lambda die: OverURMA(die, layout), made)


@asynccontextmanager
async def outside(**given: Any) -> AsyncIterator[Scene]:
    o = Options(**given)
    layout = service_layout(o)
    pod = o.pod(dict.fromkeys(layout.clients, layout.plan_client))
    async with linked_servers(layout, o.kind) as (fars, links):
        made: list[ServiceServer] = [far.server for far in fars]
        yield asking(o, pod, layout, lambda die: OutsideReach(die, links), made, is_real=True)


def service_layout(o: Options) -> ServiceLayout:
    dies = o.rng.permutation(48)[: o.clients + o.servers].tolist()
    sizes = o.max_tokens, o.top_k, o.hidden, o.quantized
    group = o.group(dies[o.clients :])
    return ServiceLayout(
        tuple(dies[: o.clients]), group, *sizes, num_slots=o.num_slots, announces=o.announces
    )


def asking(
    o: Options,
    pod: Pod,
    layout: ServiceLayout,
    reach: Callable[[Die], Reach],
    made: Sequence[ServiceServer],
    is_real: bool = False,
) -> Scene:
    """Clients, each a microbatch, and servers, which serve for as long as clients ask."""
    work, patience = o.batches(o.clients * o.num_slots), Patience(o.timeout_ns // 2, o.timeout_ns)
    quantizer = quantize if o.quantized else None
    clients = [
        ServiceClient(rank, slot, known, LAYERS, patience=patience, quantize=quantize)
        for rank, die in enumerate(layout.clients)
        for known in [KnownServers(reach(pod.dies[die]), rank, layout)]
        for slot in range(o.num_slots)
    ]

    def of_client(number: int, client: ServiceClient) -> Rank:
        async def call(turn: int, event: int) -> np.ndarray:
            await client.a2e(*work[turn][number], event)
            return (await client.e2a(event)).copy()

        return Rank(client.label, client.die, call, client.reset, client, is_real=is_real)

    def of_server(server: ServiceServer) -> Rank:
        async def call(turn: int, event: int) -> None:
            await serve(server)

        def reset() -> None:
            if not is_real:  # a process goes on as it is: a new one would have another seat's epoch
                server.register()

        return Rank(server.label, server.die, call, reset, server, serves=True, is_real=is_real)

    def expected(turn: int, index: int) -> Any:
        if index >= len(clients):
            return None
        x, topk, weights = work[turn][index]
        return oracles.weighted_sum(oracles.combine(x, topk, expert, quantizer), weights)

    def refused() -> list[Refused]:
        said = "rank client 0 cannot expert read while ready"
        return [
            *refused_batches("expert write", clients[0], layout, o.num_experts),
            Refused(lambda: clients[0].e2a(1), ProtocolError, said),
        ]

    ranks = [*(of_client(*each) for each in enumerate(clients)), *map(of_server, made)]
    return Scene(pod, ranks, expected, refused)


def steps_of_service(scene: Scene, way: Way, index: int) -> list[tuple[str, int]]:
    if scene.ranks[index].serves:
        return [("expert serve", step) for step in (1, 2, 3, 4)]
    return [("expert write", step) for step in range(1, 6)] + [("expert read", step) for step in range(1, 5)]


def steps_outside(scene: Scene, way: Way, index: int) -> list[tuple[str, int]]:
    """Those of one client and of one server: a wait for it is one of this computer's time."""
    return steps_of_service(scene, way, index) if index in (0, len(scene.ranks) - 1) else []


def missing_in_service(scene: Scene, way: Way, index: int, op: str, step: int) -> Wait | None:
    """Clients wait for a server; nobody waits for a client."""
    clients = [each for each, rank in enumerate(scene.ranks) if not rank.serves]
    return None if index in clients else Wait("expert read", "state of slot 0", clients, [2], [1])


def another_header(scene: Scene) -> Words:
    """A server answers as if it had been asked under another event."""
    (server,) = (rank.handle for rank in scene.ranks if rank.name == "expert server 1")

    def lie(op: str, step: int) -> None:
        if step == 3:
            header = server.header(0)._replace(event_id=5)
            server.die.memory.write(server.bell + server.layout.header_at(0), header.pack())

    server.steps.on_step = lie
    said = r"expert server 1, field header: expected \S+\(.*event_id=4.*, seen \S+\(.*event_id=5"
    return {}, {0: said}


# ---- the table --------------------------------------------------------------------------------------

SEEDS, YES_OR_NO = st.integers(0, 2**16), st.booleans()
CARRIERS = st.sampled_from(["mte", "urma"])
BY = st.fixed_dictionaries({"cores": st.integers(1, 6), "engine": st.sampled_from(["mte", "dma", "urma"])})


def up_to(**most: int) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.integers(1, each) for name, each in most.items()}


TOKENS = {**up_to(top_k=4, max_tokens=6, hidden=40), "quantized": YES_OR_NO}
GROUP = {**TOKENS, **up_to(num_ranks=8, num_experts=10, cores=48), "one_target": YES_OR_NO}
BIG = up_to(top_k=8, max_tokens=24, hidden=400, num_experts=64)
SIDES = {**TOKENS, **up_to(attention=9, experts=6, num_experts=18)}
SERVICES = {**TOKENS, **up_to(clients=4, servers=5, num_experts=15)}
FULL = {"top_k": 3, "num_experts": 3, "max_tokens": 2, "hidden": 8, "quantized": True, "is_full": True}

FEWER = "all go on; a smaller group has new layouts, or replicas have their tests"
HEADERS = "clients' events are their own; a server that answers another one is found out"

PROTOCOLS = (
    Protocol(
        "exchange",
        exchange,
        random={**GROUP, "carrier": CARRIERS},
        big={**BIG, **up_to(num_ranks=32)},
        small={**FULL, "num_ranks": 3, "num_experts": 6, "top_k": 2},
        steps=steps_of("dispatch", "combine", steps=(1, 2, 3, 4, 5, 7)),
        missing=missing_in_exchange,
        disagree=one_is_ahead("dispatch"),
    ),
    Protocol(
        "fused",
        exchange,
        random={**GROUP, "way": st.just("push")},
        big={**BIG, **up_to(num_ranks=32)},
        small={**FULL, "num_ranks": 3, "way": "push"},
        steps=steps_of("fused dispatch", "fused combine", steps=(1, 2, 3)),
        missing=missing_in_fused,
        disagree=one_is_ahead("fused dispatch"),
    ),
    Protocol(
        "collectives",
        collectives,
        random={
            **up_to(num_ranks=9, cores=48),
            "ops": st.lists(st.sampled_from(COLLECTIVES), min_size=1, max_size=5),
            "dtype": st.sampled_from(["float32", "int32"]),
            "reduction": st.sampled_from(["sum", "max"]),
        },
        big=up_to(num_ranks=32),
        small={"num_ranks": 4, "dtype": "float32", "reduction": "sum"},
        steps=steps_of_collective,
        missing=missing_in_collective,
        disagree=one_is_ahead(".*"),
        ways=[{"ops": [op]} for op in COLLECTIVES],
    ),
    Protocol(
        "A2E",
        a2e,
        random={
            **SIDES,
            **up_to(cores=48),
            "carrier": CARRIERS,
            "way": st.sampled_from(["pull", "push", "naive"]),
            "reduce": YES_OR_NO,
        },
        big={**BIG, **up_to(attention=24, experts=24)},
        small={**FULL, "attention": 2, "experts": 3},
        steps=steps_of_a2e,
        missing=missing_in_a2e,
        disagree=attention_is_ahead("A2E"),
        ways=({"way": "pull"}, {"way": "naive"}),
    ),
    Protocol(
        "M2N",
        m2n,
        random={**SIDES, "losses": st.sampled_from([0.0, 0.05, 0.1]), "acks_first": YES_OR_NO},
        big={**BIG, **up_to(attention=24, experts=24, hidden=3000)},
        small={**FULL, "attention": 2, "experts": 3},
        steps=steps_of_m2n,
        missing=missing_in_m2n,
        disagree=attention_is_ahead("M2N receive"),
        notes={"reset": FEWER},
    ),
    Protocol(
        "send and receive",
        send_receive,
        random={
            "sizes": st.lists(st.integers(0, 700), min_size=1, max_size=4),
            "slot": st.sampled_from([32, 64, 96, 256]),
            "ring": st.integers(1, 9),
            "by": st.tuples(BY, BY),
            "zero_copy": YES_OR_NO,
        },
        big={"sizes": st.lists(st.integers(0, 8192), min_size=1, max_size=4)},
        small={"sizes": [250]},
        steps=steps_of_message,
        missing=missing_in_message,
        disagree=lambda scene: (
            {0: 5},
            {1: "receive: rank 1 expects event 4, but the field of peer 0, core 0 says event 5"},
        ),
        ways=({"zero_copy": False}, {"zero_copy": True}),
    ),
    Protocol(
        "DistFlow",
        distflow,
        random={
            "backend": st.sampled_from(list(FLOW_NODES)),
            "is_raw": YES_OR_NO,
            **up_to(total=24),
            "units": st.just(128),
        },
        big={"total": st.integers(1, 400), "units": st.just(2048)},
        small={},
        steps=steps_of_flow,
        missing=missing_in_flow,
        disagree=lambda scene: (
            {0: 5},
            {
                0: "peer decode, field want of tag 5: expected",
                1: "peer prefill, field offer of tag 4: expected",
            },
        ),
        ways=[{"backend": backend} for backend in FLOW_NODES],
        failed=None,
        notes={
            "other event": "another tag is another transfer: each side waits for the other's",
            "reset": "a transfer fails alone: both give it up, or link anew if one has ended",
        },
    ),
    Protocol(
        "services",
        services,
        random={
            **SERVICES,
            **up_to(num_slots=2),
            "announces": YES_OR_NO,
            "batching": st.builds(Batching, st.integers(1, 5), st.integers(0, 50_000)),
        },
        big={**BIG, **up_to(clients=16, servers=16)},
        small={**FULL, "clients": 2, "servers": 3},
        steps=steps_of_service,
        missing=missing_in_service,
        disagree=another_header,
        notes={"other event": HEADERS, "reset": FEWER},
    ),
    Protocol(
        "services outside",
        outside,
        random={**SERVICES, "kind": st.sampled_from(["unix", "tcp"])},
        big={**BIG, **up_to(clients=16, servers=16)},
        small={**FULL, "clients": 2, "servers": 3},
        steps=steps_outside,
        missing=missing_in_service,
        disagree=another_header,
        timeout_ns=200 * MS,
        late_ns=20 * MS,
        num_examples=8,
        notes={
            "any order": "bits only: events and times are this computer's",
            "other event": HEADERS,
            "reset": FEWER,
        },
    ),
)

PROPERTIES = ("oracle", "any order", "dies at any step", "late", "other event", "arguments", "reset")


def table() -> list[str]:
    """Lines of Markdown: a row a protocol, a column a property, and below what cells note instead."""
    said = list(dict.fromkeys(note for protocol in PROTOCOLS for note in protocol.notes.values()))
    lines = [f"| | {' | '.join(PROPERTIES)} |", "|---" * (1 + len(PROPERTIES)) + "|"]
    for protocol in PROTOCOLS:
        notes = [protocol.notes.get(each) for each in PROPERTIES]
        cells = ["yes" if note is None else f"yes ({1 + said.index(note)})" for note in notes]
        lines.append(f"| {protocol.name} | {' | '.join(cells)} |")
    return [*lines, "", *(f"{number}. {note}" for number, note in enumerate(said, 1))]
