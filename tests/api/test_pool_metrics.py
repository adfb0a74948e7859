"""What `/metrics` says of the memory pool, where there is one."""

from xdeepserve.api.server.engine_metrics import EngineCollector
from xdeepserve.engine.serving.request import EngineStats


def values(stats: EngineStats) -> dict[str, float]:
    metrics = EngineCollector("m", lambda: stats).collect()
    return {sample.name: sample.value for metric in metrics for sample in metric.samples}


def test_what_servers_count_and_what_is_there() -> None:
    counts = {"dram hits": 3, "put bytes": 70, "mismatches": 1}
    found = values(
        EngineStats(
            pool_queries=512, pool_hits=256, pool=counts, pool_usage={"dram values": 2, "dram bytes": 9}
        )
    )
    assert found["xdeepserve:pool_queries_total"] == 512
    assert found["xdeepserve:pool_hits_total"] == 256
    assert found["xdeepserve:pool_dram_hits_total"] == 3
    assert found["xdeepserve:pool_put_bytes_total"] == 70
    assert found["xdeepserve:pool_mismatches_total"] == 1
    assert found["xdeepserve:pool_dram_bytes_now"] == 9


def test_without_a_pool_there_is_nothing_to_tell() -> None:
    assert not [name for name in values(EngineStats()) if "pool" in name]
