"""The table of serving options: name, how a value is read, default, and which kinds of process read it.

The command line and the Python keywords are both derived from this table, so neither can have an option that the other
lacks, and an option that a kind of process does not read is refused for that kind.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from triptych.config import KEY_PREFIX, MIB, Shape, parse_shape, parse_tcp_url
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role

Kind: TypeAlias = Literal["monolithic", "server", "instance"]
"""What a process is: the router and HTTP door, a role instance, or the door with one instance of all roles."""

Reader: TypeAlias = Callable[[str, object], Any]
"""Reads one value, a string from the command line or a Python value; the first argument is the flag for errors."""

Scalar: TypeAlias = bool | int | float | str

ALL: frozenset[Kind] = frozenset({"monolithic", "server", "instance"})
DOOR: frozenset[Kind] = frozenset({"monolithic", "server"})
COMPUTE: frozenset[Kind] = frozenset({"monolithic", "instance"})
SERVER: frozenset[Kind] = frozenset({"server"})
INSTANCE: frozenset[Kind] = frozenset({"instance"})

_SIZE = re.compile(r"(\d+)\s*(|B|KiB|MiB|GiB|TiB)")
_KEY = re.compile(r"[!-~]{8,512}")
_DIGEST = re.compile(KEY_PREFIX + "[0-9a-f]{64}")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30, "TiB": 1 << 40}


def refuse(flag: str, value: object, accepted: str) -> ConfigError:
    """The error of a value that an option cannot take."""
    return ConfigError(f"{flag} {value!r}: must be {accepted}")


def read_text(flag: str, value: object) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise refuse(flag, value, "a text that is not empty")
    return value


def read_path(flag: str, value: object) -> str:
    """A path, as a string."""
    return read_text(flag, str(value) if hasattr(value, "__fspath__") else value)


def read_integer(flag: str, value: object) -> int:
    """A whole number, 0 or more."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise refuse(flag, value, "a whole number, 0 or more")


def read_ports(flag: str, value: object) -> tuple[int, ...]:
    """Three ports with commas between, or a sequence of three."""
    parts: list[object] = list(re.split("[,;]", value)) if isinstance(value, str) else _sequence(flag, value)
    if len(parts) != 3:
        raise refuse(flag, value, "three ports: ENCODER,TRANSFORMER,DECODER, e.g. 8002,8003,8006")
    return tuple(read_integer(flag, part.strip() if isinstance(part, str) else part) for part in parts)


def read_share(flag: str, value: object) -> float:
    """A number from 0 up to, but not including, 1."""
    try:
        share = float(value) if isinstance(value, str | int | float) else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise refuse(flag, value, "a number from 0 to less than 1")
    return share


def read_shapes(flag: str, value: object) -> tuple[Shape, ...]:
    """Shapes with commas between, or a sequence of shapes or texts."""
    parts: list[object] = list(value.split(",")) if isinstance(value, str) else _sequence(flag, value)
    return tuple(part if isinstance(part, Shape) else parse_shape(flag, read_text(flag, part)) for part in parts)


def read_seconds(flag: str, value: object) -> float:
    """A number of seconds greater than 0."""
    try:
        seconds = float(value) if isinstance(value, str | int | float) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise refuse(flag, value, "a number of seconds greater than 0")
    return seconds


def read_seconds_or_zero(flag: str, value: object) -> float:
    """A number of seconds, 0 or more."""
    try:
        seconds = float(value) if isinstance(value, str | int | float) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise refuse(flag, value, "a number of seconds, 0 or more")
    return seconds


def read_size(flag: str, value: object) -> int:
    """Bytes: a plain number or one with a binary unit, e.g. ``256MiB``, ``1GiB``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise refuse(flag, value, "a size in bytes or with a unit: 268435456, 256MiB, 1GiB")
    return int(match[1]) * _UNITS[match[2]]


def read_switch(flag: str, value: object) -> bool:
    """A plain yes or no."""
    if not isinstance(value, bool):
        raise refuse(flag, value, "true or false")
    return value


def read_role(flag: str, value: object) -> str:
    """``monolithic``, ``server`` or a comma list of the roles, in the order in which a request passes them."""
    accepted = f"monolithic, server, or one or several of {', '.join(ROLES)} with commas between"
    if not isinstance(value, str):
        raise refuse(flag, value, accepted)
    if value in ("monolithic", "server"):
        return value
    names = [name.strip() for name in value.split(",")]
    if len(set(names)) != len(names) or not set(names) <= set(ROLES):
        raise refuse(flag, value, accepted)
    return ",".join(role for role in ROLES if role in names)


def read_address(flag: str, value: object) -> str:
    """One ``tcp://host:port``."""
    text = read_text(flag, value)
    parse_tcp_url(flag, text)
    return text


def read_addresses(flag: str, value: object) -> tuple[str, ...]:
    """Several ``tcp://host:port`` with semicolons between, or a sequence of them."""
    parts: list[object] = list(value.split(";")) if isinstance(value, str) else _sequence(flag, value)
    return tuple(read_address(flag, part.strip() if isinstance(part, str) else part) for part in parts)


def read_components(flag: str, value: object) -> dict[str, str]:
    """``NAME=PATH`` entries, or a mapping."""
    if isinstance(value, dict):
        return {str(name): read_path(flag, path) for name, path in value.items()}
    components: dict[str, str] = {}
    for entry in _sequence(flag, value):
        name, equals, path = entry.partition("=") if isinstance(entry, str) else ("", "", "")
        if not (name and equals and path):
            raise refuse(flag, entry, "NAME=PATH, e.g. transformer=weights.safetensors")
        if name in components:
            raise ConfigError(f"{flag} {entry!r}: the component {name} is given twice")
        components[name] = path
    return components


def read_defaults(flag: str, value: object) -> dict[str, Scalar]:
    """``NAME=VALUE`` entries, or a mapping. A value in text is a number, true or false if it looks like one."""
    if isinstance(value, dict):
        entries: dict[str, object] = {str(name): entry for name, entry in value.items()}
    else:
        entries = {}
        for entry in [value] if isinstance(value, str) else _sequence(flag, value):
            name, equals, text = entry.partition("=") if isinstance(entry, str) else ("", "", "")
            if not (name and equals):
                raise refuse(flag, entry, "NAME=VALUE, e.g. num_inference_steps=40")
            if name in entries:
                raise ConfigError(f"{flag} {entry!r}: {name} is given twice")
            entries[name] = _scalar(text)
    for name, entry in entries.items():
        if not isinstance(entry, bool | int | float | str):
            raise refuse(flag, f"{name}={entry!r}", "a number, a text, true or false")
    return cast("dict[str, Scalar]", entries)


def _scalar(text: str) -> Scalar:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def _shown(value: object) -> str:
    """A value of a mapping as `_scalar` reads it."""
    return value if isinstance(value, str) and _scalar(value) == value else json.dumps(value)


def read_keys(flag: str, value: object) -> tuple[str, ...]:
    """API keys or their digests, as digests: a key itself is held nowhere."""
    parts: list[object] = [value] if isinstance(value, str) else _sequence(flag, value)
    return tuple(_digest(flag, part) for part in parts)


def read_key_file(flag: str, path: str) -> tuple[str, ...]:
    """The keys in a file, one on each line; empty lines and those that begin with # are passed over."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path!r}: cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path!r}: has no key in it")
    return read_keys(flag, keys)


def _digest(flag: str, key: object) -> str:
    # The value itself is not repeated: errors end in logs.
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ConfigError(f"{flag}: a key must have 8 to 512 printable ASCII characters without spaces")
    if key.startswith(KEY_PREFIX):
        if not _DIGEST.fullmatch(key):
            raise ConfigError(f"{flag}: a digest must be {KEY_PREFIX} and 64 lower-case hex digits")
        return key
    return KEY_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def one_of(*names: str) -> Reader:
    """A reader of one of a few words."""

    def read(flag: str, value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise refuse(flag, value, f"one of {', '.join(names)}")
        return value

    return read


def _sequence(flag: str, value: object) -> list[object]:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return list(value)
    raise refuse(flag, value, "a list")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One serving option."""

    name: str
    """Python keyword; the flag is the same with hyphens."""
    read: Reader
    default: object = None
    kinds: frozenset[Kind]
    """Kinds of process that read it."""
    metavar: str
    help: str
    repeatable: bool = False

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"TRIPTYCH_{self.name.upper()}"

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone, without a value."""
        return self.read is read_switch

    def read_variable(self, text: str) -> Any:
        """The value that ``text`` stands for in the environment; raises `ConfigError` that names the variable."""
        if self.is_switch:
            if text not in ("true", "false", "1", "0"):
                raise refuse(self.variable, text, "true or false")
            return text in ("true", "1")
        parts = text.split(";") if self.read in (read_components, read_defaults) else text
        return self.read(self.variable, parts)

    def words(self, value: Any) -> list[str]:
        """The command line words that say this value."""
        if self.is_switch:
            return [self.flag] if value else []
        if isinstance(value, dict):
            return [word for name, entry in value.items() for word in (self.flag, f"{name}={_shown(entry)}")]
        if isinstance(value, tuple) and self.repeatable:
            return [word for part in value for word in (self.flag, str(part))]
        if isinstance(value, tuple):
            return [self.flag, ";".join(str(part) for part in value)]
        return [self.flag, str(value)]


def _option(
    name: str, read: Reader, default: object, kinds: frozenset[Kind], metavar: str, text: str, *, repeat: bool = False
) -> Option:
    return Option(name=name, read=read, default=default, kinds=kinds, metavar=metavar, help=text, repeatable=repeat)


def _urls(role: Role) -> Option:
    text = f"work addresses of {role}s to wait for, ';' between; more may join at run time"
    return _option(f"{role}_urls", read_addresses, (), SERVER, "TCP;TCP", text)


_ROLE = "monolithic, server, or one or several of encoder, denoiser, decoder with commas between"
_PORT = "first control port: the server's frontend (results arrive on the next three), or an instance's work port"

OPTIONS: tuple[Option, ...] = (
    _option("model_path", read_path, None, COMPUTE, "MODEL", "model folder, Hub id or embedded model (tiny)"),
    _option("disagg_role", read_role, "monolithic", ALL, "ROLE", _ROLE),
    _option("disagg_server_addr", read_address, None, INSTANCE, "TCP", "the server's frontend, tcp://host:port"),
    _option("scheduler_port", read_integer, 5555, ALL, "PORT", _PORT),
    _option("host", read_text, "127.0.0.1", DOOR, "HOST", "address that HTTP and the control plane bind"),
    _option("port", read_integer, 30000, DOOR, "PORT", "HTTP port"),
    _option("num_gpus", read_integer, 1, COMPUTE, "N", "GPUs of the instance"),
    _option("base_gpu_id", read_integer, 0, COMPUTE, "ID", "first GPU of the instance"),
    _option("device", one_of("cuda", "cpu"), None, COMPUTE, "{cuda,cpu}", "default: cuda where torch sees a GPU"),
    _option(
        "dtype",
        one_of("float32", "bfloat16", "float16"),
        None,
        COMPUTE,
        "DTYPE",
        "float32, bfloat16 or float16; default: bfloat16 on cuda, float32 on cpu",
    ),
    _urls(Role.ENCODER),
    _urls(Role.DENOISER),
    _urls(Role.DECODER),
    _option("disagg_timeout", read_seconds, 600.0, DOOR, "SECONDS", "running time of a request over all attempts"),
    _option("queue_timeout", read_seconds, 600.0, DOOR, "SECONDS", "waiting time of a request"),
    _option(
        "disagg_dispatch_policy",
        one_of("round_robin", "max_free_slots"),
        "round_robin",
        DOOR,
        "POLICY",
        "round_robin or max_free_slots",
    ),
    _option(
        "max_instance_deaths",
        read_integer,
        2,
        DOOR,
        "N",
        "instances that may die of one request, without a checkpoint between, before it fails",
    ),
    _option("disagg_p2p_hostname", read_text, "127.0.0.1", INSTANCE, "HOST", "address that peers reach this one under"),
    _option("disagg_ib_device", read_text, None, INSTANCE, "DEVICE", "RDMA device for Mooncake, e.g. mlx5_0"),
    _option(
        "disagg_transfer_pool_size", read_size, 256 * MIB, COMPUTE, "SIZE", "memory for tensors on their way: 256MiB"
    ),
    _option(
        "disagg_transfer",
        one_of("auto", "local", "shm", "mooncake"),
        "auto",
        INSTANCE,
        "PLANE",
        "auto, local, shm or mooncake: how tensors travel",
    ),
    _option(
        "task",
        one_of("text-to-image", "image-to-image", "inpainting", "text-to-video", "image-to-video"),
        None,
        COMPUTE,
        "TASK",
        "what to do with the model's weights besides its own task, e.g. inpainting; `triptych models` says which can",
    ),
    _option(
        "component",
        read_components,
        None,
        COMPUTE,
        "NAME=PATH",
        "weights that replace one component's; may be repeated",
        repeat=True,
    ),
    _option(
        "default",
        read_defaults,
        None,
        COMPUTE,
        "NAME=VALUE",
        "value of a request parameter where a request does not say it, e.g. num_inference_steps=40; may be repeated",
        repeat=True,
    ),
    _option(
        "profile",
        one_of("stock", "lossless", "fast"),
        "stock",
        COMPUTE,
        "PROFILE",
        "stock Diffusers, lossless (faster kernels, equal up to rounding), or fast (FP8 besides)",
    ),
    _option("attention_backend", read_text, "auto", COMPUTE, "NAME", "auto, native, cudnn, flash3 or flash3-fp8"),
    _option("quant", one_of("none", "fp8", "int8"), "none", COMPUTE, "KIND", "quantised denoiser: none, fp8 or int8"),
    _option(
        "prompt_cache",
        read_size,
        256 * MIB,
        COMPUTE,
        "SIZE",
        "memory for embeddings of prompts seen before, on the encoder's device; 0: none are kept",
    ),
    _option(
        "batching",
        read_switch,
        False,
        COMPUTE,
        "",
        "join the forwards of requests that run at once, where that is faster; results differ by rounding",
    ),
    _option(
        "step_cache",
        read_share,
        0.0,
        COMPUTE,
        "THRESHOLD",
        "let a denoising step reuse the last one's work where its first block changed by less, e.g. 0.1; lossy; 0: off",
    ),
    _option(
        "warmup",
        read_shapes,
        (),
        COMPUTE,
        "SHAPES",
        "shapes to compile and run before the first request, e.g. 832x480x81 or 832x480x81,1024x1024x49",
    ),
    _option(
        "cache_dir",
        read_path,
        None,
        COMPUTE,
        "FOLDER",
        "compiled graphs and measurements, kept for the next start; default: triptych in the user's cache folder",
    ),
    _option("max_running_requests", read_integer, 1, COMPUTE, "N", "requests whose denoising steps interleave"),
    _option(
        "checkpoint_interval",
        read_seconds_or_zero,
        10.0,
        COMPUTE,
        "SECONDS",
        "time between checkpoints of a denoising request, kept by another instance; 0: none",
    ),
    _option(
        "drain_timeout",
        read_seconds_or_zero,
        30.0,
        COMPUTE,
        "SECONDS",
        "time to finish or hand over its work when asked to stop; 0: leave at once",
    ),
    _option("slots", read_integer, 2, COMPUTE, "N", "requests held at once: computing, or with inputs pulled ahead"),
    _option("disagg_key_dir", read_path, None, ALL, "DIR", "keys of the control plane, made by `triptych keygen DIR`"),
    _option("insecure", read_switch, False, ALL, "", "allow binding beyond loopback without authentication"),
    _option("output_dir", read_path, "outputs", DOOR, "FOLDER", "where finished media files are kept"),
    _option("media_store", read_text, None, DOOR, "URL", "keep media in this fsspec store instead: s3://bucket/prefix"),
    _option("state_dir", read_path, None, DOOR, "FOLDER", "journal of accepted jobs; default: output-dir with -state"),
    _option("max_live_requests", read_integer, 1000, DOOR, "N", "requests that wait or run at once; more get 429"),
    _option("max_queue", read_integer, None, DOOR, "N", "requests that wait at once; more get 429; default: no limit"),
    _option("max_wait", read_seconds, None, DOOR, "SECONDS", "predicted waiting beyond which requests get 429"),
    _option("timeout_cap", read_seconds, 3600.0, DOOR, "SECONDS", "most that a request may set its own timeouts to"),
    _option(
        "task_ports", read_ports, None, DOOR, "E,T,D", "ports for tasks in three posts: ENCODER,TRANSFORMER,DECODER"
    ),
    _option(
        "api_key",
        read_keys,
        (),
        DOOR,
        "KEY",
        "HTTP API key, or its digest sha256:HEX; may be repeated (a file keeps keys out of process lists)",
        repeat=True,
    ),
    _option("api_key_file", read_path, None, DOOR, "FILE", "file with an HTTP API key, or its digest, on each line"),
    _option("max_concurrency_per_key", read_integer, None, DOOR, "N", "requests of one API key at once; more get 429"),
    _option("max_rate_per_key", read_integer, None, DOOR, "N", "requests of one API key a minute; more get 429"),
    _option("input_root", read_path, None, DOOR, "FOLDER", "folder from which requests may name pictures by path"),
    _option("allow_image_urls", read_switch, False, DOOR, "", "fetch pictures that requests name by http(s) URL"),
    _option("retain_seconds", read_seconds, None, DOOR, "SECONDS", "forget ended jobs and their media after this time"),
    _option("retain_count", read_integer, 10_000, DOOR, "N", "ended jobs kept with their media; the oldest go first"),
    _option(
        "retain_bytes", read_size, None, DOOR, "SIZE", "media kept of ended jobs, e.g. 100GiB; the oldest go first"
    ),
)
"""All serving options, in the order in which the help shows them."""

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}


def unknown_option(name: str, *also: str) -> ConfigError:
    """The error of a name that is no option; ``also`` are other names that would have done."""
    known = (*BY_NAME, *also)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return ConfigError(f"{name}: unknown option; {hint}")
