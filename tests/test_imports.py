"""The import rules of docs/architecture.md: who may import whom, and which libraries stay out of where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import triptych

ROOT = Path(triptych.__file__).parent

BASE = {"errors", "ids", "config", "parallelism"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "ids": set(),
    "config": {"errors", "ids", "parallelism"},
    "parallelism": {"errors"},
    "page_lock": set(),
    "pictures": set(),
    "models": set(),
    "wire": {"errors", "ids"},
    "core": BASE | {"wire"},
    "transport": BASE | {"wire", "page_lock"},
    "pipeline": BASE | {"wire", "models", "accel", "page_lock", "pictures"},
    "accel": BASE | {"wire"},
    "worker": BASE | {"wire", "core", "transport", "pipeline", "accel"},
    "server": BASE | {"wire", "core", "transport"},
    "api": BASE | {"wire", "core", "server", "pictures"},
    "client": BASE,
    "sim": BASE | {"wire", "core"},
    "bench": BASE
    | {"wire", "core", "transport", "pipeline", "accel", "server", "client", "models", "worker", "launch"},
    "launch": BASE | {"models", "client", "server", "api"},
    "cli": BASE
    | {"launch", "client", "api", "server", "worker", "bench", "models", "pipeline", "accel", "wire", "sim"}
    | {"transport"},
}
"""Package to the packages of the house that it may import, besides itself."""

FORBIDDEN: dict[str, set[str]] = {
    "wire": {"torch", "zmq", "asyncio", "numpy", "diffusers"},
    "core": {"asyncio", "threading", "time", "random", "torch", "zmq", "numpy", "datetime", "socket", "secrets"},
    "transport": {"fastapi", "diffusers", "transformers"},
    "pipeline": {"zmq", "fastapi"},
    "accel": {"zmq", "fastapi"},
    "worker": {"fastapi", "uvicorn"},
    "server": {"torch", "diffusers", "transformers", "pickle", "fastapi"},
    "api": {"torch", "diffusers", "transformers", "pickle", "zmq"},
    "client": {"torch", "zmq", "fastapi"},
    "sim": {"torch", "zmq", "asyncio", "threading"},
}
"""Package to libraries that it never imports."""

EVERYWHERE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
"""Nothing is ever unpickled, so nothing imports what could."""


def imports(path: Path) -> Iterator[str]:
    """Every absolute module name that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute in this house"
            assert node.module is not None
            yield node.module
            if node.module == "triptych":  # a name in there is a package of the house, or the version
                yield from (f"triptych.{alias.name}" for alias in node.names if not alias.name.startswith("__"))


def files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    own = package(path)
    assert own in LAYERS, f"{own} is not in the house: add it to docs/architecture.md and to this table"
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "triptych":
            other = rest.partition(".")[0]
            assert not other or other == own or other in LAYERS[own], f"{own} must not import {name}"
        else:
            assert top not in FORBIDDEN.get(own, set()), f"{own} must not import {name}"
            assert top not in EVERYWHERE, f"nothing imports {name}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("triptych", ("torch", "diffusers", "transformers", "fastapi", "zmq", "httpx", "msgspec")),
        ("triptych.server.service", ("torch", "diffusers", "transformers", "PIL")),
        ("triptych.api.app", ("torch", "diffusers", "transformers")),
        ("triptych.cli.main", ("torch", "diffusers", "fastapi", "zmq")),
        ("triptych.core.router", ("torch", "zmq", "asyncio")),
        ("triptych.transport.control.instance", ("torch",)),
    ],
)
def test_importing_a_layer_does_not_load_what_it_never_needs(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_client_is_had_from_the_package_itself_and_loads_no_server() -> None:
    absent = ("torch", "diffusers", "transformers", "fastapi", "zmq")
    code = f"from triptych import AsyncClient, Client; import sys; print([m for m in {absent!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_package_has_every_name_that_it_says() -> None:
    from triptych import AsyncClient, Client
    from triptych import client as package

    assert (Client, AsyncClient) == (package.Client, package.AsyncClient)
    assert [name for name in triptych.__all__ if not hasattr(triptych, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'Clent'"):
        triptych.Clent  # noqa: B018
