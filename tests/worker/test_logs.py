"""What an operator reads about each stage."""

from __future__ import annotations

from triptych.core.instance_events import Pulled, PullFailed
from triptych.ids import CopyId, Epoch, InstanceId, RequestId, Role
from triptych.wire.messages import ErrorInfo, Finished, Lease, Staged, StageFailed, Stopped
from triptych.worker.logs import outcome_line, pull_failed_line

WHO = {"instance": InstanceId("i"), "epoch": Epoch("e"), "server_epoch": None}
LEASE = Lease(RequestId("r1"), Role.DENOISER, 2)
PULLED = Pulled(lease=LEASE, seconds=0.5, nbytes=4096, plane="shm")
ERROR = ErrorInfo(code="pool_full", message="no room", blame="instance", retryable=True)


def test_every_end_of_a_stage_is_one_line_with_who_and_how_long() -> None:
    head = "role=denoiser request=r1 attempt=2"
    staged = Staged(**WHO, lease=LEASE, outputs=(), compute_seconds=1.25, stage_seconds=0.5)
    assert outcome_line(staged, PULLED) == (
        f"staged {head} pull_bytes=4096 pull_seconds=0.5000 plane=shm "
        "compute_seconds=1.250 stage_bytes=0 stage_seconds=0.5000"
    )
    finished = Finished(**WHO, lease=LEASE, files=(), compute_seconds=1, encode_seconds=2)
    assert outcome_line(finished, None) == f"finished {head} compute_seconds=1.000 files=0 encode_seconds=2.000"
    failed = StageFailed(**WHO, lease=LEASE, error=ERROR)
    assert outcome_line(failed, None) == f"failed {head} code=pool_full retryable=True error='no room'"
    assert outcome_line(Stopped(**WHO, lease=LEASE), None) == f"stopped {head}"
    assert pull_failed_line(PullFailed(lease=LEASE, copy=CopyId("c"), error=ERROR)) == (
        f"pull failed {head} copy=c code=pool_full error='no room'"
    )
