"""One line of the doctor's report."""

from __future__ import annotations

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
