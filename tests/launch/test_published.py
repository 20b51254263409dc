"""JSON role files of the system that this one's presets follow: every key has an effect, a note, or is an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from triptych.errors import ConfigError
from triptych.launch.published import NOT_NEEDED, read_published
from triptych.launch.sources import Settled, settle

VIDEO: dict[str, Any] = {
    "disagg_mode": "transformer",
    "infer_steps": 40,
    "num_frames": 81,
    "size": [480, 832],
    "sample_guide_scale": 5,
    "sample_shift": 3,
    "enable_cfg": True,
    "fps": 16,
    "cpu_offload": False,
    "self_attn_1_type": "flash_attn3",
    "cross_attn_1_type": "flash_attn3",
    "dit_original_ckpt": "weights.safetensors",
    "clip_embed_dim": 1,
    "disagg_config": {"bootstrap_addr": "10.0.0.7", "bootstrap_room": 2, "decoder_engine_rank": 2},
}


def reading(folder: Path, **changes: Any) -> Settled:
    file = folder / "role.json"
    file.write_text(json.dumps({key: value for key, value in (VIDEO | changes).items() if value is not None}))
    return settle({}, {}, str(file))


def test_a_role_file_becomes_options_and_request_defaults(tmp_path: Path) -> None:
    found = reading(tmp_path)
    assert found.values == {
        "disagg_role": "denoiser",
        "disagg_server_addr": "tcp://10.0.0.7:5555",
        "component": {"transformer": "weights.safetensors"},
        "attention_backend": "flash3,auto",
        "default": {"num_inference_steps": 40, "num_frames": 81, "height": 480, "width": 832, "guidance_scale": 5,
                    "flow_shift": 3, "fps": 16},
    }  # fmt: skip
    found.server_args().check_applies()


def test_what_is_not_needed_is_reported_with_the_reason(tmp_path: Path) -> None:
    notes = reading(tmp_path).notes
    assert len(notes) == 3
    for key in ("clip_embed_dim", "disagg_config: bootstrap_room", "disagg_config: decoder_engine_rank"):
        assert any(f"role.json: {key}: is not needed" in note for note in notes), key


@pytest.mark.parametrize("key", sorted(NOT_NEEDED))
def test_every_key_without_effect_is_accepted_with_a_note(tmp_path: Path, key: str) -> None:
    assert any(f": {key}: is not needed, {NOT_NEEDED[key]}" in note for note in reading(tmp_path, **{key: 1}).notes)


def test_the_other_spelling_of_size_and_length(tmp_path: Path) -> None:
    found = reading(
        tmp_path, size=None, num_frames=None, target_height=256, target_width=512, target_video_length=33
    ).values["default"]
    assert (found["height"], found["width"], found["num_frames"]) == (256, 512, 33)


def test_an_image_model_s_single_frame_is_no_default(tmp_path: Path) -> None:
    found = reading(tmp_path, num_frames=1)
    assert "num_frames" not in found.values["default"]
    assert any("num_frames: is not needed, an image has one frame" in note for note in found.notes)


def test_guidance_can_be_turned_off_whatever_the_model_calls_it(tmp_path: Path) -> None:
    """A scale may be no classifier-free guidance, and only the loaded model knows."""
    assert reading(tmp_path).values["default"].get("cfg") is None
    found = reading(tmp_path, enable_cfg=False).values["default"]
    assert (found["cfg"], found["guidance_scale"]) == (False, 5)


def test_two_scales_are_for_high_and_for_low_noise(tmp_path: Path) -> None:
    found = reading(tmp_path, sample_guide_scale=[4.0, 3.0]).values["default"]
    assert (found["guidance_scale"], found["guidance_scale_2"]) == (4.0, 3.0)


@pytest.mark.parametrize("role", ["encoder", "transformer", "decode"])
def test_weights_wait_in_host_memory(tmp_path: Path, role: str) -> None:
    changes = {"disagg_mode": role, "cpu_offload": True, "dit_original_ckpt": None}
    args = dataclasses.replace(reading(tmp_path, **changes).server_args(), model_path="tiny")
    config = args.instance_config(default_device="cuda")
    assert config.model.offload == {config.roles[0]: "model"}
    assert len(config.roles) == 1


def test_a_kernel_of_the_other_system_is_a_wish(tmp_path: Path) -> None:
    found = reading(tmp_path, self_attn_1_type="sage_attn2")
    assert found.values["attention_backend"] == "sage,auto"
    assert any("cross_attn_1_type=flash_attn3: one backend serves all attention" in note for note in found.notes)


def test_the_connection_is_taken_over_as_far_as_there_is_one(tmp_path: Path) -> None:
    connection = {"bootstrap_addr": "10.0.0.7:6000", "protocol": "rdma", "device_name": "mlx5_0",
                  "local_hostname": "10.0.0.8", "metadata_server": "P2PHANDSHAKE"}  # fmt: skip
    found = reading(tmp_path, disagg_config=connection).values
    assert found["disagg_server_addr"] == "tcp://10.0.0.7:6000"
    assert (found["disagg_p2p_hostname"], found["disagg_ib_device"]) == ("10.0.0.8", "mlx5_0")
    plain = reading(tmp_path, disagg_config={"protocol": "rdma", "local_hostname": "localhost"})
    assert not {"disagg_p2p_hostname", "disagg_ib_device"} & plain.values.keys()
    assert any("MOONCAKE_PROTOCOL" in note for note in plain.notes)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"disagg_mode": "controller"}, "disagg_mode 'controller': must be one of encoder, transformer, decode"),
        ({"size": [480]}, "size [480]: must be [height, width]"),
        ({"target_height": 720}, "size=480: another key says 720"),
        ({"infer_step": 4}, "did you mean infer_steps"),
        ({"enable_cfg": 1}, "enable_cfg 1: must be true or false"),
        ({"cpu_offload": "no"}, "cpu_offload 'no': must be true or false"),
        ({"sample_guide_scale": [4.0]}, "sample_guide_scale [4.0]: must be [guidance_scale, guidance_scale_2]"),
        ({"self_attn_1_type": 7}, "self_attn_1_type 7"),
        ({"disagg_config": {"protocol": "udp"}}, "protocol 'udp': must be tcp or rdma"),
        ({"disagg_config": {"metadata_server": "etcd"}}, "metadata_server 'etcd': must be P2PHANDSHAKE"),
        ({"disagg_config": {"room": 1}}, "room: unknown"),
        ({"disagg_config": []}, "must be an object"),
        ({"default": {"fps": 8}}, "default: is said twice"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_key(tmp_path: Path, changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reading(tmp_path, **changes)
    assert fragment in caught.value.message
    assert "role.json" in caught.value.message


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ("10.0.0.7", "tcp://10.0.0.7:5555"),
        ("10.0.0.7:6000", "tcp://10.0.0.7:6000"),
        ("fd00::7", "tcp://[fd00::7]:5555"),
        ("[fd00::7]", "tcp://[fd00::7]:5555"),
        ("[fd00::7]:6000", "tcp://[fd00::7]:6000"),
    ],
)
def test_a_server_is_named_with_or_without_a_port(said: str, url: str) -> None:
    reading = read_published({"disagg_config": {"bootstrap_addr": said}}, "file")
    assert reading.options["disagg_server_addr"] == url
