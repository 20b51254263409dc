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
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", document.read_text())
    assert [name for name, test in named if not is_there(ROOT / name, test)] == []


def is_there(file: Path, test: str) -> bool:
    """Whether there is such a file, and such a test in it if one is named."""
    return file.is_file() and (not test or re.search(rf"^(async )?def {test}\(", file.read_text(), re.M) is not None)


def test_a_test_that_is_not_there_is_missed() -> None:
    here = Path(__file__)
    assert is_there(here, "")
    assert is_there(here, "test_a_test_that_is_not_there_is_missed")
    assert not is_there(here, "test_a_test")
    assert not is_there(here.with_name("test_nothing.py"), "")


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.file)
def test_each_plot_is_drawn_from_its_table_as_it_is_now(plot: Plot) -> None:
    """Otherwise: python -m tools.plots"""
    assert (FOLDER / plot.file).read_text() == draw(plot, list(tables(SOURCE.read_text())))
    assert f"(plots/{plot.file})" in SOURCE.read_text()


def test_the_promises_name_their_tests() -> None:
    assert len(re.findall(r"`tests/[\w/]+\.py[`:]", (ROOT / "docs/reliability.md").read_text())) > 40
