"""JSON role files of the system whose pipelines this one's presets follow, read through one table.

Each key becomes an option or the default of a request parameter, or is reported as not needed with the reason; values
that ask for what is not here are errors. Nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from triptych.config import CFG, LOOPBACK, tcp_url
from triptych.errors import ConfigError
from triptych.launch.options import BY_NAME
from triptych.launch.readers import read_switch, refuse

ROLES: Final[Mapping[str, str]] = {"encoder": "encoder", "transformer": "denoiser", "decode": "decoder"}
"""``disagg_mode`` to the role."""

DEFAULTS: Final[Mapping[str, str]] = {
    "infer_steps": "num_inference_steps",
    "num_frames": "num_frames",
    "target_video_length": "num_frames",
    "target_height": "height",
    "target_width": "width",
    "sample_guide_scale": "guidance_scale",
    "sample_shift": "flow_shift",
    "fps": "fps",
}
"""Key to the request parameter whose default it sets."""

PAIRS: Final[Mapping[str, tuple[str, str]]] = {
    "size": ("height", "width"),
    "sample_guide_scale": ("guidance_scale", "guidance_scale_2"),
}
"""Key to the parameters that a list of two sets; of a model with two transformers, the one for high noise is first."""

ATTENTION: Final = ("self_attn_1_type", "attn_type", "cross_attn_1_type", "cross_attn_2_type")
"""Keys that name an attention kernel; the first one present decides."""

KERNELS: Final[Mapping[str, str]] = {
    "flash_attn2": "flash2",
    "flash_attn3": "flash3",
    "sage_attn2": "sage",
    "torch_sdpa": "native",
}
"""Kernel to the backend that is the same here; any other is tried by its own name."""

_FROM_MODEL: Final = "it comes from the model"
_BY_REQUEST: Final = "stages are paired by request id"

NOT_NEEDED: Final[Mapping[str, str]] = {
    "bootstrap_room": _BY_REQUEST,
    "decoder_bootstrap_room": _BY_REQUEST,
    "sender_engine_rank": _BY_REQUEST,
    "receiver_engine_rank": _BY_REQUEST,
    "encoder_engine_rank": _BY_REQUEST,
    "transformer_engine_rank": _BY_REQUEST,
    "decoder_engine_rank": _BY_REQUEST,
    "clip_embed_dim": _FROM_MODEL,
    "vae_stride": _FROM_MODEL,
    "vae_z_dim": _FROM_MODEL,
    "vae_scale_factor": _FROM_MODEL,
    "task": _FROM_MODEL,
    "text_len": _FROM_MODEL,
    "text_encoder_dim": _FROM_MODEL,
    "text_encoder_type": "the text encoder is the model's own, run by its own library",
    "prompt_template_encode": _FROM_MODEL,
    "prompt_template_encode_start_idx": _FROM_MODEL,
    "CONDITION_IMAGE_SIZE": _FROM_MODEL,
    "USE_IMAGE_ID_IN_PROMPT": _FROM_MODEL,
    "aspect_ratio": "height and width say it",
    "max_custom_size": "the model's own limit holds",
}
"""Keys that are accepted without effect, with the reason that is reported."""

_MIXED: Final = ("size", "enable_cfg", "cpu_offload", "dit_original_ckpt", "disagg_mode", "disagg_config")
_CONNECTION: Final = ("bootstrap_addr", "protocol", "local_hostname", "metadata_server", "device_name")

KEYS: Final = frozenset({*DEFAULTS, *ATTENTION, *NOT_NEEDED, *_MIXED})
"""Every key of such a file."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What keys of such a file stand for, in the words of this system's options, and what there is to say of them."""

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])


def read_published(entries: Mapping[str, Any], label: str) -> Reading:
    """The options that ``entries`` (keys in `KEYS`) say; raises `ConfigError`, which names the file by ``label``."""
    reading = Reading()
    defaults = _defaults(entries, label, reading)
    if defaults:
        reading.options["default"] = defaults
    if "disagg_mode" in entries:
        mode = entries["disagg_mode"]
        if mode not in ROLES:
            raise refuse(f"{label}: disagg_mode", mode, f"one of {', '.join(ROLES)}")
        reading.options["disagg_role"] = ROLES[mode]
    if "dit_original_ckpt" in entries:
        reading.options["component"] = {"transformer": entries["dit_original_ckpt"]}
    if "cpu_offload" in entries and read_switch(f"{label}: cpu_offload", entries["cpu_offload"]):
        reading.options["offload"] = "model"
    _attention(entries, label, reading)
    _connection(entries.get("disagg_config", {}), label, reading)
    for key in entries.keys() & NOT_NEEDED.keys():
        reading.notes.append(f"{label}: {key}: is not needed, {NOT_NEEDED[key]}")
    reading.notes.sort()
    return reading


def _defaults(entries: Mapping[str, Any], label: str, reading: Reading) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def put(key: str, name: str, value: Any) -> None:
        if found.setdefault(name, value) != value:
            raise ConfigError(f"{label}: {key}={value!r}: another key says {found[name]!r}")

    for key, name in DEFAULTS.items():
        if key not in entries or (key in PAIRS and isinstance(entries[key], list)):
            continue
        if name == "num_frames" and entries[key] == 1:
            reading.notes.append(f"{label}: {key}: is not needed, an image has one frame")
        else:
            put(key, name, entries[key])
    for key, names in PAIRS.items():
        if key not in entries or (key in DEFAULTS and not isinstance(entries[key], list)):
            continue
        pair = entries[key]
        if not isinstance(pair, list) or len(pair) != 2:
            raise refuse(f"{label}: {key}", pair, f"[{', '.join(names)}]")
        for name, value in zip(names, pair, strict=True):
            put(key, name, value)
    if "enable_cfg" in entries and not read_switch(f"{label}: enable_cfg", entries["enable_cfg"]):
        found[CFG] = False
    return found


def _attention(entries: Mapping[str, Any], label: str, reading: Reading) -> None:
    said = {key: entries[key] for key in ATTENTION if key in entries}
    if not said:
        return
    key, kernel = next(iter(said.items()))
    if not isinstance(kernel, str) or "," in kernel:
        raise refuse(f"{label}: {key}", kernel, "the name of an attention kernel")
    # A preference, for the file was made for machines with that kernel. What is used in its place is logged by the
    # process that knows.
    reading.options["attention_backend"] = f"{KERNELS.get(kernel, kernel)},auto"
    others = [f"{other}={value}" for other, value in said.items() if value != kernel]
    if others:
        reading.notes.append(f"{label}: {', '.join(others)}: one backend serves all attention, that of {key}")


def _connection(entries: Any, label: str, reading: Reading) -> None:
    label = f"{label}: disagg_config"
    if not isinstance(entries, dict):
        raise refuse(label, entries, "an object")
    for key in entries:
        if key not in _CONNECTION and key not in NOT_NEEDED:
            raise ConfigError(f"{label}: {key}: unknown; known are {', '.join((*_CONNECTION, *NOT_NEEDED))}")
        if key in NOT_NEEDED:
            reading.notes.append(f"{label}: {key}: is not needed, {NOT_NEEDED[key]}")
    address = entries.get("bootstrap_addr")
    if address is not None:
        reading.options["disagg_server_addr"] = _server_address(str(address))
    if entries.get("metadata_server", "P2PHANDSHAKE") != "P2PHANDSHAKE":
        raise refuse(f"{label}: metadata_server", entries["metadata_server"], "P2PHANDSHAKE")
    if entries.get("local_hostname", "localhost") not in LOOPBACK:
        reading.options["disagg_p2p_hostname"] = entries["local_hostname"]
    protocol, device = entries.get("protocol", ""), entries.get("device_name", "")
    if protocol not in ("", "tcp", "rdma"):
        raise refuse(f"{label}: protocol", protocol, "tcp or rdma")
    if device and protocol != "tcp":
        reading.options["disagg_ib_device"] = device
    elif protocol == "rdma":
        reading.notes.append(f"{label}: protocol: instances of other hosts are reached by RDMA with MOONCAKE_PROTOCOL")


def _server_address(said: str) -> str:
    """The URL of a server's frontend that was named with a port or without, an IPv6 address in brackets or not."""
    bare = said[1:-1] if said.startswith("[") and said.endswith("]") else said
    if "]:" in said or said.count(":") == 1:
        return f"tcp://{said}"
    return tcp_url(bare, cast("int", BY_NAME["scheduler_port"].default))
