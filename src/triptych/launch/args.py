"""`ServerArgs`: a thin reading of serving keywords into the settings of each component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from triptych.config import (
    MIB,
    DeviceType,
    DispatchPolicy,
    DTypeName,
    InstanceConfig,
    Lora,
    ModelConfig,
    Offload,
    ProfileChoice,
    Quantisation,
    RouterConfig,
    ServerConfig,
    Shape,
    Task,
    TransferConfig,
    TransferKind,
)
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.launch.option import Kind
from triptych.launch.options import BY_NAME, OPTIONS, unknown_option
from triptych.launch.readers import Scalar, read_key_file
from triptych.parallelism import Parallelism


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """The serving options of one process or of a whole group; the fields are the options of `triptych serve`.

    `triptych.launch.options` documents each. Build it with `from_kwargs`, which reads and checks the values.
    """

    model_path: str | None = None
    disagg_role: str = "monolithic"
    disagg_server_addr: str | None = None
    scheduler_port: int = 5555
    host: str = "127.0.0.1"
    port: int = 30000
    log_level: str = "info"
    num_gpus: int = 1
    base_gpu_id: int = 0
    denoiser_cfg: int | None = None
    denoiser_sp: int | None = None
    denoiser_ulysses: int | None = None
    denoiser_ring: int | None = None
    encoder_tp: int | None = None
    decoder_tp: int | None = None
    denoiser_tp: int = 1
    device: DeviceType | None = None
    revision: str | None = None
    dtype: DTypeName | None = None
    encoder_urls: tuple[str, ...] = ()
    denoiser_urls: tuple[str, ...] = ()
    decoder_urls: tuple[str, ...] = ()
    disagg_timeout: float = 600.0
    queue_timeout: float = 600.0
    disagg_dispatch_policy: DispatchPolicy = "round_robin"
    max_instance_deaths: int = 2
    disagg_p2p_hostname: str = "127.0.0.1"
    disagg_ib_device: str | None = None
    disagg_transfer_pool_size: int = 256 * MIB
    disagg_transfer_gpu_pool_size: int = 0
    disagg_transfer: TransferKind = "auto"
    task: Task | None = None
    component: dict[str, str] = field(default_factory=dict[str, str])
    default: dict[str, Scalar] = field(default_factory=dict[str, Scalar])
    profile: ProfileChoice = "auto"
    attention_backend: str = "auto"
    quant: dict[Role, Quantisation] = field(default_factory=dict[Role, Quantisation])
    offload: dict[Role, Offload] = field(default_factory=dict[Role, Offload])
    vae_tiling: bool = False
    vae_slicing: bool = False
    lora: tuple[Lora, ...] = ()
    previews: bool = False
    prompt_cache: int = 256 * MIB
    batching: bool = False
    batch_guidance: bool = False
    step_cache: float = 0.0
    warmup: tuple[Shape, ...] = ()
    cache_dir: str | None = None
    metrics_port: int | None = None
    max_running_requests: int = 1
    checkpoint_interval: float = 10.0
    drain_timeout: float = 30.0
    slots: int = 2
    disagg_key_dir: str | None = None
    insecure: bool = False
    output_dir: str = "outputs"
    media_store: str | None = None
    state_dir: str | None = None
    max_live_requests: int = 1000
    max_upload_memory: int = 2048 * MIB
    max_queue: int | None = None
    max_wait: float | None = None
    timeout_cap: float = 3600.0
    task_ports: tuple[int, int, int] | None = None
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_concurrency_per_key: int | None = None
    max_rate_per_key: int | None = None
    input_root: str | None = None
    forwarded_allow_ips: str | None = None
    allowed_hosts: str | None = None
    allow_image_urls: bool = False
    retain_seconds: float | None = None
    retain_count: int = 10_000
    retain_bytes: int | None = None
    given: frozenset[str] = frozenset()
    """Names that were said, as against defaults."""

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """Read keywords named as the flags of ``triptych serve``, with underscores.

        Raises `ConfigError` for an unknown keyword, naming the nearest known one, and for a value that the option
        cannot take, naming what it accepts.
        """
        for name in kwargs:
            if name not in BY_NAME:
                raise unknown_option(name)
        said = {name: BY_NAME[name].read(BY_NAME[name].flag, value) for name, value in kwargs.items()}
        return cls(**said, given=frozenset(said))

    @property
    def kind(self) -> Kind:
        """What a process with these options is."""
        if self.disagg_role == "monolithic":
            return "monolithic"
        return "server" if self.disagg_role == "server" else "instance"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that it computes."""
        match self.kind:
            case "monolithic":
                return ROLES
            case "server":
                return ()
            case "instance":
                return tuple(Role(name) for name in self.disagg_role.split(","))

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """GPUs of the instance."""
        return tuple(range(self.base_gpu_id, self.base_gpu_id + self.num_gpus))

    def _sharing(self, role: Role, said: int | None) -> int:
        """How many GPUs share the work of ``role``: what was said, or all of an instance that has no other."""
        return said if said is not None else self.num_gpus if self.roles == (role,) else 1

    def check_applies(self, sources: Mapping[str, str] | None = None) -> None:
        """Raise `ConfigError` for an option that was said though a process of this kind does not read it.

        ``sources`` says where an option was said, if not by its flag.
        """
        for option in OPTIONS:
            if option.name in self.given and self.kind not in option.kinds:
                readers = " or ".join(sorted(option.kinds))
                said = (sources or {}).get(option.name, option.flag)
                raise ConfigError(
                    f"{said}{'' if said == option.flag else f': {option.name}'} does not apply to --disagg-role "
                    f"{self.disagg_role}: {readers} processes read it"
                )

    def server_config(self) -> ServerConfig:
        """Settings of the router and HTTP door."""
        urls = {
            Role.ENCODER: self.encoder_urls,
            Role.DENOISER: self.denoiser_urls,
            Role.DECODER: self.decoder_urls,
        }
        from_file = () if self.api_key_file is None else read_key_file("--api-key-file", self.api_key_file)
        return ServerConfig(
            host=self.host,
            port=self.port,
            scheduler_port=self.scheduler_port,
            instance_urls={role: addresses for role, addresses in urls.items() if addresses},
            run_timeout=self.disagg_timeout,
            queue_timeout=self.queue_timeout,
            output_dir=Path(self.output_dir),
            media_store=self.media_store,
            state_dir=Path(f"{self.output_dir}-state" if self.state_dir is None else self.state_dir),
            max_live_requests=self.max_live_requests,
            max_upload_memory=self.max_upload_memory,
            max_queue=self.max_queue,
            max_wait=self.max_wait,
            timeout_cap=self.timeout_cap,
            metrics_port=self.metrics_port,
            task_ports=self.task_ports,
            api_keys=self.api_key + from_file,
            max_concurrency_per_key=self.max_concurrency_per_key,
            max_rate_per_key=self.max_rate_per_key,
            input_root=None if self.input_root is None else Path(self.input_root),
            forwarded_allow_ips=self.forwarded_allow_ips,
            allowed_hosts=() if self.allowed_hosts is None else tuple(self.allowed_hosts.split(",")),
            allow_image_urls=self.allow_image_urls,
            retained_seconds=self.retain_seconds,
            retained_jobs=self.retain_count,
            retained_bytes=self.retain_bytes,
            key_dir=self._key_dir,
            insecure=self.insecure,
            router=RouterConfig(
                model=self.model_path,
                dispatch_policy=self.disagg_dispatch_policy,
                max_kills=self.max_instance_deaths,
            ),
        )

    def instance_config(self, *, default_device: DeviceType) -> InstanceConfig:
        """Settings of a role instance; ``default_device`` is where it computes when the options do not say."""
        if self.model_path is None:
            raise ConfigError(f"--model-path is needed with --disagg-role {self.disagg_role}")
        if self.disagg_server_addr is None:
            raise ConfigError(
                f"--disagg-server-addr is needed with --disagg-role {self.disagg_role}: tcp://host:port of the "
                "server's frontend"
            )
        self._check_memory()
        return InstanceConfig(
            roles=self.roles,
            server_addr=self.disagg_server_addr,
            work_port=self.scheduler_port,
            transfer=TransferConfig(
                kind=self.disagg_transfer,
                hostname=self.disagg_p2p_hostname,
                ib_device=self.disagg_ib_device,
                pool_bytes=self.disagg_transfer_pool_size,
                gpu_pool_bytes=self.disagg_transfer_gpu_pool_size,
            ),
            model=self._model_config(self.model_path, default_device),
            gpu_ids=self.gpu_ids,
            parallel=self._parallelism(),
            slots=self.slots,
            max_running=self.max_running_requests,
            metrics_port=self.metrics_port,
            checkpoint_interval=self.checkpoint_interval,
            drain_timeout=self.drain_timeout,
            key_dir=self._key_dir,
            insecure=self.insecure,
        )

    def _model_config(self, path: str, default_device: DeviceType) -> ModelConfig:
        return ModelConfig(
            path=path,
            revision=self.revision,
            device=self.device or default_device,
            dtype=self.dtype,
            task=self.task,
            components=self.component,
            defaults=self.default,
            profile=self.profile,
            attention_backend=self.attention_backend,
            quant=self._own(self.quant),
            prompt_cache_bytes=self.prompt_cache,
            batching=self.batching,
            batch_guidance=self.batch_guidance,
            step_cache=self.step_cache,
            warmup=self.warmup,
            cache_dir=None if self.cache_dir is None else Path(self.cache_dir),
            offload=self._own(self.offload),
            vae_tiling=self.vae_tiling,
            vae_slicing=self.vae_slicing,
            loras=self.lora,
            previews=self.previews,
        )

    def _parallelism(self) -> Parallelism:
        return Parallelism(
            cfg=self.denoiser_cfg,
            sp=self.denoiser_sp,
            ulysses=self.denoiser_ulysses,
            ring=self.denoiser_ring,
            tp=self.denoiser_tp,
            encoder_tp=self._sharing(Role.ENCODER, self.encoder_tp),
            decoder_tp=self._sharing(Role.DECODER, self.decoder_tp),
        )

    def _own(self, kinds: Mapping[Role, Any]) -> dict[Role, Any]:
        """What of ``kinds`` this process does to its own roles."""
        return {role: kind for role, kind in kinds.items() if role in self.roles and kind != "none"}

    def _check_memory(self) -> None:
        """Refuse what would change nothing in this process."""
        for flag, kinds in (("--quant", self.quant), ("--offload", self.offload)):
            for role, kind in kinds.items():
                if role not in self.roles and kind != "none" and not _said_of_all(kinds):
                    raise ConfigError(f"{flag} {role}={kind}: this instance serves {', '.join(self.roles)} only")
        if self.device == "cpu" and any(kind != "none" for kind in self.offload.values()):
            raise ConfigError("--offload: needs --device cuda; on the CPU all weights are in host memory")
        if self.num_gpus > 1:
            previews = self.previews and Role.DENOISER in self.roles
            for flag, said in (("--offload", self.offload), ("--previews", previews)):
                if said:
                    raise ConfigError(f"{flag}: needs --num-gpus 1, not {self.num_gpus}")
        for name in ("vae_tiling", "vae_slicing"):
            if getattr(self, name) and self.roles == (Role.DENOISER,):
                raise ConfigError(f"{BY_NAME[name].flag}: a denoiser has no VAE")

    def for_roles(self, roles: tuple[Role, ...]) -> dict[str, Any]:
        """What was said role by role, or of what one role does, as far as it concerns an instance of ``roles``."""
        own: dict[str, Any] = {
            name: {role: kind for role, kind in getattr(self, name).items() if role in roles}
            for name in ("quant", "offload")
            if name in self.given
        }
        if Role.DENOISER not in roles and "previews" in self.given:
            own["previews"] = False
        if roles == (Role.DENOISER,):
            own |= {name: False for name in ("vae_tiling", "vae_slicing") if name in self.given}
        return own

    @property
    def _key_dir(self) -> Path | None:
        return None if self.disagg_key_dir is None else Path(self.disagg_key_dir)

    def for_child(self, kind: Kind, **overrides: Any) -> Self:
        """What a ``triptych serve`` process of this kind is to be told of what was said here, so that it can be checked
        before there is such a process.

        ``overrides`` are said besides, or instead; None takes one back.
        """
        said = {option.name: getattr(self, option.name) for option in OPTIONS if option.name in self.given}
        said = {name: value for name, value in said.items() if kind in BY_NAME[name].kinds} | overrides
        return self.from_kwargs(**{name: value for name, value in said.items() if value is not None})

    @property
    def words(self) -> list[str]:
        """The command line words that say all this to ``triptych serve``."""
        return [
            word for option in OPTIONS if option.name in self.given for word in option.words(getattr(self, option.name))
        ]


def _said_of_all(kinds: Mapping[Role, str]) -> bool:
    """Whether one kind was said of all roles, and so of whichever are here."""
    return set(kinds) == set(ROLES) and len(set(kinds.values())) == 1
