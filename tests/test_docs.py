"""The documents name files; each of them must be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(document: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", document.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_promises_name_their_tests() -> None:
    assert len(re.findall(r"`tests/[\w/]+\.py`", (ROOT / "docs/reliability.md").read_text())) > 40
