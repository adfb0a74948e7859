"""A memory pool in a fleet: what it keeps, how many servers it has, and what requests gain."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.platform.tools import LIMITS, PRICE
from xdeepserve.cli import main
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.spec import Spec
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_pool import FleetPool
from xdeepserve.platform.fleet_words import Decision, FleetTE, ServedRequest
from xdeepserve.platform.made_traffic import MadeTraffic, made
from xdeepserve.platform.pool_cache import PoolCache
from xdeepserve.platform.pool_size import PoolBounds, PoolState, next_servers
from xdeepserve.platform.traces import TracedRequest

BOUNDS = PoolBounds(most=8, patience_s=4, calm_s=10, horizon_s=100)
PROMPTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda p: tuple(range(10 * p[0], 10 * p[0] + p[1]))),
    max_size=40,
)


class PlainLRU:
    """The same, for one number of blocks and by a list."""

    def __init__(self, room: int) -> None:
        self.room, self.blocks = room, list[int]()

    def use(self, blocks: tuple[int, ...], known: int) -> int:
        there = next((i for i, block in enumerate(blocks) if block not in self.blocks), len(blocks))
        for block in reversed(blocks):
            self.blocks = [block, *(each for each in self.blocks if each != block)][: self.room]
        return max(0, there - known)


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
def test_one_pass_finds_what_each_number_of_servers_finds(
    prompts: list[tuple[int, ...]], room: int, servers: int, known: int
) -> None:
    cache, plain = PoolCache(room, servers, 4), [PlainLRU(room * n) for n in range(1, 5)]
    for blocks in prompts:
        there = cache.match(blocks)
        alone = plain[servers - 1].use(blocks, 0)
        assert there == alone
        counts = list(itertools.accumulate(cache.use(blocks, known)))
        assert counts == [max(0, alone - known) if n == servers - 1 else lru.use(blocks, known)
                          for n, lru in enumerate(plain)]  # fmt: skip
        assert len(cache) <= room * servers


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_who_comes_has_nothing_and_who_goes_takes_what_is_oldest(
    prompts: list[tuple[int, ...]], sizes: list[int]
) -> None:
    cache = PoolCache(2, 2, 4)
    for number, blocks in enumerate(prompts):
        before = {block for each in prompts[:number] for block in each if cache.match([block])}
        cache.resize(sizes[number % len(sizes)])
        after = {block for each in prompts[:number] for block in each if cache.match([block])}
        assert after <= before
        assert len(cache) == len(after) <= 2 * cache.servers
        cache.use(blocks)
        assert cache.match(blocks) == min(len(blocks), 2 * cache.servers)


def numbers(saved: list[list[float]], change_s: float = 1.0, start: int = 2) -> list[int]:
    """How many servers, after a look each two seconds."""
    state, found = PoolState(start), []
    for look, each in enumerate(saved):
        state = next_servers(state, 2.0 * look, each, change_s, BOUNDS)
        found.append(state.servers)
    return found


def test_servers_follow_after_a_while_and_stay() -> None:
    grows = [0.05 * min(n, 6) for n in range(1, 9)]
    found = numbers([grows] * 20)
    assert found[:5] == [2] * 5
    assert found[5:] == [6] * 15, "patience, and calm since the beginning"
    assert numbers([[0.0] * 8] * 20)[-1] == 1, "nothing is found: the least"
    assert set(numbers([grows, [0.0] * 8] * 10)) == {2}, "each look another workload"


def test_a_server_that_does_not_pay_is_left_out() -> None:
    assert set(numbers([[0.1 + 0.009 * n for n in range(1, 9)]] * 20, start=1)) == {1}, "worth 0.01 each"
    assert set(numbers([[0.05 * n for n in range(1, 9)]] * 20, change_s=100)) == {2}, "by then it is over"
    assert set(numbers([[0.1, 0.1, 0.1] + [0.133] * 5] * 20, start=1)) == {1}, "too little is won by four"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 0.1), min_size=8, max_size=8), st.integers(1, 8))
def test_servers_change_once_under_a_workload_that_stays(steps: list[float], start: int) -> None:
    found = numbers([list(itertools.accumulate(steps))] * 30, start=start)
    assert sum(a != b for a, b in itertools.pairwise([start, *found])) <= 1


def test_bounds_are_refused_together() -> None:
    wrong = PoolBounds(least=9, most=8, worth=-1, every_s=0).wrong()
    assert len(wrong) == 3
    assert "least=9 is more than most=8" in wrong[-1]


def served(servers: int | None, bounds: PoolBounds = BOUNDS) -> tuple[list[ServedRequest], FleetPool | None]:
    """Chats on four TEs whose own caches are small; a server has room for 40 blocks."""
    traffic = MadeTraffic(requests=300, seconds=30, prompt=400, output=20, turns=6, pause=2, systems=4,
                          system=100, block=LIMITS.block)  # fmt: skip
    fleet = Fleet([FleetTE(f"te {n}", PRICE, LIMITS) for n in range(4)], "round-robin")
    pool = None if servers is None else FleetPool(fleet, servers, 40, 1e6, bounds, Spec())
    found = fleet.run(made(traffic))
    fleet.check_integrity()
    return found, pool


def test_what_the_pool_has_is_not_computed_again() -> None:
    shares = []
    for servers in (None, 1, 8):
        found, pool = served(servers, PoolBounds(least=servers or 1, most=servers or 1))
        assert len(found) == 300
        assert pool is None or not pool.events
        shares.append(sum(each.num_cached for each in found) / sum(each.num_prompt for each in found))
    assert shares[0] < shares[1] < shares[2]


class PlainPool:
    """It has every block that anybody has computed, and a block takes a millisecond."""

    block_ns = 1e6

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def match(self, blocks: tuple[int, ...]) -> int:
        return next((i for i, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def use(self, blocks: tuple[int, ...], known: int) -> None:
        self.blocks.update(blocks)


def with_plain_pool(policy: str = "sequences", count: int = 2, **options: Any) -> Fleet:
    tes = [FleetTE(f"te {n}", PRICE, LIMITS) for n in range(count)]
    fleet = Fleet(tes, policy, **options)  # type: ignore[arg-type]
    fleet.pool = PlainPool()
    return fleet


def test_who_waits_for_its_kv_is_load() -> None:
    """One fills the pool; of two that come while nothing runs the second finds the first one's TE busy."""
    prompt = TracedRequest(0, 161, 2, tuple(range(10)))
    twice = [prompt._replace(at_ns=10**9 + n) for n in range(2)]
    seen: list[tuple[list[float], list[float]]] = []

    def look(decision: Decision) -> None:
        seen.append((fleet.known.sequences.tolist(), fleet.known.queued.tolist()))

    fleet = with_plain_pool(explain=look)
    fleet.run([prompt, *twice])
    assert seen[1][0] == [0, 0]
    assert seen[2][0] == [1, 0], "its blocks are on their way"
    (left, nothing) = seen[2][1]
    assert 0 < left < 2, "one token is left to compute, by two groups"
    assert nothing == 0


@pytest.mark.parametrize("is_full", [True, False])
def test_a_group_waits_for_what_it_has_not_itself(is_full: bool) -> None:
    """One TE of two groups: what the other group has comes from the pool, and not at once."""
    fleet = with_plain_pool(count=1)
    prompt = TracedRequest(0, 161, 2, tuple(range(10)))
    busy = [TracedRequest(10**9 - 1, 161, 400, tuple(range(90, 100)))] if is_full else []
    again = prompt._replace(at_ns=10**9)
    if busy:  # the group that has them is full
        fleet.steppers[0].limits = LIMITS._replace(num_seqs=1)
    served = {each.number: each for each in fleet.run([prompt, *busy, again])}
    last = served[max(served)]
    assert last.num_cached == 160
    waited = last.ttft_ns >= 10 * PlainPool.block_ns
    assert waited == is_full
    fleet.check_integrity()


def test_a_te_is_lost_while_kv_is_on_its_way_to_it() -> None:
    fleet = with_plain_pool("round-robin")
    prompt = TracedRequest(0, 161, 2, tuple(range(10)))
    fleet.at(1e9 + 1e6, lambda: fleet.lose(1))
    served = fleet.run([prompt, prompt._replace(at_ns=10**9)])
    assert [each.te for each in served] == [0, 0]
    assert served[1].num_cached == 160
    fleet.steppers[0].check_integrity()


def test_a_pool_without_tes_does_not_wait_for_ever() -> None:
    fleet = Fleet([FleetTE("te", PRICE, LIMITS)])
    FleetPool(fleet, 1, 40, 1e6, PoolBounds(), Spec())
    fleet.at(1e3, lambda: fleet.lose(0))
    with pytest.raises(XDeepServeError, match="1 requests of the trace wait for a TE, and none comes"):
        fleet.run([TracedRequest(0, 64, 20, ())])


def test_servers_come_where_chats_go_on() -> None:
    bounds = PoolBounds(most=8, worth=1e-4, patience_s=2, calm_s=4, while_s=10, every_s=1)
    _, pool = served(1, bounds)
    assert pool is not None
    assert [event.what for event in pool.events[:2]] == ["wanted", "joins"]
    assert "servers, not 1: " in pool.events[0].line()
    assert pool.cache.servers == pool.state.servers > 1


def test_time_of_servers_is_counted_to_the_moment_in_which_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look each second, and half a second until what is wanted is there."""
    bounds = PoolBounds(most=8, worth=1e-4, patience_s=2, calm_s=4, while_s=10, every_s=1)
    traffic = MadeTraffic(requests=300, seconds=30, prompt=400, output=20, turns=6, pause=2, systems=4,
                          system=100, block=LIMITS.block)  # fmt: skip
    fleet = Fleet([FleetTE(f"te {n}", PRICE, LIMITS) for n in range(4)], "round-robin")
    block_nbytes = Spec().ub_bandwidth.value * 0.5 / 40
    pool = FleetPool(fleet, 1, 40, block_nbytes, bounds, Spec())
    counts: list[tuple[float, int]] = []
    resize = pool.cache.resize

    def heard(servers: int) -> None:
        counts.append((fleet.now, pool.cache.servers))
        resize(servers)

    monkeypatch.setattr(pool.cache, "resize", heard)
    fleet.run(made(traffic))
    counts.append((fleet.now, pool.cache.servers))
    assert len(counts) > 1
    starts = [0.0, *(at for at, _ in counts)]
    expected = sum((at - start) * n for start, (at, n) in zip(starts, counts, strict=False)) / 1e9
    assert pool.server_s == pytest.approx(expected)


def test_a_cluster_file_with_a_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    te = 'model = "tiny"\n[[te]]\ncount = 2\ndies = 4\n'
    args = ["replay", "made:requests=60,seconds=20,prompt=200,output=10,block=16", "--cluster", str(file)]
    file.write_text(te + "[pool]\nserver_gib = 1\nworth = 1e-9\npatience_s = 1\ncalm_s = 1\n")
    assert main([*args, "--json"]) == 0
    with_pool = json.loads(capsys.readouterr().out)
    file.write_text(te)
    assert main([*args, "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert with_pool["hit_rate"] >= without["hit_rate"]
    for setting, message in (
        ("servers = 99", "outside its least and most"),
        ("server_gib = 0", "server_gib"),
    ):
        file.write_text(f"{te}[pool]\n{setting}\n")
        assert main(args) == 2
        assert message in capsys.readouterr().err
