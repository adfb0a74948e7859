"""Prometheus metrics under vLLM's names, so that dashboards made for vLLM work unchanged.

Each latency is measured twice: in seconds of wall-clock time, as a client sees it, under vLLM's name
`vllm:X_seconds`; and in virtual time, as it would be on the pod, as `xdeepserve:X_virtual_seconds`. The
engine knows virtual time only; wall time is taken here. Definitions, once a choice unless said otherwise:
- request queue time: arrival of the request to the first step that computes for it;
- time to first token (TTFT): arrival to first token;
- inter-token latency (ITL): the gap between two tokens as they are handed out, once for each delivery, as
  vLLM counts it. Tokens of one delivery (a step with MTP may make several) have no gap between them and add
  no sample: with MTP it is the time of a step, while TPOT tells the time for a token. vLLM's older name for
  the same samples, time_per_output_token_seconds, is kept beside it;
- request time per output token (TPOT): (last token time - first token time) / (tokens - 1);
- end-to-end latency: arrival to last token (wall: to the end of the choice, however it ended).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from xdeepserve.api.server.engine_metrics import ENGINE, EngineCollector
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.serving.request import EngineStats, OutputDelta

ITL_TEXT = "Gap between two deliveries of tokens; with MTP one delivery may bring several."
OLD_NAMES = {"vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds"}
TPOT_TEXT = "Mean gap between tokens, per choice."
FINISH_REASONS = ("stop", "length", "abort", "error")  # abort: the client left; error: the engine failed
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_ITL_MS = (1, 2.5, 5, 10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 2500, 5000)
_ITL_BUCKETS = tuple(ms / 1000 for ms in _ITL_MS)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
# Virtual time: a small model's step takes microseconds, a long queue seconds.
_VIRTUAL_BUCKETS = tuple(m * 10.0**e for e in range(-5, 2) for m in (1, 2, 5))
_N_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
_RATIO_BUCKETS = (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3)
_LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Timing(NamedTuple):
    """A histogram of a metric: its name, text and buckets."""

    name: str
    text: str
    buckets: tuple[float, ...]


def _virtual(name: str, text: str) -> Timing:
    return Timing(f"xdeepserve:{name}_virtual_seconds", text, _VIRTUAL_BUCKETS)


HISTOGRAMS = {  # by the field of Metrics that each is
    "ttft": Timing("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS),
    "tpot": Timing("vllm:request_time_per_output_token_seconds", TPOT_TEXT, _ITL_BUCKETS),
    "queue": Timing("vllm:request_queue_time_seconds", "Arrival to first step.", _TTFT_BUCKETS),
    "e2e": Timing("vllm:e2e_request_latency_seconds", "Arrival to last token.", _E2E_BUCKETS),
    "prefill": Timing("vllm:request_prefill_time_seconds", "First step to first token.", _E2E_BUCKETS),
    "decode": Timing("vllm:request_decode_time_seconds", "First to last token.", _E2E_BUCKETS),
    "inference": Timing("vllm:request_inference_time_seconds", "First step to last token.", _E2E_BUCKETS),
    "params_n": Timing("vllm:request_params_n", "Choices asked for, per request.", _N_BUCKETS),
    "params_max_tokens": Timing(
        "vllm:request_params_max_tokens", "Tokens asked for at most, per request.", _LENGTH_BUCKETS
    ),
    "max_output_length": Timing(
        "vllm:request_max_num_generation_tokens", "Tokens of a request's longest choice.", _LENGTH_BUCKETS
    ),
    "prompt_length": Timing("vllm:request_prompt_tokens", "Prompt tokens per request.", _LENGTH_BUCKETS),
    "output_length": Timing(
        "vllm:request_generation_tokens", "Tokens generated per choice.", _LENGTH_BUCKETS
    ),
    "virtual_ttft": _virtual("time_to_first_token", "Arrival to first token."),
    "virtual_tpot": _virtual("request_time_per_output_token", TPOT_TEXT),
    "virtual_queue": _virtual("request_queue_time", "Arrival to first step."),
    "virtual_e2e": _virtual("e2e_request_latency", "Arrival to last token."),
    "tokens_per_step": Timing(
        "xdeepserve:request_tokens_per_step",
        "Tokens per step that made any, per choice; above 1 with MTP.",
        _RATIO_BUCKETS,
    ),
}
TOKEN_TIMES = {  # counted for every delivery of tokens
    "itl": Timing("vllm:inter_token_latency_seconds", ITL_TEXT, _ITL_BUCKETS),
    "virtual_itl": _virtual("inter_token_latency", ITL_TEXT),
}


class TokenHistogram(Collector):
    """A histogram of values counted for every token, also under an older name if there is one.

    It needs neither locks nor an object for each bucket, because only the event loop counts.
    """

    def __init__(self, timing: Timing, labels: dict[str, str], old_name: str | None = None) -> None:
        self._names = {timing.name: timing.text}
        if old_name is not None:
            self._names[old_name] = f"Older name. {timing.text}"
        self._bounds, self._labels = timing.buckets, labels
        self._counts, self._sum = [0] * (len(timing.buckets) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value in the bucket where it belongs."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """Yield all values counted so far, as Prometheus metrics."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        for name, text in self._names.items():
            family = HistogramMetricFamily(name, text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], buckets, self._sum)
            yield family


class Metrics:
    """Metrics of a server's model, in a registry of their own."""

    ttft: Histogram
    itl: TokenHistogram
    tpot: Histogram
    queue: Histogram
    e2e: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    params_n: Histogram
    params_max_tokens: Histogram
    max_output_length: Histogram
    prompt_length: Histogram
    output_length: Histogram
    virtual_ttft: Histogram
    virtual_itl: TokenHistogram
    virtual_tpot: Histogram
    virtual_queue: Histogram
    virtual_e2e: Histogram
    tokens_per_step: Histogram

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, stats))
        self._labels = {"model_name": model_name}
        for field, each in HISTOGRAMS.items():
            labels = self._labels_of(each.name)
            metric = Histogram(each.name, each.text, [*labels], buckets=each.buckets, registry=self.registry)
            setattr(self, field, metric.labels(**labels))
        for field, each in TOKEN_TIMES.items():
            times = TokenHistogram(each, self._labels_of(each.name), OLD_NAMES.get(each.name))
            self.registry.register(times)
            setattr(self, field, times)
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens_total", "Tokens of prompts whose computing has begun."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens_total", "Tokens generated.")
        name, labels = "vllm:request_success_total", self._labels_of("vllm:")
        ended = Counter(
            name, "Choices that ended, by reason.", [*labels, "finished_reason"], registry=self.registry
        )
        self.finished = {reason: ended.labels(**labels, finished_reason=reason) for reason in FINISH_REASONS}

    def _labels_of(self, name: str) -> dict[str, str]:
        """Return a metric's labels. vLLM's metrics also have an engine label; here there is one engine."""
        return self._labels | ({"engine": ENGINE} if name.startswith("vllm:") else {})

    def _counter(self, name: str, text: str) -> Counter:
        labels = self._labels_of(name)
        return Counter(name, text, [*labels], registry=self.registry).labels(**labels)

    def track(self, num_prompt_tokens: int, n: int, max_tokens: int | None = None) -> RequestTracker:
        """Begin timing a request of `n` choices that has just been submitted."""
        self.params_n.observe(n)
        if max_tokens is not None:
            self.params_max_tokens.observe(max_tokens)
        self.prompt_length.observe(num_prompt_tokens)
        return RequestTracker(self, num_prompt_tokens, n)

    def observe_record(self, record: RequestMetrics) -> None:
        """Count the virtual times of a choice that has ended, finished or aborted, as far as it came."""
        for metric, ns in (
            (self.virtual_queue, record.queue_ns),
            (self.virtual_ttft, record.ttft_ns),
            (self.virtual_tpot, record.tpot_ns),
            (self.virtual_e2e, record.e2e_ns),
        ):
            if ns is not None:
                metric.observe(ns / 1e9)
        if record.tokens_per_step is not None:
            self.tokens_per_step.observe(record.tokens_per_step)

    def render(self) -> bytes:
        """Render the metrics in Prometheus' text exposition format."""
        return generate_latest(self.registry)


class RequestTracker:
    """Times the choices of a request. Choices without a finish reason at `close` end with the given one."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, n: int) -> None:
        self._metrics = metrics
        self._num_uncounted = num_prompt_tokens  # 0 as soon as a choice is in a step
        self._arrival = time.monotonic()
        self._running = {index: _ChoiceTimes() for index in range(n)}
        self._most_tokens = 0

    def begin(self, choice: int) -> None:
        """Record a choice's first part in a step."""
        self._count_prompt()
        now = self._running[choice].scheduled = time.monotonic()
        self._metrics.queue.observe(now - self._arrival)

    def _count_prompt(self) -> None:
        self._metrics.prompt_tokens.inc(self._num_uncounted)
        self._num_uncounted = 0

    def observe(self, delta: OutputDelta) -> None:
        metrics, now = self._metrics, time.monotonic()
        progress = self._running[delta.index]
        if delta.token_ids:
            self._count_prompt()
            metrics.generation_tokens.inc(len(delta.token_ids))
            if progress.num_tokens == 0:
                metrics.ttft.observe(now - self._arrival)
                if progress.scheduled:
                    metrics.prefill.observe(now - progress.scheduled)
                progress.first = now
            else:
                metrics.itl.observe(now - progress.last)
                metrics.virtual_itl.observe((delta.at_ns - progress.last_ns) / 1e9)
            progress.last, progress.last_ns = now, delta.at_ns
            progress.num_tokens += len(delta.token_ids)
        if delta.metrics is not None:
            metrics.observe_record(delta.metrics)
        if delta.finish_reason is not None:
            self._end(delta.index, delta.finish_reason, now)

    def close(self, reason: Literal["abort", "error"]) -> None:
        """End all open choices, because the client has gone or the engine failed."""
        for index in list(self._running):
            self._end(index, reason, time.monotonic())

    def _end(self, index: int, reason: str, now: float) -> None:
        metrics, progress = self._metrics, self._running.pop(index)
        metrics.finished[reason].inc()
        metrics.e2e.observe(now - self._arrival)
        metrics.output_length.observe(progress.num_tokens)
        if progress.num_tokens:
            metrics.decode.observe(progress.last - progress.first)
            if progress.scheduled:
                metrics.inference.observe(progress.last - progress.scheduled)
        self._most_tokens = max(self._most_tokens, progress.num_tokens)
        if not self._running:
            metrics.max_output_length.observe(self._most_tokens)
        if progress.num_tokens > 1:
            metrics.tpot.observe((progress.last - progress.first) / (progress.num_tokens - 1))


class _ChoiceTimes:
    __slots__ = ("first", "last", "last_ns", "num_tokens", "scheduled")

    def __init__(self) -> None:
        self.first = self.last = self.scheduled = 0.0
        self.num_tokens = self.last_ns = 0
