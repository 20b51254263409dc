"""Entry point of `triptych`: the commands, their arguments, and how errors become messages and exit statuses."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from triptych import __version__
from triptych.cli.arguments import COMMANDS
from triptych.errors import Blame, TriptychError


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Flags are never abbreviated, so that a new flag breaks no old script."""
    parser = argparse.ArgumentParser(
        prog="triptych",
        description="Serve diffusion pipelines split into encoder, denoiser and decoder processes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triptych {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.description, allow_abbrev=False)
        command.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 2 for what the operator can mend, 1 for other failures."""
    args = build_parser().parse_args(argv)
    module = importlib.import_module(f"triptych.cli.{args.command}")
    try:
        return module.run(args)
    except TriptychError as error:
        print(f"triptych {args.command}: error: {error}", file=sys.stderr)
        return 2 if error.blame in (Blame.OPERATOR, Blame.CALLER) else 1
    except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        print(f"triptych {args.command}: error: {error}", file=sys.stderr)  # says which file, and what is wrong with it
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
