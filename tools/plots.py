"""Draws the tables of docs/measurements.md that compare times, as SVG files in docs/plots.

    python -m tools.plots

The figures stand in the tables alone: a plot is drawn from what is written there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias

DOCS = Path(__file__).resolve().parent.parent / "docs"
SOURCE = DOCS / "measurements.md"
FOLDER = DOCS / "plots"

Table: TypeAlias = list[list[str]]
"""Rows of cells, the heading first."""

_WIDTH, _LABELS, _BAR, _GAP = 720, 300, 16, 8
_COLOURS = ("#8a8f98", "#2f6fde", "#d9822b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Bars of one table: a group for each row, a bar in it for each of the columns."""

    file: str
    title: str
    heading: tuple[str, ...]
    """How the table's heading begins."""
    columns: tuple[int, ...]
    rows: str = ""
    """Pattern of the rows' names; all where it is empty."""
    across: bool = False
    """Whether the columns are groups of their own, of the one row."""


PLOTS = (
    Plot(
        file="denoiser.svg",
        title="One denoiser forward of Wan2.1-T2V-1.3B, 81 frames of 832x480, H200 (ms)",
        heading=("Profile", "ms queued"),
        columns=(1,),
    ),
    Plot(
        file="decoder.svg",
        title="Wan VAE decode of the same video, H200 (ms)",
        heading=("Decoder", "ms"),
        columns=(1,),
    ),
    Plot(
        file="forwards.svg",
        title="One forward, H200 (ms)",
        heading=("One forward", "stock ms queued", "lossless ms queued"),
        columns=(1, 2),
    ),
    Plot(
        file="handoffs.svg",
        title="Pulling 4 MiB between two processes, with checksum, two CPU cores (ms)",
        heading=("", "memory copy"),
        columns=(1, 2, 3, 4, 5),
        rows="4 MiB",
        across=True,
    ),
)


def tables(text: str) -> Iterator[Table]:
    """The tables of a Markdown text."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]


def groups(plot: Plot, found: Sequence[Table]) -> list[tuple[str, list[tuple[str, float]]]]:
    """For each group its name, and names and values of its bars. Raises ValueError when the text lacks the table."""
    table = next((table for table in found if tuple(table[0][: len(plot.heading)]) == plot.heading), None)
    if table is None:
        raise ValueError(f"{plot.file}: no table begins with {plot.heading}")
    heading, *rows = table
    rows = [row for row in rows if re.fullmatch(plot.rows or ".*", row[0])]
    if plot.across:
        return [(heading[column], [("", _number(row[column]))]) for row in rows for column in plot.columns]
    names = [heading[column] if len(plot.columns) > 1 else "" for column in plot.columns]
    return [
        (row[0], [(name, _number(row[column])) for name, column in zip(names, plot.columns, strict=True)])
        for row in rows
    ]


def _number(cell: str) -> float:
    found = re.match(r"[\d,.]+", cell)
    if found is None:
        raise ValueError(f"{cell!r} is no number")
    return float(found[0].replace(",", ""))


def draw(plot: Plot, found: Sequence[Table]) -> str:
    """The plot as SVG."""
    drawn = groups(plot, found)
    most = max(value for _, bars in drawn for _, value in bars)
    parts: list[str] = []
    y = 40
    for label, bars in drawn:
        middle = y + len(bars) * _BAR / 2 + 4
        parts.append(f'<text x="{_LABELS - 8}" y="{middle:.0f}" text-anchor="end">{escape(_short(label))}</text>')
        for number, (name, value) in enumerate(bars):
            width = max(1.0, value / most * (_WIDTH - _LABELS - 130))
            colour = _COLOURS[number % len(_COLOURS)]
            parts.append(f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" fill="{colour}"/>')
            text = f"{value:,g} {name.removesuffix(' ms')}".strip()
            parts.append(f'<text x="{_LABELS + width + 6:.1f}" y="{y + 11}">{escape(text)}</text>')
            y += _BAR
        y += _GAP
    font = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" {font}>'
    title = f'<text x="12" y="22" font-size="14">{escape(plot.title)}</text>'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>', title, *parts, "</svg>", ""])


def _short(label: str) -> str:
    return label if len(label) <= 44 else f"{label[:43]}…"


def main() -> None:
    """Draw all of them."""
    found = list(tables(SOURCE.read_text()))
    FOLDER.mkdir(exist_ok=True)
    for plot in PLOTS:
        (FOLDER / plot.file).write_text(draw(plot, found))
        print(FOLDER / plot.file)


if __name__ == "__main__":
    main()
