"""The server's Prometheus metrics, in a registry of their own; every label has few values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from triptych.core.events import Count, JobState, StageTiming
from triptych.ids import InstanceId, Role

_Label = TypeVar("_Label", bound=str)

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges:
    """What is read at the moment of a scrape."""

    states: Mapping[JobState, int]
    queues: Mapping[Role, int]
    slots_used: Mapping[Role, int]
    slots_free: Mapping[Role, int]
    up: Mapping[InstanceId, bool]
    """Every instance that this server has known lately, and whether it is alive."""


class _GaugeCollector(Collector):
    """Reads the gauges when scraped, so that they cost nothing in between."""

    def __init__(self, read: Callable[[], Gauges]) -> None:
        self._read = read

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: registering must not read gauges before there is a router."""
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauges = self._read()
        yield _family("triptych_requests", "Remembered requests by state.", "state", gauges.states)
        yield _family("triptych_queue_depth", "Requests that wait for an instance.", "role", gauges.queues)
        yield _family("triptych_slots_used", "Slots with a lease.", "role", gauges.slots_used)
        yield _family("triptych_slots_free", "Slots without a lease.", "role", gauges.slots_free)
        yield _family("triptych_instance_up", "1 while an instance's heartbeats arrive.", "instance", gauges.up)


def _family(name: str, text: str, label: str, values: Mapping[_Label, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


class Metrics:
    """Counters and histograms, with their labelled children made beforehand because a look-up costs a lock.

    Scraping calls ``read``, so the registry is to be rendered on the thread of the event loop.
    """

    def __init__(self, read: Callable[[], Gauges]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_GaugeCollector(read))
        self._ended = Counter("triptych_requests_ended", "Requests by final state.", ["state"], registry=self.registry)
        self._counts = Counter(
            "triptych_events", "What the router found worth counting.", ["name"], registry=self.registry
        )
        self._dropped = Counter(
            "triptych_dropped_frames", "Messages that could not be read or sent.", ["socket"], registry=self.registry
        )
        self._dropped_before: dict[str, int] = {}
        running = self._histogram("triptych_stage_seconds", "Running time of finished stages.", "role")
        waiting = self._histogram("triptych_stage_waiting_seconds", "Waiting time of finished stages.", "role")
        self._running = {role: running.labels(role) for role in Role}
        self._waiting = {role: waiting.labels(role) for role in Role}
        self._pull_seconds = self._histogram("triptych_handoff_seconds", "Time to pull a handoff.", "plane")
        self._pull_bytes = Counter(
            "triptych_handoff_bytes", "Bytes pulled in handoffs.", ["plane"], registry=self.registry
        )
        self._pulls: dict[str, tuple[Histogram, Counter]] = {}

    def ended(self, state: JobState) -> None:
        """A request reached its final state."""
        self._ended.labels(state).inc()

    def count(self, count: Count) -> None:
        """The router counted something."""
        self._counts.labels(count.name).inc()

    def dropped(self, totals: Mapping[str, int]) -> None:
        """Messages dropped so far, by socket."""
        for socket, total in totals.items():
            self._dropped.labels(socket).inc(total - self._dropped_before.get(socket, 0))
        self._dropped_before = dict(totals)

    def stage(self, timing: StageTiming) -> None:
        """A stage finished."""
        self._running[timing.role].observe(timing.running)
        self._waiting[timing.role].observe(timing.waiting)
        if timing.plane:
            pull = self._pulls.get(timing.plane)
            if pull is None:
                plane = timing.plane
                pull = self._pulls[plane] = (self._pull_seconds.labels(plane), self._pull_bytes.labels(plane))
            pull[0].observe(timing.pulling)
            pull[1].inc(timing.pulled_bytes)

    def _histogram(self, name: str, text: str, label: str) -> Histogram:
        return Histogram(name, text, [label], registry=self.registry, buckets=_SECONDS)
