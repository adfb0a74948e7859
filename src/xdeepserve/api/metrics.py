"""Prometheus metrics under vLLM's names, so that dashboards made for vLLM work unchanged.

The definitions (seconds of wall-clock time):
- time to first token: arrival of the request to its choice's first token;
- inter-token latency: the gap between two deliveries of tokens of one choice. A delivery of several tokens
  (MTP) counts once. vLLM's older name for the same samples, time_per_output_token_seconds, is kept beside it;
- request time per output token (TPOT): (last token time - first token time) / (tokens - 1), once a choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from xdeepserve.engine.serving.request import EngineStats, OutputDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_ITL_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, stats))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name"], registry=self.registry).labels(model_name)

        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens accepted.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens generated.")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Gap between token deliveries.", _ITL_BUCKETS)
        self.itl_old_name = histogram(
            "time_per_output_token_seconds", "As inter_token_latency_seconds.", _ITL_BUCKETS
        )
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean gap between tokens, per choice.", _ITL_BUCKETS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", _E2E_BUCKETS)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens per request.", _LENGTH_BUCKETS)
        self.output_length = histogram(
            "request_generation_tokens", "Tokens generated per choice.", _LENGTH_BUCKETS
        )
        success = Counter(
            "vllm:request_success_total",
            "Choices that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.finished = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort")}

    def track(self, num_prompt_tokens: int, n: int) -> RequestTracker:
        """Begin timing a request of `n` choices that has just been submitted."""
        self.prompt_tokens.inc(num_prompt_tokens)
        self.prompt_length.observe(num_prompt_tokens)
        return RequestTracker(self, n)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class RequestTracker:
    """Times the choices of one request. A choice without a finish reason at `close` was aborted."""

    def __init__(self, metrics: Metrics, n: int) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._running = {index: _Progress() for index in range(n)}

    def observe(self, delta: OutputDelta) -> None:
        metrics, now = self._metrics, time.monotonic()
        progress = self._running[delta.index]
        if delta.token_ids:
            metrics.generation_tokens.inc(len(delta.token_ids))
            if progress.num_tokens == 0:
                metrics.ttft.observe(now - self._arrival)
                progress.first = now
            else:
                metrics.itl.observe(now - progress.last)
                metrics.itl_old_name.observe(now - progress.last)
            progress.last = now
            progress.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._end(delta.index, delta.finish_reason, now)

    def close(self) -> None:
        for index in list(self._running):
            self._end(index, "abort", time.monotonic())

    def _end(self, index: int, reason: str, now: float) -> None:
        metrics, progress = self._metrics, self._running.pop(index)
        metrics.finished[reason].inc()
        metrics.e2e.observe(now - self._arrival)
        metrics.output_length.observe(progress.num_tokens)
        if progress.num_tokens > 1:
            metrics.tpot.observe((progress.last - progress.first) / (progress.num_tokens - 1))


class _Progress:
    __slots__ = ("first", "last", "num_tokens")

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.num_tokens = 0


class _EngineCollector(Collector):
    """Reads the engine's own numbers at the moment of a scrape."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._labels = {"model_name": model_name}
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting),
            ("kv_cache_usage_perc", "KV cache in use; 1 means all of it.", stats.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
