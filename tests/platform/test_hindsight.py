"""What turned out best: every other choice tried, beside whole replays; and what a line says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.platform.tools import LIMITS, MADE, PRICE, small
from xdeepserve.cli import main
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import Decision, FleetTE, KVTransfer
from xdeepserve.platform.hindsight import SERVED_AGAIN, Hindsight, hindsights, spread

DECODE = (PRICE, LIMITS)


def tried(
    count: int | None, policy: str = "round-robin"
) -> tuple[list[Decision], list[Hindsight], list[dict[int, float]]]:
    """Hindsight of some requests, and what each took on every TE, in whole replays."""
    trace = small(seed=7)[:60]
    tes = [
        FleetTE(f"te {n}", PRICE, LIMITS, DECODE if n == 2 else None, KVTransfer(block_ns=16e4))
        for n in range(3)
    ]
    decided: list[Decision] = []
    served = Fleet(tes, policy, explain=decided.append).run(trace)  # type: ignore[arg-type]

    def make(forced: Mapping[int, int]) -> Fleet:
        return Fleet(tes, policy, forced=forced)  # type: ignore[arg-type]

    found = hindsights(make, trace, decided, served, count)
    ways = {each.number: each.te for each in decided}
    took = []
    for each in found:
        times = {}
        for te in range(3):
            all_served = make({**ways, each.number: te}).run(trace)
            (one,) = (one for one in all_served if one.number == each.number)
            times[te] = one.last_ns - one.at_ns
        took.append(times)
    return decided, found, took


@pytest.mark.parametrize("policy", ["round-robin", "cost"])
def test_the_best_is_that_of_whole_replays(policy: str) -> None:
    decided, found, took = tried(12, policy)
    assert len(found) == 12
    ways = {each.number: each.te for each in decided}
    for each, times in zip(found, took, strict=True):
        assert each.te == ways[each.number]
        assert each.took_ns == times[each.te]
        assert each.best_ns == min(times.values()) == times[each.best]
        assert each.regret == times[each.te] / min(times.values()) - 1 >= 0
    assert any(each.regret for each in found)


def test_as_many_are_tried_as_do_not_take_long() -> None:
    assert spread(5, 3, None) == spread(5, 3, 99) == [0, 1, 2, 3, 4]
    assert spread(12_000, 24, 3) == [0, 4000, 8000]
    assert spread(10**6, 100, None) == [0]
    num = len(spread(1000, 10, None))
    assert 1000 * 10 / 2 * num <= SERVED_AGAIN


def test_a_replay_says_what_turned_out_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text('model = "tiny"\npolicy = "round-robin"\n[[te]]\ncount = 3\ndies = 2\n')
    trace = "made:requests=12,seconds=0.1,prompt=400,output=20,block=16,spread=1.5"
    args = ["replay", trace, "--cluster", str(path), "--explain"]
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["number"] for each in found["hindsight"]] == list(range(12))
    for line, each in zip(found["decisions"], found["hindsight"], strict=True):
        assert line.endswith(", the best") == (each["best"] == each["te"])
        assert ("regret" in line) == (each["best"] != each["te"])
    assert "on average of 12 requests, at most " in found["regret"]
    assert main([*args, "--json", "--regret", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hindsight"], found["regret"]) == ([], "of none")
    assert not any("it took" in line for line in found["decisions"])
    for wrong, reason in ((["--regret", "-1"], "--regret must be at least 0"), ([], "belongs to --explain")):
        options = [*args, *wrong] if wrong else [*args[:-1], "--regret", "3"]
        assert main(options) == 2
        assert reason in capsys.readouterr().err


def test_tes_that_come_and_go_are_tried_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaled.toml"
    path.write_text(
        'model = "tiny"\n[[te]]\ndies = 2\nmtp = 0\nmax_num_seqs = 2\n'
        "[scale]\nmost = 4\nevery_s = 0.01\nup_s = 0.02\ncalm_s = 0.05\ndown_s = 0.1\n"
    )
    args = ["replay", MADE, "--cluster", str(path), "--json", "--faster", "10", "--explain", "--regret", "10"]
    assert main(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["hindsight"]) == 10
    assert max(each["te"] for each in found["hindsight"]) > 0, "one that has come"
    assert all(each["best_ns"] <= each["took_ns"] for each in found["hindsight"])
