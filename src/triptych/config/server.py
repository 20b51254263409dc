"""The DiffusionServer: its router, doors, stores and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from triptych.config.checks import (
    LOOPBACK,
    METRICS_OFFSET,
    MIB,
    check_host,
    check_port,
    check_reach,
    parse_tcp_url,
    positive,
)
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role

KEY_PREFIX = "sha256:"
"""What the digest of an API key begins with."""

DispatchPolicy = Literal["round_robin", "max_free_slots", "least_work"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How the router behaves."""

    model: str | None = None
    """The model that instances must serve (``--model-path`` of a server), by path, Hub id or the last part of either;
    None: whichever the first one serves."""
    dispatch_policy: DispatchPolicy = "round_robin"
    heartbeat_interval: float = 0.5
    """Seconds between an instance's heartbeats."""
    lease_timeout: float = 2.5
    """Seconds without a heartbeat after which an instance is lost and its work returns to the queue."""
    max_attempts: int = 4
    """Attempts of one stage before the request fails."""
    max_kills: int = 2
    """Instances that may die of one stage, without a checkpoint between, before the request fails
    (``--max-instance-deaths``)."""
    quarantine_after: int = 3
    """Different requests that an instance fails in a row before others are preferred."""
    quarantine_seconds: float = 30.0
    """How long for, at first; twice as long each time until it succeeds."""

    @property
    def restore_grace(self) -> float:
        """Seconds after a restart in which requests wait for the instances that had them under way."""
        return 2 * self.lease_timeout

    def __post_init__(self) -> None:
        positive(self, "heartbeat_interval", "lease_timeout", "max_attempts", "max_kills")
        positive(self, "quarantine_after", "quarantine_seconds")
        if self.lease_timeout < 2 * self.heartbeat_interval:
            raise ConfigError(f"lease_timeout={self.lease_timeout}: must be at least two heartbeat intervals")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The DiffusionServer: HTTP door and control-plane ports."""

    host: str = "127.0.0.1"
    port: int = 30000
    scheduler_port: int = 5555
    """Frontend port; the results of encoder, denoiser and decoder arrive on the next three."""
    instance_urls: dict[Role, tuple[str, ...]] = field(default_factory=dict[Role, tuple[str, ...]])
    """Work addresses of instances, by role, each of which is waited for once before the server is ready."""
    run_timeout: float = 600.0
    """Seconds of running time over all attempts of a request (``--disagg-timeout``)."""
    queue_timeout: float = 600.0
    """Seconds of waiting time of a request."""
    output_dir: Path = Path("outputs")
    """Where finished media files are kept; with ``media_store`` only the latest ones, to be served from here."""
    media_store: str | None = field(default=None, repr=False)
    """URL of another store for them (``--media-store``), e.g. ``s3://bucket/prefix``; None: ``output_dir`` alone."""
    state_dir: Path | None = None
    """Where accepted jobs are written down, so that they outlive the server (``--state-dir``); None: nowhere."""
    retained_jobs: int = 10_000
    """Ended jobs that are kept (``--retain-count``); beyond it the oldest goes, with its media. Live ones stay."""
    retained_bytes: int | None = None
    """Media that are kept (``--retain-bytes``); beyond it the oldest job goes, but never the last one. None: all."""
    retained_seconds: float | None = None
    """How long an ended job and its media are kept (``--retain-seconds``); None: until ``retained_jobs`` is reached."""
    max_upload_bytes: int = 32 * MIB
    """Largest request body, and largest picture fetched for one."""
    max_upload_memory: int = 2048 * MIB
    """Bytes that request bodies, while they are answered, and the pictures of live requests hold together
    (``--max-upload-memory``); more are put off with 429."""
    metrics_port: int | None = None
    """Another port for ``/metrics`` (``--metrics-port``), which the HTTP port has anyway."""
    max_live_requests: int = 1000
    """Requests that wait or run at the same time; more are put off with 429."""
    max_queue: int | None = None
    """Requests that wait for an instance at the same time (``--max-queue``); None: as many as may be live."""
    max_wait: float | None = None
    """Predicted seconds of waiting beyond which requests are put off (``--max-wait``); their own queue timeout in any
    case."""
    timeout_cap: float = 3600.0
    """Most seconds that a request may ask for as its own timeouts (``--timeout-cap``); the server's own if greater."""
    task_ports: tuple[int, int, int] | None = None
    """HTTP ports on which a task comes in three posts, to encoder, transformer and decoder; metrics lie 10000 above."""
    api_keys: tuple[str, ...] = ()
    """Digests (``sha256:`` and 64 hex digits) of the keys of the HTTP door; without any, it is open to everybody."""
    max_concurrency_per_key: int | None = None
    """Requests of one key that wait or run at the same time; more are put off with 429."""
    max_rate_per_key: int | None = None
    """Requests that one key may start in a minute; more are put off with 429."""
    input_root: Path | None = None
    """Folder from which requests may name pictures by path; None: by no path."""
    forwarded_allow_ips: str | None = None
    """Addresses and networks of proxies that say whence a request came (``--forwarded-allow-ips``), with commas
    between; None: what the variable FORWARDED_ALLOW_IPS says, or loopback."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may call the server, besides addresses, localhost and ``host``, and whose pages may use it
    (``--allowed-hosts``); ``*``: any. Without API keys a server on loopback answers to no others."""
    allow_image_urls: bool = False
    """Whether requests may name pictures by http(s) URL, which the server then fetches from the public internet."""
    key_dir: Path | None = None
    """Folder with the keys of the control plane (``--disagg-key-dir``); None: neither encrypted nor authenticated."""
    insecure: bool = False
    """Allow binding beyond loopback without keys."""
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        check_port("port", self.port)
        check_port("scheduler-port", self.scheduler_port)
        check_port("scheduler-port + 3", self.scheduler_port + 3)
        if self.scheduler_port <= self.port <= self.scheduler_port + 3:
            raise ConfigError(f"port={self.port} collides with the scheduler ports {self.scheduler_port} to +3")
        positive(self, "run_timeout", "queue_timeout", "retained_jobs", "max_upload_bytes", "max_live_requests")
        positive(self, "timeout_cap", *(name for name in ("max_queue", "max_wait") if getattr(self, name) is not None))
        if self.max_upload_memory < 2 * self.max_upload_bytes:
            least = 2 * self.max_upload_bytes
            raise ConfigError(f"max-upload-memory={self.max_upload_memory}: must be at least {least}, for one request")
        self._check_task_ports()
        self._check_keys()
        if self.retained_seconds is not None:
            positive(self, "retained_seconds")
        if self.retained_bytes is not None:
            positive(self, "retained_bytes")
        for role, urls in self.instance_urls.items():
            for url in urls:
                parse_tcp_url(f"{role}-urls", url)
        check_host("host", self.host)
        check_reach("host", self.host, self.key_dir, self.insecure)
        if self.host not in LOOPBACK and not self.api_keys and not self.insecure:
            raise ConfigError(
                f"host={self.host!r} opens the HTTP API beyond loopback without authentication; pass --api-key-file "
                "FILE, or pass --insecure to accept that (a proxy before it may ask for passwords)"
            )

    @property
    def http_ports(self) -> tuple[int, ...]:
        """Every port that answers HTTP: the door's own, then the task ports, then those of their metrics."""
        tasks = self.task_ports or ()
        metrics = (self.metrics_port,) if self.metrics_port else ()
        return (self.port, *metrics, *tasks, *(port + METRICS_OFFSET for port in tasks))

    @property
    def monitoring_ports(self) -> tuple[int, ...]:
        """Those of them that answer metrics and probes only."""
        metrics = (self.metrics_port,) if self.metrics_port else ()
        return (*metrics, *(port + METRICS_OFFSET for port in self.task_ports or ()))

    def _check_keys(self) -> None:
        for digest in self.api_keys:
            if not (digest.startswith(KEY_PREFIX) and len(digest) == len(KEY_PREFIX) + 64):
                raise ConfigError("api-key: must be the digest of a key, sha256: and 64 hex digits")
        for name in ("max_concurrency_per_key", "max_rate_per_key"):
            if getattr(self, name) is None:
                continue
            positive(self, name)
            if not self.api_keys:
                raise ConfigError(f"{name.replace('_', '-')}={getattr(self, name)}: needs --api-key or a key file")

    def _check_task_ports(self) -> None:
        for port in self.task_ports or ():
            check_port("task-ports", port)
            if port + METRICS_OFFSET > 65535:
                raise ConfigError(
                    f"task-ports={port}: must be at most {65535 - METRICS_OFFSET}, metrics are {METRICS_OFFSET} above"
                )
        taken = [*self.http_ports, *range(self.scheduler_port, self.scheduler_port + 4)]
        if self.metrics_port:
            check_port("metrics-port", self.metrics_port)
            if taken.count(self.metrics_port) > 1:
                raise ConfigError(f"metrics-port={self.metrics_port}: the port is used twice")
        for port in self.http_ports[1:]:
            if taken.count(port) > 1:
                raise ConfigError(
                    f"task-ports={','.join(map(str, self.task_ports or ()))}: the port {port} is used twice"
                )

    def result_port(self, role: Role) -> int:
        """Port on which reports of a stage of ``role`` arrive."""
        return self.scheduler_port + 1 + ROLES.index(role)
