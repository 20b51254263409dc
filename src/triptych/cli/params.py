"""What `--param NAME=VALUE` says, in the types that the served model declares: requests are strict about them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from triptych.errors import ConfigError

ADDRESSES: Final = ("data:", "http://", "https://")
"""How a picture begins that the server is to fetch; anything else is a file here."""

_OWN: Final[Mapping[str, str]] = {
    "n": "one file is made",
    "output_format": "--output says it with its suffix",
    "response_format": "the file itself is fetched",
    "path": "--output names the file",
    "timeout": "a request has queue_timeout and run_timeout",
    "on_progress": "progress is shown anyway",
}
"""Fields that this command decides itself."""

_FILES: Final = ("image", "images", "video")


def read_file(flag: str, path: str) -> bytes:
    """The bytes of a file that a flag names; raises `ConfigError`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from error


def read_params(said: Iterable[tuple[str, str]], declared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Name to value, files read. ``declared``: parameters as `/v1/models` lists them.

    A name that is not declared goes to the server as JSON if it is that, else as text: it may be a field of the API,
    and the server says which one comes near it if not. Raises `ConfigError`.
    """
    types = {param["name"]: param["type"] for param in declared}
    found: dict[str, Any] = {}
    for name, text in said:
        if name in _OWN:
            raise ConfigError(f"--param {name}={text}: cannot be said; {_OWN[name]}")
        value = _typed(name, text, types.get(name))
        if types.get(name) == "images":
            found.setdefault(name, []).append(value)
        elif name in found:
            raise ConfigError(f"--param {name}={text}: {name} is given twice")
        else:
            found[name] = value
    return found


def _typed(name: str, text: str, kind: str | None) -> Any:
    flag = f"--param {name}={text}"
    if kind in _FILES:
        return text if text.startswith(ADDRESSES) else read_file(f"--param {name}", text)
    try:
        match kind:
            case "integer":
                return int(text)
            case "number":
                return float(text)
            case "boolean":
                return {"true": True, "false": False}[text.lower()]
            case None:
                return _guessed(text)
            case _:
                return text
    except (ValueError, KeyError):
        words = {"integer": "an integer", "number": "a number", "boolean": "true or false"}
        raise ConfigError(f"{flag}: must be {words[kind or '']}") from None


def _guessed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
