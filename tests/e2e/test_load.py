"""Many requests of several kinds at once over several instances of each role."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.harness import ROLES, Deployment, instances_of

KINDS: tuple[dict[str, Any], ...] = (
    {"size": "32x32", "num_frames": 1 + 4, "num_inference_steps": 2},
    {"size": "64x32", "num_frames": 1 + 4, "num_inference_steps": 3},
    {"size": "64x64", "num_frames": 1 + 8, "num_inference_steps": 4},
)
REQUESTS = 40


def test_forty_concurrent_requests_all_finish_and_the_work_is_spread(pool: Deployment) -> None:
    orders = [KINDS[number % len(KINDS)] | {"seed": number} for number in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as clients:
        jobs = list(clients.map(lambda order: pool.api.submit(**order), orders))
        videos = list(clients.map(pool.api.done, jobs))
    assert len(set(jobs)) == REQUESTS
    for order, video in zip(orders, videos, strict=True):
        assert (video["size"], video["num_frames"], video["seed"]) == (
            order["size"],
            order["num_frames"],
            order["seed"],
        )
        assert [timing["role"] for timing in video["timings"]] == list(ROLES)
    for role, count in (("encoder", 2), ("denoiser", 3), ("decoder", 2)):
        shares = Counter(instance for video in videos for instance in instances_of(video, role))
        assert len(shares) == count, f"{role}: {shares}"
        assert min(shares.values()) >= 2, f"{role}: {shares}"
    for number in (0, 19, 38):  # each alone gives what it gave in the crowd
        assert pool.api.make(**orders[number]) == pool.api.content(jobs[number])
