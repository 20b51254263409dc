"""Large bodies of awkward shapes: whatever they cost, others are answered meanwhile."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests import asking
from triptych.api.body import MAX_ESCAPES, MAX_MARKS, parse_json
from triptych.api.idempotency import canonical
from triptych.errors import BadRequest

MIB = 1 << 20
PATIENCE = 2.5
"""Seconds of the processor for which a small request may wait beside a large one: a fraction of what parsing costs.
Client and server are one process here, so that nothing counts of what else a machine has to do."""

BODIES: dict[str, Callable[[], bytes]] = {
    "objects": lambda: b'{"x": [' + b"{}," * (10 * MIB) + b"1]}",
    "numbers": lambda: b'{"x": [' + b"1," * (15 * MIB) + b"1]}",
    "names": lambda: b"{" + b",".join(b'"%d":1' % i for i in range(60_000)) + b',"59999":1}',
    "escapes": lambda: b'{"prompt": "' + b"\\n" * (15 * MIB) + b'"}',
    "percents": lambda: b'{"prompt": "a", "image": "data:image/png,' + b"%41" * (10 * MIB) + b'"}',
    "percents in base64": lambda: b'{"prompt": "a", "image": "data:image/png;base64,' + b"%41" * (10 * MIB) + b'"}',
    "a long name": lambda: b'{"prompt": "a", "' + b"prompt" * (5 * MIB) + b'": 1}',
    "a long head": lambda: b'{"prompt": "a", "image": "data:image/png' + b";a=b" * (7 * MIB) + b'"}',
}


@pytest.fixture(scope="module")
def busy(make_house: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with make_house() as house:
        yield house


class Pulse:
    """Asks a server for its health again and again, and remembers for how long this process computed at most until it
    had its answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest = 0.0

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stopped.is_set():
                begun = time.process_time()
                assert http.get("/health").status_code == 200
                self.longest = max(self.longest, time.process_time() - begun)
                time.sleep(0.01)


@pytest.mark.parametrize("kind", BODIES)
def test_a_heavy_body_keeps_nobody_waiting_and_is_refused(busy: Any, kind: str) -> None:
    body = BODIES[kind]()
    headers = {"content-type": "application/json", "idempotency-key": kind}
    with Pulse(busy.url) as pulse:
        answer = asking.post(f"{busy.url}/v1/videos", content=body, headers=headers)
    assert answer.status_code == 400
    assert pulse.longest < PATIENCE


@pytest.mark.parametrize("escape", [lambda text: text, lambda text: text.replace("/", "\\/")])
def test_a_large_picture_is_read_meanwhile(busy: Any, escape: Callable[[str], str]) -> None:
    data = base64.b64encode(bytes(range(256)) * (80 << 10)).decode()
    body = f'{{"prompt": "a", "image": "data:image/png;base64,{escape(data)}"}}'.encode()
    headers = {"content-type": "application/json", "idempotency-key": "large"}
    with Pulse(busy.url) as pulse:
        answer = asking.post(f"{busy.url}/v1/videos", content=body, headers=headers)
    assert "not a readable PNG" in answer.json()["error"]["message"]
    assert pulse.longest < PATIENCE


def test_what_is_counted_is_said() -> None:
    with pytest.raises(BadRequest, match=f"{MAX_MARKS + 2} commas and brackets; at most {MAX_MARKS}"):
        parse_json(b'{"x": [' + b"1," * MAX_MARKS + b"1]}")
    with pytest.raises(BadRequest, match=f"at most {MAX_ESCAPES}"):
        parse_json(b'{"x": "' + b"\\\\" * MAX_ESCAPES + b'"}')
    assert len(parse_json(b'{"x": [' + b"1," * (MAX_MARKS - 2) + b"1]}")["x"]) == MAX_MARKS - 1


def test_the_name_that_is_given_twice_is_found_among_many() -> None:
    many = ",".join(f'"{i}": {i}' for i in range(50_000))
    with pytest.raises(BadRequest, match="49999: given more than once"):
        parse_json(f'{{{many}, "49999": 1}}'.encode())


def test_a_body_nested_deeper_than_can_be_compared_is_refused(busy: Any) -> None:
    for depth in (500, 900, 2000, 20_000):
        body = '{"prompt": "a", "x": ' + "[" * depth + "]" * depth + "}"
        headers = {"content-type": "application/json", "idempotency-key": f"deep {depth}"}
        answer = asking.post(f"{busy.url}/v1/videos", content=body.encode(), headers=headers)
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: {"image_url": {"url": t}}])
def test_large_texts_are_compared_to_their_last_character(wrap: Callable[[str], Any]) -> None:
    first, same, other = ({"b": 1, "image": wrap(text)} for text in ("x" * 9000, "x" * 9000, "x" * 8999 + "y"))
    assert canonical(first) == canonical(dict(reversed(same.items())))
    assert canonical(first) != canonical(other)
    assert len(canonical(first)) < 200
