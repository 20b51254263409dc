"""Settings of each component: frozen, keyword-only, validated when built, each field documented under it.

Construction never probes hardware. What is derived is a property. A module takes the few values that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from triptych.errors import ConfigError
from triptych.ids import ADAPTER_NAME, MAX_ADAPTER_SCALE, ROLES, Role
from triptych.parallelism import Parallelism

MIB = 1 << 20

KEY_PREFIX = "sha256:"
"""What the digest of an API key begins with."""

METRICS_OFFSET = 10_000
"""From a task port to the port of its metrics."""

DispatchPolicy = Literal["round_robin", "max_free_slots"]
DeviceType = Literal["cuda", "cpu"]
DTypeName = Literal["float32", "bfloat16", "float16"]
Task = Literal["text-to-image", "image-to-image", "inpainting", "text-to-video", "image-to-video"]
Profile = Literal["stock", "lossless", "fast"]
Quantisation = Literal["none", "fp8", "int8"]
Offload = Literal["none", "model", "block", "layer"]
TransferKind = Literal["auto", "local", "shm", "mooncake"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise ConfigError(f"{name}={value!r}: must be greater than 0")


def _port(name: str, value: int) -> None:
    if not 0 < value < 65536:
        raise ConfigError(f"{name}={value}: must be a port, 1 to 65535")


def _check_reach(flag: str, host: str, key_dir: Path | None, insecure: bool) -> None:
    if host not in LOOPBACK and key_dir is None and not insecure:
        raise ConfigError(
            f"{flag}={host!r} binds beyond loopback without authentication; make keys with `triptych keygen DIR` and "
            "pass --disagg-key-dir DIR, or pass --insecure to accept that"
        )


def parse_tcp_url(name: str, url: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``; raises `ConfigError` that names the flag."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:  # a port that is no number, half an IPv6 address
        scheme, host, port = "", None, None
    if scheme != "tcp" or not host or port is None:
        raise ConfigError(f"{name}={url!r}: must look like tcp://host:port")
    _port(name, port)
    return host, port


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Pixels and frames of an output; an image has one frame."""

    width: int
    height: int
    frames: int = 1

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")


def parse_shape(name: str, text: str) -> Shape:
    """``832x480x81`` or, of an image, ``1024x1024``; raises `ConfigError` that names the flag."""
    parts = text.split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{name} {text!r}: must look like 832x480x81 (width x height x frames) or 1024x1024")
    width, height, frames = (*map(int, parts), 1)[:3]
    return Shape(width=width, height=height, frames=frames)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """A LoRA adapter that requests may name."""

    name: str
    path: str
    """A safetensors file."""
    second: str | None = None
    """A file for the second transformer of models that have two, where ``path`` does not hold its tensors as well."""
    scale: float = 1.0
    """Of requests that name it without one."""

    def __post_init__(self) -> None:
        if not ADAPTER_NAME.fullmatch(self.name):
            raise ConfigError(f"lora {self.name!r}: a name has up to 64 letters, digits, '-' and '_'")
        for path in self.files:
            if not path.endswith(".safetensors"):
                raise ConfigError(f"lora {self.name}={path}: must be a .safetensors file")
        if not abs(self.scale) <= MAX_ADAPTER_SCALE:
            raise ConfigError(f"lora {self.name}: scale {self.scale}: must lie within {MAX_ADAPTER_SCALE:g} of 0")

    def __str__(self) -> str:
        return f"{self.name}={','.join(self.files)}:{self.scale!r}"

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all its files."""
        return (self.path,) if self.second is None else (self.path, self.second)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model to load, and how."""

    path: str
    """A Diffusers-layout folder, a Hub id, or the name of an embedded model (``tiny``)."""
    task: Task | None = None
    """What to do with the weights, where Diffusers has a pipeline of the same family for it; None: what the model's
    index names."""
    device: DeviceType = "cuda"
    dtype: DTypeName | None = None
    """None: bfloat16 on CUDA, float32 on CPU."""
    components: dict[str, str] = field(default_factory=dict[str, str])
    """Component name to a folder or file whose weights replace that component's."""
    profile: Profile = "stock"
    """stock: Diffusers as it is. lossless: faster kernels, the same arithmetic up to rounding. fast: FP8 besides."""
    attention_backend: str = "auto"
    """auto, or a backend by name (`triptych.accel.attention`)."""
    defaults: dict[str, bool | int | float | str] = field(default_factory=dict[str, "bool | int | float | str"])
    """Request parameter to its value where a request does not say it, in place of the model's own (``--default``)."""
    quant: dict[Role, Quantisation] = field(default_factory=dict[Role, Quantisation])
    """Linear layers of a role's transformers in FP8 or INT8; lossy. Roles that are not named keep theirs."""
    offload: dict[Role, Offload] = field(default_factory=dict[Role, Offload])
    """What of a role's weights waits in host memory until it is computed with: whole models, blocks or layers."""
    vae_tiling: bool = False
    """Decode and encode large pictures in tiles; seams are blended, so pixels differ a little."""
    vae_slicing: bool = False
    """Decode and encode the outputs of one request one after another."""
    prompt_cache_bytes: int = 256 * MIB
    """Memory for embeddings of prompts that were seen before (``--prompt-cache``); 0: none are kept."""
    batching: bool = False
    """Join the forwards of requests that run at once, where that is faster (``--batching``); differs by rounding."""
    batch_guidance: bool = False
    """Compute the branches of guidance in one forward, where that is faster (``--batch-guidance``); differs by
    rounding."""
    step_cache: float = 0.0
    """Threshold under which a denoising step reuses the work of the one before; lossy. 0: every step is computed."""
    warmup: tuple[Shape, ...] = ()
    """Shapes of which each role runs a request before it says that it is there (``--warmup``)."""
    cache_dir: Path | None = None
    """Where compiled graphs and measurements outlive the process; None: ``triptych`` in the user's cache folder."""

    previews: bool = False
    """Let requests ask for small pictures of what is being denoised."""
    loras: tuple[Lora, ...] = ()
    """Adapters that requests may name, and no others."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("model-path='': a model folder, Hub id or embedded model name is needed")
        if not 0 <= self.step_cache < 1:
            raise ConfigError(f"step-cache={self.step_cache}: must be 0 (off) or a share below 1, e.g. 0.1")
        if self.batching and self.step_cache:
            raise ConfigError("batching and step-cache: requests that share a forward cannot skip parts of it apart")
        if self.batch_guidance and (self.batching or self.step_cache):
            other = "batching" if self.batching else "step-cache"
            raise ConfigError(f"batch-guidance and {other}: each decides in its own way which forwards are computed")
        names = [lora.name for lora in self.loras]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"lora {', '.join(sorted(twice))}: given twice")
        if self.loras and self.profile != "stock":
            raise ConfigError(f"lora: needs profile stock, not {self.profile!r}, whose kernels replace the layers")
        if self.loras and self.batching:
            raise ConfigError("lora and batching: requests that share a forward cannot have different adapters")
        if self.offload and self.profile != "stock":
            raise ConfigError(f"offload: needs profile stock, not {self.profile!r}, whose kernels hold the weights")

    @property
    def effective_dtype(self) -> DTypeName:
        """The dtype that weights are loaded in."""
        return self.dtype or ("bfloat16" if self.device == "cuda" else "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferConfig:
    """The data plane of one instance."""

    kind: TransferKind = "auto"
    """auto takes the best plane that both ends have: local, then shm on one host, then Mooncake."""
    hostname: str = "127.0.0.1"
    """Address that peers reach this instance's data plane and work port under (``--disagg-p2p-hostname``)."""
    ib_device: str | None = None
    """RDMA device for Mooncake, e.g. mlx5_0; None means TCP."""
    pool_bytes: int = 256 * MIB
    """Registered memory for staged and pulled tensors."""

    def __post_init__(self) -> None:
        if self.pool_bytes < MIB:
            raise ConfigError(f"disagg-transfer-pool-size={self.pool_bytes}: must be at least 1 MiB")
        if self.ib_device is not None and self.kind not in ("auto", "mooncake"):
            raise ConfigError(f"disagg-ib-device={self.ib_device!r} needs disagg-transfer mooncake, not {self.kind!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceConfig:
    """One role instance: what it serves, where it binds, how much it takes on."""

    roles: tuple[Role, ...]
    server_addr: str
    """The server's frontend, tcp://host:port."""
    work_port: int
    """Its own port for work (``--scheduler-port``)."""
    transfer: TransferConfig
    model: ModelConfig
    gpu_ids: tuple[int, ...] = (0,)
    """CUDA devices, one for each rank; on the CPU only their number counts."""
    parallel: Parallelism = field(default_factory=Parallelism)
    """How several GPUs share the denoiser's work."""
    slots: int = 2
    """Leases held at once: those computing plus those whose inputs are pulled ahead."""
    max_running: int = 1
    """Requests whose denoising steps interleave (``--max-running-requests``)."""
    checkpoint_interval: float = 10.0
    """Seconds between checkpoints of a denoising stage, which another instance keeps; 0: none are made."""
    metrics_port: int | None = None
    """HTTP port of its metrics (``--metrics-port``); 0: none. None: 10000 above the work port, where that is free."""
    drain_timeout: float = 30.0
    """Seconds that leaving may take once asked to stop, while work is finished or handed over; 0: leave at once."""
    key_dir: Path | None = None
    """Folder with the keys of the control plane (``--disagg-key-dir``); None: neither encrypted nor authenticated."""
    insecure: bool = False
    """Allow binding beyond loopback without keys."""

    def __post_init__(self) -> None:
        if not self.roles or len(set(self.roles)) != len(self.roles):
            raise ConfigError(
                f"disagg-role={','.join(self.roles)!r}: must name one or several of {', '.join(ROLES)} once"
            )
        parse_tcp_url("disagg-server-addr", self.server_addr)
        _port("scheduler-port", self.work_port)
        _positive(self, "slots", "max_running")
        if self.metrics_port:
            _port("metrics-port", self.metrics_port)
            if self.metrics_port == self.work_port:
                raise ConfigError(f"metrics-port={self.metrics_port} is the work port (scheduler-port)")
        for name in ("checkpoint_interval", "drain_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more seconds")
        if self.max_running > self.slots:
            raise ConfigError(f"max-running-requests={self.max_running}: must not exceed the slots ({self.slots})")
        if self.model.batching and self.max_running < 2 and self.roles != (Role.DECODER,):
            raise ConfigError("batching: needs max-running-requests of 2 or more, since it joins what runs at once")
        _check_reach("disagg-p2p-hostname", self.transfer.hostname, self.key_dir, self.insecure)
        self._check_ranks()

    @property
    def ranks(self) -> int:
        """GPUs, and processes, of the instance."""
        return len(self.gpu_ids)

    def _check_ranks(self) -> None:
        if not self.gpu_ids or len(set(self.gpu_ids)) != len(self.gpu_ids):
            raise ConfigError(f"num-gpus={len(self.gpu_ids)}: an instance needs one GPU or several different ones")
        said, tps = ",".join(self.roles), self._tps
        for role, tp in tps.items():
            if tp not in (1, self.ranks):
                raise ConfigError(f"{role}-tp={tp}: must be 1 or num-gpus={self.ranks}")
            if tp > 1 and role not in self.roles:
                raise ConfigError(f"{role}-tp={tp} does not apply to disagg-role {said}")
        if tps[Role.DECODER] > 1 and (self.model.vae_tiling or self.model.vae_slicing):
            raise ConfigError(f"decoder-tp={tps[Role.DECODER]}: its strips leave nothing for vae-tiling or vae-slicing")
        if tps[Role.DECODER] > 1 and Role.DECODER in self.model.offload:
            raise ConfigError(f"decoder-tp={tps[Role.DECODER]}: needs the decoder's weights on the GPU, not offloaded")
        if Role.DENOISER in self.roles:
            self.parallel.check(self.ranks)
        elif self.parallel.of_denoiser:
            raise ConfigError(f"denoiser-cfg and so on do not apply to disagg-role {said}")
        elif self.ranks not in tps.values():
            raise ConfigError(
                f"num-gpus={self.ranks}: must be 1 for disagg-role {said}; denoisers share GPUs, encoders with "
                "encoder-tp, decoders with decoder-tp"
            )
        if self.ranks == 1:
            return
        denoises = Role.DENOISER in self.roles and (self.model.step_cache > 0 or self.model.batch_guidance)
        if self.model.batching or denoises:
            raise ConfigError(
                f"num-gpus={self.ranks}: batching, step-cache and batch-guidance are for denoisers of one GPU"
            )
        if self.parallel.tp > 1 and (self.model.profile != "stock" or self.model.quant):
            raise ConfigError(
                f"denoiser-tp={self.parallel.tp}: needs profile=stock and quant=none, other layers cannot be spread"
            )

    @property
    def shared_roles(self) -> tuple[Role, ...]:
        """The roles that all ranks compute; rank 0 computes the others alone."""
        shared = {Role.DENOISER, *(role for role, tp in self._tps.items() if tp > 1)}
        return tuple(role for role in self.roles if role in shared)

    @property
    def _tps(self) -> dict[Role, int]:
        """The GPUs that encoder and decoder share, by role."""
        return {Role.ENCODER: self.parallel.encoder_tp, Role.DECODER: self.parallel.decoder_tp}

    @property
    def work_url(self) -> str:
        """Where the server reaches this instance's work port."""
        return f"tcp://{self.transfer.hostname}:{self.work_port}"

    @property
    def own_metrics_port(self) -> int:
        """Where its metrics are; 0: nowhere."""
        if self.metrics_port is not None:
            return self.metrics_port
        port = self.work_port + METRICS_OFFSET
        return port if port < 65536 else 0

    @property
    def torch_device(self) -> str:
        """Name of the device of rank 0."""
        return self.device_of(0)

    def device_of(self, rank: int) -> str:
        """Name of the device that a rank computes on."""
        return f"cuda:{self.gpu_ids[rank]}" if self.model.device == "cuda" else "cpu"


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
        _positive(self, "heartbeat_interval", "lease_timeout", "max_attempts", "max_kills")
        _positive(self, "quarantine_after", "quarantine_seconds")
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
    """Work addresses of instances to wait for before the server is ready, by role."""
    run_timeout: float = 600.0
    """Seconds of running time over all attempts of a request (``--disagg-timeout``)."""
    queue_timeout: float = 600.0
    """Seconds of waiting time of a request."""
    output_dir: Path = Path("outputs")
    """Where finished media files are kept; with ``media_store`` only the latest ones, to be served from here."""
    media_store: str | None = None
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
    allow_image_urls: bool = False
    """Whether requests may name pictures by http(s) URL, which the server then fetches from the public internet."""
    key_dir: Path | None = None
    """Folder with the keys of the control plane (``--disagg-key-dir``); None: neither encrypted nor authenticated."""
    insecure: bool = False
    """Allow binding beyond loopback without keys."""
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        _port("port", self.port)
        _port("scheduler-port", self.scheduler_port)
        _port("scheduler-port + 3", self.scheduler_port + 3)
        if self.scheduler_port <= self.port <= self.scheduler_port + 3:
            raise ConfigError(f"port={self.port} collides with the scheduler ports {self.scheduler_port} to +3")
        _positive(self, "run_timeout", "queue_timeout", "retained_jobs", "max_upload_bytes", "max_live_requests")
        _positive(self, "timeout_cap", *(name for name in ("max_queue", "max_wait") if getattr(self, name) is not None))
        self._check_task_ports()
        self._check_keys()
        if self.retained_seconds is not None:
            _positive(self, "retained_seconds")
        if self.retained_bytes is not None:
            _positive(self, "retained_bytes")
        for role, urls in self.instance_urls.items():
            for url in urls:
                parse_tcp_url(f"{role}-urls", url)
        _check_reach("host", self.host, self.key_dir, self.insecure)
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

    def _check_keys(self) -> None:
        for digest in self.api_keys:
            if not (digest.startswith(KEY_PREFIX) and len(digest) == len(KEY_PREFIX) + 64):
                raise ConfigError("api-key: must be the digest of a key, sha256: and 64 hex digits")
        for name in ("max_concurrency_per_key", "max_rate_per_key"):
            if getattr(self, name) is None:
                continue
            _positive(self, name)
            if not self.api_keys:
                raise ConfigError(f"{name.replace('_', '-')}={getattr(self, name)}: needs --api-key or a key file")

    def _check_task_ports(self) -> None:
        for port in self.task_ports or ():
            _port("task-ports", port)
            if port + METRICS_OFFSET > 65535:
                raise ConfigError(
                    f"task-ports={port}: must be at most {65535 - METRICS_OFFSET}, metrics are {METRICS_OFFSET} above"
                )
        taken = [*self.http_ports, *range(self.scheduler_port, self.scheduler_port + 4)]
        if self.metrics_port:
            _port("metrics-port", self.metrics_port)
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
