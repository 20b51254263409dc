"""LoRA adapters in real processes: named when denoisers are launched, chosen by each request, never another's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.harness import SMALL, Deployment
from tests.pipeline.harness import Trio
from triptych.config import Lora, ModelConfig
from triptych.ids import ROLES, Role
from triptych.pipeline.load import load_pipeline, quiet_libraries
from triptych.worker.media import encode_clip

LAYERS = {"blocks.0.attn1.to_q": (256, 256), "blocks.1.ffn.net.2": (256, 1024), "blocks.1.attn2.to_v": (256, 256)}
CHOICES = (None, "fox", "snow", "fox:0.25,snow:-1.5")


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lora, ...]:
    folder = tmp_path_factory.mktemp("adapters")
    made: list[Lora] = []
    for seed, (name, scale) in enumerate({"fox": 1.0, "snow": 0.5}.items()):
        random = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for layer, (wide, narrow) in LAYERS.items():
            tensors[f"transformer.{layer}.lora_A.weight"] = torch.randn(4, narrow, generator=random) / narrow**0.5
            tensors[f"transformer.{layer}.lora_B.weight"] = torch.randn(wide, 4, generator=random) / 2
        save_file(tensors, folder / f"{name}.safetensors")
        made.append(Lora(name=name, path=str(folder / f"{name}.safetensors"), scale=scale))
    return tuple(made)


@pytest.fixture(scope="module")
def deployment(loras: tuple[Lora, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    words = [word for lora in loras for word in ("--lora", str(lora))]
    with Deployment(tmp_path_factory.mktemp("deployment")) as deployment:
        deployment.start_server()
        for role in ROLES:
            own = (*words, "--max-running-requests", "2") if role is Role.DENOISER else ()
            deployment.start(f"{role}-0", *own)
        deployment.wait_ready()
        yield deployment


def asked(choice: str | None) -> dict[str, Any]:
    return {"prompt": "a red ball", "seed": 3, "num_inference_steps": 4} | ({"lora": choice} if choice else {})


def spelt_out(fields: dict[str, Any]) -> dict[str, Any]:
    """A small request as the pipeline takes it."""
    request = SMALL | fields
    width, height = map(int, request.pop("size").split("x"))
    return request | {"width": width, "height": height}


def test_interleaved_requests_get_the_files_of_their_own_adapters(
    deployment: Deployment, loras: tuple[Lora, ...]
) -> None:
    """Held against the roles without processes, of which the pipeline's tests show that they are the classic one's."""
    quiet_libraries()
    jobs = {(again, choice): deployment.api.submit(**asked(choice)) for again in range(2) for choice in CHOICES}
    pipeline: Any = load_pipeline(ModelConfig(path="tiny", device="cpu", loras=loras), ROLES, "cpu")
    trio = Trio.of(dict.fromkeys(ROLES, pipeline))
    expected: dict[str | None, bytes] = {}
    for choice in CHOICES:
        (clip,) = trio.generate(spelt_out(asked(choice)))
        expected[choice] = encode_clip(clip, "mp4").data
    assert len(set(expected.values())) == len(CHOICES)
    for (_, choice), job in jobs.items():
        deployment.api.done(job)
        assert deployment.api.content(job) == expected[choice], choice


def test_a_task_names_an_adapter_in_its_own_words(deployment: Deployment) -> None:
    """``lora_name`` and ``lora_strength`` make the file of ``lora``."""
    job = deployment.api.submit(**asked("fox:0.25"))
    task = spelt_out(asked(None)) | {"lora_name": "fox", "lora_strength": 0.25}
    answer = deployment.api.post("/v1/tasks/video/", task)
    assert answer.status_code == 200, answer.text
    for made in (job, answer.json()["task_id"]):
        deployment.api.done(made)
    assert deployment.api.content(answer.json()["task_id"]) == deployment.api.content(job)


def test_an_adapter_that_is_not_served_is_refused_with_those_that_are(deployment: Deployment) -> None:
    answer = deployment.api.post("/v1/videos", SMALL | {"prompt": "a red ball", "lora": "wolf"})
    assert answer.status_code == 400
    assert all(name in answer.json()["error"]["message"] for name in ("wolf", "fox", "snow"))
