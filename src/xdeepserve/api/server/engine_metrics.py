"""The engine's own counters for Prometheus, read at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from xdeepserve.engine.recovery.ladder import STAGES
from xdeepserve.engine.serving.request import EngineStats

ENGINE = "0"
ROWS = "vllm:iteration_tokens_total"
_ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class EngineCollector(Collector):
    """Collector turning `EngineStats` into metrics, under vLLM's names where vLLM has one."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 means all.", stats.kv_cache_usage)
        yield self._gauge(
            "xdeepserve:virtual_time_seconds", "Virtual time since the pod started.", stats.virtual_ns / 1e9
        )
        yield self._counter("vllm:num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up.", stats.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found.", stats.prefix_cache_hits)
        yield self._cache_config(stats)
        yield self._health(stats)
        yield from self._servers(stats)
        yield self._lives(stats)
        yield self._recoveries(stats)
        keys = "xdeepserve:cache_key"
        yield self._gauge(f"{keys}s", "Prompt cache keys that prefixes are kept under.", stats.num_cache_keys)
        yield self._counter(f"{keys}_queries", "Requests with a prompt cache key.", stats.cache_key_queries)
        yield self._counter(
            f"{keys}_hits", "Of these, those that began with what is kept.", stats.cache_key_hits
        )
        yield self._counter(
            "xdeepserve:prefetched_blocks",
            "KV blocks brought from the host's memory while their request waited.",
            stats.num_prefetched_blocks,
        )
        yield self._counter(
            "xdeepserve:prompt_tree_tokens",
            "Tokens of prompts that the job executors' prompt tree had as cached at the chosen TE.",
            stats.num_promised,
        )
        yield self._counter(
            "xdeepserve:prompt_tree_tokens_gone",
            "Of these, tokens that were computed after all.",
            stats.num_broken,
        )
        yield self._counter(
            "xdeepserve:peer_queries",
            "Tokens of prompts that were looked up in the prefix caches of other TEs (cache.peers).",
            stats.peer_queries,
        )
        yield self._counter(
            "xdeepserve:peer_hits", "Of these, those that came from there by DistFlow.", stats.peer_hits
        )
        yield from self._pool(stats)
        yield self._rows_per_step(stats)
        yield from self._drafts(stats)
        yield from self._experts(stats)

    @staticmethod
    def _labels(name: str, *more: str) -> list[str]:
        """Return a metric's labels. vLLM's metrics also have an engine label; here there is one engine."""
        return ["model_name", *(["engine"] if name.startswith("vllm:") else []), *more]

    def _values(self, name: str, *more: str) -> list[str]:
        return [self._model_name, *([ENGINE] if name.startswith("vllm:") else []), *more]

    def _cache_config(self, stats: EngineStats) -> Metric:
        """Make vLLM's metric of the KV cache's shape, which consists of labels."""
        name, text = "vllm:cache_config_info", "The KV cache of all DP groups."
        labels = self._labels(name, "block_size", "num_gpu_blocks", "num_cpu_blocks")
        family = GaugeMetricFamily(name, text, labels=labels)
        sizes = (stats.kv_block_size, stats.num_kv_blocks, stats.num_host_kv_blocks)
        family.add_metric(self._values(name, *map(str, sizes)), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._labels(name))
        family.add_metric(self._values(name), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._labels(name))
        family.add_metric(self._values(name), value)
        return family

    def _health(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "xdeepserve:dp_groups",
            "DP groups by TE and state: healthy, suspect or lost.",
            labels=["model_name", "te", "state"],
        )
        for te in stats.health:
            num_ill = len(te.suspect_groups) + len(te.lost_groups)
            for state, number in (
                ("healthy", te.num_groups - num_ill),
                ("suspect", len(te.suspect_groups)),
                ("lost", len(te.lost_groups)),
            ):
                family.add_metric([self._model_name, te.name, state], number)
        return family

    def _servers(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield the states of expert servers, if experts are services."""
        family = GaugeMetricFamily(
            "xdeepserve:expert_servers",
            "Expert servers by TE and state: healthy, suspect (an answer is late) or lost.",
            labels=["model_name", "te", "state"],
        )
        for te in stats.health:
            num_ill = len(te.suspect_servers) + len(te.lost_servers)
            for state, number in (
                ("healthy", te.num_servers - num_ill),
                ("suspect", len(te.suspect_servers)),
                ("lost", len(te.lost_servers)),
            ):
                if te.num_servers:
                    family.add_metric([self._model_name, te.name, state], number)
        if family.samples:
            yield family

    def _lives(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "xdeepserve:tes",
            "1 for each TE with its state: loading, ready, draining or lost.",
            labels=["model_name", "te", "state"],
        )
        for te in stats.health:
            family.add_metric([self._model_name, te.name, te.life], 1)
        return family

    def _recoveries(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            "xdeepserve:recoveries",
            f"Recoveries by stage: {'; '.join(f'{stage}, {what}' for stage, what in STAGES.items())}.",
            labels=["model_name", "stage"],
        )
        for stage in sorted(STAGES):
            family.add_metric([self._model_name, stage], stats.num_recoveries[stage])
        return family

    def _pool(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield metrics of the memory pool, if there is one: tokens queried and found, servers' counters, and
        usage."""
        if not stats.pool:
            return
        name = "xdeepserve:pool"
        asked = "Tokens of prompts that the memory pool was asked for."
        yield self._counter(f"{name}_queries", asked, stats.pool_queries)
        yield self._counter(f"{name}_hits", "Of these, those that came from there.", stats.pool_hits)
        for what, number in stats.pool.items():
            text = f"Of all servers of the memory pool: {what}."
            yield self._counter(f"{name}_{what.replace(' ', '_')}", text, number)
        for what, number in stats.pool_usage.items():
            yield self._gauge(f"{name}_{what.replace(' ', '_')}_now", f"In the memory pool: {what}.", number)

    def _rows_per_step(self, stats: EngineStats) -> Metric:
        """Make vLLM's histogram of tokens per engine step; here a DP group's step counts as one."""
        family = HistogramMetricFamily(ROWS, "Token rows in a step of a DP group.", labels=self._labels(ROWS))
        steps = stats.rows_per_step.items()
        buckets = [(str(top), sum(n for rows, n in steps if rows <= top)) for top in _ROWS_BUCKETS]
        buckets.append(("+Inf", sum(n for _, n in steps)))
        family.add_metric(self._values(ROWS), buckets, sum(rows * n for rows, n in steps))
        return family

    def _experts(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield metrics of EPLB: the unevenness of the load, where it is collected, and the number of replica
        changes."""
        name = "xdeepserve:expert_load_hottest_over_mean"
        text = "Hottest over mean load, of experts or of dies with their replicas, in the latest time slice."
        family = GaugeMetricFamily(name, text, labels=["model_name", "te", "layer", "of"])
        for load in stats.expert_load:
            labels = [self._model_name, load.te, str(load.layer)]
            family.add_metric([*labels, "experts"], load.hottest_expert)
            family.add_metric([*labels, "dies"], load.hottest_die)
        yield family
        yield self._counter(
            "xdeepserve:expert_reconfigurations",
            "Times that replicas of experts have changed.",
            stats.num_reconfigurations,
        )

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield metrics of MTP: steps of a sequence with drafts, drafts, and accepted ones, in all and by
        position."""
        name, drafted, accepted = "vllm:spec_decode_num_", stats.num_drafted, stats.num_accepted
        yield self._counter(f"{name}drafts", "Steps of a sequence with drafts.", drafted[0] if drafted else 0)
        yield self._counter(f"{name}draft_tokens", "Tokens drafted.", sum(drafted))
        yield self._counter(f"{name}accepted_tokens", "Drafted tokens accepted.", sum(accepted))
        family = CounterMetricFamily(
            f"{name}accepted_tokens_per_pos",
            "Drafted tokens accepted, by position in the step.",
            labels=self._labels(name, "position"),
        )
        for position, number in enumerate(accepted):
            family.add_metric(self._values(name, str(position)), number)
        yield family
