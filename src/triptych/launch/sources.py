"""Where the value of each option comes from: its flag, else its environment variable, else the config file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from triptych.errors import ConfigError
from triptych.launch.args import ServerArgs
from triptych.launch.options import BY_NAME, OPTIONS, unknown_option
from triptych.launch.published import KEYS, read_published

_Layer: TypeAlias = dict[str, tuple[Any, str]]
"""Option to its value, and what said it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The options that were said, read and checked one by one."""

    values: dict[str, Any]
    sources: dict[str, str]
    """Option to what said it, the way that the operator knows it."""
    notes: tuple[str, ...]
    """What a file says that has no effect here, and why."""

    def server_args(self) -> ServerArgs:
        """As the arguments of a process."""
        return ServerArgs.from_kwargs(**self.values)


def settle(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: str | None, *, only: Collection[str] | None = None
) -> Settled:
    """Put flags over variables over the file. Options whose value is a mapping are put together entry by entry.

    The file and the flags are meant for this process, so an option that it does not read is an error there, raised by
    `ServerArgs.check_applies` or, where ``only`` names the options that are taken, here. Variables may be meant for
    others, so they are passed over. Raises `ConfigError` that names file, key and value, or the variable.
    """
    from_file, notes = ({}, ()) if file is None else read_file(Path(file))
    if only is not None and (others := sorted(from_file.keys() - set(only))):
        raise ConfigError(f"{file}: {others[0]}: is not an option of this command")
    below: _Layer = {name: (value, str(file)) for name, value in from_file.items()}
    above: _Layer = {}
    for name, value in flags.items():
        flag = BY_NAME[name].flag
        above[name] = (BY_NAME[name].read(flag, value), flag)
    if only is None:
        said = _over(_over(below, _variables(environment, {"disagg_role"})), above)
        kind = ServerArgs(disagg_role=said["disagg_role"][0] if "disagg_role" in said else "monolithic").kind
        only = {option.name for option in OPTIONS if kind in option.kinds}
    said = _over(_over(below, _variables(environment, only)), above)
    return Settled(
        values={name: value for name, (value, _) in said.items()},
        sources={name: source for name, (_, source) in said.items()},
        notes=notes,
    )


def read_file(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options that a config file says, and notes on what in it has no effect. Raises `ConfigError`."""
    entries = _parsed(path)
    own = {key: value for key, value in entries.items() if key.replace("-", "_") in BY_NAME}
    if entries.keys() - own.keys():  # a published file, whose keys mean what they mean there
        own = {key: value for key, value in own.items() if key not in KEYS}
    foreign = {key: value for key, value in entries.items() if key not in own}
    for key in foreign:
        if key not in KEYS:
            raise ConfigError(f"{path}: {unknown_option(key, *sorted(KEYS)).message}")
    reading = read_published(foreign, str(path))
    found: dict[str, Any] = {}
    for key, value in (*own.items(), *reading.options.items()):
        option = BY_NAME[key.replace("-", "_")]
        read = option.read(f"{path}: {key}", value)
        if option.name not in found:
            found[option.name] = read
        elif isinstance(read, dict) and not read.keys() & found[option.name].keys():
            found[option.name] |= read
        else:
            raise ConfigError(f"{path}: {key}: is said twice")
    return found, tuple(reading.notes)


def _variables(environment: Mapping[str, str], names: Collection[str]) -> _Layer:
    """Options out of the environment; an empty variable says nothing."""
    options = [option for option in OPTIONS if option.name in names and environment.get(option.variable)]
    return {option.name: (option.read_variable(environment[option.variable]), option.variable) for option in options}


def _over(below: _Layer, above: _Layer) -> _Layer:
    merged = dict(below)
    for name, (value, source) in above.items():
        under = below.get(name)
        if under is not None and isinstance(value, dict) and isinstance(under[0], dict):
            value, source = under[0] | value, f"{under[1]}, {source}"
        merged[name] = (value, source)
    return merged


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {str(path)!r}: cannot be read: {error}") from error
    try:
        match path.suffix.lower():
            case ".toml":
                content: Any = tomllib.loads(text)
            case ".json":
                content = json.loads(text, object_pairs_hook=_once)
            case ".yaml" | ".yml":
                content = yaml.load(text, _Loader)
            case suffix:
                raise ConfigError(
                    f"--config {str(path)!r}: is {suffix or 'without a suffix'}; must be toml, json or yaml"
                )
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {str(path)!r}: cannot be read as {path.suffix[1:]}: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {str(path)!r}: must be a table of option names and values")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return result


class _Loader(yaml.SafeLoader):
    """Plain values only, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """One table."""
        entries = [(self.construct_object(key, deep=True), value) for key, value in node.value]
        return _once([(key, self.construct_object(value, deep=True)) for key, value in entries])
