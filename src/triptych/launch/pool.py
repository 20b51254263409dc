"""`launch_pool_disagg_server`: a whole disaggregated pool on this machine from one Python call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from triptych.launch.args import ServerArgs
from triptych.launch.group import Group, LaunchError, ProcessStatus, print_line
from triptych.launch.plan import Gpus, GroupPlan, plan_pool
from triptych.launch.probe import probe


class Pool:
    """A running server with its instances. Use it as a context manager, or call `stop`."""

    def __init__(self, plan: GroupPlan, group: Group) -> None:
        self.url = plan.url
        """Where the HTTP API listens."""
        self._group = group

    def wait_ready(self, timeout: float = 600.0) -> Self:
        """Wait until the server and all instances are there.

        Raises `LaunchError` when that takes longer than ``timeout`` seconds or can never be, with the reason.
        """
        deadline = time.monotonic() + timeout
        reason = ""
        while time.monotonic() < deadline:
            if self._group.wait(0.1):
                raise LaunchError(self._group.failure or "the pool was stopped")
            reason = probe(self.url)
            if reason is None:
                return self
        raise LaunchError(f"{self.url} is not ready after {timeout:g} s: {reason or 'no answer'}")

    def statuses(self) -> tuple[ProcessStatus, ...]:
        """How each process is doing."""
        return self._group.statuses()

    def stop(self) -> None:
        """Stop every process and wait for its end; idempotent."""
        self._group.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def launch_pool_disagg_server(
    server_args: ServerArgs,
    *,
    encoder_gpus: Gpus = (),
    denoiser_gpus: Gpus,
    decoder_gpus: Gpus = (),
    encoder_decoder_gpus: Gpus = (),
    output: Callable[[str, str], None] = print_line,
) -> Pool:
    """Start a server and its role instances on this machine; each inner list is the GPUs of one instance.
    Those of ``encoder_decoder_gpus`` encode and decode.

    Returns at once: call `Pool.wait_ready`. With ``device="cpu"`` the lists say how many instances there are.
    ``output`` is given the name of a process and each line that it prints. Raises `ConfigError` for a pool that cannot
    work.
    """
    plan = plan_pool(
        server_args,
        encoder_gpus=encoder_gpus,
        denoiser_gpus=denoiser_gpus,
        decoder_gpus=decoder_gpus,
        encoder_decoder_gpus=encoder_decoder_gpus,
    )
    group = Group(plan.processes, output=output)
    group.start()
    return Pool(plan, group)
