"""`triptych models`: which pipelines can be split and how, or which role runs what of one model."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    from triptych.pipeline.capabilities import capabilities, model_capability, model_parts, parts_table, table

    if args.model is None:
        print(table(capabilities()))
    else:
        parts = model_parts(args.model, args.revision)  # raises for a model that cannot be split
        print(table([model_capability(args.model, args.revision)]), parts_table(parts), sep="\n\n")
    return 0
