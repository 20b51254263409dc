from __future__ import annotations

from random import Random

import pytest

from triptych.core.job import Job
from triptych.core.queues import StageQueue
from triptych.ids import RequestId


def job(number: int) -> Job:
    return Job(request=RequestId(f"r{number}"), number=number, params={}, queue_timeout=1.0, run_timeout=1.0, since=0.0)


def test_a_request_that_comes_back_goes_before_those_accepted_later() -> None:
    queue = StageQueue()
    for number in (1, 2, 3):
        queue.add(job(number))
    first = queue.take()
    assert first.number == 1
    assert queue.take().number == 2
    queue.add(first)
    assert queue.position(first) == 0
    assert [waiting.number for waiting in queue.jobs()] == [1, 3]


def test_an_empty_queue_has_nothing_to_take() -> None:
    with pytest.raises(IndexError):
        StageQueue().take()


def test_agrees_with_a_sorted_list_under_random_use() -> None:
    random = Random(5)
    queue = StageQueue()
    waiting: dict[int, Job] = {}
    outside = {number: job(number) for number in range(2000)}
    for _ in range(20_000):
        if outside and random.random() < 0.5:
            number = random.choice([min(outside), max(outside)])
            waiting[number] = outside.pop(number)
            queue.add(waiting[number])
        elif waiting and random.random() < 0.7:
            taken = queue.take()
            assert taken.number == min(waiting)
            outside[taken.number] = waiting.pop(taken.number)
        elif waiting:
            number = random.choice(list(waiting))
            assert queue.position(waiting[number]) == sum(other < number for other in waiting)
            queue.remove(waiting[number])
            outside[number] = waiting.pop(number)
        assert len(queue) == len(waiting)
    assert [entry.number for entry in queue.jobs()] == sorted(waiting)
    assert all(entry.queued for entry in waiting.values())
    assert not any(entry.queued for entry in outside.values())
