"""The role process: binds, loads, serves and leaves.

Several kinds of threads share the work. *Control* (the main thread) owns the sockets and the instance machine.
*Compute* owns the model. *Transfer* pulls inputs ahead and stages outputs, *keeping* fetches what is kept for others.
*Media* writes files, *preview* pictures of what is denoised. They talk by queues only.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final, NoReturn

import psutil
import torch

from triptych.accel.tally import Tally
from triptych.config import InstanceConfig
from triptych.config.logs import configure_logging
from triptych.core.instance import InstanceMachine
from triptych.core.instance_events import Stop, Usage
from triptych.pipeline.load import load_pipeline
from triptych.pipeline.stage import RolePipeline
from triptych.transport.control.instance import InstanceControl
from triptych.transport.control.keys import load_keys
from triptych.transport.data.plane import open_plane
from triptych.transport.host import host_id
from triptych.wire.messages import PROTOCOL_VERSION, Counts, Hello
from triptych.worker.control import ControlLoop
from triptych.worker.crew import Crew
from triptych.worker.exporter import serve_metrics
from triptych.worker.jobs import Identity, Loaded, ThreadDied
from triptych.worker.lifecycle import EXIT_OPERATOR, exit_by, exit_now, instance_id, new_epoch, on_stop_signals
from triptych.worker.metrics import InstanceMetrics
from triptych.worker.ranks.leader import Leader
from triptych.worker.ranks.lockstep import load_in_lockstep
from triptych.worker.standing import Standing
from triptych.worker.threads import Mailbox

log = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 3.0
"""How long the threads may take to end what they do; a step that takes longer is left behind."""
_LEAVE_SECONDS: Final = 6.0
"""How long leaving may take in all, whatever hangs."""


def run_instance(config: InstanceConfig) -> NoReturn:
    """Serve the roles of ``config`` until a signal or the server ends it, then end the process with its exit code.

    To be called from the main thread of a process of its own, whose signals it takes over.

    Raises `ConfigError` for a port, a key, a plane or a log level that cannot be had.
    """
    mailbox = Mailbox()
    identity = Identity(instance=instance_id(config.roles, host_id(), config.work_url), epoch=new_epoch())
    configure_logging(identity.instance)
    on_stop_signals(lambda name: mailbox.post(Stop(reason=name, seconds=config.drain_timeout)))
    instance = _Instance(config, identity, mailbox)
    code = 1
    try:
        code = instance.serve()
    except Exception:
        log.critical("the control thread died", exc_info=True)
    instance.leave(code)


class _Instance:
    """The parts of the process, from the sockets that may be taken to the threads that serve.

    Raises `ConfigError` for what cannot be had; then nothing stays open.
    """

    def __init__(self, config: InstanceConfig, identity: Identity, mailbox: Mailbox) -> None:
        self._config = config
        self._identity = identity
        self._mailbox = mailbox
        self._tally = Tally()
        self._loop: ControlLoop | None = None
        self._sharing = ""
        with contextlib.ExitStack() as opened:
            self._control = InstanceControl(
                bind_host=config.transfer.hostname,
                work_port=config.work_port,
                server_addr=config.server_addr,
                keys=None if config.key_dir is None else load_keys(config.key_dir, "instance"),
            )
            opened.callback(self._control.close)
            plane = self._plane = open_plane(config.transfer, identity.instance, identity.epoch, config.torch_device)
            opened.callback(plane.close)
            self._standing = Standing(config.server_addr)
            self._metrics = InstanceMetrics(
                identity=identity,
                config=config,
                figures=lambda: plane.figures,
                tally=self._tally,
                standing=self._standing,
            )
            self._exporter = serve_metrics(self._metrics, config)
            opened.pop_all()
        # Last: the further ranks are processes, and nothing that comes after them may be refused.
        self._leader = Leader(config, identity.instance, mailbox.post, self._tally) if config.ranks > 1 else None
        self._crew = Crew(
            load=self._load,
            tally=self._tally,
            warmed=config.model.warmup,
            device=config.torch_device,
            slots=config.slots,
            max_running=config.max_running,
            checkpoint_interval=config.checkpoint_interval,
            plane=plane,
            identity=identity,
            post=mailbox.post,
        )

    def serve(self) -> int:
        """Load the model and work until told to stop; the exit code."""
        config = self._config
        log.info("starting roles=%s work=%s server=%s", ",".join(config.roles), config.work_url, config.server_addr)
        self._crew.start()
        loaded = _await_model(self._mailbox)
        if isinstance(loaded, int):
            return loaded
        self._metrics.loaded(loaded)
        self._loop = ControlLoop(
            control=self._control,
            machine=InstanceMachine(self._hello(loaded)),
            plane=self._plane,
            crew=self._crew,
            mailbox=self._mailbox,
            identity=self._identity,
            usage=self._usage,
            metrics=self._metrics,
            standing=self._standing,
        )
        self._mailbox.attach(self._control.wake)
        return self._loop.run()

    def leave(self, code: int) -> NoReturn:
        """Say goodbye, end the threads, give the memory back, and end the process; all of it within a bound."""
        if self._exporter is not None:
            self._exporter.close()
        guard = exit_by(_LEAVE_SECONDS, code)
        self._mailbox.attach(None)
        self._control.close()
        if self._loop is not None:
            self._loop.abandon()
        self._crew.close(_JOIN_SECONDS)
        self._plane.close()
        if self._leader is not None:
            self._leader.close()
        guard.cancel()
        log.info("ended with exit code %d", code)
        # The interpreter takes seconds to take the model libraries down, in which whoever restarts us waits; and native
        # threads of an engine or a model abort the process when it is taken down around them.
        exit_now(code)

    def _load(self) -> RolePipeline:
        config = self._config
        if self._leader is None:
            pipeline = load_pipeline(
                config.model, config.roles, config.torch_device, self._tally, at_once=config.max_running
            )
        else:
            pipeline = load_in_lockstep(config, self._leader, self._tally)
        self._metrics.attention(pipeline.attention)
        self._sharing = pipeline.sharing
        return pipeline

    def _hello(self, loaded: Loaded) -> Hello:
        config, plane = self._config, self._plane
        return Hello(
            instance=self._identity.instance,
            epoch=self._identity.epoch,
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
            sharing=self._sharing,
        )

    def _usage(self) -> Usage:
        config = self._config
        on_gpu = torch.cuda.memory_allocated(config.torch_device) if config.model.device == "cuda" else 0
        return Usage(
            pool_used=self._plane.used_bytes,
            resident_bytes=psutil.Process().memory_info().rss,
            device_bytes=on_gpu,
            counts=Counts(**{name: getattr(self._tally, name) for name in Counts.__struct_fields__}),
        )


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
