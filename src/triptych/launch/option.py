"""What a serving option is: its name in each place where it can be said, and how its value is read and said again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from triptych.launch.readers import (
    Reader,
    read_components,
    read_defaults,
    read_loras,
    read_switch,
    refuse,
    shown,
)

Kind: TypeAlias = Literal["monolithic", "server", "instance"]
"""What a process is: the router and HTTP door, a role instance, or the door with one instance of all roles."""

ALL: frozenset[Kind] = frozenset({"monolithic", "server", "instance"})
DOOR: frozenset[Kind] = frozenset({"monolithic", "server"})
COMPUTE: frozenset[Kind] = frozenset({"monolithic", "instance"})
SERVER: frozenset[Kind] = frozenset({"server"})
INSTANCE: frozenset[Kind] = frozenset({"instance"})


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
        parts = text.split(";") if self.read in (read_components, read_defaults, read_loras) else text
        return self.read(self.variable, parts)

    def words(self, value: Any) -> list[str]:
        """The command line words that say this value."""
        if self.is_switch:
            return [self.flag] if value else []
        if isinstance(value, dict):
            return [word for name, entry in value.items() for word in (self.flag, f"{name}={shown(entry)}")]
        if isinstance(value, tuple) and self.repeatable:
            return [word for part in value for word in (self.flag, str(part))]
        if isinstance(value, tuple):
            return [self.flag, ";".join(str(part) for part in value)]
        return [self.flag, str(value)]
