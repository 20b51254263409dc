"""`triptych models`: which pipelines can be split and how, or which role runs what of one model."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    from triptych.pipeline.capabilities import capabilities, model_parts, parts_table, table

    print(table(capabilities()) if args.model is None else parts_table(model_parts(args.model)))
    return 0
