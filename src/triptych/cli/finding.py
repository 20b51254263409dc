"""One line of the doctor's report, and what all of them ask."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is there or lacks, and how to mend it."""

    verdict: Verdict
    what: str
    found: str
    mend: str = ""


def installed(package: str) -> str | None:
    """The version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
