"""An hour of traffic in Mooncake's format on as many TEs as it needs, and what a request costs a computer."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import msgspec
import pytest

from xdeepserve.cli import main
from xdeepserve.platform.cluster import Cluster, ClusterTE, PricedKind, fleet_tes, priced_kinds
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.made_traffic import MadeTraffic, made

A_REQUEST_S = 0.3  # of an hour with 12,000
FLAT = 1.6  # times the processor time of a request in the shortest trace, or on the fewest TEs
CHATS = MadeTraffic(requests=12_000, seconds=3600)
CONVERSATION = MadeTraffic(requests=12_031, seconds=3600, prompt=12_035, output=343)  # Mooncake's means
SERVING = 'policy = "load"\n[[te]]\ncount = 64\ndies = 32\n'


@pytest.mark.campaign
@pytest.mark.idle
@pytest.mark.parametrize(
    ("traffic", "cluster", "least", "most_s"),
    [(CHATS, "", 0.9, 120), (CONVERSATION, SERVING, 0.8, 60), (CONVERSATION, "", 0.8, 60)],
    ids=["chats", "given", "bounds that cannot be kept"],
)
def test_an_hour_takes_a_minute_or_two(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    traffic: MadeTraffic,
    cluster: str,
    least: float,
    most_s: float,
) -> None:
    """DeepSeek-R1, pricing among it, and the search for how many TEs are needed where they are not given."""
    path, file = tmp_path / "hour.jsonl", tmp_path / "cluster.toml"
    file.write_text(cluster)
    with path.open("w") as lines:
        for each in made(traffic):
            record = {"timestamp": each.at_ns / 1e6, "input_length": each.input_length}
            lines.write(
                json.dumps({**record, "output_length": each.output_length, "hash_ids": each.blocks}) + "\n"
            )
    begin = time.perf_counter(), time.process_time()
    assert main(["replay", str(path), "--json", *(["--cluster", str(file)] if cluster else [])]) == 0
    wall_s, cpu_s = time.perf_counter() - begin[0], time.process_time() - begin[1]
    found = json.loads(capsys.readouterr().out)
    print(f"{found['cluster']}: {wall_s:.1f} s, {cpu_s:.1f} s of processor time")
    assert found["format"].startswith("mooncake: ")
    assert found["num_requests"] == traffic.requests
    assert found["within"] >= least
    assert ("missed" in found) == (not cluster and found["within"] < 0.9)
    assert found["seconds"] > 3500
    assert wall_s < most_s


@functools.cache
def kinds() -> tuple[PricedKind, ...]:
    return tuple(priced_kinds(Cluster((ClusterTE(),)), block=512))


def cpu_ms(requests: int, tes: int) -> float:
    """Processor time of a request, where each has the same time."""
    work = made(MadeTraffic(requests=requests, seconds=A_REQUEST_S * requests))
    cluster = Cluster((ClusterTE(count=tes),))
    fleet = Fleet(fleet_tes(cluster, list(kinds())), cluster.policy)
    begin = time.process_time()
    assert len(fleet.run(work)) == requests
    return 1e3 * (time.process_time() - begin) / requests


@pytest.mark.campaign
def test_a_request_costs_the_same_however_many_there_are() -> None:
    few = [cpu_ms(1000, 24) for _ in range(3)]
    many = cpu_ms(100_000, 24)
    few += [cpu_ms(1000, 24) for _ in range(3)]
    print(f"1,000: {sorted(few)[3]:.3f} ms, 100,000: {many:.3f} ms")
    assert many < FLAT * sorted(few)[3]


@pytest.mark.campaign
def test_a_request_costs_the_same_on_however_many_tes() -> None:
    found = {tes: min(cpu_ms(4000, tes) for _ in range(3)) for tes in (8, 64, 200)}
    print(msgspec.json.encode(found).decode())
    assert found[200] < FLAT * found[8]
