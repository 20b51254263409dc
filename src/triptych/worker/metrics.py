"""Prometheus metrics of one instance.

The control thread counts what it sees; a thread of the exporter renders. The compute thread has no part in it, and its
own counts (`Tally`) are read, not asked for. Every label has few values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.accel.tally import Tally
from triptych.config import InstanceConfig
from triptych.config.durations import BUCKETS
from triptych.core.events import COUNT_NAMES, CountName
from triptych.core.instance_events import ComputeStarted, Ended, InstanceEvent, Pulled, PullFailed, Stepped, Usage
from triptych.transport.data.protocol import PoolFigures
from triptych.wire.messages import Finished, Lease, Outcome, Staged, StageFailed, Stopped
from triptych.worker.jobs import Identity, Loaded
from triptych.worker.standing import Standing

log = logging.getLogger(__name__)


class _Read(Collector):
    """A counter that others keep, read when it is asked for."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._value = f"triptych_instance_{name}", text, read

    def describe(self) -> Iterable[Metric]:
        """The family without a value: registering must not read what is not there yet."""
        yield CounterMetricFamily(self._name, self._text)

    def collect(self) -> Iterable[Metric]:
        """The counter as it stands."""
        yield CounterMetricFamily(self._name, self._text, value=self._value())


def _kept_by_others(figures: Callable[[], PoolFigures], tally: Tally) -> tuple[_Read, ...]:
    """The counters of the pool and of the compute thread."""
    return (
        _Read("pool_refusals", "How often the pool had no room.", lambda: figures().refusals),
        _Read("compilations", "Graphs compiled.", lambda: tally.compilations),
        _Read("compile_seconds", "Time spent on compiling.", lambda: tally.compile_seconds),
        _Read(
            "uncompiled",
            "Calls without a graph: there were too many, or the compiler failed.",
            lambda: tally.uncompiled,
        ),
        _Read("unshared_forwards", "Forwards that each GPU computed whole.", lambda: tally.unshared_forwards),
    )


class InstanceMetrics:
    """What one instance has done. All but `attention` and rendering is for the control thread."""

    def __init__(
        self,
        *,
        identity: Identity,
        config: InstanceConfig,
        figures: Callable[[], PoolFigures],
        tally: Tally,
        standing: Standing,
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self._identity = identity
        self._config = config
        self._computing: set[Lease] = set()
        self.standing = standing

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"triptych_instance_{name}", text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"triptych_instance_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"triptych_instance_{name}", text, labels, registry=registry, buckets=BUCKETS)

        self._about = Info("triptych_instance", "What this instance is.", registry=registry)
        self._about.info({"instance_id": identity.instance, "roles": ",".join(config.roles)})
        self._attention = Info("triptych_attention_backend", "What attention runs on.", ["model"], registry=registry)
        self._load_seconds = gauge("load_seconds", "Time that loading the model took; 0 until it is loaded.")
        gauge("welcomed", "1 while the server has this instance.").set_function(lambda: standing.welcomed)
        self._held = gauge("leases", "Leases held: computing, pulled ahead, or about to be.")
        self._running = gauge("leases_computing", "Leases whose stage computes.")
        self._resident = gauge("resident_bytes", "Memory of the process.")
        self._device = gauge("device_bytes", "GPU memory that tensors take.")
        self._compute = histogram("compute_seconds", "Computing time of finished stages.", "role")
        self._stage = histogram("stage_out_seconds", "Time to put a finished stage's output into the pool.", "role")
        self._encode = histogram("encode_seconds", "Time to write media files.")
        self._pull = histogram("pull_seconds", "Time to pull the inputs of a stage.", "plane")
        self._pulled = counter("pulled_bytes", "Bytes pulled.", "plane")
        self._steps = counter("steps", "Denoising steps done.")
        self._ended = counter("stages_ended", "Stages by how they ended.", "role", "outcome")
        self._events = counter("events", "What happened that should not, or seldom.", "name")
        for name in COUNT_NAMES:  # there from the start: an increase is only seen of a series that had a value before
            self._events.labels(name)
        self._frames = counter("dropped_frames", "Messages that could not be read or sent.", "socket")
        self._frames_seen: dict[str, int] = {}
        self._errors = counter("errors", "Failed stages and pulls by kind.", "role", "code")
        gauge("pool_bytes", "Size of the transfer pool.").set(config.transfer.pool_bytes)
        gauge("pool_used_bytes", "Bytes of the transfer pool that are taken.").set_function(lambda: figures().used)
        gauge("pool_peak_bytes", "Most that was ever taken.").set_function(lambda: figures().peak)
        for counted in _kept_by_others(figures, tally):
            registry.register(counted)

    def loaded(self, loaded: Loaded) -> None:
        """The model is there."""
        about = {"model": loaded.schema.model, "pipeline": loaded.schema.pipeline, "device": loaded.device}
        self._about.info({"instance_id": self._identity.instance, "roles": ",".join(self._config.roles), **about})
        self._load_seconds.set(loaded.seconds)

    def attention(self, backends: Mapping[str, str]) -> None:
        """What the attention of each model really runs on. From any thread."""
        for model, backend in backends.items():
            log.info("attention of %s runs on %s", model, backend)
            self._attention.labels(model).info({"backend": backend})

    def held(self, leases: int) -> None:
        """So many leases are held now."""
        self._held.set(leases)

    def counted(self, name: CountName) -> None:
        """The instance machine found something worth counting."""
        self._events.labels(name).inc()

    def dropped(self, counts: Mapping[str, int]) -> None:
        """So many messages were dropped by now, by socket."""
        for socket, count in counts.items():
            self._frames.labels(socket).inc(count - self._frames_seen.get(socket, 0))
            self._frames_seen[socket] = count

    def saw(self, event: InstanceEvent) -> None:
        """Count what ``event`` says."""
        match event:
            case ComputeStarted(lease=lease):
                self._computing.add(lease)
            case Stepped():
                self._steps.inc()
            case Pulled():
                self._pull.labels(event.plane).observe(event.seconds)
                self._pulled.labels(event.plane).inc(event.nbytes)
            case PullFailed():
                self._errors.labels(event.lease.role, event.error.code).inc()
                self._computing.discard(event.lease)
            case Ended(outcome=outcome):
                self._computing.discard(outcome.lease)
                self._end(outcome)
            case Usage():
                self._resident.set(event.resident_bytes)
                self._device.set(event.device_bytes)
            case _:
                return
        self._running.set(len(self._computing))

    def _end(self, outcome: Outcome) -> None:
        role = outcome.lease.role
        match outcome:
            case Staged():
                self._ended.labels(role, "staged").inc()
                self._compute.labels(role).observe(outcome.compute_seconds)
                self._stage.labels(role).observe(outcome.stage_seconds)
            case Finished():
                self._ended.labels(role, "finished").inc()
                self._compute.labels(role).observe(outcome.compute_seconds)
                self._encode.observe(outcome.encode_seconds)
            case StageFailed():
                self._ended.labels(role, "failed").inc()
                self._errors.labels(role, outcome.error.code).inc()
            case Stopped():
                self._ended.labels(role, "stopped").inc()
            case _:
                assert_never(outcome)
