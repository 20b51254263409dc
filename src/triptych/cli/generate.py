"""`triptych generate`: one prompt, or one picture, to one file with a running server."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.cli.params import read_file, read_params
from triptych.cli.progress import JobBar
from triptych.client import Client, Result
from triptych.errors import ConfigError

_STILLS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


def run(args: argparse.Namespace) -> int:
    """Make the video or image, save it, and name the file."""
    path = Path(args.output)
    still = _STILLS.get(path.suffix.lower())
    if still is None and path.suffix.lower() != ".mp4":
        raise ConfigError(f"--output {args.output!r}: must end in .mp4, {', '.join(_STILLS)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    wishes = _wishes(args)
    with Client(args.server, api_key=args.api_key) as client:
        _add_params(client, args, wishes)
        prompt, image = wishes.pop("prompt", None), wishes.pop("image", None)
        with JobBar() as bar:
            if still:
                result = _image(client, prompt, image, {**wishes, "output_format": still})
                path.write_bytes(result.read())
            else:
                result = client.generate(prompt, image=image, path=path, on_progress=bar, **wishes)
    print(f"{path} ({path.stat().st_size} bytes, {result.seconds:.1f} s, seed {result.seed})")
    return 0


def _wishes(args: argparse.Namespace) -> dict[str, Any]:
    """What was said with flags of its own, under the names of the API, files read."""
    still = Path(args.output).suffix.lower() in _STILLS
    for flag, value in (("--seconds", args.seconds), ("--num-frames", args.num_frames)):
        if still and value is not None:
            raise ConfigError(f"{flag} {value}: {args.output!r} is an image; write to a .mp4 file for a video")
    said = {
        "prompt": args.prompt,
        "image": [read_file("--image", name) for name in args.image] or None,
        "mask": None if args.mask is None else read_file("--mask", args.mask),
        "last_frame": None if args.last_frame is None else read_file("--last-frame", args.last_frame),
        "size": args.size,
        "seconds": args.seconds,
        "num_frames": args.num_frames,
        "num_inference_steps": args.steps,
        "guidance_scale": args.guidance_scale,
        "seed": args.seed,
        "negative_prompt": args.negative_prompt,
        "true_cfg_scale": args.true_cfg_scale,
        "lora": ",".join(args.lora) or None,
    }
    return {name: value for name, value in said.items() if value is not None}


def _add_params(client: Client, args: argparse.Namespace, wishes: dict[str, Any]) -> None:
    """What was said with ``--param``, besides."""
    if not args.param:
        return
    models = client.models().get("data") or [{}]  # none while no instance is there, which the request will say
    for name, value in read_params(args.param, models[0].get("parameters", [])).items():
        if name in wishes:
            raise ConfigError(f"--param {name}: is given twice, also with a flag of its own")
        wishes[name] = value


def _image(client: Client, prompt: str | None, image: Any, wishes: Mapping[str, Any]) -> Result:
    if image is None:
        (result,) = client.generate_images(prompt or "", **wishes)
    else:
        (result,) = client.edit_images(prompt or "", image, **wishes)
    return result
