"""The official `openai` client against a live server: what its types promise is what comes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from PIL import Image

from tests import asking

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")


@pytest.fixture
def sdk(house: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_video_from_prompt_to_file(sdk: openai.OpenAI, house: Any) -> None:
    video = sdk.videos.create_and_poll(prompt="a cat", model="painter", seconds="4", size="128x64")  # type: ignore[arg-type]
    assert video.status == "completed"
    assert (video.object, video.progress, video.error) == ("video", 100, None)
    assert (video.model, video.prompt, video.size, video.seconds) == ("painter", "a cat", "128x64", "4")
    assert video.completed_at is not None
    assert video.created_at <= video.completed_at
    params, _ = house.seen[-1]
    assert (params["width"], params["height"]) == (128, 64)
    assert params["num_frames"] == 33  # the legal number nearest to 4 seconds at 8 frames a second
    assert params["output_format"] == "mp4"
    content = sdk.videos.download_content(video.id)
    assert content.response.headers["content-type"] == "video/mp4"
    assert content.read() == bytes(range(256)) * 40
    assert sdk.videos.retrieve(video.id) == video


@pytest.fixture
def theatre(cinema: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cinema.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_finished_video_has_a_thumbnail_and_a_sheet(theatre: openai.OpenAI, cinema: Any) -> None:
    video = theatre.videos.create_and_poll(prompt="a cat")
    assert theatre.videos.download_content(video.id, variant="video").read() == cinema.clip
    content = theatre.videos.download_content(video.id, variant="thumbnail")
    assert content.response.headers["content-type"] == "image/webp"
    picture = Image.open(io.BytesIO(content.read()))
    assert (picture.format, picture.size) == ("WEBP", (96, 64))
    red, green, _ = picture.convert("RGB").getpixel((40, 30))  # type: ignore[misc]
    assert 100 < red < 160  # the frame in the middle
    assert green < 20
    content = theatre.videos.download_content(video.id, variant="spritesheet")
    assert content.response.headers["content-type"] == "image/jpeg"
    sheet = Image.open(io.BytesIO(content.read()))
    assert (sheet.format, sheet.size) == ("JPEG", (5 * 96, 4 * 64))  # 17 frames in rows of 5
    reds = [sheet.getpixel((96 * (i % 5) + 40, 64 * (i // 5) + 30))[0] for i in range(17)]  # type: ignore[index]
    assert reds == sorted(reds)
    assert reds[-1] > 230
    expected = f'inline; filename="{video.id}-spritesheet.jpg"'
    assert content.response.headers["content-disposition"] == expected


def test_a_file_that_is_no_video_has_no_thumbnail(sdk: openai.OpenAI) -> None:
    video = sdk.videos.create_and_poll(prompt="a cat")
    with pytest.raises(openai.InternalServerError, match=r"\.mp4 cannot be decoded") as caught:
        sdk.videos.download_content(video.id, variant="thumbnail")
    assert "/" not in caught.value.body["message"]  # type: ignore[index]


def test_a_video_says_when_it_goes(theatre: openai.OpenAI) -> None:
    video = theatre.videos.create_and_poll(prompt="a cat")
    assert video.completed_at is not None
    assert video.expires_at is not None
    assert 3599 <= video.expires_at - video.completed_at <= 3601


def test_a_remix_keeps_all_but_the_prompt(sdk: openai.OpenAI, house: Any) -> None:
    source = sdk.videos.create_and_poll(prompt="a cat", size="128x64", seconds="2", extra_body={"seed": 11})  # type: ignore[arg-type]
    first, _ = house.seen[-1]
    remix = sdk.videos.poll(sdk.videos.remix(source.id, prompt="a dog").id)
    second, _ = house.seen[-1]
    assert second == {**first, "prompt": "a dog"}
    assert second["seed"] == 11
    assert (remix.status, remix.prompt, remix.size) == ("completed", "a dog", "128x64")
    assert remix.remixed_from_video_id == source.id
    assert remix.id != source.id
    sdk.videos.poll(sdk.videos.remix(remix.id, prompt="a cow", extra_body={"size": "64x64", "seconds": "1"}).id)
    third, _ = house.seen[-1]
    assert (third["width"], third["height"], third["num_frames"], third["seed"]) == (64, 64, 9, 11)


def test_a_remix_starts_from_the_same_picture(sdk: openai.OpenAI, house: Any) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(buffer, "PNG")
    source = sdk.videos.create_and_poll(prompt="a cat", input_reference=("cat.png", buffer.getvalue()))
    sdk.videos.poll(sdk.videos.remix(source.id, prompt="a dog").id)
    params, blobs = house.seen[-1]
    assert params["prompt"] == "a dog"
    assert blobs == (buffer.getvalue(),)


def test_a_remix_starts_from_the_same_picture_also_when_that_is_long_ago(
    make_house: Callable[..., Any], picture: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: after a restart, or 64 MiB of newer pictures, only a video's picture was not there any more."""
    monkeypatch.setattr("triptych.api.desk.PICTURE_BYTES", 0)  # forgotten at once, as by a new process
    with (
        make_house(state_dir=tmp_path / "state") as house,
        openai.OpenAI(base_url=f"{house.url}/v1", api_key="x") as sdk,
    ):
        source = sdk.videos.create_and_poll(prompt="a cat", input_reference=("cat.png", picture))
        remix = sdk.videos.poll(sdk.videos.remix(source.id, prompt="a dog").id)
        assert remix.status == "completed"
        params, blobs = house.seen[-1]
        assert (params["prompt"], blobs) == ("a dog", (picture,))


def test_a_model_without_prompt_is_used_with_an_empty_one(
    make_house: Callable[..., Any], house: Any, picture: bytes
) -> None:
    """To this SDK a prompt is required everywhere."""
    schema = house.service.schema()
    params = (
        msgspec.structs.replace(p, required=True, nullable=False) if p.name == "image" else p
        for p in schema.params
        if p.name != "prompt"
    )
    with (
        make_house(accepts=msgspec.structs.replace(schema, params=tuple(params))) as mute,
        openai.OpenAI(base_url=f"{mute.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        video = sdk.videos.create_and_poll(prompt="", input_reference=("a.png", picture))
        assert (video.status, video.prompt) == ("completed", None)
        remix = sdk.videos.poll(sdk.videos.remix(video.id, prompt="").id)
        assert remix.status == "completed"
        assert mute.seen[-1] == mute.seen[-2]
        assert mute.seen[-1][1] == (picture,)
        edited = sdk.images.edit(prompt="", image=("a.png", picture), response_format="b64_json")
        assert edited.data is not None
        with pytest.raises(openai.BadRequestError, match="takes no prompt"):
            sdk.videos.create(prompt="a cat", input_reference=("a.png", picture))


def test_a_remix_of_nothing_is_not_found(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        sdk.videos.remix("video_0", prompt="a dog")


def test_a_reference_may_be_a_data_url(sdk: openai.OpenAI, house: Any) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    for reference in ({"image_url": url}, url):
        video = sdk.videos.poll(sdk.videos.create(prompt="a cat", extra_body={"input_reference": reference}).id)
        assert video.status == "completed"
        params, blobs = house.seen[-1]
        assert params["image"] == {"blob": 0}
        assert blobs == (buffer.getvalue(),)


def test_create_answers_before_the_job_is_done(sdk: openai.OpenAI, house: Any) -> None:
    video = sdk.videos.create(prompt="slow", extra_body={"num_inference_steps": 5})
    assert video.status == "queued"
    assert video.progress == 0
    with pytest.raises(openai.ConflictError, match="its content comes with status completed"):
        sdk.videos.download_content(video.id)
    deleted = sdk.videos.delete(video.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        sdk.videos.retrieve(video.id)


def test_a_failed_job_says_why(sdk: openai.OpenAI) -> None:
    video = sdk.videos.create_and_poll(prompt="fail")
    assert video.status == "failed"
    assert video.error is not None
    assert video.error.code == "stage_failed"
    assert "the paint is dry" in video.error.message
    with pytest.raises(openai.NotFoundError, match="the paint is dry"):
        sdk.videos.download_content(video.id)


def test_a_reference_picture_reaches_the_encoder(sdk: openai.OpenAI, house: Any) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    video = sdk.videos.create_and_poll(prompt="a cat", input_reference=("../../cat.png", buffer.getvalue()))
    assert video.status == "completed"
    params, blobs = house.seen[-1]
    assert params["image"] == {"blob": 0}
    assert blobs == (buffer.getvalue(),)


def test_listing_walks_all_pages_once(sdk: openai.OpenAI) -> None:
    made = [sdk.videos.create_and_poll(prompt=f"cat {i}", poll_interval_ms=20).id for i in range(5)]
    first = sdk.videos.list(limit=2)
    assert [v.id for v in first.data] == made[:-3:-1]
    assert first.has_next_page()
    everything = [video.id for video in sdk.videos.list(limit=2)]
    assert everything[:5] == made[::-1]
    assert len(everything) == len(set(everything))
    oldest_first = [video.id for video in sdk.videos.list(limit=3, order="asc")]
    assert oldest_first == everything[::-1]


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_images_come_in_the_form_that_is_asked_for(sdk: openai.OpenAI, form: Any) -> None:
    images = sdk.images.generate(prompt="a cat", size="64x32", response_format="b64_json", output_format=form)
    assert images.data is not None
    assert images.data[0].b64_json is not None
    picture = Image.open(io.BytesIO(base64.b64decode(images.data[0].b64_json)))
    assert (picture.format, picture.size) == (form.upper(), (64, 32))
    assert images.output_format == form


def test_images_come_as_bytes_or_by_address(sdk: openai.OpenAI, house: Any) -> None:
    images = sdk.images.generate(
        prompt="a cat", size="64x32", n=2, response_format="b64_json", output_format="webp", extra_body={"seed": 7}
    )
    assert images.data is not None
    colours: list[Any] = []
    for image in images.data:
        assert image.b64_json is not None
        picture = Image.open(io.BytesIO(base64.b64decode(image.b64_json)))
        assert (picture.format, picture.size) == ("WEBP", (64, 32))
        colours.append(picture.getpixel((0, 0)))
    assert colours[0] != colours[1]
    assert images.output_format == "webp"
    assert list(house.folder.glob("image_*")) == []  # bytes that were handed over are not kept
    linked = sdk.images.generate(prompt="a cat", model="/models/painter", response_format="url")
    assert linked.data is not None
    assert linked.data[0].url is not None
    fetched = asking.get(linked.data[0].url)
    assert fetched.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(fetched.content)).size == (96, 64)
    assert house.seen[-1][0]["num_frames"] == 1


def test_an_edit_starts_from_the_picture(sdk: openai.OpenAI, house: Any) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    for image in (("a.png", buffer.getvalue()), [("a.png", buffer.getvalue())]):
        edited = sdk.images.edit(prompt="a cat", image=image, response_format="b64_json")
        assert edited.data is not None
        assert edited.data[0].b64_json is not None
        assert house.seen[-1][1] == (buffer.getvalue(),)


def test_a_pipeline_of_single_images_gets_one_job_for_each(single_house: Any) -> None:
    with openai.OpenAI(base_url=f"{single_house.url}/v1", api_key="none", max_retries=0) as sdk:
        images = sdk.images.generate(prompt="a cat", n=3, response_format="url", extra_body={"seed": 7})
        assert images.data is not None
        assert len({image.url for image in images.data}) == 3
        assert sorted(params["seed"] for params, _ in single_house.seen) == [7, 8, 9]
        with pytest.raises(openai.InternalServerError, match="the paint is dry"):
            sdk.images.generate(prompt="fail", n=3)
        with pytest.raises(openai.BadRequestError, match="the paint is dry"):
            sdk.images.generate(prompt="fail: caller", n=3)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("storage_full", 507),
        ("storage_failed", 500),
        ("poison", 422),
        ("out_of_memory", 413),
        ("too_large", 413),
        ("attempts_exhausted", 500),
    ],
)
def test_a_picture_that_failed_says_of_what_and_is_not_asked_for_again(house: Any, code: str, status: int) -> None:
    before = len(house.seen)
    with (
        openai.OpenAI(base_url=f"{house.url}/v1", api_key="none") as patient,  # sends again what may succeed then
        pytest.raises(openai.APIStatusError, match="the paint is dry") as caught,
    ):
        patient.images.generate(prompt=f"fail as {code}")
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert len(house.seen) == before + 1


def test_models_are_named_with_their_parameters(sdk: openai.OpenAI) -> None:
    models = sdk.models.list().data
    assert [m.id for m in models] == ["/models/painter"]
    assert sdk.models.retrieve("painter") == models[0]
    names = [param["name"] for param in models[0].model_dump()["parameters"]]
    assert "num_inference_steps" in names


def test_a_refusal_reaches_the_caller_with_the_field(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.videos.create(prompt="a cat", size="100x100")  # type: ignore[arg-type]
    assert caught.value.param == "size"
    assert "96 and 112" in caught.value.message
    assert caught.value.request_id
