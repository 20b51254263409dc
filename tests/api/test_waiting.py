"""What becomes of jobs that nobody waits for any more."""

from __future__ import annotations

import asyncio
from typing import Any

from triptych.api.waiting import Waiting
from triptych.errors import NotFound
from triptych.ids import RequestId


class Deletions:
    """Writes down what is asked of it; the job ``gone`` is not there."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def free_key(self, id: RequestId) -> None:
        if id == "gone":
            raise NotFound("gone")
        self.asked.append(f"free {id}")

    async def delete(self, id: RequestId) -> None:
        if id == "gone":
            raise NotFound("gone")
        await asyncio.sleep(0)
        self.asked.append(f"delete {id}")


async def test_no_job_of_an_order_can_be_joined_once_one_of_them_is_being_deleted() -> None:
    """Or the same order, sent again meanwhile, would wait for a picture that is about to go."""
    service: Any = Deletions()
    await Waiting(service, lambda: False).forget(RequestId("a"), RequestId("gone"), RequestId("b"))
    assert service.asked == ["free a", "free b", "delete a", "delete b"]
