"""The documents name files; each of them must be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.plots import FOLDER, PLOTS, SOURCE, Plot, draw, tables

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", document.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.file)
def test_each_plot_is_drawn_from_its_table_as_it_is_now(plot: Plot) -> None:
    """Otherwise: python -m tools.plots"""
    assert (FOLDER / plot.file).read_text() == draw(plot, list(tables(SOURCE.read_text())))
    assert f"(plots/{plot.file})" in SOURCE.read_text()


def test_the_promises_name_their_tests() -> None:
    assert len(re.findall(r"`tests/[\w/]+\.py`", (ROOT / "docs/reliability.md").read_text())) > 40
