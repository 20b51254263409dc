"""`triptych config show`: every option of a process with its value and where that comes from."""

from __future__ import annotations

import argparse
import os
from typing import Any

from triptych.cli.arguments import said_options
from triptych.config.secrets import without_secrets
from triptych.launch.args import ServerArgs
from triptych.launch.options import OPTIONS
from triptych.launch.sources import Settled, settle


def run(args: argparse.Namespace) -> int:
    """Print the table; raises `ConfigError` for what a process could not be started with."""
    settled = settle(said_options(args), os.environ, args.config)
    options = settled.server_args()
    options.check_applies(settled.sources)
    rows = [*_option_rows(options, settled), *_between_hosts(options)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, source in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")
    for note in settled.notes:
        print(f"note: {note}")
    return 0


def _option_rows(options: ServerArgs, settled: Settled) -> list[tuple[str, str, str]]:
    rows = [("OPTION", "VALUE", "FROM")]
    for option in OPTIONS:
        if options.kind in option.kinds:
            value = "(said)" if option.name == "api_key" and options.api_key else _shown(getattr(options, option.name))
            rows.append((option.name, value, settled.sources.get(option.name, "default")))
    return rows


def _shown(value: Any) -> str:
    match value:
        case None | ():
            return "-"
        case dict() if not value:
            return "-"
        case bool():
            return "true" if value else "false"
        case dict():
            return ", ".join(f"{name}={_shown(entry)}" for name, entry in value.items())
        case tuple():
            return ", ".join(map(str, value))
        case _:
            return without_secrets(str(value))


def _between_hosts(options: ServerArgs) -> list[tuple[str, str, str]]:
    """What Mooncake is to use, which has a file and variables of its own."""
    if options.kind != "instance" or options.disagg_transfer not in ("auto", "gpudirect", "mooncake"):
        return []
    from triptych.transport.data.settings import FILE_VARIABLE, VARIABLES, engine_settings

    config = options.instance_config(default_device="cpu").transfer
    found = engine_settings(config, os.environ)
    said = [name for name in (*VARIABLES.values(), FILE_VARIABLE) if os.environ.get(name)]
    source = ", ".join(said) if said else "default"
    devices = f" on {found.devices}" if found.devices else ""
    return [("mooncake", f"{found.transport}{devices}, as {found.hostname}", source)]
