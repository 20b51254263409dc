"""How the values of options are read: text of the command line or of a variable, or a value of a file or keyword.

Every reader takes the name that errors are to use, and the value. It gives the value in the option's own type, and
takes that back unchanged. What it cannot read is a `ConfigError` that names the value and what would be accepted.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias, cast

from triptych.config import KEY_PREFIX, MIB, Lora, Shape, parse_shape, parse_tcp_url
from triptych.config.logs import LEVELS
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role

Reader: TypeAlias = Callable[[str, object], Any]
"""Reads one value, a string from the command line or a Python value; the first argument is the flag for errors."""

Scalar: TypeAlias = bool | int | float | str

OTHERS = 0o007
"""Rights of users who neither own a file nor are in its group."""

_SIZE = re.compile(r"(\d+)\s*(|B|KiB|MiB|GiB|TiB)")
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
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


def read_gpu_lists(flag: str, value: object) -> list[list[int]]:
    """GPU numbers: ';' between instances, ',' between the GPUs of one instance."""
    text = read_text(flag, value)
    if re.fullmatch(r"\d+(,\d+)*(;\d+(,\d+)*)*", text) is None:
        raise refuse(flag, text, "GPU numbers, ';' between instances and ',' within one, e.g. \"0,1;2\"")
    return [[int(gpu) for gpu in part.split(",")] for part in text.split(";")]


def read_ports(flag: str, value: object) -> tuple[int, ...]:
    """Three ports with commas between, or a sequence of three."""
    parts: list[object] = list(re.split("[,;]", value)) if isinstance(value, str) else _sequence(flag, value)
    if len(parts) != 3:
        raise refuse(flag, value, "three ports: ENCODER,TRANSFORMER,DECODER, e.g. 8002,8003,8006")
    return tuple(read_integer(flag, part.strip() if isinstance(part, str) else part) for part in parts)


def read_proxies(flag: str, value: object) -> str:
    """Addresses and networks with commas between, a sequence of them, or ``*``; the result is text."""
    parts = value.split(",") if isinstance(value, str) else [str(part) for part in _sequence(flag, value)]
    names = [part.strip() for part in parts]
    try:
        if names != ["*"]:
            for name in names:
                ipaddress.ip_network(name)
    except ValueError as error:
        raise refuse(flag, value, "IP addresses and networks with commas between, e.g. 10.0.0.0/8,::1, or *") from error
    return ",".join(names)


def read_hosts(flag: str, value: object) -> str:
    """Names of hosts without ports and with commas between, a sequence of them, or ``*``; the result is text."""
    parts = value.split(",") if isinstance(value, str) else [str(part) for part in _sequence(flag, value)]
    names = [part.strip().lower() for part in parts]
    if names != ["*"] and not all(_HOST.fullmatch(name) for name in names):
        raise refuse(flag, value, "names of hosts without ports, with commas between, e.g. pictures.example, or *")
    return ",".join(names)


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
    return tuple(
        part if isinstance(part, Shape) else parse_shape(flag, read_text(flag, part), counted=True) for part in parts
    )


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


def read_host(flag: str, value: object) -> str:
    """A host name or address, an IPv6 address with or without brackets."""
    text = read_text(flag, value)
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


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


def shown(value: object) -> str:
    """A value of a mapping as `_scalar` reads it."""
    return value if isinstance(value, str) and _scalar(value) == value else json.dumps(value)


def read_loras(flag: str, value: object) -> tuple[Lora, ...]:
    """``NAME=PATH``, ``NAME=PATH:SCALE`` or ``NAME=PATH,PATH:SCALE`` entries, or a mapping of names to such paths."""
    if isinstance(value, dict):
        value = [f"{name}={path}" for name, path in value.items()]
    found: list[Lora] = []
    for entry in [value] if isinstance(value, str) else _sequence(flag, value):
        if isinstance(entry, Lora):
            found.append(entry)
            continue
        name, equals, rest = entry.partition("=") if isinstance(entry, str) else ("", "", "")
        path, colon, scale = rest.rpartition(":")
        if not (name and equals and rest):
            raise refuse(flag, entry, "NAME=PATH[,SECOND][:SCALE], e.g. fox=fox.safetensors:0.8")
        try:
            found.append(_lora(name, path, float(scale)) if colon else _lora(name, rest, 1.0))
        except ValueError:  # a colon that belongs to the path
            found.append(_lora(name, rest, 1.0))
    return tuple(found)


def _lora(name: str, paths: str, scale: float) -> Lora:
    """Commas belong to a path unless a whole file name stands before them."""
    path, comma, second = paths.partition(".safetensors,")
    return Lora(name=name, path=f"{path}.safetensors" if comma else path, second=second if comma else None, scale=scale)


def per_role(bare: tuple[Role, ...], *kinds: str) -> Reader:
    """A reader of words for roles: KIND alone means the roles ``bare``, ROLE=KIND one. The result maps role to kind."""

    def read(flag: str, value: object) -> dict[Role, str]:
        accepted = f"one of {', '.join(kinds)}, or ROLE=KIND with commas between, e.g. encoder={kinds[1]}"
        if isinstance(value, dict):
            value = [f"{role}={kind}" for role, kind in value.items()]
        entries = [value] if isinstance(value, str) else _sequence(flag, value)
        found: dict[Role, str] = {}
        for entry in (part.strip() for text in entries for part in str(text).split(",")):
            name, equals, kind = entry.rpartition("=")
            if kind not in kinds or (equals and name not in ROLES):
                raise refuse(flag, entry, accepted)
            for role in (Role(name),) if equals else bare:
                if role in found:
                    raise ConfigError(f"{flag} {entry!r}: the {role} is given twice")
                found[role] = kind
        return found

    return read


def read_keys(flag: str, value: object) -> tuple[str, ...]:
    """API keys or their digests, as digests: a key itself is held nowhere."""
    parts: list[object] = [value] if isinstance(value, str) else _sequence(flag, value)
    return tuple(_digest(flag, part) for part in parts)


def read_key_file(flag: str, path: str) -> tuple[str, ...]:
    """The keys in a file, one on each line; empty lines and those that begin with # are passed over.

    A file that every user of the machine can read is refused, as of a control key, unless it has digests alone.
    """
    try:
        with Path(path).open() as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.strip() for line in file.read().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path!r}: cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path!r}: has no key in it")
    if mode & OTHERS and not all(key.startswith(KEY_PREFIX) for key in keys):
        raise ConfigError(
            f"{flag} {path!r}: can be read by every user of this machine; chmod 600 it, or keep digests there"
        )
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


def read_log_level(flag: str, value: object) -> str:
    """A level by its name, in letters of any case."""
    return one_of(*LEVELS)(flag, value.lower() if isinstance(value, str) else value)


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
