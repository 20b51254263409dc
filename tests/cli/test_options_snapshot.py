"""The command line is a contract: a change of a flag or a default must be made on purpose, here too."""

from __future__ import annotations

import argparse
from typing import Any

from triptych.cli.main import build_parser
from triptych.launch.args import ServerArgs
from triptych.launch.options import OPTIONS

SERVE_OPTIONS = {
    "--model-path": None,
    "--disagg-role": "monolithic",
    "--disagg-server-addr": None,
    "--scheduler-port": 5555,
    "--host": "127.0.0.1",
    "--port": 30000,
    "--log-level": "info",
    "--num-gpus": 1,
    "--base-gpu-id": 0,
    "--denoiser-cfg": None,
    "--denoiser-sp": None,
    "--denoiser-ulysses": None,
    "--denoiser-ring": None,
    "--encoder-tp": None,
    "--decoder-tp": None,
    "--denoiser-tp": 1,
    "--revision": None,
    "--device": None,
    "--dtype": None,
    "--encoder-urls": (),
    "--denoiser-urls": (),
    "--decoder-urls": (),
    "--disagg-timeout": 600.0,
    "--queue-timeout": 600.0,
    "--disagg-dispatch-policy": "round_robin",
    "--max-instance-deaths": 2,
    "--disagg-p2p-hostname": "127.0.0.1",
    "--disagg-ib-device": None,
    "--disagg-transfer-pool-size": 268435456,
    "--disagg-transfer-gpu-pool-size": 0,
    "--disagg-transfer": "auto",
    "--task": None,
    "--component": None,
    "--default": None,
    "--profile": "auto",
    "--attention-backend": "auto",
    "--quant": None,
    "--offload": None,
    "--vae-tiling": False,
    "--vae-slicing": False,
    "--lora": (),
    "--previews": False,
    "--prompt-cache": 268435456,
    "--batching": False,
    "--batch-guidance": False,
    "--step-cache": 0.0,
    "--warmup": (),
    "--cache-dir": None,
    "--metrics-port": None,
    "--max-running-requests": 1,
    "--checkpoint-interval": 10.0,
    "--drain-timeout": 30.0,
    "--slots": 2,
    "--disagg-key-dir": None,
    "--insecure": False,
    "--output-dir": "outputs",
    "--media-store": None,
    "--state-dir": None,
    "--forwarded-allow-ips": None,
    "--allowed-hosts": None,
    "--max-live-requests": 1000,
    "--max-upload-memory": 2 << 30,
    "--max-queue": None,
    "--max-wait": None,
    "--timeout-cap": 3600.0,
    "--task-ports": None,
    "--api-key": (),
    "--api-key-file": None,
    "--max-concurrency-per-key": None,
    "--max-rate-per-key": None,
    "--input-root": None,
    "--allow-image-urls": False,
    "--retain-seconds": None,
    "--retain-count": 10000,
    "--retain-bytes": None,
}

COMMAND_ARGUMENTS: dict[str, dict[str, Any]] = {
    "up": {
        "model": None,
        "--config": None,
        "--encoder-gpus": None,
        "--denoiser-gpus": None,
        "--decoder-gpus": None,
        "--encoder-decoder-gpus": None,
        "--encoders": None,
        "--denoisers": None,
        "--decoders": None,
        "--encoder-decoders": None,
        "--replicas": None,
        "--first-work-port": None,
    },
    "generate": {
        "prompt": None,
        "--output": None,
        "--server": "http://127.0.0.1:30000",
        "--api-key": None,
        "--size": None,
        "--seconds": None,
        "--num-frames": None,
        "--steps": None,
        "--guidance-scale": None,
        "--seed": None,
        "--negative-prompt": None,
        "--true-cfg-scale": None,
        "--image": [],
        "--mask": None,
        "--last-frame": None,
        "--lora": [],
        "--param": [],
    },
    "doctor": {"--output-dir": "outputs", "--port": 30000, "--scheduler-port": 5555},
    "models": {"model": None, "--revision": None},
    "keygen": {"folder": None},
    "bench": {"what": None, "arguments": None},
    "synth": {"size": None, "--out": None, "--device": None, "--dtype": "bfloat16"},
    "demo": {"--output": "outputs/demo.mp4", "--prompt": None},
}

NOT_IN_UP = {
    "--model-path",
    "--disagg-role",
    "--disagg-server-addr",
    "--num-gpus",
    "--base-gpu-id",
    "--metrics-port",
    "--encoder-urls",
    "--denoiser-urls",
    "--decoder-urls",
}


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser()
    (sub,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(sub.choices)


def _long_name(action: argparse.Action) -> str:
    """A switch can also be taken back, which is no name of its own."""
    return next((name for name in action.option_strings if name.startswith("--")), action.dest)


def arguments(parser: argparse.ArgumentParser) -> dict[str, Any]:
    found = {_long_name(action): action.default for action in parser._actions}
    found.pop("--help")
    return found


def test_serve_has_these_flags_with_these_defaults() -> None:
    assert {option.flag: option.default for option in OPTIONS} == SERVE_OPTIONS
    assert set(arguments(commands()["serve"])) == {"model", "--config", *SERVE_OPTIONS}
    assert set(arguments(commands()["config"])) == {"what", "model", "--config", *SERVE_OPTIONS}


def test_python_keywords_have_the_defaults_of_the_flags() -> None:
    args = ServerArgs.from_kwargs()
    for option in OPTIONS:
        expected = {} if option.name in ("component", "default", "quant", "offload") else option.default
        assert getattr(args, option.name) == expected, option.name


def test_the_other_commands_have_these_arguments() -> None:
    found = {name: arguments(parser) for name, parser in commands().items()}
    found.pop("serve")
    found.pop("config")
    shared = {flag: argparse.SUPPRESS for flag in SERVE_OPTIONS if flag not in NOT_IN_UP}
    assert found == COMMAND_ARGUMENTS | {"up": COMMAND_ARGUMENTS["up"] | shared}
