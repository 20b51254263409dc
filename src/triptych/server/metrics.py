"""The server's Prometheus metrics, in a registry of their own; every label has few values.

Numbers are kept as plain attributes of one thread and become metric families when scraped: the client library's own
counters and histograms take a lock for every sample, which was an eighth of the server's time per request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from triptych.config.durations import BUCKETS
from triptych.core.events import COUNT_NAMES, Count, CountName, JobState, StageTiming
from triptych.core.states import TERMINAL
from triptych.ids import InstanceId, Role
from triptych.wire.messages import Counts

_Label = TypeVar("_Label", bound=str)

_INSTANCE = "instance_id"
"""Not ``instance``, which Prometheus itself gives every series, for the address that it scraped."""

PLANES = frozenset({"local", "shm", "cuda-ipc", "gpudirect", "mooncake"})
"""Data planes with a label value of their own. The name comes from an instance, so any other counts as ``other``."""

_COUNTS = {
    "compilations": "Graphs compiled, warm-up included.",
    "compile_seconds": "Time spent compiling.",
    "uncompiled": "Calls of compiled parts computed without a graph: there were too many, or the compiler failed.",
    "prompt_hits": "Prompts whose embeddings were there already.",
    "prompt_misses": "Prompts that the text encoder had to compute.",
    "steps_skipped": "Denoiser forwards that step caching made short.",
    "unshared_forwards": "Denoiser forwards that each GPU computed whole, for their tokens do not divide.",
    "turnovers": "Stages that began when the one before was over, and were known of by then.",
    "turnover_seconds": "Time in between, until the model itself computed.",
}
"""Fields of `Counts` as metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges:
    """What is read at the moment of a scrape."""

    states: Mapping[JobState, int]
    failing: Mapping[str, bool]
    """Journal and media store, and whether each cannot be written."""
    queues: Mapping[Role, int]
    slots_used: Mapping[Role, int]
    slots_free: Mapping[Role, int]
    up: Mapping[InstanceId, bool]
    """Every instance that this server has known lately, and whether it is alive."""
    counts: Mapping[InstanceId, Counts]
    """What the models of each live instance have done; begins anew with its process."""
    quarantined: Mapping[InstanceId, bool]
    """Every live instance, and whether others are preferred because it failed several requests in a row."""


class _Durations:
    """How many durations fell into each bucket, and their sum in seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


class Metrics:
    """Counters and histograms of one server. ``read`` gives the gauges at a scrape, and so the registry is to be
    rendered on the thread of the event loop."""

    def __init__(self, read: Callable[[], Gauges]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Scrape(self, read))
        # All there from the start: an increase is only seen of a series that had a value before.
        self.ended = {state: 0 for state in JobState if state in TERMINAL}
        self.lasted = {state: _Durations() for state in self.ended}
        self.events: dict[CountName, int] = dict.fromkeys(COUNT_NAMES, 0)
        self.dropped: Mapping[str, int] = {}
        """Messages that could not be read or sent so far, by socket or direction."""
        self.running = {role: _Durations() for role in Role}
        self.waiting = {role: _Durations() for role in Role}
        self.pulls: dict[str, _Durations] = {}
        self.pulled_bytes: dict[str, int] = {}

    def end(self, state: JobState, seconds: float | None) -> None:
        """A request reached its final state, that long after it was accepted; None: before this server's time."""
        self.ended[state] += 1
        if seconds is not None:
            self.lasted[state].add(seconds)

    def count(self, count: Count) -> None:
        """The router counted something."""
        self.events[count.name] += 1

    def stage(self, timing: StageTiming) -> None:
        """A stage finished."""
        self.running[timing.role].add(timing.running)
        self.waiting[timing.role].add(timing.waiting)
        if timing.plane:
            plane = timing.plane if timing.plane in PLANES else "other"
            if plane not in self.pulls:
                self.pulls[plane] = _Durations()
            self.pulls[plane].add(timing.pulling)
            self.pulled_bytes[plane] = self.pulled_bytes.get(plane, 0) + timing.pulled_bytes


class _Scrape(Collector):
    """Renders the numbers of a `Metrics` when asked."""

    def __init__(self, metrics: Metrics, read: Callable[[], Gauges]) -> None:
        self._metrics = metrics
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read gauges before there is a router."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every family of this server."""
        gauges, metrics = self._read(), self._metrics
        live = {state: count for state, count in gauges.states.items() if state not in TERMINAL}
        yield _gauge("requests", "Requests that have not ended, by state.", "state", live)
        yield _gauge("storage_failing", "1 while it cannot be written.", "store", gauges.failing)
        yield _gauge("queue_depth", "Requests that wait for an instance.", "role", gauges.queues)
        yield _gauge("slots_used", "Slots with a lease.", "role", gauges.slots_used)
        yield _gauge("slots_free", "Slots without a lease.", "role", gauges.slots_free)
        yield _gauge("instance_up", "1 while an instance's heartbeats arrive.", _INSTANCE, gauges.up)
        for field, text in _COUNTS.items():
            yield _counter(field, text, _INSTANCE, {i: getattr(counts, field) for i, counts in gauges.counts.items()})
        yield _gauge(
            "instance_quarantined", "1 while others are preferred to an instance.", _INSTANCE, gauges.quarantined
        )
        yield _counter("requests_ended", "Requests by final state.", "state", metrics.ended)
        yield _histogram("request_seconds", "Seconds from acceptance to the end.", "state", metrics.lasted)
        yield _counter("events", "What the router found worth counting.", "name", metrics.events)
        yield _counter("dropped_frames", "Messages that could not be read or sent.", "socket", metrics.dropped)
        yield _counter("handoff_bytes", "Bytes pulled in handoffs.", "plane", metrics.pulled_bytes)
        yield _histogram("handoff_seconds", "Time to pull a handoff.", "plane", metrics.pulls)
        yield _histogram("stage_seconds", "Running time of finished stages.", "role", metrics.running)
        yield _histogram("stage_waiting_seconds", "Waiting time of finished stages.", "role", metrics.waiting)


def _gauge(name: str, text: str, label: str, values: Mapping[_Label, float]) -> Metric:
    family = GaugeMetricFamily(f"triptych_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _counter(name: str, text: str, label: str, values: Mapping[_Label, float]) -> Metric:
    family = CounterMetricFamily(f"triptych_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, label: str, values: Mapping[_Label, _Durations]) -> Metric:
    family = HistogramMetricFamily(f"triptych_{name}", text, labels=[label])
    for key, durations in values.items():
        upto, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip((*BUCKETS, float("inf")), durations.counts, strict=True):
            upto += count
            buckets.append((floatToGoString(bound), upto))
        family.add_metric([key], buckets, durations.total)
    return family
