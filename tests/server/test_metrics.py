"""Metrics of a server that has worked: true numbers, and no label that grows with the number of requests."""

from __future__ import annotations

from msgspec.structs import asdict
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.house import House, until
from triptych.config import ServerConfig
from triptych.config.durations import BUCKETS
from triptych.core.events import JobState, StageTiming
from triptych.core.instance_events import Usage
from triptych.ids import ROLES, InstanceId, Role
from triptych.server.metrics import Gauges, Metrics
from triptych.server.service import DiffusionService
from triptych.wire.messages import Counts, ErrorInfo, Lease, StageFailed


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
    assert ("triptych_requests", (("state", "done"),)) not in now  # it is over
    assert now["triptych_requests", (("state", "denoising_running"),)] == 3
    assert now["triptych_requests_ended_total", (("state", "done"),)] == 5
    assert now["triptych_request_seconds_count", (("state", "done"),)] == 5
    assert 0 < now["triptych_request_seconds_sum", (("state", "done"),)] < 600
    assert now["triptych_queue_depth", (("role", "denoiser"),)] == 1
    assert now["triptych_slots_used", (("role", "denoiser"),)] == 3
    assert now["triptych_slots_free", (("role", "denoiser"),)] == 0
    assert now["triptych_slots_free", (("role", "decoder"),)] == 3
    assert now["triptych_stage_seconds_count", (("role", "encoder"),)] == 9
    assert now["triptych_stage_seconds_count", (("role", "decoder"),)] == 5
    assert now["triptych_handoff_seconds_count", (("plane", "local"),)] == 10
    assert all(now["triptych_instance_up", (("instance_id", p.instance),)] == 1 for p in house.puppets)


async def test_what_models_did_comes_with_the_heartbeats_of_each_instance(house: House) -> None:
    puppet, idle = house.add(), house.add()
    await house.instances(2)
    counts = Counts(
        compilations=3, compile_seconds=4.5, uncompiled=5, prompt_hits=6, prompt_misses=7, steps_skipped=8, turnovers=9,
        turnover_seconds=10.5, unshared_forwards=11,
    )  # fmt: skip
    did = asdict(counts)
    assert len(set(did.values()) - {0}) == len(did), "each its own number"
    puppet.post(Usage(pool_used=0, resident_bytes=0, device_bytes=0, counts=counts))

    def counted(instance: str) -> dict[str, float | None]:
        now = samples(house.service)
        return {name: now.get((f"triptych_{name}_total", (("instance_id", instance),))) for name in did}

    await until(lambda: counted(puppet.instance) == did, "the counts of its models")
    assert set(counted(idle.instance).values()) == {0}


async def test_an_instance_in_quarantine_shows(house: House) -> None:
    bad, good = house.add(Role.DENOISER), house.add(Role.DENOISER)
    for role in (Role.ENCODER, Role.DECODER):
        house.add(role)
    await house.ready()
    await house.instances(4)

    def fail(lease: Lease, params: object, blobs: object) -> StageFailed:
        error = ErrorInfo(code="broken", message="a broken fan", blame="instance", retryable=True)
        return StageFailed(instance=bad.instance, epoch=bad.epoch, server_epoch=None, lease=lease, error=error)

    bad.work = fail  # type: ignore[method-assign]
    for i in range(8):
        assert (await house.run(str(i))).view.state is JobState.DONE
    now = samples(house.service)
    assert now["triptych_instance_quarantined", (("instance_id", bad.instance),)] == 1
    assert now["triptych_instance_quarantined", (("instance_id", good.instance),)] == 0
    assert now["triptych_events_total", (("name", "instance_quarantined"),)] == 1
    assert any("a broken fan" in reason for reason in house.service.readiness().reasons)
    assert house.service.readiness().ready


async def test_no_series_is_added_by_further_requests(house: House) -> None:
    house.add()
    await house.ready()
    first = await house.run()
    before = samples(house.service).keys()
    for i in range(10):
        await house.run(str(i))
    assert samples(house.service).keys() == before
    assert first.id not in generate_latest(house.service.registry).decode()


def test_what_can_happen_has_a_series_before_it_does() -> None:
    """Prometheus sees no increase from nothing to one."""
    text = generate_latest(Metrics(no_gauges).registry).decode().splitlines()
    for state in ("done", "failed", "timed_out", "cancelled"):
        assert f'triptych_requests_ended_total{{state="{state}"}} 0.0' in text
    assert 'triptych_events_total{name="instance_lost"} 0.0' in text


async def test_no_label_is_one_that_prometheus_sets_itself(house: House) -> None:
    house.add()
    await house.ready()
    await house.run()
    names = {name for _, labels in samples(house.service) for name, _ in labels}
    assert names >= {"instance_id", "role", "state"}
    assert not names & {"instance", "job"}


def test_no_request_that_may_be_made_lasts_beyond_the_last_bound() -> None:
    assert max(BUCKETS) >= ServerConfig().timeout_cap


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
    assert instance["pool_bytes"] == house.service.largest_pool(Role.ENCODER)


def no_gauges() -> Gauges:
    return Gauges(states={}, failing={}, queues={}, slots_used={}, slots_free={}, up={}, quarantined={}, counts={})


def timing(plane: str, running: float) -> StageTiming:
    return StageTiming(
        role=Role.DENOISER,
        instance=InstanceId("i"),
        attempt=1,
        waiting=0.5,
        pulling=0.02,
        pulled_bytes=7,
        plane=plane,
        running=running,
        compute=running,
        staging=0.0,
    )


def test_an_instance_cannot_make_up_label_values() -> None:
    metrics = Metrics(no_gauges)
    for i in range(100):
        metrics.stage(timing(f"invented-{i}", 1.0))
    text = generate_latest(metrics.registry).decode()
    assert "invented" not in text
    assert 'triptych_handoff_bytes_total{plane="other"} 700.0' in text


def test_durations_fall_into_the_bucket_that_holds_them() -> None:
    metrics = Metrics(no_gauges)
    for running in (0.0005, 0.001, 0.002, 20000.0):
        metrics.stage(timing("shm", running))
    text = generate_latest(metrics.registry).decode()
    for line in (
        'triptych_stage_seconds_bucket{le="0.001",role="denoiser"} 2.0',
        'triptych_stage_seconds_bucket{le="0.003",role="denoiser"} 3.0',
        'triptych_stage_seconds_bucket{le="10000.0",role="denoiser"} 3.0',
        'triptych_stage_seconds_bucket{le="+Inf",role="denoiser"} 4.0',
        'triptych_stage_seconds_count{role="denoiser"} 4.0',
        'triptych_stage_seconds_sum{role="denoiser"} 20000.0035',
        'triptych_stage_waiting_seconds_bucket{le="0.3",role="denoiser"} 0.0',
        'triptych_handoff_seconds_bucket{le="0.03",plane="shm"} 4.0',
        'triptych_handoff_bytes_total{plane="shm"} 28.0',
    ):
        assert line in text.splitlines()
