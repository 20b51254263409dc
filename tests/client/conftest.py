"""The client is tested against the same live server as the door that it talks to."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("live_house", Path(__file__).parents[1] / "api" / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)

house = _MODULE.house
make_house = _MODULE.make_house
picture = _MODULE.picture
single_house = _MODULE.single_house
