"""The ready config files: each is accepted for its role, the four of a model fit together, and the presets are those
that are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.ids import ROLES
from triptych.launch.args import ServerArgs
from triptych.launch.sources import settle

FOLDER = Path(__file__).parents[2] / "configs"

VIDEO = {"height": 480, "width": 832, "num_frames": 81, "fps": 16}
PRESETS = {
    "wan-t2v": ((8002, 8003, 8006), VIDEO | {"num_inference_steps": 50, "guidance_scale": 5.0, "flow_shift": 5.0}),
    "wan-i2v": ((8004, 8005, 8007), VIDEO | {"num_inference_steps": 40, "guidance_scale": 5.0, "flow_shift": 3.0}),
    "wan-t2v-distilled": ((8002, 8003, 8006), VIDEO | {"num_inference_steps": 4, "cfg": False}),
    "qwen-image": ((8002, 8003, 8008), {"num_inference_steps": 50}),
    "qwen-image-distilled": ((8002, 8003, 8008), {"num_inference_steps": 8, "cfg": False}),
    "qwen-image-edit": ((8012, 8013, 8014), {"num_inference_steps": 40}),
}


def read(path: Path) -> ServerArgs:
    settled = settle({}, {}, str(path))
    assert settled.notes == ()
    args = settled.server_args()
    args.check_applies(settled.sources)
    return args


def test_there_is_a_file_for_every_role_of_every_model() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert found == {f"{model}/{role}.toml" for model in PRESETS for role in ("server", *ROLES)}


@pytest.mark.parametrize("model", PRESETS)
def test_the_files_of_a_model_fit_together(model: str) -> None:
    ports, defaults = PRESETS[model]
    server = read(FOLDER / model / "server.toml").server_config()
    assert server.task_ports == ports
    for number, role in enumerate(ROLES):
        config = read(FOLDER / model / f"{role}.toml").instance_config(default_device="cuda")
        assert config.roles == (role,)
        assert server.instance_urls[role] == (config.work_url,)
        assert config.server_addr == f"tcp://127.0.0.1:{server.scheduler_port}"
        assert config.torch_device == f"cuda:{number}"
        assert config.model.defaults == defaults
