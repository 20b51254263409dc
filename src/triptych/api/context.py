"""What the doors share."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.api.desk import Desk
from triptych.api.events import Events
from triptych.config import ServerConfig
from triptych.server.service import DiffusionService


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One of each for the whole application."""

    service: DiffusionService
    config: ServerConfig
    desk: Desk
    events: Events
