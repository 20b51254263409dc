"""Load over HTTP as clients make it: bursts of simultaneous requests, and Poisson arrivals that wait for nobody.

Every request that was sent is accounted for, with the reason when it did not end well. The server's own count of live
requests is sampled meanwhile, so that Little's law (requests in the system = rate x time in the system) holds two
measurements that know nothing of each other against one another.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import httpx

from triptych.client import RequestRefused, ServerUnreachable

_Answer: TypeAlias = tuple[int, tuple[dict[str, Any], ...]]
"""Bytes of the files, and the server's figures for each stage."""

_ENDED: Final = frozenset({"done", "failed", "timed_out", "cancelled"})
_LIVE = re.compile(r'^triptych_requests\{state="(\w+)"\} (\S+)$', re.MULTILINE)
_SAMPLE_SECONDS: Final = 0.05
_LITTLE_SHARE: Final = 0.15
_LITTLE_REQUESTS: Final = 0.5
"""The law holds when both sides differ by no more than this share, or by no more than so many requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One request: seconds of a steady clock, and what became of it."""

    sent: float
    ended: float
    """When the last byte of the file had arrived, or the request had failed."""
    nbytes: int
    failure: str | None = None
    """Why there is no file; None when there is."""
    timings: tuple[dict[str, Any], ...] = ()
    """The server's figures for each stage."""

    @property
    def latency(self) -> float:
        """From sending to the last byte, seconds."""
        return self.ended - self.sent


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """All requests of one load, and what the server said meanwhile."""

    samples: tuple[Sample, ...]
    live: float
    """Mean number of live requests as the server counted them."""

    @property
    def done(self) -> list[Sample]:
        """Requests that gave a file."""
        return [sample for sample in self.samples if sample.failure is None]

    @property
    def failures(self) -> list[str]:
        """Reasons of all others."""
        return [sample.failure for sample in self.samples if sample.failure is not None]

    @property
    def makespan(self) -> float:
        """From the first request sent to the last one ended, seconds."""
        return max(s.ended for s in self.samples) - min(s.sent for s in self.samples)

    @property
    def qps(self) -> float:
        """Files per second over the makespan."""
        return len(self.done) / self.makespan

    @property
    def expected_live(self) -> float:
        """What Little's law says of the mean number of live requests: arrival rate times mean latency."""
        return sum(sample.latency for sample in self.samples) / self.makespan

    @property
    def little_holds(self) -> bool:
        """Whether the server's count agrees with the clients' clocks."""
        return abs(self.live - self.expected_live) <= max(_LITTLE_REQUESTS, _LITTLE_SHARE * self.expected_live)

    def within(self, seconds: float) -> float:
        """The share of all requests that gave a file in no more than ``seconds``."""
        return sum(sample.latency <= seconds for sample in self.done) / len(self.samples)

    def percentile(self, share: float) -> float:
        """Latency that ``share`` of the finished requests do not exceed; NaN when none finished."""
        ordered = sorted(sample.latency for sample in self.done)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


class Load:
    """Sends requests with the same ``fields`` and seeds 0, 1, 2, ... to one server, whose model makes ``kind``."""

    def __init__(
        self,
        url: str,
        fields: Mapping[str, Any],
        *,
        kind: Literal["video", "image"] = "video",
        api_key: str | None = None,
        patience: float = 1260.0,
    ) -> None:
        self._url = url
        self._fields = dict(fields)
        self._kind = kind
        self._key = api_key
        self._patience = patience
        self._sent = 0

    def burst(self, count: int) -> Measured:
        """``count`` requests at the same moment."""
        return asyncio.run(self._measure([0.0] * count))

    def poisson(self, count: int, rate: float, seed: int = 0) -> Measured:
        """``count`` requests at exponential intervals, ``rate`` a second on average, whatever the server does."""
        rng = random.Random(seed)
        moment, moments = 0.0, list[float]()
        for _ in range(count):
            moments.append(moment)
            moment += rng.expovariate(rate)
        return asyncio.run(self._measure(moments))

    async def _measure(self, moments: Sequence[float]) -> Measured:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(
            base_url=self._url, timeout=self._patience, limits=limits, headers=headers, trust_env=False
        ) as http:
            begun = time.perf_counter()
            samples, live = await _while(
                lambda: _sampled(http),
                asyncio.gather(*(self._one(http, begun + moment) for moment in moments)),
            )
        return Measured(samples=tuple(samples), live=live)

    async def _one(self, http: httpx.AsyncClient, moment: float) -> Sample:
        fields = {**self._fields, "seed": self._sent}
        self._sent += 1
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        sent = time.perf_counter()
        nbytes, failure, timings = 0, None, ()
        try:
            async with asyncio.timeout(self._patience):
                nbytes, timings = await (self._video if self._kind == "video" else self._image)(http, fields)
        except TimeoutError:
            failure = f"no end within {self._patience:g} s"
        except (RequestRefused, ServerUnreachable) as error:
            failure = error.message
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        return Sample(sent=sent, ended=time.perf_counter(), nbytes=nbytes, failure=failure, timings=timings)

    async def _video(self, http: httpx.AsyncClient, fields: Mapping[str, Any]) -> _Answer:
        job = (await _asked(http, "POST", "/v1/videos", fields))["id"]
        async with http.stream("GET", f"/v1/videos/{job}/events") as events:
            async for _ in events.aiter_lines():
                pass  # the stream ends with the job
        video = await _asked(http, "GET", f"/v1/videos/{job}", None)
        if video["status"] != "completed":
            error = video["error"] or {"message": f"the event stream broke off while it was {video['stage']}"}
            raise ServerUnreachable(f"{job}: {error['message']}")
        content = await http.get(f"/v1/videos/{job}/content")
        content.raise_for_status()
        return len(content.content), tuple(video["timings"])

    async def _image(self, http: httpx.AsyncClient, fields: Mapping[str, Any]) -> _Answer:
        body = {**fields, "response_format": "b64_json"}
        answer = await _asked(http, "POST", "/v1/images/generations", body)
        return sum(len(item["b64_json"]) * 3 // 4 for item in answer["data"]), tuple(answer["timings"][0])


async def _asked(http: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    answer = await http.request(method, path, json=body)
    if not answer.is_success:
        raise RequestRefused(answer.text[:500], http_status=answer.status_code, param=None, error_code=None)
    return answer.json()


async def _while(
    sample: Callable[[], Awaitable[float]], work: asyncio.Future[list[Sample]]
) -> tuple[list[Sample], float]:
    """The result of ``work`` and the time-weighted mean of ``sample`` until it is done."""
    area, weight, last = 0.0, 0.0, time.perf_counter()
    while not work.done():
        await asyncio.wait((work,), timeout=_SAMPLE_SECONDS)
        now, value = time.perf_counter(), await sample()
        if not work.done():
            area, weight = area + value * (now - last), weight + now - last
        last = now
    return await work, area / weight if weight else 0.0


async def _sampled(http: httpx.AsyncClient) -> float:
    return live_requests((await http.get("/metrics")).text)


def live_requests(metrics: str) -> float:
    """How many requests have not ended, by a server's ``metrics``. Often asked for, so they are not parsed whole."""
    return sum(float(count) for state, count in _LIVE.findall(metrics) if state not in _ENDED)
