"""The Task API against a live server: creating, looking, fetching, stopping, and what is refused."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from PIL import Image

from tests import asking

STATUS_FIELDS = {"task_id", "status", "start_time", "end_time", "error", "error_type", "save_result_path"}


@pytest.fixture
def http(house: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.url, timeout=60) as client:
        yield client


def ended(http: httpx.Client, task: str) -> dict[str, Any]:
    """The status of a task once it is final."""
    deadline = time.monotonic() + 60
    while True:
        status = http.get(f"/v1/tasks/{task}/status").json()
        if status["status"] not in ("pending", "processing"):
            return status
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_held(house: Any, task: str) -> None:
    deadline = time.monotonic() + 60
    while not any(lease.request == task for lease in list(house.held)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_task_from_post_to_file(http: httpx.Client, house: Any) -> None:
    payload = {
        "prompt": "a cat",
        "negative_prompt": "",
        "image_path": "",
        "infer_steps": 7,
        "target_video_length": 33,
        "target_shape": [48, 112],
        "target_fps": 16,
        "seed": 42,
        "save_result_path": "save_results/cat.mp4",
        "use_prompt_enhancer": False,
        "num_fragments": 1,
        "lora_name": None,
        "lora_strength": 1.0,
    }
    created = http.post("/v1/tasks/video/", json=payload).json()
    assert created.keys() == {"task_id", "task_status", "save_result_path"}
    assert (created["task_status"], created["save_result_path"]) == ("pending", "save_results/cat.mp4")
    status = ended(http, created["task_id"])
    assert status.keys() == STATUS_FIELDS
    assert (status["status"], status["error"], status["error_type"]) == ("completed", None, None)
    assert datetime.fromisoformat(status["start_time"]) <= datetime.fromisoformat(status["end_time"])
    params, _ = house.seen[-1]
    assert (params["num_inference_steps"], params["num_frames"], params["fps"]) == (7, 33, 16)
    assert (params["height"], params["width"], params["seed"]) == (48, 112, 42)
    assert (house.folder / "save_results" / "cat.mp4").read_bytes() == house.clip
    result = http.get(f"/v1/tasks/{created['task_id']}/result")
    assert (result.content, result.headers["content-type"]) == (house.clip, "video/mp4")
    assert http.get("/v1/files/download/save_results/cat.mp4").content == house.clip


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("named/my cat.mp4", "filename*=utf-8''my%20cat.mp4"),
        ("named/Größe.mp4", "filename*=utf-8''Gr%C3%B6%C3%9Fe.mp4"),
        ("named/cat.mp4", 'filename="cat.mp4"'),
    ],
)
def test_a_download_is_called_as_the_task_asked_for(http: httpx.Client, path: str, said: str) -> None:
    task = http.post("/v1/tasks/video/", json={"prompt": "a cat", "save_result_path": path}).json()["task_id"]
    assert ended(http, task)["save_result_path"] == path
    for door in (f"/v1/tasks/{task}/result", f"/v1/files/download/{path}"):
        for method in ("GET", "HEAD"):
            answer = http.request(method, door)
            assert (answer.status_code, answer.headers["content-disposition"]) == (200, f"attachment; {said}")
    assert http.head(f"/v1/files/{task}.mp4").headers["content-disposition"] == f'inline; filename="{task}.mp4"'


def test_a_task_without_a_path_is_saved_under_its_id(http: httpx.Client, house: Any) -> None:
    created = http.post("/v1/tasks/video", json={"prompt": "a cat"}).json()
    assert created["save_result_path"] == f"{created['task_id']}.mp4"
    status = ended(http, created["task_id"])
    assert status["save_result_path"] == created["save_result_path"]
    assert http.get(f"/v1/files/download/{status['save_result_path']}").content == house.clip


def test_a_path_without_a_suffix_gets_that_of_the_file(http: httpx.Client, house: Any) -> None:
    created = http.post("/v1/tasks/image/", json={"prompt": "a cat", "save_result_path": "stills/one"}).json()
    assert created["save_result_path"] == "stills/one.png"
    assert ended(http, created["task_id"])["status"] == "completed"
    with Image.open(house.folder / "stills" / "one.png") as image:
        assert image.size == (96, 64)


def test_the_suffix_of_an_image_says_its_format(http: httpx.Client, house: Any) -> None:
    created = http.post("/v1/tasks/image/", json={"prompt": "a cat", "save_result_path": "one.webp"}).json()
    ended(http, created["task_id"])
    with Image.open(house.folder / "one.webp") as image:
        assert image.format == "WEBP"


def test_a_form_carries_pictures(http: httpx.Client, house: Any, picture: bytes) -> None:
    form = {"prompt": "a cat", "infer_steps": "4", "target_fps": "8", "seed": "3", "save_result_path": ""}
    created = http.post("/v1/tasks/video/form", data=form, files={"image_file": ("../x.png", picture)}).json()
    assert ended(http, created["task_id"])["status"] == "completed"
    params, blobs = house.seen[-1]
    assert (params["num_inference_steps"], params["seed"]) == (4, 3)
    assert blobs == (picture,)


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_a_picture_may_be_base64(http: httpx.Client, house: Any, picture: bytes, prefix: str) -> None:
    text = prefix + base64.b64encode(picture).decode()
    created = http.post("/v1/tasks/video/", json={"prompt": "a cat", "image_path": text}).json()
    assert ended(http, created["task_id"])["status"] == "completed"
    assert house.seen[-1][1] == (picture,)


def test_an_aspect_ratio_keeps_the_models_area(http: httpx.Client, house: Any) -> None:
    created = http.post("/v1/tasks/image/", json={"prompt": "a cat", "aspect_ratio": "1:1"}).json()
    ended(http, created["task_id"])
    params, _ = house.seen[-1]
    assert (params["width"], params["height"]) == (80, 80)  # 96x64 has the area of a square of 78.4


def still(width: int, height: int, turn: int = 1) -> str:
    """A picture in base64; ``turn`` is EXIF's number for how the camera was held."""
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.new("RGB", (width, height)).save(buffer, "JPEG", exif=exif)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"image_path": still(64, 128)}, (48, 112)),  # 96x64 has the area of 55x111
        ({"image_path": still(128, 64, turn=6)}, (48, 112)),
        ({"image_path": still(300, 300)}, (80, 80)),
        ({"image_path": still(1200, 100)}, (256, 16)),  # the area would be that of 271x23, and 256 is the longest side
        ({"image_path": still(64, 128), "target_shape": []}, (48, 112)),
        ({"image_path": still(64, 128), "target_shape": [64, 64]}, (64, 64)),
        ({"image_path": still(64, 128), "aspect_ratio": "3:2"}, (96, 64)),
        ({"image_path": still(64, 128), "size": "32x32"}, (32, 32)),
        ({"image_path": ""}, (96, 64)),
    ],
    ids=["tall", "turned", "square", "wide", "empty shape", "shape", "ratio", "size", "no picture"],
)
def test_an_adaptive_task_has_the_shape_of_its_picture(
    http: httpx.Client, house: Any, fields: dict[str, Any], size: tuple[int, int]
) -> None:
    body = {"prompt": "a cat", "resize_mode": "adaptive", **fields}
    assert ended(http, http.post("/v1/tasks/video/", json=body).json()["task_id"])["status"] == "completed"
    params, _ = house.seen[-1]
    assert (params["width"], params["height"]) == size


def test_a_task_that_is_not_adaptive_has_the_models_size(http: httpx.Client, house: Any) -> None:
    body = {"prompt": "a cat", "image_path": still(64, 128)}
    ended(http, http.post("/v1/tasks/video/", json=body).json()["task_id"])
    assert (house.seen[-1][0]["width"], house.seen[-1][0]["height"]) == (96, 64)


def test_a_picture_of_a_shape_that_the_model_does_not_make_is_refused(http: httpx.Client, house: Any) -> None:
    before = len(house.seen)
    body = {"prompt": "a cat", "resize_mode": "adaptive", "image_path": still(2000, 20)}
    answer = http.post("/v1/tasks/image/", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resize_mode")
    assert "the picture is 2000x20, and the model makes no size of that shape" in answer.json()["error"]["message"]
    assert len(house.seen) == before


def test_an_image_may_be_waited_for(http: httpx.Client) -> None:
    response = http.post("/v1/tasks/image/sync?timeout_seconds=10", json={"prompt": "a cat", "target_shape": [32, 64]})
    assert response.status_code == 200
    assert response.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(response.content)).size == (64, 32)


def test_an_image_that_takes_too_long_is_cancelled(http: httpx.Client, house: Any) -> None:
    response = http.post("/v1/tasks/image/sync?timeout_seconds=1", json={"prompt": "slow", "task_id": "late"})
    assert response.status_code == 504
    assert ended(http, "late")["status"] == "cancelled"
    house.held.clear()


def test_a_failure_is_told_with_its_kind(http: httpx.Client) -> None:
    created = http.post("/v1/tasks/video/", json={"prompt": "fail"}).json()
    status = ended(http, created["task_id"])
    assert (status["status"], status["error_type"]) == ("failed", "stage_failed")
    assert "the paint is dry" in status["error"]
    result = http.get(f"/v1/tasks/{created['task_id']}/result")
    assert result.status_code == 404
    assert "the paint is dry" in result.json()["error"]["message"]


def test_a_task_can_be_stopped_once(http: httpx.Client, house: Any) -> None:
    task = http.post("/v1/tasks/video/", json={"prompt": "slow"}).json()["task_id"]
    until_held(house, task)
    assert http.get(f"/v1/tasks/{task}/status").json()["status"] == "processing"
    assert http.delete(f"/v1/tasks/{task}").json() == {
        "stop_status": "success",
        "reason": "Task stopped successfully.",
    }
    assert ended(http, task)["status"] == "cancelled"
    assert http.delete(f"/v1/tasks/{task}").json()["stop_status"] == "do_nothing"
    house.held.clear()


@pytest.mark.parametrize("what", ["status", "result", "files", "events"])
def test_a_path_may_end_in_a_slash(http: httpx.Client, what: str) -> None:
    """Symptom: only some of the paths took one, the others were 404."""
    task = http.post("/v1/tasks/image", json={"prompt": "a tree"}).json()["task_id"]
    assert ended(http, task)["status"] == "completed"
    plain, slashed = (http.get(f"/v1/tasks/{task}/{what}{end}") for end in ("", "/"))
    assert (plain.status_code, slashed.status_code) == (200, 200)
    assert slashed.content == plain.content
    assert http.delete(f"/v1/tasks/{task}/").json()["stop_status"] == "do_nothing"


def test_a_client_may_name_its_task(http: httpx.Client) -> None:
    created = http.post("/v1/tasks/video/", json={"prompt": "a cat", "task_id": "my-task.1"}).json()
    assert created["task_id"] == "my-task.1"
    assert ended(http, "my-task.1")["task_id"] == "my-task.1"
    again = http.post("/v1/tasks/video/", json={"prompt": "a dog", "task_id": "my-task.1"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "task_exists")


def test_the_name_of_a_task_that_was_deleted_is_free_again(http: httpx.Client) -> None:
    http.post("/v1/tasks/video/", json={"prompt": "a cat", "task_id": "again"})
    assert ended(http, "again")["status"] == "completed"
    job = http.get("/v1/videos?limit=1").json()["data"][0]["id"]
    http.delete(f"/v1/videos/{job}").raise_for_status()
    assert http.get("/v1/tasks/again/status").status_code == 404
    assert http.post("/v1/tasks/video/", json={"prompt": "a dog", "task_id": "again"}).status_code == 200
    ended(http, "again")


def colour(data: bytes) -> int:
    """The colour of a painter's picture: its seed."""
    pixel = Image.open(io.BytesIO(data)).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel[0]


def test_everything_that_a_task_made_is_saved_and_listed(http: httpx.Client, house: Any) -> None:
    body = {"prompt": "a cat", "n": 3, "seed": 7, "save_result_path": "many/cat.png"}
    task = http.post("/v1/tasks/image/", json=body).json()["task_id"]
    assert ended(http, task)["save_result_path"] == "many/cat.png"
    listed = http.get(f"/v1/tasks/{task}/files").json()
    assert listed == {"task_id": task, "files": ["many/cat.png", "many/cat-1.png", "many/cat-2.png"]}
    for index, path in enumerate(listed["files"]):
        assert colour((house.folder / path).read_bytes()) == 7 + index
        assert colour(http.get(f"/v1/files/download/{path}").content) == 7 + index
    assert http.get("/v1/files/download/many/cat-3.png").status_code == 404


def test_several_images_without_a_path_are_found_under_the_id(http: httpx.Client) -> None:
    created = http.post("/v1/tasks/image/", json={"prompt": "a cat", "n": 2, "seed": 7}).json()
    assert ended(http, created["task_id"])["save_result_path"] == created["save_result_path"]
    paths = http.get(f"/v1/tasks/{created['task_id']}/files").json()["files"]
    assert paths[0] == created["save_result_path"]
    assert [colour(http.get(f"/v1/files/download/{path}").content) for path in paths] == [7, 8]
    assert colour(http.get(f"/v1/files/download/{created['task_id']}.png").content) == 7


def test_an_answer_that_is_an_image_has_no_room_for_two(http: httpx.Client, house: Any) -> None:
    before = len(house.seen)
    response = http.post("/v1/tasks/image/sync", json={"prompt": "a cat", "n": 2})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert len(house.seen) == before


def test_more_images_than_a_model_makes_at_once_are_refused(single_house: Any) -> None:
    for path in ("", "form", "sync"):
        response = asking.post(f"{single_house.url}/v1/tasks/image/{path}", json={"prompt": "a cat", "n": 3})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        assert "start more tasks" in response.json()["error"]["message"]
    assert not single_house.seen


def test_a_path_that_two_tasks_asked_for_has_the_later_ones_file(http: httpx.Client, house: Any) -> None:
    def start(prompt: str, seed: int) -> str:
        body = {"prompt": prompt, "seed": seed, "save_result_path": "both.png"}
        return http.post("/v1/tasks/image/", json=body).json()["task_id"]

    def shown() -> tuple[int, int]:
        here = (house.folder / "both.png").read_bytes()
        return colour(here), colour(http.get("/v1/files/download/both.png").content)

    earlier = start("slow", 1)
    until_held(house, earlier)
    later = start("a cat", 2)
    assert ended(http, later)["status"] == "completed"
    assert shown() == (2, 2)
    (lease,) = [lease for lease in house.held if lease.request == earlier]
    house.held.pop(lease).let_go(lease)
    assert ended(http, earlier)["status"] == "completed"
    assert shown() == (2, 2)
    assert colour(http.get(f"/v1/tasks/{earlier}/result").content) == 1
    assert ended(http, start("fail", 3))["status"] == "failed"
    assert shown() == (2, 2)


def test_the_queue_and_the_service_tell_how_full_they_are(http: httpx.Client, house: Any) -> None:
    idle = http.get("/v1/tasks/queue/status").json()
    assert idle == {
        "is_processing": False,
        "current_task": None,
        "pending_count": 0,
        "active_count": 0,
        "queue_size": 1000,
        "queue_available": 1000,
    }
    tasks = [http.post("/v1/tasks/video/", json={"prompt": f"slow {i}"}).json()["task_id"] for i in range(6)]
    for task in tasks[:4]:
        until_held(house, task)
    busy = http.get("/v1/tasks/queue/status").json()
    assert busy["is_processing"]
    assert busy["active_count"] == 6
    assert busy["queue_available"] == 994
    service = http.get("/v1/service/status").json()
    assert service["service_status"] == "busy"
    assert set(tasks[:4]) <= set(service["active_tasks"])
    assert service["total_tasks"] >= 6
    listed = http.get("/v1/tasks/").json()
    assert [task for task in listed if task in tasks] == tasks
    assert listed[tasks[0]].keys() == STATUS_FIELDS
    for task in tasks:
        http.delete(f"/v1/tasks/{task}")
    house.held.clear()


def test_the_service_names_its_model(http: httpx.Client) -> None:
    told = http.get("/v1/service/metadata").json()
    assert (told["model_path"], told["model_cls"], told["output"]) == ("/models/painter", "WanPipeline", "video")


def test_a_task_can_be_followed(http: httpx.Client) -> None:
    task = http.post("/v1/tasks/video/", json={"prompt": "a cat", "task_id": "followed"}).json()["task_id"]
    assert "event: done" in http.get(f"/v1/tasks/{task}/events").text


@pytest.mark.parametrize(
    ("fields", "param", "fragment"),
    [
        ({"save_result_path": "/etc/passwd"}, "save_result_path", "relative path"),
        ({"save_result_path": "../up.mp4"}, "save_result_path", "'..'"),
        ({"save_result_path": "a/../../up.mp4"}, "save_result_path", "'..'"),
        ({"save_result_path": "a/.hidden.mp4"}, "save_result_path", "hidden"),
        ({"save_result_path": "a\\b.mp4"}, "save_result_path", "relative path"),
        ({"save_result_path": "a\x00b.mp4"}, "save_result_path", "relative path"),
        ({"save_result_path": "a.exe"}, "save_result_path", ".mp4"),
        ({"save_result_path": "video_" + "0" * 32 + ".mp4"}, "save_result_path", "the server's own"),
        ({"image_path": "/etc/passwd"}, "image_path", "--input-root"),
        ({"image_path": "http://127.0.0.1/a.png"}, "image_path", "--allow-image-urls"),
        ({"last_frame_path": "a.png"}, "last_frame_path", "takes no last frame"),
        ({"task_id_must_unique": 1}, "task_id_must_unique", "served without it"),
        ({"num_fragments": True}, "num_fragments", "served without it"),
        ({"lora_name": "style"}, "lora_name", "served without it"),
        ({"lora_strength": 0.5}, "lora_strength", "served without it"),
        ({"audio_path": "a.wav"}, "audio_path", "served without it"),
        ({"resize_mode": "fixed_area"}, "resize_mode", "served without it"),
        ({"infer_steps": 0}, "infer_steps", "infer_steps=0: must be 1 to 100"),
        ({"target_video_length": 32}, "target_video_length", "the nearest are 29 and 33"),
        ({"target_shape": [48]}, "target_shape", "[height, width]"),
        ({"target_shape": [50, 112]}, "target_shape", "target_shape=[50, 112]: height=50: must be a multiple of 16"),
        ({"target_shape": [48, 112], "height": 48}, "height", "height and target_shape are both given"),
        ({"aspect_ratio": "1:1", "width": 48}, "width", "width and aspect_ratio are both given"),
        ({"target_shape": [48, 112], "aspect_ratio": "1:1"}, "aspect_ratio", "give one"),
        ({"aspect_ratio": "square"}, "aspect_ratio", "WIDTH:HEIGHT"),
        ({"infer_steps": 3, "num_inference_steps": 4}, "num_inference_steps", "give one"),
        ({"infer_step": 3}, "infer_step", "did you mean 'infer_steps'"),
        ({"task_id": "../x"}, "task_id", "letters"),
        ({"task_id": "image_" + "0f" * 16}, "task_id", "the server's own"),
        ({"task_id": "queue"}, "task_id", "the server's own"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"n": 5}, "n", "4"),
    ],
)
def test_a_bad_field_is_refused_under_the_clients_name(
    http: httpx.Client, house: Any, fields: dict[str, Any], param: str, fragment: str
) -> None:
    before = len(house.seen)
    response = http.post("/v1/tasks/video/", json={"prompt": "a cat", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert fragment in error["message"]
    assert len(house.seen) == before


def test_a_path_that_a_link_leads_out_of_the_folder_is_refused(http: httpx.Client, house: Any, tmp_path: Any) -> None:
    (house.folder / "link").symlink_to(tmp_path)
    response = http.post("/v1/tasks/video/", json={"prompt": "a cat", "save_result_path": "link/up.mp4"})
    assert response.status_code == 400
    assert "leads out" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "link/../x", ".hidden", "nothing.mp4", "%2e%2e%2fetc%2fpasswd"])
def test_nothing_else_can_be_downloaded(http: httpx.Client, house: Any, name: str) -> None:
    (house.folder / ".hidden").write_text("secret")
    assert http.get(f"/v1/files/download/{name}").status_code == 404


def test_tasks_that_are_not_there_are_not_found(http: httpx.Client) -> None:
    for method, path in (("GET", "status"), ("GET", "result"), ("GET", "events")):
        assert http.request(method, f"/v1/tasks/nothing/{path}").status_code == 404
    assert http.delete("/v1/tasks/nothing").status_code == 404
