"""What `triptych bench scaling` has measured so far, as Markdown tables from the files of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from triptych.bench.handoffs import Handoff, handoff_text
from triptych.bench.turnover import idle_text

_GUIDANCE = {None: "", True: "on", False: "off"}


def report(folder: Path) -> Iterator[str]:
    """Lines of the tables; runs that have left no rows are not in them."""
    for title, names in (
        ("A denoising step", ("step", "spread")),
        ("A decode", ("decode",)),
    ):
        rows = [row for name in names for file in _files(folder, name) for row in json.loads(file.read_text())]
        if rows:
            yield f"### {title}"
            yield from _table(
                ("GPUs", "layout", "guidance", "ms", "x one", "of ideal", "bytes"), [_shared(row) for row in rows]
            )
    served = [(file.stem.removeprefix("serve-"), row) for file in _files(folder, "serve") for row in _rows(file)]
    if served:
        yield "### Requests over HTTP"
        heading = (
            "run",
            "GPUs",
            "load",
            "done",
            "QPS",
            "P50 s",
            "P95 s",
            "P99 s",
            "handoffs ms (staging + pull)",
            "idle ms",
        )
        yield from _table(heading, [_served(name, row) for name, row in served])
        yield "### From start to ready, seconds"
        loads = {(name, instance): s for name, row in served for instance, s in row["loads"].items()}
        yield from _table(("run", "instance", "s"), [(*key, f"{seconds:.1f}") for key, seconds in loads.items()])


def _files(folder: Path, name: str) -> list[Path]:
    return [file for file in sorted(folder.glob("*.json")) if file.stem.partition("-")[0] == name]


def _rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())


def _shared(row: dict[str, Any]) -> tuple[str, ...]:
    head = (str(row["ranks"]), row["layout"], _GUIDANCE[row["guidance"]])
    if row["failed"]:
        return (*head, f"failed: {row['failed']}", "", "", "")
    same = "equal" if row["equal"] else f"{row['error']:.1e}"
    return (*head, f"{row['seconds'] * 1e3:.1f}", f"{row['ratio']:.2f}", f"{row['ratio'] / row['ranks']:.0%}", same)


def _served(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{name} ({row['arrangement']})",
        str(row["gpus"]),
        row["load"],
        f"{row['done']}/{row['sent']}",
        f"{row['qps']:.4g}",
        *(f"{row[key]:.2f}" for key in ("p50", "p95", "p99")),
        handoff_text({edge: Handoff(**spent) for edge, spent in row["handoffs"].items()}),
        idle_text(row["turnovers"], row["idle"]),
    )


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield f"|{'---|' * len(heading)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
