"""The live server that the door is tested with, for tests of what talks to it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Under a name of its own: pytest has loaded the file itself, as a conftest.
_SPEC = importlib.util.spec_from_file_location("live_house", Path(__file__).parent / "api" / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)

house = _MODULE.house
make_house = _MODULE.make_house
picture = _MODULE.picture
schema = _MODULE.schema
single_house = _MODULE.single_house
