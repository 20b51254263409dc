"""LiteLLM's video functions against a live server: what goes through its `openai` provider comes out whole."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys, time
import litellm

url, picture = sys.argv[1:]
server = {"api_base": url, "api_key": "none"}

def finish(video):
    while video.status not in ("completed", "failed"):
        time.sleep(0.05)
        video = litellm.video_status(video_id=video.id, **server)
    return video

video = finish(litellm.video_generation(model="openai/painter", prompt="a cat", seconds="2", size="128x64", **server))
remix = finish(litellm.video_remix(video_id=video.id, prompt="a dog", **server))
with open(picture, "rb") as file:
    started = litellm.video_generation(model="openai/painter", prompt="a cow", input_reference=file, **server)
print(json.dumps({
    "video": video.model_dump(),
    "content": litellm.video_content(video_id=video.id, **server).hex(),
    "remix": remix.model_dump(),
    "started": finish(started).status,
    "listed": len(litellm.video_list(custom_llm_provider="openai", **server)["data"]),
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="LiteLLM is not installed")
def test_litellm_makes_remixes_and_fetches_videos(cinema: Any, tmp_path: Path, picture: bytes) -> None:
    reference = tmp_path / "reference.png"
    reference.write_bytes(picture)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"{cinema.url}/v1", str(reference)],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["video"]["status"] == "completed"
    assert (told["video"]["size"], told["video"]["seconds"]) == ("128x64", "2")
    assert told["video"]["expires_at"] > told["video"]["completed_at"]
    assert bytes.fromhex(told["content"]) == cinema.clip
    assert told["remix"]["status"] == "completed"
    assert told["remix"]["seconds"] == "2"
    assert told["started"] == "completed"
    assert told["listed"] == 3
    assert [params["prompt"] for params, _ in cinema.seen] == ["a cat", "a dog", "a cow"]
    assert cinema.seen[-1][1] == (picture,)
