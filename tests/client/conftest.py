"""The client is tested against the same live server as the door that it talks to."""

from __future__ import annotations

from tests.live_house import house, make_house, picture, single_house

__all__ = ["house", "make_house", "picture", "single_house"]
