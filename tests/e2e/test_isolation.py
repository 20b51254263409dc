"""A role needs no other role's weights, neither on disk nor in memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.harness import Deployment
from triptych.models import tiny_path

OWN: Mapping[str, str] = {"encoder": "text_encoder", "denoiser": "transformer", "decoder": "vae"}
"""Role to the component of the embedded model whose weights it needs."""


def test_each_role_serves_from_a_folder_without_the_others_weights(folder: Path) -> None:
    """The folders have one name, as the same model on three machines would, and different contents."""
    with Deployment(folder, model="model") as deployment:
        deployment.start_server()
        for role, own in OWN.items():
            home = folder / role
            shutil.copytree(tiny_path(), home / "model")
            for weights in (home / "model").rglob("*.safetensors"):
                if weights.parent.name != own:
                    weights.unlink()
            assert [p.parent.name for p in (home / "model").rglob("*.safetensors")] == [own]
            deployment.start(f"{role}-0", cwd=home)
        deployment.wait_ready()
        assert deployment.api.make()[4:8] == b"ftyp"
