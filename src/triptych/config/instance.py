"""One role instance: its roles, ports, devices and data plane."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from triptych.config.checks import (
    METRICS_OFFSET,
    MIB,
    check_host,
    check_port,
    check_reach,
    parse_tcp_url,
    positive,
    tcp_url,
)
from triptych.config.model import ModelConfig
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.parallelism import Parallelism

TransferKind = Literal["auto", "local", "shm", "cuda-ipc", "gpudirect", "mooncake"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferConfig:
    """The data plane of one instance."""

    kind: TransferKind = "auto"
    """auto takes the best plane that both ends have: CUDA IPC between GPUs that share memory, local, then shm on one
    host, then Mooncake, by RDMA also between GPUs."""
    hostname: str = "127.0.0.1"
    """Address that peers reach this instance's data plane and work port under (``--disagg-p2p-hostname``)."""
    ib_device: str | None = None
    """RDMA device for Mooncake, e.g. mlx5_0; None means TCP."""
    pool_bytes: int = 256 * MIB
    """Registered memory for staged and pulled tensors."""
    gpu_pool_bytes: int = 0
    """GPU memory out of which other GPUs take the newest of them: of the host by CUDA IPC, of others by Mooncake over
    RDMA; 0: they go through host memory."""

    def __post_init__(self) -> None:
        if self.pool_bytes < MIB:
            raise ConfigError(f"disagg-transfer-pool-size={self.pool_bytes}: must be at least 1 MiB")
        if self.gpu_pool_bytes and self.gpu_pool_bytes < MIB:
            raise ConfigError(f"disagg-transfer-gpu-pool-size={self.gpu_pool_bytes}: must be 0 or at least 1 MiB")
        if self.ib_device is not None and self.kind not in ("auto", "gpudirect", "mooncake"):
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
        check_port("scheduler-port", self.work_port)
        positive(self, "slots", "max_running")
        if self.metrics_port:
            check_port("metrics-port", self.metrics_port)
            if self.metrics_port == self.work_port:
                raise ConfigError(f"metrics-port={self.metrics_port} is the work port (scheduler-port)")
        for name in ("checkpoint_interval", "drain_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more seconds")
        if self.max_running > self.slots:
            raise ConfigError(f"max-running-requests={self.max_running}: must not exceed the slots ({self.slots})")
        if self.model.batching and self.max_running < 2 and self.roles != (Role.DECODER,):
            raise ConfigError("batching: needs max-running-requests of 2 or more, since it joins what runs at once")
        check_host("disagg-p2p-hostname", self.transfer.hostname)
        check_reach("disagg-p2p-hostname", self.transfer.hostname, self.key_dir, self.insecure)
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
        if tps[Role.ENCODER] > 1 and Role.ENCODER in self.model.quant:
            raise ConfigError(
                f"encoder-tp={tps[Role.ENCODER]}: needs quant=none for the encoder, other layers cannot be spread"
            )
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
        if self.parallel.tp > 1 and (self.model.profile not in ("auto", "stock") or self.model.quant):
            raise ConfigError(
                f"denoiser-tp={self.parallel.tp}: needs profile=stock and quant=none, other layers cannot be spread"
            )
        if self.parallel.tp > 1 and self.model.loras:
            raise ConfigError(
                f"denoiser-tp={self.parallel.tp} and lora: layers that adapters may change cannot be spread; "
                "denoiser-cfg, denoiser-ulysses and denoiser-ring can"
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
        return tcp_url(self.transfer.hostname, self.work_port)

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
