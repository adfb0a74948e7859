"""dispatch and combine: what `contract` does not say of them already."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.contract import FULL, Scene, answers, exchange, one_token, opened, run
from tests.comm.tools import expert, quantize, same_bits
from xdeepserve.comm import oracles
from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.means import Means
from xdeepserve.comm.turns import Phase
from xdeepserve.errors import AddressError, DeploymentError, ProtocolError
from xdeepserve.hw.pod import Pod

SMALL = {**FULL, "seed": 3, "num_ranks": 3, "num_experts": 6, "top_k": 2}


async def gathered(scene: Scene, program: Callable[[XCCL], Any]) -> list[Any]:
    tasks = [rank.die.spawn(program(rank.handle)) for rank in scene.ranks]
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_the_trace_shows_every_step_and_who_was_waited_for(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        trace = scene.pod.trace
        trace.is_on = True
        ends = await run(scene, 1)
        for rank, end in zip(scene.ranks, ends, strict=True):
            die = rank.die.index
            steps = [span for span in trace.spans if (span.node, span.lane) == (die, "XCCL")]
            sends, receives = len(end.results[0]["result"]) > 0, len(end.results[0]["scale"]) > 0
            # Without rows a step takes no time; few rows are stored (step 3) while the kernel still loads.
            busy = {"dispatch": (sends, receives), "combine": (receives, sends)}
            assert [span.name for span in steps if not span.name.endswith(" 3")] == [
                f"{op} {step}"
                for op in ("dispatch", "combine")
                for step in ("1", "2", "4", "5", "6-7")
                if step in {"1", "4", "5"} or busy[op][step == "6-7"]
            ]
            assert all(first.end_ns <= second.start_ns for first, second in itertools.pairwise(steps))
        assert {flow.name for flow in trace.flows} <= {"dispatch last field", "combine last field"}
        for flow in trace.flows:
            # An arrow starts in the store that was waited for and ends in the wait.
            ends_at = {(s.node, s.lane, s.end_ns): s.name for s in trace.spans}
            assert ends_at[flow.node, "MTE3", flow.at_ns + 1].endswith("4 post fields")
            assert ends_at[flow.to_node, "XCCL", flow.to_ns + 1] == flow.name.split()[0] + " 5"
        assert trace.flows
        trace.write(tmp_path / "exchange.trace.json")
        events = json.loads((tmp_path / "exchange.trace.json").read_text())["traceEvents"]
        for phase in "sf":
            assert sum(event["ph"] == phase for event in events) == len(trace.flows)

    opened(exchange, body, **SMALL, one_target=True)


# ---- peers that err ---------------------------------------------------------------------------------


def test_an_expert_rank_that_answers_with_another_count_is_named() -> None:
    async def body(scene: Scene) -> None:
        async def program(xccl: XCCL) -> np.ndarray:
            x, topk, _ = one_token(xccl.layout)
            got = await xccl.dispatch(x, topk, 1)
            out = got.payload * got.scale[:, None]
            if xccl.rank == 1:  # loses its last row
                source = int(np.flatnonzero(got.num_tokens_per_rank)[-1])
                counts = got.num_tokens_per_rank.copy()
                counts[source] -= 1
                columns = [column[:-1] for column in got[:-1]]
                xccl.boxes.received = type(got)(*columns, num_tokens_per_rank=counts)
                out = out[:-1]
            return await xccl.combine(out, 1)

        results = await gathered(scene, program)
        (error,) = [str(result) for result in results if isinstance(result, ProtocolError)]
        assert "rows to peer 1 in event 1, which answers with" in error

    opened(exchange, body, **SMALL)


async def test_groups_that_differ_are_found_by_the_rank_that_gets_the_wrong_rows() -> None:
    layout, pod = Layout(2, 4, 1, 8, 1, False), Pod()
    for die in (0, 1):
        layout.plan(pod.plan(die))
    pod.materialise()
    means = Means(timeout_ns=100_000)
    handles = [
        XCCL(pod.dies[die], die, Group((0, 1), ranks), layout, means=means)
        for die, ranks in ((0, (0, 1)), (1, (1, 0)))
    ]

    async def program(xccl: XCCL) -> Any:
        topk_idx = np.full((2, 1), xccl.rank, np.int32)
        return await xccl.dispatch(np.ones((2, 8), np.float32), topk_idx, 1)

    results = await asyncio.gather(*[x.die.spawn(program(x)) for x in handles], return_exceptions=True)
    assert str(results[0]) == (
        "dispatch: rank 0 has the physical experts [0], but peer 1 sends it a row for expert 1: "
        "groups must be equal"
    )
    assert results[1].num_tokens_per_rank.tolist() == [0, 0]
    assert handles[0].phase is Phase.FAILED


# ---- callers that err -------------------------------------------------------------------------------


def test_wrong_order_and_answers_that_do_not_fit_are_refused() -> None:
    async def program(xccl: XCCL) -> None:
        x, topk, _ = one_token(xccl.layout)
        with pytest.raises(AddressError, match="the layout is for quantize=False, not True"):
            await xccl.dispatch(x, topk, 1, quantize=True)
        got = await xccl.dispatch(x, topk, 3)
        with pytest.raises(ProtocolError, match="cannot dispatch while holding"):
            await xccl.dispatch(x, topk, 4)
        with pytest.raises(AddressError, match="expert_out must be contiguous float32"):
            await xccl.combine(got.payload[:-1], 3)
        with pytest.raises(AddressError, match="combine: expert_out must be a NumPy array, not list"):
            await xccl.combine(got.payload.tolist(), 3)
        await xccl.combine(np.ascontiguousarray(got.payload), 3)
        assert xccl.phase is Phase.READY
        with pytest.raises(ProtocolError, match="given event 3 after 3: event IDs must increase"):
            await xccl.dispatch(x, topk, 3)

    async def body(scene: Scene) -> None:
        (result,) = await gathered(scene, program)
        assert result is None, result

    opened(exchange, body, **{**SMALL, "num_ranks": 1, "quantized": False})


def test_handles_that_cannot_be_are_refused() -> None:
    async def body(scene: Scene) -> None:
        xccl = scene.ranks[0].handle
        die, group, layout = xccl.die, xccl.group, xccl.layout
        with pytest.raises(DeploymentError, match="is not rank 1 of the group"):
            XCCL(die, 1, group, layout, quantize)
        with pytest.raises(DeploymentError, match="needs a kernel"):
            XCCL(die, 0, group, layout)
        said = r"the layout is for 3 ranks with \d experts each, the group has 4"
        with pytest.raises(DeploymentError, match=said):
            XCCL(die, 0, Group((*group.dies, 47), (0,)), layout, quantize)
        with pytest.raises(DeploymentError, match="the group has 3 with up to 9"):
            XCCL(die, 0, Group(group.dies, (0,) * 9), layout, quantize)
        for means in (Means(0), Means(49), Means(carrier="tcp")):  # type: ignore[arg-type]
            with pytest.raises(DeploymentError, match=r"1\.\.48 AIV cores|carried by mte or urma"):
                XCCL(die, 0, group, layout, quantize, means)

    opened(exchange, body, **SMALL)


# ---- what operators are given -----------------------------------------------------------------------


def test_fewer_cores_take_longer() -> None:
    async def body(scene: Scene) -> int:
        await run(scene, 1)
        return scene.pod.clock.now

    times = [opened(exchange, body, **{**SMALL, "top_k": 4, "max_tokens": 6}, cores=n) for n in (1, 4, 48)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3


@given(st.integers(0, 2**16), st.booleans(), st.integers(1, 4))
def test_redundant_physical_experts_change_no_bit(seed: int, quantized: bool, replicas: int) -> None:
    """Logical expert e has copies on several ranks; row i of a rank's tokens goes to copy i mod replicas."""
    num_logical = 5

    async def body(scene: Scene) -> None:
        rng, homes = np.random.default_rng(seed), scene.ranks[0].handle.group.expert_rank
        tokens = [rng.standard_normal((int(rng.integers(0, 6)), 8)).astype(np.float32) for _ in range(4)]
        topk = [
            np.array([rng.permutation(num_logical)[:2] for _ in x], np.int32).reshape(-1, 2) for x in tokens
        ]

        async def program(xccl: XCCL) -> np.ndarray:
            x, e = tokens[xccl.rank], topk[xccl.rank]
            copy = (np.arange(len(x), dtype=np.int32) % replicas)[:, None]
            got = await xccl.dispatch(x, e * replicas + copy, 1)
            assert all(homes[p] == xccl.rank for p in got.expert_idx)  # where that very replica lives
            return await xccl.combine(answers(got, lambda p, row: expert(p // replicas, row)), 1)

        quantizer = quantize if quantized else None
        for x, e, result in zip(tokens, topk, await gathered(scene, program), strict=True):
            assert same_bits(result, oracles.combine(x, e, expert, quantizer))

    sizes = {"num_ranks": 4, "num_experts": num_logical * replicas, "top_k": 2, "max_tokens": 5, "hidden": 8}
    opened(exchange, body, seed=seed, quantized=quantized, **sizes)


def test_tokens_that_are_quantised_already_are_forwarded_as_they_are() -> None:
    async def body(scene: Scene) -> None:
        rng = np.random.default_rng(1)
        tokens = [rng.standard_normal((2, 8)).astype(np.float32) for _ in range(3)]
        topk = [np.array([[0, 1], [2, 5]], np.int32)] * 3

        async def program(xccl: XCCL) -> Any:
            q, scale = quantize(tokens[xccl.rank])
            with pytest.raises(AddressError, match="scale must be float32"):
                await xccl.dispatch(q, topk[0], 1, scale=scale[:0].astype(np.float64))
            got = await xccl.dispatch(q, topk[0], 1, scale=scale)
            return {name: np.array(value) for name, value in got._asdict().items()}

        homes = scene.ranks[0].handle.group.expert_rank
        for rank, found in enumerate(await gathered(scene, program)):
            for name, expected in oracles.dispatch(tokens, topk, homes, rank, quantize).items():
                assert same_bits(found[name], expected), name

    opened(exchange, body, **SMALL)
