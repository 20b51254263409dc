"""Options whose values are more than a word: API keys, which are held as digests only, and task ports."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from triptych.accel.attention import EXACT, LOSSY
from triptych.config import Shape
from triptych.errors import ConfigError
from triptych.ids import ROLES, Role
from triptych.launch.args import ServerArgs
from triptych.launch.options import BY_NAME
from triptych.launch.readers import read_shapes

KEY = "a-secret-key"
DIGEST = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()


def test_a_key_becomes_its_digest_at_once() -> None:
    args = ServerArgs.from_kwargs(api_key=[KEY, DIGEST])
    assert args.server_config().api_keys == (DIGEST, DIGEST)
    assert KEY not in repr(args)
    assert args.for_child("server").words == ["--api-key", DIGEST, "--api-key", DIGEST]


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the studio\n\n  {KEY}  \n{DIGEST}\n")
    file.chmod(0o640)  # as orchestrators mount secrets
    config = ServerArgs.from_kwargs(api_key="another-key", api_key_file=file).server_config()
    assert config.api_keys[1:] == (DIGEST, DIGEST)
    assert len(config.api_keys) == 3


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "with spaces in it\n", "sha256:abc0123\n"])
def test_a_file_without_a_good_key_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--api-key-file"):
        ServerArgs.from_kwargs(api_key_file=file).server_config()


def test_a_file_of_keys_that_everybody_can_read_is_refused_but_not_one_of_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{DIGEST}\n{KEY}\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by every user of this machine; chmod 600"):
        ServerArgs.from_kwargs(api_key_file=file).server_config()
    file.write_text(f"{DIGEST}\n")
    assert ServerArgs.from_kwargs(api_key_file=file).server_config().api_keys == (DIGEST,)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerArgs.from_kwargs(api_key_file=tmp_path / "nothing").server_config()


def test_a_refused_key_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs.from_kwargs(api_key="secret with spaces")
    assert "secret" not in caught.value.message


def test_task_ports_are_three() -> None:
    args = ServerArgs.from_kwargs(task_ports="8002,8003,8006")
    assert args.server_config().task_ports == (8002, 8003, 8006)
    (flag, word) = args.for_child("server").words
    assert ServerArgs.from_kwargs(task_ports=word) == args
    assert flag == "--task-ports"
    with pytest.raises(ConfigError, match="three ports"):
        ServerArgs.from_kwargs(task_ports="8002,8003")


def test_limits_and_roots_arrive(tmp_path: Path) -> None:
    config = ServerArgs.from_kwargs(
        input_root=tmp_path,
        allow_image_urls=True,
        retain_seconds=60,
        max_live_requests=7,
        max_upload_memory="1GiB",
        max_concurrency_per_key=3,
        api_key=KEY,
    ).server_config()
    assert config.input_root == tmp_path
    assert config.allow_image_urls
    assert config.max_upload_memory == 1 << 30
    assert (config.retained_seconds, config.max_live_requests, config.max_concurrency_per_key) == (60, 7, 3)


def test_a_kind_alone_is_for_the_usual_roles_and_a_named_one_for_its_own() -> None:
    args = ServerArgs.from_kwargs(quant="fp8", offload="block")
    assert args.quant == {Role.DENOISER: "fp8"}
    assert args.offload == dict.fromkeys(ROLES, "block")
    args = ServerArgs.from_kwargs(quant=["encoder=int8", "denoiser=fp8"], offload="encoder=model,decoder=none")
    assert args.quant == {Role.ENCODER: "int8", Role.DENOISER: "fp8"}
    assert args.offload == {Role.ENCODER: "model", Role.DECODER: "none"}


def test_none_takes_back_what_a_file_says() -> None:
    said = {"model_path": "tiny", "disagg_role": "denoiser", "disagg_server_addr": "tcp://127.0.0.1:5555"}
    args = ServerArgs.from_kwargs(**said, quant="none", offload="none")
    model = args.instance_config(default_device="cuda").model
    assert model.quant == {}
    assert model.offload == {}


@pytest.mark.parametrize("value", ["fp4", "painter=fp8", "encoder=", "", "encoder=int8,encoder=fp8", 8])
def test_a_kind_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="--quant"):
        ServerArgs.from_kwargs(quant=value)


@pytest.mark.parametrize(
    ("said", "files", "scale"),
    [
        ("fox=a.safetensors", ("a.safetensors",), 1.0),
        ("fox=a.safetensors:0.5", ("a.safetensors",), 0.5),
        ("fox=c:a,b.safetensors", ("c:a,b.safetensors",), 1.0),
        ("fox=high.safetensors,low.safetensors", ("high.safetensors", "low.safetensors"), 1.0),
        ("fox=high.safetensors,low.safetensors:-1.5", ("high.safetensors", "low.safetensors"), -1.5),
    ],
)
def test_an_adapter_has_a_file_or_two_and_a_scale(said: str, files: tuple[str, ...], scale: float) -> None:
    args = ServerArgs.from_kwargs(disagg_role="denoiser", disagg_server_addr="tcp://127.0.0.1:1", lora=said)
    (lora,) = args.lora
    assert (lora.name, lora.files, lora.scale) == ("fox", files, scale)
    words = args.for_child("instance").words
    (again,) = ServerArgs.from_kwargs(lora=words[words.index("--lora") + 1]).lora
    assert again == lora


def test_the_help_names_every_attention_backend() -> None:
    said = re.findall(r"[\w-]+", BY_NAME["attention_backend"].help)
    assert {"auto", *EXACT, *LOSSY} <= set(said)


def test_hosts_are_named_without_ports() -> None:
    args = ServerArgs.from_kwargs(allowed_hosts="Pictures.example, gpu1")
    assert args.server_config().allowed_hosts == ("pictures.example", "gpu1")
    assert ServerArgs.from_kwargs(allowed_hosts=["*"]).server_config().allowed_hosts == ("*",)
    assert ServerArgs.from_kwargs().server_config().allowed_hosts == ()
    for wrong in ("pictures.example:443", "https://pictures.example", "a,,b", "*,a", "*.example", "[::1]"):
        with pytest.raises(ConfigError, match="--allowed-hosts"):
            ServerArgs.from_kwargs(allowed_hosts=wrong)


def test_proxies_are_named_by_address_or_network() -> None:
    config = ServerArgs.from_kwargs(forwarded_allow_ips="10.0.0.0/8, ::1").server_config()
    assert config.forwarded_allow_ips == "10.0.0.0/8,::1"
    assert (
        ServerArgs.from_kwargs(forwarded_allow_ips=["10.0.0.1", "fd00::/8"]).forwarded_allow_ips == "10.0.0.1,fd00::/8"
    )
    assert ServerArgs.from_kwargs(forwarded_allow_ips="*").forwarded_allow_ips == "*"
    for wrong in ("proxy.example", "10.0.0.1/8", "*,::1", ""):
        with pytest.raises(ConfigError, match="--forwarded-allow-ips"):
            ServerArgs.from_kwargs(forwarded_allow_ips=wrong)


def test_shapes_to_warm_up_say_how_many_outputs_a_request_makes() -> None:
    several = Shape(width=64, height=48, frames=5, count=2)
    assert read_shapes("warmup", "64x48x5*2,32x32") == (several, Shape(width=32, height=32))
    assert str(several) == "64x48x5*2"
    for text in ("64x48*", "64x48*0", "64x48*two", "*2"):
        with pytest.raises(ConfigError, match=r"must look like 832x480x81 .* with \*2 for two outputs"):
            read_shapes("warmup", text)
