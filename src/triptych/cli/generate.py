"""`triptych generate`: one prompt to one file with a running server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
    with Client(args.server, api_key=args.api_key) as client, JobBar() as bar:
        if still:
            result = _image(client, args, path, still)
        else:
            result = client.generate(
                args.prompt,
                path=path,
                on_progress=bar,
                seconds=args.seconds,
                num_frames=args.num_frames,
                **_wishes(args),
            )
    print(f"{path} ({path.stat().st_size} bytes, {result.seconds:.1f} s, seed {result.seed})")
    return 0


def _wishes(args: argparse.Namespace) -> dict[str, Any]:
    """What was said, under the names of the API; None means the model's own default."""
    return {
        "size": args.size,
        "num_inference_steps": args.steps,
        "guidance_scale": args.guidance_scale,
        "seed": args.seed,
        "negative_prompt": args.negative_prompt,
        "true_cfg_scale": args.true_cfg_scale,
    }


def _image(client: Client, args: argparse.Namespace, path: Path, kind: str) -> Result:
    for flag, value in (("--seconds", args.seconds), ("--num-frames", args.num_frames)):
        if value is not None:
            raise ConfigError(f"{flag} {value}: {args.output!r} is an image; write to a .mp4 file for a video")
    (result,) = client.generate_images(args.prompt, output_format=kind, **_wishes(args))
    path.write_bytes(result.read())
    return result
