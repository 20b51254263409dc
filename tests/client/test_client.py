"""The client against a live server: progress, files, deadlines, and failures in the server's own words."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from triptych.client import (
    AsyncClient,
    Client,
    ClientTimeout,
    JobFailed,
    Progress,
    RequestRefused,
    ServerUnreachable,
)
from triptych.errors import ConfigError
from triptych.launch.ports import free_ports
from triptych.wire.schema import Param

CLIP = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def album(make_house: Callable[..., Any], house: Any) -> Iterator[Any]:
    """A live server whose model takes pictures of several kinds."""
    known = house.service.schema()
    pictures = (
        Param(name="image", type="images", max_length=3, nullable=True),
        Param(name="reference_images", type="images", max_length=3, nullable=True),
        Param(name="mask_image", type="image", nullable=True),
        Param(name="fast", type="boolean", default=False),
    )
    params = (*(param for param in known.params if param.name != "image"), *pictures)
    with make_house(accepts=msgspec.structs.replace(known, params=params)) as album:
        yield album


@pytest.fixture
def client(house: Any) -> Iterator[Client]:
    with Client(house.url) as client:
        yield client


def release_when_held(house: Any) -> None:
    """Let every held stage go, from the callback of a wait."""
    for lease in list(house.held):
        house.held.pop(lease).let_go(lease)


def test_generate_gives_the_file_and_its_story(client: Client) -> None:
    seen: list[Progress] = []
    result = client.generate("a cat", seed=3, num_frames=9, on_progress=seen.append)
    assert result.read() == CLIP
    assert result.media_type == "video/mp4"
    assert result.seed == 3
    assert [timing["role"] for timing in result.timings] == ["encoder", "denoiser", "decoder"]
    assert seen[-1].stage == "done"
    assert seen[-1].percent == 100


def test_progress_tells_steps_and_an_estimate(client: Client, house: Any) -> None:
    seen: list[Progress] = []

    def watch(progress: Progress) -> None:
        seen.append(progress)
        if progress.step:
            release_when_held(house)

    client.generate("slow", on_progress=watch)
    stepped = [p for p in seen if p.step == 5]
    assert stepped
    assert stepped[0].steps == 10
    assert stepped[0].stage == "denoising_running"
    estimated = [p.eta_seconds for p in seen if p.eta_seconds is not None]
    assert all(eta >= 0 for eta in estimated)


def test_generate_streams_into_a_file_and_leaves_no_part(client: Client, tmp_path: Path) -> None:
    target = tmp_path / "cat.mp4"
    result = client.generate("a cat", path=target)
    assert result.path == target
    assert result.data is None
    assert result.read() == CLIP
    assert list(tmp_path.iterdir()) == [target]


def test_a_timeout_stops_the_job_on_the_server(client: Client, house: Any) -> None:
    before = {job.id for job in client.list(limit=100)}
    with pytest.raises(ClientTimeout, match=r"1\.5 seconds"):
        client.generate("slow", timeout=1.5)
    assert {job.id for job in client.list(limit=100)} == before
    house.held.clear()


def test_an_interrupt_stops_the_job_on_the_server(client: Client, house: Any) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    before = {job.id for job in client.list(limit=100)}
    with pytest.raises(KeyboardInterrupt):
        client.generate("slow", on_progress=interrupt)
    assert {job.id for job in client.list(limit=100)} == before
    house.held.clear()


def test_a_job_is_paused_and_goes_on(client: Client, house: Any) -> None:
    job = client.create("slow").id
    assert client.pause(job).raw["paused"]
    assert not client.resume(job).raw["paused"]
    with pytest.raises(RequestRefused, match="cannot be moved") as caught:
        client.migrate(job)  # there is one denoiser
    assert (caught.value.http_status, caught.value.error_code) == (409, "not_movable")
    client.delete(job)
    house.held.clear()


def test_a_failed_job_raises_the_servers_reason(client: Client) -> None:
    with pytest.raises(JobFailed, match="the paint is dry") as caught:
        client.generate("fail")
    assert client.retrieve(caught.value.job.id).status == "failed"


def test_a_refusal_names_the_field(client: Client) -> None:
    with pytest.raises(RequestRefused, match="did you mean 'num_inference_steps'") as caught:
        client.generate("a cat", num_inference_step=3)
    assert (caught.value.http_status, caught.value.param) == (400, "num_inference_step")


def test_a_server_that_is_not_there_is_named() -> None:
    (port,) = free_ports(1)
    with Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ServerUnreachable, match=str(port)):
            client.server_info()
        with pytest.raises(ClientTimeout, match="not ready within"):
            client.wait_ready(0.3)


def test_a_server_of_another_kind_is_named(house: Any) -> None:
    with Client(f"{house.url}/v1/") as client:
        for call in (client.server_info, client.readiness, client.models, lambda: client.create("a cat")):
            with pytest.raises(RequestRefused, match=r"there is nothing here; .* is given without /v1"):
                call()


@pytest.mark.parametrize("address", ["localhost:30000", "127.0.0.1:30000", "//host", "ftp://host"])
def test_an_address_without_its_protocol_is_told_so(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="must begin with http://"):
            kind(address)


def test_a_silent_server_costs_no_more_than_the_deadline() -> None:
    from triptych.launch.ports import listen

    (port,) = free_ports(1)
    with (
        listen("127.0.0.1", port, "--port"),
        Client(f"http://127.0.0.1:{port}") as client,
        pytest.raises(ClientTimeout, match=r"no answer within 0\.3 seconds"),
    ):
        client.generate_images("a cat", timeout=0.3)


def test_the_parts_of_generate_can_be_called_alone(client: Client, tmp_path: Path) -> None:
    job = client.create("a cat", size="64x64")
    done = client.wait(job.id)
    assert done.status == "completed"
    assert client.download(job.id) == CLIP
    assert client.download(job.id, tmp_path / "a.mp4") is None
    assert client.list(limit=1)[0].id == job.id
    client.delete(job.id)
    with pytest.raises(RequestRefused, match="no job has the id"):
        client.retrieve(job.id)


def test_each_of_several_files_can_be_fetched(house: Any, client: Client, tmp_path: Path) -> None:
    result = client.generate("a cat", n=3)
    assert len(house.service.get(result.id).files) == 3
    assert client.download(result.id, index=2) == CLIP
    assert client.download(result.id, tmp_path / "last.mp4", index=2) is None
    assert (tmp_path / "last.mp4").read_bytes() == CLIP
    with pytest.raises(RequestRefused, match=r"index=3: .* made 3, counted from 0"):
        client.download(result.id, index=3)


def test_a_remix_changes_what_is_given_and_keeps_the_rest(house: Any, client: Client, picture: bytes) -> None:
    first = client.generate("a cat", image=picture, seed=11, size="64x64")
    again = client.remix(first.id, "a dog", num_frames=5)
    assert client.wait(again.id).status == "completed"
    assert again.raw["remixed_from_video_id"] == first.id
    (before, pictures), (after, same) = house.seen[-2:]
    assert after == {**before, "prompt": "a dog", "num_frames": 5}
    assert pictures == same == (picture,)
    other = client.generate_images("a cat")[0].read()
    client.wait(client.remix(first.id, "a dog", image=other).id)
    assert house.seen[-1][1] == (other,)


def test_a_result_is_shown_without_its_bytes(client: Client, tmp_path: Path) -> None:
    held = repr(client.generate("a cat", seed=3))
    assert "data=<10240 bytes>, media_type='video/mp4', seed=3" in held
    assert len(held) < 200
    target = tmp_path / "a.mp4"
    assert f"path={str(target)!r}" in repr(client.generate("a cat", path=target))


def test_images_that_one_job_makes_have_its_seed(client: Client) -> None:
    images = client.generate_images("a cat", n=2, seed=7, output_format="png")
    assert [image.seed for image in images] == [7, 7]
    assert all(image.read().startswith(b"\x89PNG") for image in images)
    assert images[0].media_type == "image/png"


@pytest.mark.parametrize("first", [7, 2**63 - 1])
def test_images_of_a_job_each_come_in_order_of_the_seeds_that_made_them(single_house: Any, first: int) -> None:
    with Client(single_house.url) as client:
        images = client.generate_images("a cat", n=2, seed=first)
    seeds = [image.seed for image in images]
    assert seeds == [first, (first + 1) % 2**63]
    assert sorted(params["seed"] for params, _ in single_house.seen[-2:]) == sorted(seeds)


def test_a_picture_travels_as_a_form(client: Client, house: Any) -> None:
    picture = client.generate_images("a cat")[0].read()
    client.generate("a cat", image=picture, num_frames=5)
    params, blobs = house.seen[-1]
    assert blobs == (picture,)
    assert params["num_frames"] == 5


def test_several_pictures_and_their_kinds_travel_in_their_order(album: Any, picture: bytes) -> None:
    other = io.BytesIO()
    Image.new("RGB", (4, 4)).save(other, "PNG")
    second = other.getvalue()
    with Client(album.url) as client:
        client.generate("a cat", image=[second, picture], reference_images=[picture], fast=True)
        params, blobs = album.seen[-1]
        assert [blobs[item["blob"]] for item in params["image"]] == [second, picture]
        assert [blobs[item["blob"]] for item in params["reference_images"]] == [picture]
        assert params["fast"] is True
        named = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        client.generate("a cat", image=second, reference_images=[named, second, named])
        assert album.seen[-1][1] in ((second, picture, second, picture), (picture, second, picture, second))
        params, blobs = album.seen[-1]
        assert [blobs[item["blob"]] for item in params["reference_images"]] == [picture, second, picture]


def test_an_image_is_edited_within_a_mask(album: Any, picture: bytes) -> None:
    mask = io.BytesIO()
    Image.new("L", (16, 8), 255).save(mask, "PNG")
    with Client(album.url) as client:
        images = client.edit_images("a cat", picture, mask=mask.getvalue(), n=2, output_format="png")
        assert len(images) == 2
        params, blobs = album.seen[-1]
        assert blobs[params["image"][0]["blob"]] == picture
        assert blobs[params["mask_image"]["blob"]] == mask.getvalue()
        with pytest.raises(RequestRefused, match="image: has 0 pictures"):
            client.edit_images("a cat", [])


def test_models_and_readiness_are_told(client: Client) -> None:
    assert client.models()["data"][0]["id"] == "/models/painter"
    assert client.readiness() == (True, [])


def test_both_clients_offer_the_same() -> None:
    def offered(kind: type) -> dict[str, inspect.Signature]:
        return {name: inspect.signature(it) for name, it in vars(kind).items() if not name.startswith("_")}

    assert offered(AsyncClient) == offered(Client)


async def test_asking_about_the_server_while_other_things_are_awaited(house: Any) -> None:
    async with AsyncClient(house.url) as client:
        job = await client.create("a cat")
        listed, models, info, (ready, reasons) = await asyncio.gather(
            client.list(limit=1), client.models(), client.server_info(), client.readiness()
        )
        assert listed[0].id == job.id
        assert models["data"]
        assert info["ready"] == ready
        assert bool(reasons) != ready
        await client.delete(job.id)


async def test_the_async_client_does_the_same(house: Any) -> None:
    async with AsyncClient(house.url) as client:
        results = await asyncio.gather(*(client.generate(f"cat {i}", seed=i) for i in range(3)))
        assert [result.seed for result in results] == [0, 1, 2]
        assert all(result.read() == CLIP for result in results)
        again = await client.wait((await client.remix(results[2].id, "a dog", n=2)).id)
        assert again.raw["seed"] == 2
        assert await client.download(again.id, index=1) == CLIP


async def test_cancelling_the_task_stops_the_job_on_the_server(house: Any) -> None:
    async with AsyncClient(house.url) as client:
        started = threading.Event()
        task = asyncio.ensure_future(client.generate("slow", on_progress=lambda _: started.set()))
        while not started.is_set():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with Client(house.url) as blocking:
        assert all(job.ended for job in blocking.list(limit=100))
    house.held.clear()
