"""Policies are rows: settings know what the tables name, and users bring functions of their own."""

from __future__ import annotations

import inspect
import pkgutil

import numpy as np
import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.balance.dp import GroupStatus, next_of_all, next_open, two_level
from xdeepserve.engine.balance.eplb import Slots, by_slices, by_totals
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.policies import BY_SETTING, DISPATCH, OWN, ROUTE, SCALING, Policies
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.deploy.settings import settings
from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.preemption import Running, last, least_computed
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Queued, by_arrival, shortest_first
from xdeepserve.errors import DeploymentError, XDeepServeError

TABLES = {**BY_SETTING, "scale.policy": SCALING}
HERE = "tests.engine.test_policies"


@pytest.mark.parametrize("key", TABLES)
def test_each_row_is_a_function_of_its_kind(key: str) -> None:
    table = TABLES[key]
    assert pkgutil.resolve_name(f"xdeepserve.{table.signature}") is not None
    found = [table.function(name) for name in table.rows]
    assert all(map(callable, found))
    assert len({*found}) == len(found)
    assert len({len(inspect.signature(each).parameters) for each in found}) == 1
    assert all(
        inspect.getdoc(each) and row.meaning for each, row in zip(found, table.rows.values(), strict=True)
    )
    assert not any(table.wrong(name) for name in table.rows)


def test_settings_read_the_tables() -> None:
    found = {each.key: each for each in settings()}
    for key, table in BY_SETTING.items():
        assert found[key].names == [*table.names]
        assert found[key].meaning == table.meaning
        assert found[key].default in table.rows


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "scheduler.decode=kvs",
            "scheduler.decode must be one of kv, next-open, round-robin or module:function, found 'kvs' "
            "(did you mean kv?)",
        ),
        ("scheduler.admission=a:b", "scheduler.admission must be one of decode, prefill, found 'a:b'"),
        ("cache.eviction=3", "cache.eviction must be one of lfu, lru or module:function, found 3"),
        (
            "scheduler.order=:x",
            "scheduler.order must be one of arrival, shortest or module:function, found ':x'",
        ),
    ],
)
def test_a_wrong_name_is_refused_with_the_rows(override: str, reason: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        resolve("pd", [override])
    assert str(caught.value) == f"deployment pd: {override}: {reason}"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such.module:victim", "names no function: No module named 'no_such'"),
        (f"{HERE}:no_such", "names no function: module .* has no attribute 'no_such'"),
        (f"{HERE}:HERE", f"names no function, but '{HERE}'"),
    ],
)
def test_a_function_that_is_not_there_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(XDeepServeError, match=f"scheduler.victim={name} {reason}"):
        LLM("tiny-random", "monolithic", overrides=[f"scheduler.victim={name}"], progress=False)


called: set[str] = set()


def own_route(asked, known, heat):  # type: ignore[no-untyped-def]
    called.add("route")
    return [-known.sequences]


def own_dispatch(candidates, statuses, max_tokens, turn):  # type: ignore[no-untyped-def]
    called.add("dispatch")
    return [(0, max(status.rank for status in statuses))]


def own_decode(statuses, num_blocks, num_now, turn):  # type: ignore[no-untyped-def]
    called.add("decode")
    return max(status.rank for status in statuses)


def own_order(seq):  # type: ignore[no-untyped-def]
    called.add("order")
    return (-seq.number,)


def own_victim(running):  # type: ignore[no-untyped-def]
    called.add("victim")
    return len(running) - 1


def own_eviction(block):  # type: ignore[no-untyped-def]
    called.add("eviction")
    return -block.last_used


def own_placement(token_count, slots):  # type: ignore[no-untyped-def]
    called.add("placement")
    return [[] for _ in slots.free]


OWN_ROWS = [
    *(f"scheduler.{kind}={HERE}:own_{kind}" for kind in ("route", "dispatch", "decode", "order", "victim")),
    f"cache.eviction={HERE}:own_eviction",
]
TWO = ("prefill.count=2", "prefill.dies=1", "decode.dies=2")
FEW = (
    "max_model_len=128",
    "scheduler.max_num_seqs=4",
    "scheduler.max_num_batched_tokens=32",
    "cache.num_blocks=8",
)


def served(deployment: str, *overrides: str) -> list[tuple[int, ...]]:
    prompts = [[number] * (20 + 3 * number) for number in range(1, 8)]
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    with LLM("tiny-random", deployment, "int8", overrides=overrides, progress=False) as llm:
        outputs = llm.generate(prompts, params)
        llm.engine.check_integrity()
        return [tuple(each.token_ids) for output in outputs for each in output.outputs]


def test_functions_of_a_user_choose_and_no_token_changes() -> None:
    called.clear()
    assert served("pd", *FEW, *TWO, *OWN_ROWS) == served("pd", *FEW, *TWO)
    assert called == {"route", "dispatch", "decode", "order", "victim", "eviction"}


def test_replicas_by_a_function_of_a_user() -> None:
    called.clear()
    eplb = ("dies=2", "experts.redundant_slots=1", "experts.balance_interval=0.0001")
    assert served("colocated", *eplb, f"experts.placement={HERE}:own_placement") == served("colocated", *eplb)
    assert called == {"placement"}


@pytest.mark.parametrize(
    "overrides",
    [
        ("scheduler.order=shortest",),
        ("scheduler.victim=least-computed",),
        ("scheduler.victim=least-computed", "cache.num_host_blocks=8", "cache.preemption=swap"),
        ("cache.eviction=lfu", "cache.num_host_blocks=8", "cache.load=always"),
    ],
)
def test_no_policy_changes_a_token(overrides: tuple[str, ...]) -> None:
    assert served("monolithic", *FEW, *overrides) == served("monolithic", *FEW)


def status(rank: int, used: int = 0, places: int = 4) -> GroupStatus:
    return GroupStatus(
        rank=rank, num_free_places=places, num_sequences=4 - places, num_blocks=10, num_used_blocks=used
    )


def test_groups_in_turn() -> None:
    statuses = [status(0), status(2, used=10), status(3)]
    assert [next_of_all(statuses, 1, 1, turn) for turn in range(5)] == [0, 2, 2, 3, 0]
    assert [next_open(statuses, 1, 1, turn) for turn in range(5)] == [0, 3, 3, 3, 0]
    assert next_open([status(0, places=0)], 1, 1, 0) is None
    assert next_of_all([], 1, 1, 0) is None
    assert two_level([None] * 4, statuses, 8, 2) == [(0, 2), (1, 3), (2, 0), (3, 2)]  # type: ignore[list-item]


def test_order() -> None:
    queue = [Queued(0, 1, 50, 9), Queued(0, 2, 10, 9), Queued(-1, 3, 90, 9), Queued(0, 4, 10, 1)]
    assert [each.number for each in sorted(queue, key=by_arrival)] == [3, 1, 2, 4]
    assert [each.number for each in sorted(queue, key=shortest_first)] == [3, 2, 4, 1]


def test_victims() -> None:
    running = [
        Running((0, 1), 70, 5),
        Running((0, 4), 30, 2),
        Running((-1, 9), 20, 2),
        Running((0, 2), 20, 2),
    ]
    assert last(running) == 1
    assert least_computed(running) == 3


@pytest.mark.parametrize(("eviction", "kept"), [("lru", 2), ("lfu", 1)])
def test_evictions(eviction: str, kept: int) -> None:
    """Two prefixes; the older has been found once more."""
    rtc = RTC(2, 16, eviction=BY_SETTING["cache.eviction"].function(eviction))
    tokens = {1: [1] * 16, 2: [2] * 16, 3: [3] * 16}

    def use(number: int) -> None:
        holding = Holding()
        rtc.adopt(holding, rtc.match_by_prefix_token(tokens[number]).ready)
        assert rtc.alloc_blocks(holding, 16)
        rtc.publish(holding, tokens[number])
        rtc.free(holding)

    for number in (1, 1, 2, 3):
        use(number)
    assert [number for number in tokens if rtc.match_by_prefix_token(tokens[number]).ready] == [kept, 3]


def test_placements() -> None:
    """An expert hot in one slice, and one that is warm in all."""
    token_count = np.array([[90, 0, 0], [40, 40, 40], [0, 50, 0], [0, 0, 50]])
    slots = Slots(primary=[0, 1, 2, 3], free=[1, 0, 0, 0], base=[], max_replicas=4)
    assert by_slices(token_count, slots._replace(free=[0, 1, 0, 0])) == [[], [0], [], []]
    assert by_totals(token_count, slots) == [[1], [], [], []]


def test_a_table_answers_for_functions_that_it_lacks() -> None:
    assert ROUTE.names[-1] == OWN
    assert ROUTE.has(f"{HERE}:own_route", "reads a heat map")
    assert not DISPATCH.has(f"{HERE}:own_dispatch", "on arrival")
    assert isinstance(SCALING, Policies)
    assert Deployment(name="", kind="pd").scheduler.route in ROUTE.rows
