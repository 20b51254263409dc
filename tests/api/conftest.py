"""A live server for the tests of the HTTP door and its client: real sockets and service, instances without a model."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import uvicorn
import xxhash
from PIL import Image

from tests.ports import free_task_ports
from triptych.api.app import create_app
from triptych.api.connection import http_settings
from triptych.bench.noop import NoopInstance
from triptych.client import Client
from triptych.config import RouterConfig, ServerConfig
from triptych.core.instance_events import Ended, Stepped
from triptych.ids import ROLES, Role
from triptych.launch.ports import free_ports, listen
from triptych.server.service import DiffusionService
from triptych.wire.messages import ErrorInfo, Finished, Lease, MediaFile, Outcome, StageFailed
from triptych.wire.schema import Param, RequestSchema

CLIP = bytes(range(256)) * 40
"""What stands for the bytes of every video."""

STEPS = 10


def film(width: int = 96, height: int = 64, frames: int = 17) -> bytes:
    """A real MP4 whose frames grow from black to bright red."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[..., 0] = 255 * index // max(1, frames - 1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    return buffer.getvalue()


def schema(*, with_count: bool) -> RequestSchema:
    """What the painters say that they accept."""
    count = (Param(name="n", type="integer", default=1, minimum=1, maximum=4),) if with_count else ()
    return RequestSchema(
        model="/models/painter",
        pipeline="WanPipeline",
        split="modular",
        task="text-to-video",
        output="video",
        params=(
            Param(name="prompt", type="string", required=True, max_length=1000),
            Param(name="height", type="integer", default=64, minimum=16, maximum=256, multiple_of=16),
            Param(name="width", type="integer", default=96, minimum=16, maximum=256, multiple_of=16),
            Param(name="num_frames", type="integer", default=17, minimum=1, maximum=65, multiple_of=4, remainder=1),
            Param(name="fps", type="integer", default=8, minimum=1, maximum=120),
            Param(name="num_inference_steps", type="integer", default=STEPS, minimum=1, maximum=100),
            Param(name="seed", type="integer", nullable=True, minimum=0, maximum=float(2**63 - 1)),
            Param(name="image", type="image", nullable=True),
            *count,
            Param(name="output_format", type="string", nullable=True, choices=("mp4", "png", "jpeg", "webp")),
        ),
    )


class Painter(NoopInstance):
    """An instance whose stages obey the prompt: "fail" fails ("fail as CODE" with that code), "slow" stays in the
    denoiser until it is let go, "hold ROLE" in that role."""

    def __init__(self, *, house: House, **options: Any) -> None:
        super().__init__(**options)
        self._house = house

    def work(self, lease: Lease, params: dict[str, Any], blobs: tuple[bytes, ...]) -> Outcome | None:
        """One stage."""
        if lease.role is Role.ENCODER:
            self._house.seen.append((params, blobs))
        prompt = params.get("prompt", "")
        if f"hold {lease.role}" in prompt:
            self._house.held[lease] = self
            return None
        if lease.role is Role.DENOISER:
            return self._denoise(lease, prompt)
        if lease.role is Role.DECODER:
            return self._decode(lease, params)
        return self.outcome(lease)

    def _denoise(self, lease: Lease, prompt: str) -> Outcome | None:
        if "fail" in prompt:
            blame = "caller" if "caller" in prompt else "instance"
            code = prompt.partition("fail as ")[2] or "stage_failed"
            error = ErrorInfo(code=code, message="the paint is dry", blame=blame)
            return StageFailed(instance=self.instance, epoch=self.epoch, server_epoch=None, lease=lease, error=error)
        if "slow" in prompt:
            self.post(Stepped(lease=lease, step=STEPS // 2, steps=STEPS))
            self._house.held[lease] = self
            return None
        return self.outcome(lease)

    def _decode(self, lease: Lease, params: dict[str, Any]) -> Finished:
        kind = params["output_format"]
        mime, suffix = ("video/mp4", ".mp4") if kind == "mp4" else (f"image/{kind}", f".{kind}")
        contents = [self._house.clip if kind == "mp4" else paint(params, index) for index in range(params.get("n", 1))]
        self._files[lease] = tuple(contents)
        return Finished(
            instance=self.instance,
            epoch=self.epoch,
            server_epoch=None,
            lease=lease,
            files=tuple(
                MediaFile(
                    blob=index,
                    mime=mime,
                    suffix=suffix,
                    width=params["width"],
                    height=params["height"],
                    frames=params["num_frames"],
                    fps=0 if kind != "mp4" else params["fps"],
                    checksum=xxhash.xxh3_64_intdigest(data),
                )
                for index, data in enumerate(contents)
            ),
            compute_seconds=0.0,
            encode_seconds=0.0,
        )

    def let_go(self, lease: Lease) -> None:
        """Finish a held stage. Safe from any thread."""
        self.post(Ended(outcome=self.outcome(lease)))


@pytest.fixture(scope="session")
def picture() -> bytes:
    """A small PNG."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 8), (1, 2, 3)).save(buffer, "PNG")
    return buffer.getvalue()


def paint(params: dict[str, Any], index: int) -> bytes:
    """A picture of one colour, which is the seed's."""
    buffer = io.BytesIO()
    colour = ((params["seed"] + index) % 256, 0, 0)
    Image.new("RGB", (params["width"], params["height"]), colour).save(buffer, params["output_format"])
    return buffer.getvalue()


class House:
    """A server on a free port and one painter for each role, each in a thread."""

    def __init__(self, folder: Path, schema: RequestSchema, *, clip: bytes = CLIP, **options: Any) -> None:
        self.folder = folder
        self.clip = clip
        self.seen: list[tuple[dict[str, Any], tuple[bytes, ...]]] = []
        """Parameters and pictures of every encoder stage."""
        self.held: dict[Lease, Painter] = {}
        """Denoiser stages that wait to be let go."""
        first, *_ = free_ports(5)
        options.setdefault("router", RouterConfig(lease_timeout=60))  # nobody dies here, but a painter may be slow
        self.config = ServerConfig(port=first + 4, scheduler_port=first, output_dir=folder, **options)
        self.url = f"http://127.0.0.1:{first + 4}"
        self._schema = schema
        self._server: uvicorn.Server | None = None
        self._up = threading.Event()
        self._threads: list[threading.Thread] = []
        self._painters: list[NoopInstance] = []

    def open(self) -> None:
        """Return once the server is ready."""
        self._start(lambda: asyncio.run(self._serve()))
        assert self._up.wait(60)
        for painter in self._staff():
            self._painters.append(painter)
            self._start(painter.run)
        with Client(self.url) as client:
            client.wait_ready(60)

    def _staff(self) -> Iterator[NoopInstance]:
        """The instances that serve here."""
        for role, port in zip(ROLES, free_ports(3), strict=True):
            yield Painter(
                house=self,
                server_addr=f"tcp://127.0.0.1:{self.config.scheduler_port}",
                work_url=f"tcp://127.0.0.1:{port}",
                roles=(role,),
                slots=4,
                schema=self._schema,
            )

    def close(self) -> None:
        """Stop everything."""
        for painter in self._painters:
            painter.stop()
        for thread in self._threads[1:]:
            thread.join(60)
        assert self._server is not None
        self._server.should_exit = True
        self._threads[0].join(60)
        assert not any(thread.is_alive() for thread in self._threads)

    def _start(self, target: Any) -> None:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        self._threads.append(thread)

    async def _serve(self) -> None:
        doors = [listen("127.0.0.1", port, "--port") for port in self.config.http_ports]
        service = self.service = DiffusionService(self.config)
        app = create_app(service, self.config, stopping=lambda: self._server is not None and self._server.should_exit)
        self._server = uvicorn.Server(http_settings(app, self.config.forwarded_allow_ips))
        await service.start()
        self._up.set()
        try:
            await self._server.serve(sockets=doors)
        finally:
            await service.close()
            for door in doors:
                door.close()


def _house(folder: Path, *, with_count: bool) -> Iterator[House]:
    house = House(folder, schema(with_count=with_count))
    house.open()
    yield house
    house.close()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A live server whose pipeline makes several images of a prompt itself."""
    yield from _house(tmp_path_factory.mktemp("media"), with_count=True)


@pytest.fixture(scope="module")
def cinema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A live server whose videos can be played, and are kept for an hour."""
    house = House(tmp_path_factory.mktemp("media"), schema(with_count=True), clip=film(), retained_seconds=3600)
    house.open()
    yield house
    house.close()


@pytest.fixture(scope="module")
def task_ports() -> tuple[int, ...]:
    """Three ports that are free, as are those of their metrics."""
    return free_task_ports()


@pytest.fixture(scope="module")
def make_house(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[House]]:
    """Opens a live server with the settings of a `ServerConfig` that are given.

    ``accepts``: the schema of its model. ``inputs``: files of its input folder. ``playable``: its videos are real.
    """

    @contextmanager
    def make(
        *,
        accepts: RequestSchema | None = None,
        inputs: Mapping[str, bytes] | None = None,
        playable: bool = False,
        **options: Any,
    ) -> Iterator[House]:
        if inputs is not None:
            options["input_root"] = root = tmp_path_factory.mktemp("inputs")
            for name, data in inputs.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(data)
        if playable:
            options["clip"] = film()
        house = House(tmp_path_factory.mktemp("media"), accepts or schema(with_count=True), **options)
        house.open()
        try:
            yield house
        finally:
            house.close()

    return make


@pytest.fixture(scope="module")
def single_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A live server whose pipeline makes one image at a time."""
    yield from _house(tmp_path_factory.mktemp("media"), with_count=False)
