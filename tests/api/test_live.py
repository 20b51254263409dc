"""The door over a real socket: downloads in ranges, hang-ups, uploads without end, and what operators read."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

CLIP = bytes(range(256)) * 40


@pytest.fixture
def http(house: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.url, timeout=60) as client:
        yield client


@pytest.fixture
def content(http: httpx.Client) -> str:
    """Path of a finished video's content."""
    video = http.post("/v1/videos", json={"prompt": "a cat"}).json()
    until(lambda: http.get(f"/v1/videos/{video['id']}").json()["status"] == "completed")
    return f"/v1/videos/{video['id']}/content"


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_download_has_a_safe_name_and_a_length(http: httpx.Client, content: str) -> None:
    response = http.get(content)
    assert response.status_code == 200
    assert response.content == CLIP
    assert response.headers["accept-ranges"] == "bytes"
    assert response.headers["content-disposition"] == f'attachment; filename="{content.split("/")[3]}.mp4"'
    head = http.head(content)
    assert head.content == b""
    assert head.headers["content-length"] == str(len(CLIP))


@pytest.mark.parametrize("door", ["/v1/videos/{}/content", "/v1/tasks/{}/result", "/v1/files/{}.mp4",
                                  "/v1/files/download/{}.mp4"])  # fmt: skip
def test_a_client_that_has_the_file_does_not_get_it_again(http: httpx.Client, content: str, door: str) -> None:
    url = door.format(content.split("/")[3])
    head = http.head(url)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(CLIP)))
    etag = head.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        for method in ("GET", "HEAD"):
            # A range, even one that is not there, does not matter to who has the whole.
            answer = http.request(method, url, headers={"if-none-match": known, "range": "bytes=99999-"})
            assert (answer.status_code, answer.content) == (304, b"")
            assert answer.headers["etag"] == etag
    for other in ('"other"', etag.strip('"'), ""):
        assert http.get(url, headers={"if-none-match": other}).content == CLIP


@pytest.mark.parametrize(
    ("header", "expected", "said"),
    [
        ("bytes=0-99", CLIP[:100], "bytes 0-99/10240"),
        ("bytes=10000-", CLIP[10000:], "bytes 10000-10239/10240"),
        ("bytes=-10", CLIP[-10:], "bytes 10230-10239/10240"),
        ("bytes=10200-99999", CLIP[10200:], "bytes 10200-10239/10240"),
    ],
)
def test_a_range_is_answered_with_that_part(
    http: httpx.Client, content: str, header: str, expected: bytes, said: str
) -> None:
    response = http.get(content, headers={"range": header})
    assert response.status_code == 206
    assert response.content == expected
    assert response.headers["content-range"] == said


def test_several_ranges_come_in_one_answer(http: httpx.Client, content: str) -> None:
    response = http.get(content, headers={"range": "bytes=0-1, 5-6"})
    assert response.status_code == 206
    assert response.headers["content-type"].startswith("multipart/byteranges")
    assert b"bytes 0-1/10240" in response.content
    assert b"bytes 5-6/10240" in response.content


@pytest.mark.parametrize("header", ["bytes=a-b", "lines=1-2", "bytes=9-3", "nonsense", "bytes=", "bytes=-"])
def test_a_range_that_is_none_is_ignored(http: httpx.Client, content: str, header: str) -> None:
    response = http.get(content, headers={"range": header})
    assert response.status_code == 200
    assert response.content == CLIP


@pytest.mark.parametrize("header", ["bytes=10240-", "bytes=99999-100000", "bytes=-0"])
def test_a_range_outside_the_file_is_refused_with_its_size(http: httpx.Client, content: str, header: str) -> None:
    response = http.get(content, headers={"range": header})
    assert response.status_code == 416
    assert response.headers["content-range"] == "bytes */10240"
    assert "10240 bytes" in response.json()["error"]["message"]


def test_a_job_shows_its_stage_and_steps_while_it_runs(http: httpx.Client, house: Any) -> None:
    video = http.post("/v1/videos", json={"prompt": "slow", "seed": 5}).json()
    path = f"/v1/videos/{video['id']}"
    until(lambda: http.get(path).json()["step"] == 5)
    response = http.get(path)
    running = response.json()
    assert running["status"] == "in_progress"
    assert running["stage"] == "denoising_running"
    assert running["progress"] == 5 + 85 // 2
    assert running["seed"] == 5
    assert running["started_at"] is not None
    assert [timing["role"] for timing in running["timings"]] == ["encoder"]
    assert int(response.headers["openai-poll-after-ms"]) > 0
    (lease,) = [lease for lease in list(house.held) if lease.request == video["id"]]
    house.held.pop(lease).let_go(lease)
    until(lambda: http.get(path).json()["status"] == "completed")
    done = http.get(path).json()
    assert (done["step"], done["steps"]) == (10, 10)
    assert [timing["role"] for timing in done["timings"]] == ["encoder", "denoiser", "decoder"]


def test_a_seed_is_drawn_and_told_when_none_is_given(http: httpx.Client) -> None:
    seeds = {http.post("/v1/videos", json={"prompt": "a cat"}).json()["seed"] for _ in range(3)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_null_means_not_given_and_whole_numbers_are_integers(http: httpx.Client) -> None:
    video = http.post("/v1/videos", json={"prompt": "a cat", "size": None, "num_frames": None, "seed": 3.0}).json()
    assert video["size"] == "96x64"
    assert video["num_frames"] == 17
    assert video["seed"] == 3


@pytest.mark.parametrize(("seconds", "frames"), [(1, 9), ("2", 17), (0.01, 1), (8, 65), (1.7, 13), ("08", 65)])
def test_seconds_become_the_nearest_legal_number_of_frames(
    http: httpx.Client, house: Any, seconds: Any, frames: int
) -> None:
    answer = http.post("/v1/videos", json={"prompt": "a cat", "seconds": seconds})
    assert answer.status_code == 200
    assert answer.json()["num_frames"] == frames
    assert answer.json()["seconds"] == f"{float(seconds):g}"


def test_form_values_are_read_as_what_the_model_declares(http: httpx.Client) -> None:
    fields = {"prompt": "a cat", "num_frames": "9", "fps": " 16", "seed": "9223372036854775807"}
    video = http.post("/v1/videos", files={k: (None, v) for k, v in fields.items()}).json()
    assert (video["num_frames"], video["fps"], video["seed"]) == (9, 16, 2**63 - 1)


def test_a_client_that_hangs_up_stops_the_image(http: httpx.Client, house: Any) -> None:
    body = b'{"prompt": "slow image"}'
    head = "POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    with socket.create_connection(("127.0.0.1", house.config.port)) as wire:
        wire.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: any(lease.request.startswith("image_") for lease in list(house.held)))
        until(lambda: busy(http) == 1)  # that of the test before may still be at its decoder
    until(lambda: busy(http) == 0)
    house.held.clear()


def busy(http: httpx.Client) -> int:
    return sum(len(instance["leases"]) for instance in http.get("/server_info").json()["instances"])


def test_deleting_a_running_job_frees_its_slot(http: httpx.Client, house: Any) -> None:
    video = http.post("/v1/videos", json={"prompt": "slow"}).json()
    until(lambda: busy(http) == 1)
    assert http.delete(f"/v1/videos/{video['id']}").json() == {
        "id": video["id"],
        "object": "video.deleted",
        "deleted": True,
    }
    until(lambda: busy(http) == 0)
    house.held.clear()


def test_a_deleted_video_leaves_no_file(http: httpx.Client, house: Any, content: str) -> None:
    name = content.split("/")[3]
    assert http.get(f"/v1/files/{name}.mp4").content == CLIP
    http.delete(f"/v1/videos/{name}")
    assert http.get(f"/v1/files/{name}.mp4").status_code == 404
    assert list(house.folder.glob(f"{name}*")) == []


def test_an_upload_without_end_is_cut_off_and_the_server_lives(http: httpx.Client, house: Any) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(house.config.max_upload_bytes // 65536 + 2):
            yield b" " * 65536

    answer = http.post("/v1/videos", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"
    assert http.get("/health").json() == {"status": "ok"}


def test_metrics_have_no_ids_in_their_labels(http: httpx.Client, content: str) -> None:
    http.get(content)
    http.get("/v1/nothing/at/all")
    http.get("/v1/videos/video_1")
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    routes = {sample.labels["route"] for sample in families["triptych_http_requests"].samples}
    assert "/v1/videos/{video_id}/content" in routes
    assert "unmatched" in routes
    assert not any("video_" in route.replace("{video_id}", "") or "nothing" in route for route in routes)


def test_readiness_and_info_tell_the_roles(http: httpx.Client) -> None:
    assert http.get("/ready").json() == {"ready": True, "reasons": []}
    info = http.get("/server_info").json()
    assert info["roles"].keys() == {"encoder", "denoiser", "decoder"}


def test_the_openapi_document_describes_the_served_model(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    body = document["components"]["schemas"]["VideoRequest"]
    assert body["required"] == ["prompt"]
    assert body["additionalProperties"] is False
    assert {"image", "input_reference"} <= body["properties"].keys()  # by data URL or address
    assert "image" in document["components"]["schemas"]["VideoForm"]["properties"]
    frames = body["properties"]["num_frames"]["anyOf"][0]
    assert frames["enum"][:3] == [1, 5, 9]
    create = document["paths"]["/v1/videos"]["post"]
    assert create["requestBody"]["content"].keys() == {"application/json", "multipart/form-data"}
    for path in document["paths"].values():
        for operation in path.values():
            assert "ValidationError" not in str(operation["responses"])
    assert "num_frames" not in document["components"]["schemas"]["ImageRequest"]["properties"]


def test_a_video_can_be_paused_and_resumed(http: httpx.Client) -> None:
    job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
    paused = http.post(f"/v1/videos/{job}/pause")
    assert (paused.status_code, paused.json()["paused"]) == (200, True)
    assert http.post(f"/v1/videos/{job}/pause").json()["paused"]
    resumed = http.post(f"/v1/videos/{job}/resume").json()
    assert (resumed["paused"], resumed["resumed_from_step"]) == (False, 0)
    http.delete(f"/v1/videos/{job}")
    for verb in ("pause", "resume", "migrate"):
        assert http.post(f"/v1/videos/{job}/{verb}").status_code == 404


def test_a_video_that_no_other_denoiser_can_take_is_not_moved(http: httpx.Client) -> None:
    job = http.post("/v1/videos", json={"prompt": "slow"}).json()["id"]
    until(lambda: http.get(f"/v1/videos/{job}").json()["stage"] == "denoising_running")
    answer = http.post(f"/v1/videos/{job}/migrate")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_movable")
    assert "no other denoiser" in answer.json()["error"]["message"]
    assert http.get(f"/v1/videos/{job}").json()["stage"] == "denoising_running"
    http.delete(f"/v1/videos/{job}")
