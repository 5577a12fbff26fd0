"""Counters, gauges and histograms in the format of Prometheus.

    metrics = Metrics(); metrics.prompt_tokens.inc(12); text = metrics.render()

The names are those of vLLM with the prefix `clearhead_`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from clearhead.engine import EngineStatistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)
FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """All measurements of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.prompt_tokens = Counter(
            "clearhead_prompt_tokens", "Prompt tokens of all texts that were started.", registry=registry
        )
        self.tokens = TokenTimes()
        registry.register(self.tokens)
        self.finished = Counter(
            "clearhead_request_success", "Texts that ended, by reason.", ["finished_reason"], registry=registry
        )
        for reason in FINISH_REASONS:
            self.finished.labels(reason)  # so that every reason has a value from the start
        self.answers = Counter(
            "clearhead_http_responses", "Answers by path and status.", ["path", "status"], registry=registry
        )
        self.request_seconds = self._histogram(
            "e2e_request_latency", "From the arrival of a request to the end of a text.", _SECONDS
        )
        self.preparation_seconds = self._histogram(
            "request_preparation", "From the arrival of a request until its texts are submitted.", _SECONDS
        )
        self.prompt_lengths = Histogram(
            "clearhead_request_prompt_tokens", "Prompt tokens of a text.", buckets=_LENGTHS, registry=registry
        )
        self.output_lengths = Histogram(
            "clearhead_request_generation_tokens", "Tokens of a text that ended.", buckets=_LENGTHS, registry=registry
        )

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"clearhead_{name}_seconds", description, buckets=buckets, registry=self.registry)

    def watch_engine(self, statistics: Callable[[], EngineStatistics]) -> None:
        """Report the state of an engine whenever the metrics are read."""
        self.registry.register(_EngineCollector(statistics))

    def render(self) -> bytes:
        """Return all measurements as text."""
        return generate_latest(self.registry)


class TokenTimes(Collector):
    """Counts generated tokens and their times, for the event loop only.

    The classes of prometheus_client take locks and search buckets one by one, 2 us for a token instead of 0.3.
    """

    def __init__(self) -> None:
        self._first, self._following = _Times(_SECONDS), _Times(_TOKEN_SECONDS)

    def count_first(self, seconds: float) -> None:
        """Count the first token of a text; seconds: since its request arrived."""
        self._first.add(seconds)

    def count(self, seconds: float) -> None:
        """Count a further token; seconds: since the token before it."""
        self._following.add(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the number of tokens and the distributions of times."""
        number = sum(self._first.counts) + sum(self._following.counts)
        yield CounterMetricFamily("clearhead_generation_tokens", "Generated tokens.", value=number)
        yield self._first.metric("time_to_first_token", "From the arrival of a request to the first token of a text.")
        yield self._following.metric("inter_token_latency", "Between two tokens of a text.")


class _Times:
    """A histogram of seconds."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds, self._sum = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)  # up to each bound, and above all of them

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def metric(self, name: str, description: str) -> HistogramMetricFamily:
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self.counts)), strict=True))
        return HistogramMetricFamily(f"clearhead_{name}_seconds", description, buckets=buckets, sum_value=self._sum)


class _EngineCollector(Collector):
    def __init__(self, statistics: Callable[[], EngineStatistics]):
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges and counters of the engine."""
        now = self._statistics()
        gauges = {
            "num_requests_running": ("Texts that are being generated.", now.num_running),
            "num_requests_waiting": ("Texts that wait for a place.", now.num_waiting),
            "kv_cache_usage_ratio": ("Share of the pages that texts use.", now.num_used_pages / max(now.num_pages, 1)),
            "kv_cache_cached_ratio": (
                "Share of the pages that are kept for later texts.",
                now.num_cached_pages / max(now.num_pages, 1),
            ),
        }
        counters = {
            "num_preemptions": ("How often a text lost its pages to an older one.", now.num_preemptions),
            "prefix_cache_queries": ("Prompt tokens that were looked up.", now.num_prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens that were not computed again.", now.num_cached_tokens),
        }
        for name, (description, value) in gauges.items():
            yield GaugeMetricFamily(f"clearhead_{name}", description, value=value)
        for name, (description, value) in counters.items():
            yield CounterMetricFamily(f"clearhead_{name}", description, value=value)
