"""The arguments of every command. No import here may be slow: this runs for every `triptych --help`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triptych.errors import ConfigError
from triptych.launch.option import Option
from triptych.launch.options import OPTIONS
from triptych.launch.readers import read_gpu_lists, read_integer

DEFAULT_SERVER = "http://127.0.0.1:30000"

UP_TAKES_FROM_SERVE: tuple[str, ...] = tuple(
    option.name
    for option in OPTIONS
    if option.name
    not in {
        "model_path",
        "disagg_role",
        "disagg_server_addr",
        "num_gpus",
        "base_gpu_id",
        "metrics_port",
        "encoder_urls",
        "denoiser_urls",
        "decoder_urls",
    }
)
"""Serving options of a group; `triptych up` sets the others itself, for each of its processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of the command line; it runs ``triptych.cli.<name>.run``."""

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def parse_size(text: str) -> str:
    """``WIDTHxHEIGHT``."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be WIDTHxHEIGHT, e.g. 832x480")
    return text


def parse_gpu_lists(text: str) -> list[list[int]]:
    """`read_gpu_lists` in the words of argparse."""
    try:
        return read_gpu_lists("", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message.strip()) from error


def parse_count(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 1 or more")
    return int(text)


def parse_positive(text: str) -> float:
    """A number greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number greater than 0")
    return value


def parse_param(text: str) -> tuple[str, str]:
    """``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=VALUE, e.g. flow_shift=5")
    return name, value


def _typed(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return option.read(option.flag, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message.removeprefix(f"{option.flag} ")) from error

    return read


def add_options(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Add serving options; those that are not said stay absent from the namespace."""
    for option in OPTIONS:
        if option.name not in names:
            continue
        text = option.help if option.default in (None, False, ()) else f"{option.help} (default: {option.default})"
        if option.is_switch:
            switch = argparse.BooleanOptionalAction  # so that a flag can take back what a file says
            parser.add_argument(option.flag, action=switch, default=argparse.SUPPRESS, help=text)
        elif option.repeatable:
            parser.add_argument(
                option.flag, action="append", metavar=option.metavar, default=argparse.SUPPRESS, help=text
            )
        else:
            parser.add_argument(
                option.flag,
                type=_typed(option),
                metavar=option.metavar,
                default=argparse.SUPPRESS,
                help=text,
            )


def said_options(args: argparse.Namespace) -> dict[str, Any]:
    """The serving options that were said as flags. A model may be named with or without one."""
    said = {option.name: getattr(args, option.name) for option in OPTIONS if hasattr(args, option.name)}
    if getattr(args, "model", None) is not None:
        if "model_path" in said:
            raise ConfigError(f"MODEL {args.model!r} and --model-path {said['model_path']!r}: name the model once")
        said["model_path"] = args.model
    return said


def _serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model-path")
    _config_file(parser)
    add_options(parser, tuple(option.name for option in OPTIONS))


def _config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML, JSON or YAML file with options by name; environment variables TRIPTYCH_NAME win over it, flags "
        "over both",
    )


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show",), help="show: every option of this process, and where it comes from")
    _serve(parser)


def _up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder, Hub id or embedded model (tiny)")
    _config_file(parser)
    plan = parser.add_argument_group("instances")
    for role in ("encoder", "denoiser", "decoder"):
        plan.add_argument(
            f"--{role}-gpus",
            type=parse_gpu_lists,
            metavar="GPUS",
            help=f"GPUs of the {role} instances, ';' between instances",
        )
    plan.add_argument(
        "--encoder-decoder-gpus",
        type=parse_gpu_lists,
        metavar="GPUS",
        help="GPUs of instances that encode and decode, ';' between instances",
    )
    for role in ("encoder", "denoiser", "decoder"):
        plan.add_argument(f"--{role}s", type=parse_count, metavar="N", help=f"{role} instances on the CPU (default: 1)")
    plan.add_argument(
        "--encoder-decoders", type=parse_count, metavar="N", help="instances on the CPU that encode and decode"
    )
    plan.add_argument("--replicas", type=parse_count, metavar="N", help="N instances that serve all three roles")
    plan.add_argument(
        "--first-work-port",
        type=_plain_port,
        metavar="PORT",
        help="work port of the first instance, the others follow (default: free ports)",
    )
    add_options(parser, UP_TAKES_FROM_SERVE)


def _plain_port(text: str) -> int:
    try:
        return read_integer("--first-work-port", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a port") from error


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="needed by every model that takes one")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help="where the video or image is written; folders that are missing are made",
    )
    parser.add_argument("--server", metavar="URL", default=DEFAULT_SERVER, help="default: %(default)s")
    parser.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get("TRIPTYCH_API_KEY"), help="default: TRIPTYCH_API_KEY, if set"
    )
    parser.add_argument("--size", type=parse_size, metavar="WxH", help="default: the model's")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=parse_positive, metavar="S", help="length of the video")
    length.add_argument("--num-frames", type=parse_count, metavar="N", help="length of the video in frames")
    parser.add_argument("--steps", type=parse_count, metavar="N", help="denoising steps")
    parser.add_argument("--guidance-scale", type=float, metavar="G")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--negative-prompt", metavar="TEXT")
    parser.add_argument(
        "--true-cfg-scale", type=float, metavar="G", help="for models where --guidance-scale is not about it"
    )
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="picture to start from; repeatable for several"
    )
    parser.add_argument("--mask", metavar="FILE", help="what of the picture is to be made anew")
    parser.add_argument("--last-frame", metavar="FILE", help="picture that the video is to end with")
    parser.add_argument(
        "--lora", action="append", default=[], metavar="NAME[:SCALE]", help="adapter of the server's; repeatable"
    )
    parser.add_argument(
        "--param",
        type=parse_param,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other parameter of the model, a picture or clip as a file; the server's /v1/models lists them",
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", metavar="FOLDER", default="outputs", help="media folder (default: %(default)s)")
    parser.add_argument("--port", type=int, metavar="PORT", default=30000, help="HTTP port (default: %(default)s)")
    parser.add_argument(
        "--scheduler-port", type=int, metavar="PORT", default=5555, help="control port (default: %(default)s)"
    )


_BENCHES = (
    "the router alone, handoffs, a forward and a decode against stock Diffusers, errors of forwards, HTTP serving, a "
    "pool under load, a denoising step on several GPUs, all comparisons of several GPUs, memory by role"
)
_BENCH_NAMES = ("control", "transfer", "stages", "fidelity", "serve", "soak", "parallel", "scaling", "memory")


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=_BENCH_NAMES, help=_BENCHES)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of that benchmark")


def _synth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("size", metavar="SIZE", help="e.g. wan2.1-t2v-1.3b; an unknown one lists those known")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="where the model folder is written")
    where = "where it is made, a GPU being many times faster (default: cuda where torch sees a GPU)"
    parser.add_argument("--device", choices=("cuda", "cpu"), help=where)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")


def _models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="model folder, Hub id or embedded model; default: all"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model from the Hub")


def _keygen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="where the four key files are written")


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", default="outputs/demo.mp4", help="default: %(default)s")
    parser.add_argument("--prompt", metavar="TEXT", help="default: one that the embedded model knows")


COMMANDS: tuple[Command, ...] = (
    Command(
        name="serve",
        help="start a server, a role instance, or both in one",
        description="Start one part of a disaggregated deployment, or (by default) a server with one instance that "
        "computes all roles.",
        add_arguments=_serve,
    ),
    Command(
        name="up",
        help="start a server and its role instances on this machine",
        description="Start a whole deployment on this machine, restart what dies, stop it all with Ctrl+C.",
        add_arguments=_up,
    ),
    Command(
        name="config",
        help="show the options that a process would have, and where each comes from",
        description="Takes what `triptych serve` takes and shows every option in effect with its source: flag, "
        "environment variable, config file or default. Nothing is started.",
        add_arguments=_config,
    ),
    Command(
        name="generate",
        help="make one video or image with a running server",
        description="Send a prompt, pictures, or both to a running server, follow its progress, and save the result.",
        add_arguments=_generate,
    ),
    Command(
        name="doctor",
        help="check that this machine has what serving needs",
        description="Check this machine; each finding says how to mend it. Exit status 1 when it cannot serve.",
        add_arguments=_doctor,
    ),
    Command(
        name="models",
        help="show which pipelines can be split, or the parts of one model",
        description="Show every pipeline class and how it is split, or which role runs what of one model.",
        add_arguments=_models,
    ),
    Command(
        name="keygen",
        help="make the keys that authenticate server and instances",
        description="Make one key pair for the server and one for all instances, for --disagg-key-dir.",
        add_arguments=_keygen,
    ),
    Command(
        name="bench",
        help="measure the router or the handoffs",
        description="Run a benchmark of this package.",
        add_arguments=_bench,
    ),
    Command(
        name="synth",
        help="write a model folder of random weights at a real size",
        description="Write a Diffusers-layout folder of random weights at a real model's size, to measure speed with.",
        add_arguments=_synth,
    ),
    Command(
        name="demo",
        help="make a video with the embedded model in four processes",
        description="Start a server and three role processes on the CPU, send a prompt over HTTP, save the video.",
        add_arguments=_demo,
    ),
)
