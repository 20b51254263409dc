"""What a scrape of an instance shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import asking
from triptych.accel.tally import Tally
from triptych.config import METRICS_OFFSET, InstanceConfig, ModelConfig, TransferConfig
from triptych.core.instance_events import ComputeStarted, Ended, Pulled, PullFailed, Stepped, Usage
from triptych.errors import ConfigError
from triptych.ids import ROLES, CopyId, Epoch, InstanceId, RequestId, Role
from triptych.launch.ports import free_ports, is_free, listen
from triptych.transport.data.protocol import PoolFigures
from triptych.wire.messages import ErrorInfo, Finished, Lease, Staged, StageFailed
from triptych.worker.exporter import Exporter, serve_metrics
from triptych.worker.jobs import Identity
from triptych.worker.metrics import InstanceMetrics
from triptych.worker.standing import Standing

IDENTITY = Identity(instance=InstanceId("denoiser-1"), epoch=Epoch("e"))
ERROR = ErrorInfo(code="out_of_memory", message="no", blame="instance")


def config(**options: Any) -> InstanceConfig:
    values: dict[str, Any] = {
        "roles": (Role.DENOISER,),
        "server_addr": "tcp://127.0.0.1:1",
        "work_port": free_ports(1)[0],
        "transfer": TransferConfig(),
        "model": ModelConfig(path="tiny", device="cpu"),
    }
    return InstanceConfig(**(values | options))


def metrics(settings: InstanceConfig, tally: Tally | None = None) -> InstanceMetrics:
    figures = PoolFigures(used=10, peak=30, refusals=2)
    return InstanceMetrics(
        identity=IDENTITY,
        config=settings,
        figures=lambda: figures,
        tally=tally or Tally(),
        standing=Standing(settings.server_addr),
    )


def lease(number: int, role: Role = Role.DENOISER) -> Lease:
    return Lease(RequestId(f"r{number}"), role, 1)


def ended(kind: type[Any], which: Lease, **fields: Any) -> Ended:
    common = {"instance": IDENTITY.instance, "epoch": IDENTITY.epoch, "server_epoch": None, "lease": which}
    return Ended(outcome=kind(**common, **fields))


@pytest.fixture
def scraped() -> Iterator[tuple[InstanceMetrics, Exporter, Tally]]:
    settings = config(metrics_port=free_ports(1)[0])
    tally = Tally()
    subject = metrics(settings, tally)
    exporter = serve_metrics(subject, settings)
    assert exporter is not None
    yield subject, exporter, tally
    exporter.close()
    assert is_free(exporter.port)


def scrape(exporter: Exporter) -> dict[str, float]:
    text = asking.get(f"http://127.0.0.1:{exporter.port}/metrics", trust_env=False).raise_for_status().text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.replace("triptych_instance_", ""): float(value) for name, _, value in lines}


def test_a_scrape_shows_what_was_done_and_what_is_held(scraped: tuple[InstanceMetrics, Exporter, Tally]) -> None:
    subject, exporter, tally = scraped
    for number in (1, 2, 3):
        subject.saw(Pulled(lease=lease(number), seconds=0.02, nbytes=1000, plane="shm"))
        subject.saw(ComputeStarted(lease=lease(number)))
        subject.saw(Stepped(lease=lease(number), step=1, steps=4))
    subject.held(2)
    subject.saw(ended(Staged, lease(1), outputs=(), compute_seconds=2.0, stage_seconds=0.01))
    subject.saw(ended(StageFailed, lease(2), error=ERROR))
    subject.saw(PullFailed(lease=lease(4), copy=CopyId("c"), error=ERROR))
    subject.saw(Usage(pool_used=1, resident_bytes=7, device_bytes=8))
    tally.compilations = 5
    found = scrape(exporter)
    assert found['events_total{name="stale_message"}'] == 0  # there before the first one
    assert found["steps_total"] == 3
    assert (found["leases"], found["leases_computing"]) == (2, 1)
    assert (found["pool_used_bytes"], found["pool_peak_bytes"], found["pool_refusals_total"]) == (10, 30, 2)
    assert found["pool_bytes"] == config().transfer.pool_bytes
    assert found['pulled_bytes_total{plane="shm"}'] == 3000
    assert found['pull_seconds_count{plane="shm"}'] == 3
    assert found['compute_seconds_sum{role="denoiser"}'] == 2.0
    assert found['stages_ended_total{outcome="staged",role="denoiser"}'] == 1
    assert found['errors_total{code="out_of_memory",role="denoiser"}'] == 2
    assert (found["resident_bytes"], found["device_bytes"], found["compilations_total"]) == (7, 8, 5)


def test_probes_are_told_whether_the_process_lives_and_serves(
    scraped: tuple[InstanceMetrics, Exporter, Tally],
) -> None:
    subject, exporter, _ = scraped

    def ask(path: str) -> tuple[int, str]:
        answer = asking.get(f"http://127.0.0.1:{exporter.port}{path}", trust_env=False)
        return answer.status_code, answer.text

    assert ask("/health")[0] == 200
    assert ask("/ready")[0] == 503
    assert scrape(exporter)["welcomed"] == 0
    subject.standing.saw(True, 1.0)
    assert ask("/ready") == (200, "the server has this instance\n")
    assert scrape(exporter)["welcomed"] == 1
    subject.standing.saw(False, 2.0)
    assert ask("/ready")[0] == 503
    assert ask("/else")[0] == 404


def test_a_decoder_counts_files(scraped: tuple[InstanceMetrics, Exporter, Tally]) -> None:
    subject, exporter, _ = scraped
    subject.saw(ended(Finished, lease(1, Role.DECODER), files=(), compute_seconds=1.0, encode_seconds=0.5))
    found = scrape(exporter)
    assert found["encode_seconds_sum"] == 0.5
    assert found['stages_ended_total{outcome="finished",role="decoder"}'] == 1


def test_the_attention_backend_in_use_is_logged_and_exported(
    scraped: tuple[InstanceMetrics, Exporter, Tally], caplog: pytest.LogCaptureFixture
) -> None:
    subject, exporter, _ = scraped
    with caplog.at_level("INFO"):
        subject.attention({"transformer": "native"})
    assert "attention of transformer runs on native" in caplog.text
    assert scrape(exporter)['triptych_attention_backend_info{backend="native",model="transformer"}'] == 1


def test_the_default_port_is_the_instance_s_own() -> None:
    work = [config(work_port=19000 + number, roles=(role,)) for number, role in enumerate(ROLES)]
    assert [one.own_metrics_port for one in work] == [19000 + METRICS_OFFSET + number for number in range(3)]
    assert config(work_port=60000).own_metrics_port == 0
    assert config(metrics_port=0).own_metrics_port == 0
    assert serve_metrics(metrics(config()), config(metrics_port=0)) is None


def test_a_port_that_was_asked_for_must_be_free_and_a_default_need_not(caplog: pytest.LogCaptureFixture) -> None:
    port = free_ports(1)[0] + METRICS_OFFSET
    with listen("127.0.0.1", port, "port"):
        with pytest.raises(ConfigError, match=f"--metrics-port {port} on 127.0.0.1"):
            serve_metrics(metrics(config()), config(metrics_port=port))
        settings = config(work_port=port - METRICS_OFFSET)
        assert serve_metrics(metrics(settings), settings) is None
        assert f"no metrics: --metrics-port {port}" in caplog.text


def test_a_metrics_port_must_not_be_the_work_port() -> None:
    with pytest.raises(ConfigError, match="metrics-port=20001 is the work port"):
        config(work_port=20001, metrics_port=20001)
