"""The role process: binds, loads, serves and leaves.

Four kinds of threads share the work. *Control* (the main thread) owns the sockets and the instance machine. *Compute*
owns the model. *Transfer* pulls inputs ahead and stages outputs. *Media* writes files. They talk by queues only.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Final, NoReturn

import psutil
import torch

from triptych.accel.tally import Tally
from triptych.config import InstanceConfig
from triptych.core.instance import InstanceMachine
from triptych.core.instance_events import Stop, Usage
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import RolePipeline
from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.keys import load_keys
from triptych.transport.data.plane import open_plane
from triptych.transport.data.protocol import DataPlane
from triptych.transport.host import host_id
from triptych.wire.messages import PROTOCOL_VERSION, Counts, Hello
from triptych.worker.control import ControlLoop
from triptych.worker.crew import Crew
from triptych.worker.jobs import Identity, Loaded, ThreadDied
from triptych.worker.lifecycle import exit_by, exit_now, instance_id, new_epoch, on_stop_signals
from triptych.worker.logs import configure_logging
from triptych.worker.metrics import InstanceMetrics, serve_metrics
from triptych.worker.ranks.leader import Leader
from triptych.worker.ranks.lockstep import load_in_lockstep
from triptych.worker.threads import Mailbox

log = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 3.0
"""How long the threads may take to end what they do; a step that takes longer is left behind."""
_LEAVE_SECONDS: Final = 6.0
"""How long leaving may take in all, whatever hangs."""

EXIT_OPERATOR: Final = 2
"""Exit code of a process that the operator must mend something for; whoever supervises it need not start it again."""


def run_instance(config: InstanceConfig) -> int:
    """Serve the roles of ``config`` until a signal or the server ends it; the exit code of the process.

    To be called from the main thread of a process of its own: it takes over the signals, and once it has begun to
    serve it does not return but ends the process itself.

    Raises `ConfigError` for a port, a key, a plane or a log level that cannot be had.
    """
    identity = Identity(instance=instance_id(config.roles, host_id(), config.work_url), epoch=new_epoch())
    configure_logging(identity.instance)
    mailbox = Mailbox()
    on_stop_signals(lambda name: mailbox.post(Stop(reason=name, seconds=config.drain_timeout)))
    control = InstanceControl(
        bind_host=config.transfer.hostname,
        work_port=config.work_port,
        server_addr=config.server_addr,
        keys=None if config.key_dir is None else load_keys(config.key_dir, "instance"),
    )
    try:
        plane = open_plane(config.transfer, identity.instance, identity.epoch, config.torch_device)
    except BaseException:
        control.close()
        raise
    tally = Tally()
    metrics = InstanceMetrics(identity=identity, config=config, figures=lambda: plane.figures, tally=tally)
    try:
        exporter = serve_metrics(metrics, config)
    except BaseException:
        control.close()
        plane.close()
        raise
    leader = Leader(config, identity.instance, mailbox.post) if config.ranks > 1 else None

    def load() -> RolePipeline:
        pipeline = _load(config, tally, leader)
        metrics.attention(pipeline.attention)
        return pipeline

    crew = Crew(
        load=load,
        tally=tally,
        device=config.torch_device,
        slots=config.slots,
        max_running=config.max_running,
        checkpoint_interval=config.checkpoint_interval,
        plane=plane,
        identity=identity,
        post=mailbox.post,
    )
    log.info("starting roles=%s work=%s server=%s", ",".join(config.roles), config.work_url, config.server_addr)
    crew.start()
    code = 1
    loop: ControlLoop | None = None
    try:
        loaded = _await_model(mailbox)
        if isinstance(loaded, int):
            code = loaded
        else:
            metrics.loaded(loaded)
            loop = _control_loop(config, identity, loaded, control, plane, crew, mailbox, tally, metrics)
            mailbox.attach(control.wake)
            code = loop.run()
    except Exception:
        log.critical("the control thread died", exc_info=True)
    if exporter is not None:
        exporter.close()
    _leave(code, mailbox, loop, control, crew, plane, leader)


def _load(config: InstanceConfig, tally: Tally, leader: Leader | None) -> RolePipeline:
    if leader is None:
        return load_pipeline(config.model, config.roles, config.torch_device, tally)
    return load_in_lockstep(config, leader, tally)


def _await_model(mailbox: Mailbox) -> Loaded | int:
    """Wait until the model is there; or the exit code, when that fails or a signal comes first."""
    while True:
        match mailbox.wait():
            case Loaded() as loaded:
                log.info("loaded model=%s device=%s seconds=%.1f", loaded.schema.model, loaded.device, loaded.seconds)
                return loaded
            case ThreadDied(mendable=mendable):
                return EXIT_OPERATOR if mendable else 1
            case Stop(reason=reason):
                log.info("stopping while the model loads: %s", reason)
                return 0
            case post:
                raise AssertionError(f"{post!r} before the model was loaded")


def _control_loop(
    config: InstanceConfig,
    identity: Identity,
    loaded: Loaded,
    control: InstanceControl,
    plane: DataPlane,
    crew: Crew,
    mailbox: Mailbox,
    tally: Tally,
    metrics: InstanceMetrics,
) -> ControlLoop:
    hello = Hello(
        instance=identity.instance,
        epoch=identity.epoch,
        server_epoch=None,
        protocol=PROTOCOL_VERSION,
        roles=config.roles,
        work_url=config.work_url,
        host=host_id(),
        slots=config.slots,
        pool_bytes=plane.pool_bytes,
        planes=plane.planes,
        schema=loaded.schema,
        fingerprint=loaded.fingerprint,
        device=loaded.device,
    )
    process = psutil.Process()

    def usage() -> Usage:
        on_gpu = torch.cuda.memory_allocated(config.torch_device) if config.model.device == "cuda" else 0
        return Usage(
            pool_used=plane.used_bytes,
            resident_bytes=process.memory_info().rss,
            device_bytes=on_gpu,
            counts=Counts(**dataclasses.asdict(tally)),
        )

    return ControlLoop(
        control=control,
        machine=InstanceMachine(hello),
        plane=plane,
        crew=crew,
        mailbox=mailbox,
        identity=identity,
        usage=usage,
        metrics=metrics,
    )


def _leave(
    code: int,
    mailbox: Mailbox,
    loop: ControlLoop | None,
    control: InstanceControl,
    crew: Crew,
    plane: DataPlane,
    leader: Leader | None,
) -> NoReturn:
    """Say goodbye, end the threads, give the memory back, and end the process; all of it within a bound."""
    guard = exit_by(_LEAVE_SECONDS, code)
    mailbox.attach(None)
    control.close()
    if loop is not None:
        loop.abandon()
    crew.close(_JOIN_SECONDS)
    plane.close()
    if leader is not None:
        leader.close()
    guard.cancel()
    log.info("ended with exit code %d", code)
    # The interpreter takes seconds to take the model libraries down, in which whoever restarts us waits; and native
    # threads of an engine or a model abort the process when it is taken down around them.
    exit_now(code)
