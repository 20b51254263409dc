"""What a journal's folder would tell the next server."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from triptych.core.journal import History, replay
from triptych.ids import RequestId
from triptych.server.journal import Journal


def told(histories: dict[RequestId, History]) -> dict[RequestId, Any]:
    """What a server would do with each request."""
    return {
        request: (
            history.restore() if history.live else history.ended(),
            history.stored,
            history.live and history.paused,
            history.saved,
            history.deleting,
        )
        for request, history in histories.items()
    }


def on_disk(folder: Path) -> dict[RequestId, Any]:
    """What a server would find that starts on a copy of the folder as it is now: as after a kill at this moment."""
    with tempfile.TemporaryDirectory() as elsewhere:
        copy = Path(elsewhere) / "state"
        shutil.copytree(folder, copy)
        journal = Journal(copy)
        try:
            return told(replay(journal.open()))
        finally:
            journal.close()
