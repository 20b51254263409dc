"""Clients that keep a deployment busy while something is done to it, and remember what was accepted from them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx

from tests.e2e.harness import PATIENCE, SMALL, Api, until

SHORT: dict[str, Any] = {"num_inference_steps": 6, "size": "64x64", "num_frames": 5}
SEEDS = 4
_CLIENTS = 2


class Clients:
    """Each submits a small request, waits for its end and submits the next, with one seed after the other. They come
    again where the server is away, and forgive nothing else."""

    def __init__(self, api: Api) -> None:
        self.accepted: list[tuple[str, int]] = []
        """Jobs, each with its seed."""
        self._api = api
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(_CLIENTS)
        self._running = [self._threads.submit(self._client, number) for number in range(_CLIENTS)]

    def submit(self) -> None:
        """One more, which must be accepted at this moment; nobody waits for its end yet."""
        self._accept(self._api, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Let each come to the end of its last request."""
        self._over.set()
        self._threads.shutdown()
        for client in self._running:
            if failed is None:
                client.result()

    def _accept(self, api: Api, seed: int) -> str:
        job = api.post("/v1/videos", SMALL | SHORT | {"seed": seed}).raise_for_status().json()["id"]
        self.accepted.append((job, seed))
        return job

    def _client(self, seed: int) -> None:
        api = Api(self._api.url)
        while not self._over.is_set():
            job = _persist(lambda seed=seed: self._accept(api, seed))
            until(
                lambda job=job: _persist(lambda: api.job(job))["status"] in ("completed", "failed"),
                f"the end of {job}",
                every=0.1,
            )
            seed = (seed + 1) % SEEDS
        api.close()


def _persist(ask: Callable[[], Any]) -> Any:
    """Ask until the server is there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except httpx.TransportError:
            pass
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 503:  # that is what one says that is about to leave
                raise
        assert time.monotonic() < deadline, "the server stayed away"
        time.sleep(0.05)
