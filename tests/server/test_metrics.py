"""Metrics of a server that has worked: true numbers, and no label that grows with the number of requests."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.house import House
from triptych.core.events import JobState
from triptych.ids import ROLES, Role
from triptych.server.service import DiffusionService


def samples(service: DiffusionService) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(service.registry).decode()
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_numbers_are_those_of_the_requests(house: House) -> None:
    for role in ROLES:
        house.add(role, slots=3)
    puppet = house.puppets[1]
    await house.ready()
    for i in range(5):
        await house.run(str(i))
    puppet.hold = frozenset({Role.DENOISER})
    running = [await house.service.submit({"prompt": "x"}, output="video") for _ in range(4)]
    for record in running[:3]:
        await house.reach(record.id, JobState.DENOISING_RUNNING)
    await house.reach(running[3].id, JobState.DENOISING_WAITING)
    now = samples(house.service)
    assert now["triptych_requests", (("state", "done"),)] == 5
    assert now["triptych_requests", (("state", "denoising_running"),)] == 3
    assert now["triptych_requests_ended_total", (("state", "done"),)] == 5
    assert now["triptych_queue_depth", (("role", "denoiser"),)] == 1
    assert now["triptych_slots_used", (("role", "denoiser"),)] == 3
    assert now["triptych_slots_free", (("role", "denoiser"),)] == 0
    assert now["triptych_slots_free", (("role", "decoder"),)] == 3
    assert now["triptych_stage_seconds_count", (("role", "encoder"),)] == 9
    assert now["triptych_stage_seconds_count", (("role", "decoder"),)] == 5
    assert now["triptych_handoff_seconds_count", (("plane", "local"),)] == 10
    assert all(now["triptych_instance_up", (("instance", p.instance),)] == 1 for p in house.puppets)


async def test_no_series_is_added_by_further_requests(house: House) -> None:
    house.add()
    await house.ready()
    first = await house.run()
    before = samples(house.service).keys()
    for i in range(10):
        await house.run(str(i))
    assert samples(house.service).keys() == before
    assert first.id not in generate_latest(house.service.registry).decode()


async def test_info_is_plain_and_names_roles_instances_and_leases(house: House) -> None:
    puppet = house.add(slots=3, hold=Role.ENCODER)
    await house.ready()
    record = await house.service.submit({"prompt": "x"}, output="video")
    info = house.service.info()
    assert info["ready"]
    assert info["requests"] == {"encoder_waiting": 1}
    assert info["roles"]["encoder"] == {
        "instances": [puppet.instance],
        "slots": 3,
        "free_slots": 2,
        "queue_depth": 0,
    }
    (instance,) = info["instances"]
    assert instance["leases"] == [{"request": record.id, "role": "encoder", "attempt": 1}]
    assert instance["pool_bytes"] == house.service.smallest_pool()
