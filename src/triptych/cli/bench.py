"""`triptych bench`: hands over to the benchmark that was asked for."""

from __future__ import annotations

import argparse
import importlib


def run(args: argparse.Namespace) -> int:
    """Run ``triptych.bench.<what>`` with the remaining arguments; returns its exit status."""
    module = importlib.import_module(f"triptych.bench.{args.what}")
    return module.main(args.arguments)
