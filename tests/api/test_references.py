"""Pictures that requests name: data URLs, addresses, files under the operator's folder, and several at once."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from tests import asking
from triptych.api.body import Body
from triptych.api.references import References
from triptych.config import ServerConfig
from triptych.errors import BadRequest, ConfigError
from triptych.wire.schema import Param


@pytest.fixture(scope="module")
def album(make_house: Callable[..., Any], house: Any, picture: bytes) -> Iterator[Any]:
    """A live server whose model takes up to three pictures, and an input folder with one in it."""
    known = house.service.schema()
    image = Param(name="image", type="images", required=True, max_length=3)
    params = (*(param for param in known.params if param.name != "image"), image)
    accepts = msgspec.structs.replace(known, params=params)
    with make_house(accepts=accepts, inputs={"in/cat.png": picture}) as album:
        yield album


def url_of(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def finished(house: Any, response: httpx.Response) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """What the encoder saw of a request."""
    assert response.status_code == 200, response.text
    answer = response.json()
    task = answer.get("task_id") or answer["id"]
    deadline = time.monotonic() + 60
    while asking.get(f"{house.url}/v1/tasks/{task}/status").json()["status"] != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return house.seen[-1]


def test_several_pictures_keep_their_order(album: Any, picture: bytes) -> None:
    other = io.BytesIO()
    Image.new("RGB", (4, 4)).save(other, "JPEG")
    second = other.getvalue()
    body = {"prompt": "a cat", "image": [url_of(picture), {"image_url": url_of(second)}]}
    params, blobs = finished(album, asking.post(f"{album.url}/v1/videos", json=body))
    assert params["image"] == [{"blob": 0}, {"blob": 1}]
    assert blobs == (picture, second)
    files = [("image[]", ("a", second)), ("image[]", ("b", picture)), ("prompt", (None, "a"))]
    params, blobs = finished(album, asking.post(f"{album.url}/v1/videos", files=files))
    assert blobs == (second, picture)
    task = {"prompt": "a cat", "image_path": [url_of(picture), "in/cat.png"]}
    params, blobs = finished(album, asking.post(f"{album.url}/v1/tasks/video/", json=task))
    assert blobs == (picture, picture)


def test_a_form_may_name_a_picture(album: Any, picture: bytes) -> None:
    form = {"prompt": (None, "a"), "input_reference[image_url]": (None, url_of(picture))}
    _, blobs = finished(album, asking.post(f"{album.url}/v1/videos", files=form))
    assert blobs == (picture,)


def test_a_form_may_name_several_pictures(album: Any, picture: bytes) -> None:
    other = io.BytesIO()
    Image.new("RGB", (4, 4)).save(other, "PNG")
    second = other.getvalue()
    for name in ("image", "image[]", "image[image_url]", "input_reference[][image_url]"):
        files = [(name, (None, url_of(second))), (name, (None, url_of(picture))), ("prompt", (None, "a"))]
        _, blobs = finished(album, asking.post(f"{album.url}/v1/videos", files=files))
        assert blobs == (second, picture)
    _, blobs = finished(
        album, asking.post(f"{album.url}/v1/videos", files={"prompt": (None, "a"), "image[]": (None, url_of(picture))})
    )
    assert blobs == (picture,)


def test_null_in_a_remix_keeps_what_the_source_has(album: Any, picture: bytes) -> None:
    first = {"prompt": "a cat", "size": "256x64", "seconds": 3, "seed": 5, "image": [url_of(picture)]}
    source = asking.post(f"{album.url}/v1/videos", json=first)
    before, _ = finished(album, source)
    nothing = dict.fromkeys(("size", "seconds", "seed", "width", "num_frames", "input_reference", "image", "model"))
    path = f"{album.url}/v1/videos/{source.json()['id']}/remix"
    answer = asking.post(path, json={"prompt": "a dog", **nothing})
    after, blobs = finished(album, answer)
    assert after == {**before, "prompt": "a dog"}
    assert blobs == (picture,)
    assert answer.json()["seconds"] == source.json()["seconds"] == "3"
    assert asking.post(path, json={"prompt": None}).json()["error"]["param"] == "prompt"
    assert asking.post(path, json={"prompt": "a dog", "sise": None}).json()["error"]["param"] == "sise"


def test_a_remix_may_bring_another_picture(album: Any, picture: bytes) -> None:
    source = asking.post(f"{album.url}/v1/videos", json={"prompt": "a cat", "image": [url_of(picture)] * 2})
    finished(album, source)
    path = f"{album.url}/v1/videos/{source.json()['id']}/remix"
    _, blobs = finished(album, asking.post(path, json={"prompt": "a dog"}))
    assert blobs == (picture, picture)
    _, blobs = finished(album, asking.post(path, json={"prompt": "a dog", "input_reference": url_of(picture)}))
    assert blobs == (picture,)
    _, blobs = finished(album, asking.post(path, files={"prompt": (None, "a dog"), "image": ("a", picture)}))
    assert blobs == (picture,)


def test_too_many_pictures_are_refused(album: Any, picture: bytes) -> None:
    for count, reason in ((4, "at most 3"), (9, "1 to 8"), (0, "1 to 8")):
        response = asking.post(f"{album.url}/v1/videos", json={"prompt": "a", "image": [url_of(picture)] * count})
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]


def test_only_the_task_api_reads_paths(album: Any) -> None:
    response = asking.post(f"{album.url}/v1/videos", json={"prompt": "a", "image": "in/cat.png"})
    assert response.status_code == 400
    assert "a data URL" in response.json()["error"]["message"]


def test_a_large_picture_fits_into_a_form_field(album: Any) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((1200, 1200), 100).convert("RGB").save(buffer, "PNG")
    assert len(buffer.getvalue()) > 1 << 20
    form = {"prompt": (None, "a"), "image": (None, url_of(buffer.getvalue()))}
    _, blobs = finished(album, asking.post(f"{album.url}/v1/videos", files=form))
    assert blobs == (buffer.getvalue(),)


# -- without a server -----------------------------------------------------------------------------------------------


async def resolve(value: Any, *, paths: bool = False, **options: Any) -> list[bytes]:
    body = await References(ServerConfig(**options)).resolve(Body(fields={"image": value}), ["image"], paths=paths)
    assert body.fields == {}
    return body.uploads["image"]


def test_a_root_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    """Symptom: every path in a request was said not to exist."""
    with pytest.raises(ConfigError, match=r"--input-root .*nowhere: there is no such folder"):
        References(ServerConfig(input_root=tmp_path / "nowhere"))


async def test_a_path_is_read_under_the_root_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "cat.png").write_bytes(b"cat")
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "good-link").symlink_to(root / "sub" / "cat.png")
    assert await resolve("sub/cat.png", paths=True, input_root=root) == [b"cat"]
    assert await resolve(str(root / "sub" / "cat.png"), paths=True, input_root=root) == [b"cat"]
    assert await resolve("good-link", paths=True, input_root=root) == [b"cat"]
    for bad in ("../secret", "/etc/passwd", "link", "sub/../../secret", ".", "a\0b"):
        with pytest.raises(BadRequest, match=r"leads out|not a path"):
            await resolve(bad, paths=True, input_root=root)
    for missing in ("sub", "nothing.png"):
        with pytest.raises(BadRequest, match="no such file"):
            await resolve(missing, paths=True, input_root=root)
    with pytest.raises(BadRequest, match="more than 2 bytes"):
        await resolve("sub/cat.png", paths=True, input_root=root, max_upload_bytes=2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("data:image/png;base64,Y2F0", b"cat"),
        ("data:;base64,Y2F0", b"cat"),
        ("data:image/svg+xml;charset=utf-8,c%61t", b"cat"),
        ({"image_url": "data:image/png;base64,Y2F0"}, b"cat"),
        ({"image_url": {"url": "data:image/png;base64,Y2F0"}}, b"cat"),
    ],
)
async def test_data_urls_in_every_form(value: Any, expected: bytes) -> None:
    assert await resolve(value) == [expected]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"file_id": "file-1"}, "has file_id"),
        ({}, "has nothing"),
        (7, "must be a data URL"),
        ("", "must be a data URL"),
        (True, "must be a data URL"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:text/plain;base64,Y2F0", "a data URL of an image"),
        ("javascript:alert(1)", "must be a data URL"),
        ("https://example.com/a.png", "--allow-image-urls"),
    ],
)
async def test_references_that_are_none(value: Any, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        await resolve(value)


async def test_an_address_inside_is_refused_even_where_addresses_are_allowed() -> None:
    with pytest.raises(BadRequest, match="not on the public internet"):
        await resolve("http://127.0.0.1/a.png", allow_image_urls=True)
