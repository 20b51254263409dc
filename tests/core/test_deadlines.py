from __future__ import annotations

from math import inf
from random import Random

from triptych.core.deadlines import Deadlines


def test_due_keys_come_earliest_first_and_once() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for key, when in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        deadlines.set(key, when)
    assert deadlines.first() == 1.0
    assert deadlines.pop_due(2.0) == ["a", "b"]
    assert deadlines.pop_due(2.0) == []
    assert deadlines.first() == 3.0


def test_a_moved_deadline_strikes_at_its_new_time_only() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)
    assert deadlines.pop_due(4.0) == []
    deadlines.set("a", 2.0)
    assert deadlines.first() == 2.0
    assert deadlines.pop_due(9.0) == ["a"]


def test_a_discarded_deadline_never_strikes() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.discard("a")
    deadlines.discard("never set")
    assert deadlines.first() == inf
    assert deadlines.pop_due(9.0) == []


def test_moving_deadlines_for_ever_takes_no_more_memory() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for number in range(10_000):
        deadlines.set(f"k{number % 10}", 600.0 + number)
    assert len(deadlines) == 10
    assert len(deadlines._heap) < 100


def test_agrees_with_a_plain_dictionary_under_random_use() -> None:
    random = Random(3)
    deadlines: Deadlines[str] = Deadlines()
    plain: dict[str, float] = {}
    now = 0.0
    for _ in range(3000):
        key = f"k{random.randrange(20)}"
        match random.randrange(4):
            case 0 | 1:
                plain[key] = now + random.random() * 5
                deadlines.set(key, plain[key])
            case 2:
                plain.pop(key, None)
                deadlines.discard(key)
            case _:
                now += random.random()
                due = sorted((when, name) for name, when in plain.items() if when <= now)
                assert deadlines.pop_due(now) == [name for _, name in due]
                for _, name in due:
                    del plain[name]
        assert deadlines.first() == min(plain.values(), default=inf)
