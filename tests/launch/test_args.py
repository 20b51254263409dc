"""Keywords to settings: each option must arrive in the setting that it is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import triptych
from triptych.cli.arguments import said_options
from triptych.cli.main import build_parser
from triptych.errors import ConfigError
from triptych.ids import Role
from triptych.launch.args import ServerArgs

DENOISER = {"model_path": "tiny", "disagg_role": "denoiser", "disagg_server_addr": "tcp://127.0.0.1:19655"}


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="disagg_timeouts: unknown option; did you mean disagg_timeout"):
        ServerArgs.from_kwargs(disagg_timeouts=3)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("host", "localhost", lambda c: c.host),
        ("port", 22000, lambda c: c.port),
        ("scheduler_port", 19655, lambda c: c.scheduler_port),
        ("disagg_timeout", 30.0, lambda c: c.run_timeout),
        ("queue_timeout", 20.0, lambda c: c.queue_timeout),
        ("disagg_dispatch_policy", "max_free_slots", lambda c: c.router.dispatch_policy),
        ("insecure", True, lambda c: c.insecure),
        ("model_path", "tiny", lambda c: c.router.model),
        ("denoiser_urls", ("tcp://a:1", "tcp://b:2"), lambda c: c.instance_urls[Role.DENOISER]),
    ],
)
def test_an_option_of_the_server_takes_effect(name: str, value: Any, read: Any) -> None:
    config = ServerArgs.from_kwargs(disagg_role="server", **{name: value}).server_config()
    assert read(config) == value


def test_the_output_folder_takes_effect(tmp_path: Path) -> None:
    assert ServerArgs.from_kwargs(output_dir=tmp_path).server_config().output_dir == tmp_path


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("scheduler_port", 19001, lambda c: c.work_port),
        ("disagg_server_addr", "tcp://127.0.0.1:7", lambda c: c.server_addr),
        ("base_gpu_id", 3, lambda c: c.gpu_ids[0]),
        ("device", "cpu", lambda c: c.model.device),
        ("dtype", "float16", lambda c: c.model.dtype),
        ("component", {"vae": "other"}, lambda c: c.model.components),
        ("disagg_p2p_hostname", "localhost", lambda c: c.transfer.hostname),
        ("disagg_ib_device", "mlx5_0", lambda c: c.transfer.ib_device),
        ("disagg_transfer_pool_size", 1 << 30, lambda c: c.transfer.pool_bytes),
        ("disagg_transfer_gpu_pool_size", 1 << 27, lambda c: c.transfer.gpu_pool_bytes),
        ("disagg_transfer", "mooncake", lambda c: c.transfer.kind),
        ("slots", 4, lambda c: c.slots),
        ("insecure", True, lambda c: c.insecure),
    ],
)
def test_an_option_of_an_instance_takes_effect(name: str, value: Any, read: Any) -> None:
    config = ServerArgs.from_kwargs(**DENOISER | {name: value}).instance_config(default_device="cuda")
    assert read(config) == value


def test_interleaving_takes_effect() -> None:
    args = ServerArgs.from_kwargs(**DENOISER, slots=4, max_running_requests=3)
    assert args.instance_config(default_device="cpu").max_running == 3


@pytest.mark.parametrize(
    ("text", "size"), [("268435456", 1 << 28), ("256MiB", 1 << 28), ("1GiB", 1 << 30), ("2 GiB", 2 << 30)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert ServerArgs.from_kwargs(disagg_transfer_pool_size=text).disagg_transfer_pool_size == size


def test_roles_are_kept_in_the_order_of_the_pipeline() -> None:
    assert ServerArgs.from_kwargs(disagg_role="decoder,encoder").roles == (Role.ENCODER, Role.DECODER)


def test_words_say_the_same_again() -> None:
    said = DENOISER | {
        "component": {"vae": "a", "transformer": "b"},
        "disagg_transfer_pool_size": "1GiB",
        "insecure": True,
        "slots": 3,
    }
    args = ServerArgs.from_kwargs(**said)
    namespace = build_parser().parse_args(["serve", *args.for_child("instance").words])
    assert ServerArgs.from_kwargs(**said_options(namespace)) == args


def test_words_leave_out_what_the_kind_does_not_read() -> None:
    args = ServerArgs.from_kwargs(model_path="tiny", queue_timeout=5, slots=3)
    assert args.for_child("server").words == ["--model-path", "tiny", "--queue-timeout", "5.0"]
    assert args.for_child("instance").words == ["--model-path", "tiny", "--slots", "3"]


def test_the_package_offers_it_on_first_use() -> None:
    assert triptych.ServerArgs is ServerArgs
    assert callable(triptych.launch_pool_disagg_server)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        triptych.nothing_like_it  # noqa: B018


@pytest.mark.parametrize("role", [Role.ENCODER, Role.DECODER])
def test_all_gpus_of_an_encoder_or_decoder_share_its_work_unless_it_is_said_otherwise(role: Role) -> None:
    alone = ServerArgs.from_kwargs(**DENOISER | {"disagg_role": role, "num_gpus": 2})
    assert alone.instance_config(default_device="cuda").shared_roles == (role,)
    whole = ServerArgs.from_kwargs(**DENOISER | {"disagg_role": "monolithic", "num_gpus": 2})
    assert whole.instance_config(default_device="cuda").shared_roles == (Role.DENOISER,)
