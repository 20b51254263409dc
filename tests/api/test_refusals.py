"""Requests that can never succeed: each is refused with the field, the value and what would be accepted, and none of
them reaches the service."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from tests import asking
from triptych.api.app import create_app
from triptych.config import ServerConfig
from triptych.ids import Role
from triptych.server.service import DiffusionService, JobRecord
from triptych.wire.schema import HandoffSize, Param, RequestSchema

LIMIT = 64 * 1024

SCHEMA = RequestSchema(
    model="/models/tiny",
    pipeline="WanPipeline",
    split="modular",
    task="text-to-video",
    output="video",
    params=(
        Param(name="prompt", type="string", required=True, max_length=1000),
        Param(name="negative_prompt", type="string", nullable=True, max_length=1000),
        Param(name="height", type="integer", default=128, minimum=16, maximum=256, multiple_of=16),
        Param(name="width", type="integer", default=128, minimum=16, maximum=256, multiple_of=16),
        Param(name="num_frames", type="integer", default=17, minimum=1, maximum=65, multiple_of=4, remainder=1),
        Param(name="fps", type="integer", default=8, minimum=1, maximum=120),
        Param(name="num_inference_steps", type="integer", default=20, minimum=1, maximum=100),
        Param(name="guidance_scale", type="number", default=3.0, minimum=0, maximum=30),
        Param(name="seed", type="integer", nullable=True, minimum=0, maximum=float(2**63 - 1)),
        Param(name="fast", type="boolean", default=False),
        Param(name="n", type="integer", default=1, minimum=1, maximum=4),
        Param(name="output_format", type="string", nullable=True, choices=("mp4", "png", "jpeg", "webp")),
    ),
)

PICTURES = msgspec.structs.replace(SCHEMA, params=(*SCHEMA.params, Param(name="image", type="image", required=True)))
STILLS = msgspec.structs.replace(SCHEMA, output="image", task="text-to-image")


class Watchful(DiffusionService):
    """The service with a known model and no instances; remembers what was submitted to it."""

    def __init__(self, config: ServerConfig, schema: RequestSchema | None) -> None:
        super().__init__(config)
        self.known = schema
        self.submitted: list[dict[str, Any]] = []

    def schema(self) -> RequestSchema | None:
        return self.known

    async def submit(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> JobRecord:
        self.submitted.append(params)
        return await super().submit(params, *args, **kwargs)


class Door:
    """The HTTP application over a watchful service, without a socket."""

    def __init__(self, folder: Path, schema: RequestSchema | None) -> None:
        config = ServerConfig(output_dir=folder, max_upload_bytes=LIMIT)
        self.service = Watchful(config, schema)
        self.app = create_app(self.service, config)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://localhost"
        )

    async def refuses(
        self, response: httpx.Response, status: int, param: str | None, fragments: Sequence[str]
    ) -> dict[str, Any]:
        """Assert the error object, and that nothing was submitted."""
        assert response.status_code == status, response.text
        body = response.json()
        assert body.keys() == {"error"}
        error = body["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert error["param"] == param
        for fragment in fragments:
            assert fragment in error["message"]
        assert len(error["message"]) < 1000
        assert response.headers["x-request-id"]
        assert self.service.submitted == []
        return error


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    """One door for all tests: refusing changes nothing in it."""
    return Door(tmp_path_factory.mktemp("media"), SCHEMA)


BAD_FIELDS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"prompt": None}, "prompt", ["required"]),
    ({"prompt": ""}, "prompt", ["empty"]),
    ({"prompt": "  \n"}, "prompt", ["empty"]),
    ({"prompt": 7}, "prompt", ["7", "a string"]),
    ({"prompt": ["a", "b"]}, "prompt", ["a string"]),
    ({"prompt": {"text": "a"}}, "prompt", ["a string"]),
    ({"prompt": True}, "prompt", ["True", "a string"]),
    ({"prompt": "x" * 1001}, "prompt", ["1001 characters", "at most 1000"]),
    ({"prompt": "half \ud83d a face"}, "prompt", ["surrogate"]),
    ({"negative_prompt": 1}, "negative_prompt", ["a string"]),
    ({"size": "big"}, "size", ["'big'", "WIDTHxHEIGHT"]),
    ({"size": 128}, "size", ["128", "WIDTHxHEIGHT"]),
    ({"size": "128"}, "size", ["WIDTHxHEIGHT"]),
    ({"size": "１６x16"}, "size", ["WIDTHxHEIGHT"]),
    ({"seconds": "٢"}, "seconds", ["a number"]),
    ({"size": "128x"}, "size", ["WIDTHxHEIGHT"]),
    ({"size": "-128x128"}, "size", ["WIDTHxHEIGHT"]),
    ({"size": "0x128"}, "size", ["width=0", "16 to 256"]),
    ({"size": "100x128"}, "size", ["width=100", "multiple of 16", "96 and 112"]),
    ({"size": "128x99999"}, "size", ["height=99999", "16 to 256"]),
    ({"size": "128x128x128"}, "size", ["WIDTHxHEIGHT"]),
    ({"size": "128x128", "width": 64}, "size", ["width", "both given"]),
    ({"width": -16}, "width", ["-16", "16 to 256"]),
    ({"width": "128"}, "width", ["'128'", "an integer"]),
    ({"width": 128.5}, "width", ["128.5", "an integer"]),
    ({"width": 1e300}, "width", ["64 bits"]),
    ({"width": True}, "width", ["True", "an integer"]),
    ({"height": 10**9}, "height", ["1000000000", "16 to 256"]),
    ({"height": 10**30}, "height", ["64 bits"]),
    ({"height": [128]}, "height", ["an integer"]),
    ({"num_frames": 16}, "num_frames", ["16", "multiple of 4 plus 1", "13 and 17"]),
    ({"num_frames": 0}, "num_frames", ["1 to 65"]),
    ({"num_frames": 69}, "num_frames", ["69", "1 to 65"]),
    ({"num_frames": 17, "seconds": 2}, "seconds", ["num_frames", "both given"]),
    ({"seconds": 0}, "seconds", ["0"]),
    ({"seconds": -4}, "seconds", ["-4"]),
    ({"seconds": "soon"}, "seconds", ["'soon'", "a number"]),
    ({"seconds": "inf"}, "seconds", ["a number"]),
    ({"seconds": 4000}, "seconds", ["4000", "at most 8.125 at 8 fps"]),
    ({"seconds": "1.5"}, "seconds", ["a number"]),
    ({"seconds": 8, "fps": 16}, "seconds", ["at most 4.0625 at 16 fps"]),
    ({"seconds": 1e300}, "seconds", ["at most"]),
    ({"seconds": True}, "seconds", ["a number"]),
    ({"fps": 0}, "fps", ["0", "1 to 120"]),
    ({"num_inference_steps": 0}, "num_inference_steps", ["0", "1 to 100"]),
    ({"num_inference_steps": 10_000}, "num_inference_steps", ["10000", "1 to 100"]),
    ({"num_inference_steps": "20"}, "num_inference_steps", ["'20'", "an integer"]),
    ({"guidance_scale": -1}, "guidance_scale", ["-1", "0 to 30"]),
    ({"guidance_scale": "5"}, "guidance_scale", ["'5'", "a number"]),
    ({"guidance_scale": True}, "guidance_scale", ["a number"]),
    ({"seed": -1}, "seed", ["-1", "0 to 9223372036854775807"]),
    ({"seed": 2**63}, "seed", ["64 bits"]),
    ({"seed": 1.5}, "seed", ["1.5", "an integer"]),
    ({"fast": 1}, "fast", ["true or false"]),
    ({"fast": "true"}, "fast", ["true or false"]),
    ({"n": 5}, "n", ["1 to 4"]),
    ({"output_format": "gif"}, "output_format", ["'gif'", "mp4"]),
    ({"output_format": "png"}, "output_format", ["mp4"]),
    ({"input_reference": "https://host/cat.png"}, "input_reference", ["takes no image"]),
    ({"num_inference_step": 20}, "num_inference_step", ["did you mean 'num_inference_steps'"]),
    ({"sise": "128x128"}, "sise", ["did you mean 'size'"]),
    ({"steps": 20}, "steps", ["did you mean 'num_inference_steps'"]),
    ({"zzz": 1}, "zzz", ["known are", "prompt"]),
    ({"response_format": "url"}, "response_format", ["not a field"]),
    ({"../../etc/passwd" * 20: 1}, ("../../etc/passwd" * 20)[:60], ["not a field"]),
    ({"model": 5}, "model", ["a string"]),
    ({"\ud800": 1}, "\\ud800", ["not a field"]),
    ({"size": "\ud800"}, "size", ["WIDTHxHEIGHT"]),
]


@pytest.mark.parametrize(("fields", "param", "fragments"), BAD_FIELDS, ids=lambda v: repr(v)[:40])
async def test_a_bad_field_is_named(door: Door, fields: dict[str, Any], param: str, fragments: list[str]) -> None:
    content = json.dumps({"prompt": "a cat", **fields})
    response = await door.http.post("/v1/videos", content=content, headers={"content-type": "application/json"})
    await door.refuses(response, 400, param, fragments)


def test_no_bad_request_reaches_a_role_instance(make_house: Callable[..., Any]) -> None:
    assert len(BAD_FIELDS) >= 40
    with make_house(accepts=SCHEMA) as house, httpx.Client(base_url=house.url, timeout=60) as http:
        for fields, param, _ in BAD_FIELDS:
            body = json.dumps({"prompt": "a cat", **fields})
            answer = http.post("/v1/videos", content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
        job = http.post("/v1/videos", json={"prompt": "the one that is good"}).json()["id"]
        http.get(f"/v1/videos/{job}/events").raise_for_status()  # which ends with the job
        assert [params["prompt"] for params, _ in house.seen] == ["the one that is good"]


async def test_more_pixels_than_the_model_makes_are_refused_with_what_fits(tmp_path: Path) -> None:
    door = Door(tmp_path, msgspec.structs.replace(SCHEMA, max_pixels=128 * 128 * 17))
    response = await door.http.post("/v1/videos", json={"prompt": "a", "size": "256x128"})
    await door.refuses(response, 400, "size", ["256x128 in 17 frames is 557056 pixels", "at most 8 frames fit"])


@pytest.mark.parametrize("fields", [{"num_frames": 1}, {"fps": 8}, {"seconds": 1}, {"output_format": "mp4"}, {"n": 5}])
async def test_a_field_that_makes_no_sense_for_an_image_is_refused(door: Door, fields: dict[str, Any]) -> None:
    response = await door.http.post("/v1/images/generations", json={"prompt": "a cat", **fields})
    await door.refuses(response, 400, next(iter(fields)), [])


async def test_an_unknown_response_format_is_refused(door: Door) -> None:
    response = await door.http.post("/v1/images/generations", json={"prompt": "a", "response_format": "tiff"})
    await door.refuses(response, 400, "response_format", ["'tiff'", "url, b64_json"])


BAD_BODIES: list[tuple[bytes, str | None, list[str]]] = [
    (b"", None, ["not JSON"]),
    (b'{"prompt": "a"', None, ["not JSON", "line 1"]),
    (b"[1, 2]", None, ["array", "object"]),
    (b'"a"', None, ["string", "object"]),
    (b"null", None, ["null", "object"]),
    (b'{"prompt": "a", "guidance_scale": NaN}', None, ["NaN"]),
    (b'{"prompt": "a", "guidance_scale": -Infinity}', None, ["Infinity"]),
    (b'{"prompt": "a", "guidance_scale": 1e999}', "guidance_scale", ["finite"]),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", None, ["number"]),
    (b'{"prompt": "a", "prompt": "b"}', "prompt", ["more than once"]),
    (rb'{"\ud800": 1, "\ud800": 2}', r"\ud800", ["more than once"]),
    (b'{"' + b"x" * 99 + b'": 1, "' + b"x" * 99 + b'": 2}', "x" * 60, ["more than once"]),
    (b'{"prompt": "\xff\xfe"}', None, ["UTF-8"]),
    (b"[" * 30_000, None, ["nested too deeply"]),
]


@pytest.mark.parametrize(("content", "param", "fragments"), BAD_BODIES, ids=lambda v: repr(v)[:30])
async def test_a_malformed_body_is_refused(door: Door, content: bytes, param: str | None, fragments: list[str]) -> None:
    response = await door.http.post("/v1/videos", content=content, headers={"content-type": "application/json"})
    await door.refuses(response, 400, param, fragments)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "", "a" * 99])
async def test_another_content_type_is_refused(door: Door, kind: str) -> None:
    response = await door.http.post("/v1/videos", content=b'{"prompt": "a"}', headers={"content-type": kind})
    await door.refuses(response, 415, "Content-Type", ["application/json or multipart/form-data"])


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
async def test_a_body_that_is_said_to_be_compressed_is_refused(door: Door, coding: str) -> None:
    """Symptom: it was said not to be UTF-8, and taken as it is when it was plain after all."""
    headers = {"content-type": "application/json", "content-encoding": coding}
    response = await door.http.post("/v1/videos", content=b'{"prompt": "a"}', headers=headers)
    await door.refuses(response, 415, "Content-Encoding", [coding])


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/images/generations", "/v1/tasks/video/", "/v1/tasks/image/"])
async def test_unknown_fields_are_all_named(door: Door, path: str) -> None:
    response = await door.http.post(path, json={"prompt": "a", "promt": "b", "qqqq": 1, "seeed": 2})
    error = await door.refuses(response, 400, "promt", ["'promt' (did you mean 'prompt'?)", "'qqqq'", "'seeed'"])
    assert error["code"] == "unknown_field"
    many = {f"zz{number:04}": 1 for number in range(2000)}
    response = await door.http.post(path, json={"prompt": "a", **many})
    await door.refuses(response, 400, "zz0000", ["'zz0001'", "and 1984 more are not fields"])


async def test_unknown_query_parameters_are_all_named(door: Door) -> None:
    response = await door.http.get("/v1/videos?limit=3&lmit=4&ordr=asc")
    await door.refuses(response, 400, "lmit", ["did you mean 'limit'", "did you mean 'order'"])


async def test_a_picture_to_edit_is_refused_by_a_model_that_takes_none(door: Door) -> None:
    files = {"prompt": (None, "a"), "image[]": ("a.png", png(8, 8))}
    response = await door.http.post("/v1/images/edits", files=files)
    await door.refuses(response, 400, "image", ["takes no image"])


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/images/generations", "/v1/tasks/video/"])
@pytest.mark.parametrize(
    "content", [rb'{"prompt": "a", "\ud800": 1}', rb'{"prompt": "a", "prompt": {"\udfff": [], "\udfff": 1}}']
)
async def test_half_of_a_surrogate_pair_in_a_name_is_refused_everywhere(door: Door, path: str, content: bytes) -> None:
    response = await door.http.post(path, content=content, headers={"content-type": "application/json"})
    await door.refuses(response, 400, r"\ud800" if b"d800" in content else r"\udfff", [])


@pytest.mark.parametrize(
    "value", [{"\ud800": 1}, "data:,\ud800", "data:;base64,\ud800", "\ud800", {"image_url": {"\ud800": 1}}, ["\ud800"]]
)
@pytest.mark.parametrize(("path", "field"), [("/v1/videos", "image"), ("/v1/tasks/video/", "image_path")])
async def test_half_of_a_surrogate_pair_for_a_picture_is_refused(
    tmp_path: Path, path: str, field: str, value: Any
) -> None:
    door = Door(tmp_path, PICTURES)
    content = json.dumps({"prompt": "a", field: value})
    response = await door.http.post(path, content=content, headers={"content-type": "application/json"})
    await door.refuses(response, 400, field, [])


async def test_an_edit_without_a_picture_is_refused(door: Door, tmp_path: Path) -> None:
    response = await door.http.post("/v1/images/edits", json={"prompt": "a"})
    await door.refuses(response, 400, "image", ["takes no image", "/v1/images/generations"])
    params = (*SCHEMA.params, Param(name="image", type="image", nullable=True))
    other = Door(tmp_path, msgspec.structs.replace(SCHEMA, params=params))
    response = await other.http.post("/v1/images/edits", json={"prompt": "a", "image": None})
    await other.refuses(response, 400, "image", ["is required"])
    document = (await other.http.get("/openapi.json")).json()
    edit = document["components"]["schemas"]["ImageEditRequest"]
    assert [found["required"] for found in edit["anyOf"]] == [["input_reference"], ["image"]]
    assert "/v1/images/edits" not in (await door.http.get("/openapi.json")).json()["paths"]


async def test_an_unknown_model_is_answered_with_the_served_one(door: Door) -> None:
    response = await door.http.post("/v1/videos", json={"prompt": "a", "model": "sora-2"})
    error = await door.refuses(response, 404, "model", ["'sora-2'", "/models/tiny", "tiny"])
    assert error["code"] == "model_not_found"


async def test_a_video_of_an_image_model_is_refused(tmp_path: Path) -> None:
    door = Door(tmp_path, STILLS)
    response = await door.http.post("/v1/videos", json={"prompt": "a"})
    await door.refuses(response, 400, "model", ["/v1/images/generations"])


async def test_before_a_model_is_known_requests_are_put_off(tmp_path: Path) -> None:
    door = Door(tmp_path, None)
    response = await door.http.post("/v1/videos", json={"prompt": "a"})
    await door.refuses(response, 503, None, ["encoder"])
    assert int(response.headers["retry-after"]) > 0
    ready = await door.http.get("/ready")
    assert ready.status_code == 503
    assert len(ready.json()["reasons"]) == 3
    assert "decoder" in ready.json()["error"]["message"]


FORMS: list[tuple[list[tuple[str, Any]], str, list[str]]] = [
    ([("prompt", (None, "a")), ("prompt", (None, "b"))], "prompt", ["more than once"]),
    ([("prompt[]", (None, "a")), ("prompt[]", (None, "b"))], "prompt", ["more than once"]),
    (
        [("prompt", (None, "a")), ("queue_timeout", (None, "1")), ("queue_timeout", (None, "1"))],
        "queue_timeout",
        ["once"],
    ),
    ([("prompt", (None, "a")), ("width", (None, "12a"))], "width", ["'12a'", "an integer"]),
    ([("prompt", (None, "a")), ("width", (None, ""))], "width", ["''", "an integer"]),
    ([("prompt", (None, "a")), ("width", (None, "9" * 21))], "width", ["an integer"]),
    ([("prompt", (None, "a")), ("guidance_scale", (None, "nan"))], "guidance_scale", ["a number"]),
    ([("prompt", (None, "a")), ("guidance_scale", (None, "1e999"))], "guidance_scale", ["finite"]),
    ([("prompt", (None, "a")), ("fast", (None, "yes"))], "fast", ["true or false"]),
    ([("prompt", ("a.txt", b"a"))], "prompt", ["not a file"]),
    ([("prompt", (None, "a")), ("input_reference", ("a.png", b"x"))], "input_reference", ["takes no image"]),
    ([("prompt", (None, "a")), ("video", ("a.mp4", b"x"))], "video", ["not a field"]),
    ([("prompt", (None, "a")), ("seed", (None, "1")), ("seed", ("a", b"1"))], "seed", ["more than once"]),
]


@pytest.mark.parametrize(("parts", "param", "fragments"), FORMS, ids=lambda v: repr(v)[:50])
async def test_a_bad_form_is_refused(
    door: Door, parts: list[tuple[str, Any]], param: str, fragments: list[str]
) -> None:
    response = await door.http.post("/v1/videos", files=parts)
    await door.refuses(response, 400, param, fragments)


@pytest.mark.parametrize("header", ["multipart/form-data", "multipart/form-data; boundary=x"])
async def test_a_broken_form_is_refused(door: Door, header: str) -> None:
    response = await door.http.post("/v1/videos", content=b"--y\r\nnonsense", headers={"content-type": header})
    await door.refuses(response, 400, None, [])


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((32, 32), 100).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("parts", "param", "fragment"),
    [
        ([("input_reference", ("a.png", b"not a picture"))], "input_reference", "not a readable"),
        ([("input_reference", ("a.png", png(9000, 1)))], "input_reference", "9000x1"),
        ([("input_reference", ("a.png", png(8, 8)[:-20]))], "input_reference", "not a readable"),
        ([("input_reference", ("a.jpg", encoded("JPEG")[:-400]))], "input_reference", "not a readable"),
        ([("input_reference", ("a.png", png(8, 8)))] * 2, "input_reference", "2 files"),
        ([("image", ("a", png(8, 8))), ("input_reference", ("b", png(8, 8)))], "input_reference", "twice"),
        ([("input_reference", (None, "https://host/a.png"))], "input_reference", "--allow-image-urls"),
        ([("image", (None, "/etc/passwd"))], "image", "a data URL"),
        ([("image", (None, "data:image/png;base64,####"))], "image", "not valid base64"),
        ([("image", (None, "data:text/html,hello"))], "image", "a data URL of an image"),
        ([("image", (None, "data:image/png;base64,aGVsbG8="))], "image", "not a readable"),
        ([], "image", "required"),
    ],
)
async def test_a_bad_picture_is_refused(
    tmp_path: Path, parts: list[tuple[str, Any]], param: str, fragment: str
) -> None:
    door = Door(tmp_path, PICTURES)
    response = await door.http.post("/v1/videos", files=[("prompt", (None, "a")), *parts])
    await door.refuses(response, 400, param, [fragment])


async def test_a_body_that_says_it_is_too_large_is_refused(door: Door) -> None:
    response = await door.http.post("/v1/videos", json={"prompt": "x" * LIMIT})
    await door.refuses(response, 413, None, [str(LIMIT)])


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
async def test_a_body_without_a_length_is_refused_while_it_streams(door: Door, kind: str) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n'
        while sent < 100 * LIMIT:
            sent += 4096
            yield b"x" * 4096

    response = await door.http.post("/v1/videos", content=endless(), headers={"content-type": kind})
    await door.refuses(response, 413, None, [str(LIMIT)])
    assert sent < 2 * LIMIT


async def test_what_no_pool_can_hold_is_refused_with_both_sizes(tmp_path: Path, monkeypatch: Any) -> None:
    door = Door(tmp_path, msgspec.structs.replace(
        SCHEMA, handoff=HandoffSize(channels=16, spatial=8, temporal=4, item_bytes=4)
    ))  # fmt: skip
    monkeypatch.setattr(door.service, "largest_pool", {Role.ENCODER: 300_000, Role.DENOISER: 200_000}.get)
    response = await door.http.post("/v1/videos", json={"prompt": "a", "size": "256x256"})
    needed = 4 * 16 * 5 * 32 * 32
    await door.refuses(response, 413, "size", ["denoiser", str(needed), "200000"])


def test_what_no_pool_of_a_live_instance_can_hold_is_refused_with_its_size(make_house: Any) -> None:
    handoff = HandoffSize(channels=16, spatial=8, temporal=4, item_bytes=4)
    with make_house(accepts=msgspec.structs.replace(SCHEMA, handoff=handoff)) as house:

        def post(frames: int) -> httpx.Response:
            body = {"prompt": "a", "size": "256x256", "num_frames": frames}
            return asking.post(f"{house.url}/v1/videos", json=body)

        pool = house.service.info()["instances"][0]["pool_bytes"]
        assert pool == 4 * 16 * 16 * 32 * 32
        assert post(1 + 4 * 15).status_code == 200
        answer = post(1 + 4 * 16)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert f"takes {4 * 16 * 17 * 32 * 32} bytes" in answer.json()["error"]["message"]
        assert f"has {pool} " in answer.json()["error"]["message"]


async def test_a_picture_that_the_encoder_could_not_hand_on_is_refused_before_it_is_encoded(
    tmp_path: Path, monkeypatch: Any
) -> None:
    door = Door(tmp_path, msgspec.structs.replace(
        SCHEMA, handoff=HandoffSize(channels=16, condition_channels=20, spatial=8, temporal=4, item_bytes=4)
    ))  # fmt: skip
    monkeypatch.setattr(door.service, "largest_pool", {Role.ENCODER: 400_000, Role.DENOISER: 400_000}.get)
    response = await door.http.post("/v1/videos", json={"prompt": "a", "size": "256x256"})
    await door.refuses(response, 413, "size", ["encoder", str(4 * 20 * 5 * 32 * 32), "400000"])


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", "/v1/videos?limit=0", 400, "limit"),
        ("GET", "/v1/videos?limit=101", 400, "limit"),
        ("GET", "/v1/videos?limit=many", 400, "limit"),
        ("GET", "/v1/videos?limit=1&limit=2", 400, "limit"),
        ("GET", "/v1/videos?order=up", 400, "order"),
        ("GET", "/v1/videos?after=nothing", 400, "after"),
        ("GET", "/v1/videos?page=2", 400, "page"),
        ("GET", "/v1/videos/video_1", 404, None),
        ("GET", "/v1/videos/video_1/content", 404, None),
        ("GET", "/v1/videos/video_1/content?variant=audio", 400, "variant"),
        ("DELETE", "/v1/videos/video_1", 404, None),
        ("GET", "/v1/files/..%2f..%2fetc%2fpasswd", 404, None),
        ("GET", "/v1/files/video_00000000000000000000000000000000.mp4", 404, None),
        ("GET", "/v1/models/other", 404, "model"),
        ("GET", "/v1/nothing", 404, None),
        ("GET", "/docs", 404, None),
        ("GET", "/v1/videos/", 404, None),
        ("PUT", "/v1/videos", 405, None),
        ("POST", "/health", 405, None),
    ],
)
async def test_a_bad_address_is_answered_in_the_same_shape(
    door: Door, method: str, path: str, status: int, param: str | None
) -> None:
    await door.refuses(await door.http.request(method, path), status, param, [])


async def test_a_wrong_method_is_answered_with_the_right_ones(door: Door) -> None:
    response = await door.http.request("PATCH", "/v1/videos")
    assert response.headers["allow"] == "GET, POST"


async def test_a_bug_fails_one_request_and_shows_nothing_of_itself(
    door: Door, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("the secret of the house")

    monkeypatch.setattr(door.service, "readiness", broken)
    response = await door.http.get("/ready", headers={"x-request-id": "my-id"})
    error = await door.refuses(response, 500, None, ["my-id"])
    assert "secret" not in response.text
    assert error["code"] == "internal_error"
    assert response.headers["x-request-id"] == "my-id"
    assert "the secret of the house" in caplog.text
    assert (await door.http.get("/health")).status_code == 200


async def test_a_request_id_with_line_breaks_is_replaced(door: Door) -> None:
    response = await door.http.get("/health", headers={"x-request-id": "a b\tc"})
    assert response.headers["x-request-id"].startswith("req_")
