"""`triptych serve`: one process of a deployment, or the server with one instance that computes all roles."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal

from triptych.cli.arguments import said_options
from triptych.config.logs import VARIABLE, configure_logging
from triptych.errors import ConfigError
from triptych.ids import ROLES
from triptych.launch.args import ServerArgs
from triptych.launch.sources import settle
from triptych.launch.supervised import follow_supervisor

log = logging.getLogger("triptych")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit status."""
    follow_supervisor()
    settled = settle(said_options(args), os.environ, args.config)
    options = settled.server_args()
    os.environ[VARIABLE] = options.log_level
    configure_logging("server")  # a role says later which instance it is
    options.check_applies(settled.sources)
    for note in settled.notes:
        log.warning("%s", note)
    match options.kind:
        case "server":
            return _run_server(options)
        case "instance":
            return _run_instance(options)
        case "monolithic":
            return _run_monolithic(options)


def _run_server(options: ServerArgs) -> int:
    from triptych.launch.serving import LEAVE_SECONDS, leave_within, run_server

    status = run_server(options.server_config())
    leave_within(LEAVE_SECONDS)
    return status


def _run_instance(options: ServerArgs) -> int:
    from triptych.pipeline.source import local_folder

    config = options.instance_config(default_device="cpu")  # what is impossible is said before torch is loaded
    local_folder(config.model.path, config.model.revision)
    if config.key_dir is not None:
        from triptych.transport.control.keys import load_keys

        load_keys(config.key_dir, "instance")
    # Some blocks of Diffusers draw a bar of their own that no setting of theirs turns off. Tqdm reads this once, when
    # it is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Looking for garbage in what is being imported, which stays, takes up to a third of the time.
    gc.disable()
    from triptych.launch.device import detect_device
    from triptych.worker.process import run_instance

    gc.enable()
    return run_instance(options.instance_config(default_device=options.device or detect_device()))


def _run_monolithic(options: ServerArgs) -> int:
    """The server in this process, and one child that computes; tensors stay in the child's own memory."""
    from triptych.launch.group import Group, ProcessStatus
    from triptych.launch.plan import instance_spec
    from triptych.launch.ports import free_ports
    from triptych.launch.serving import LEAVE_SECONDS, leave_within, run_server

    if options.model_path is None:
        raise ConfigError("a model is needed: triptych serve MODEL (a folder, Hub id, or the embedded tiny)")
    config = options.server_config()
    spec = instance_spec(
        options,
        name="instance",
        roles=ROLES,
        gpus=options.gpu_ids,
        work_port=free_ports(1)[0],
        threads=1,
        disagg_transfer="local",
    )

    def report(status: ProcessStatus) -> None:
        who = status.name if status.pid is None else f"{status.name} (pid {status.pid})"
        log.info("%s: %s %s", who, status.state, status.detail)
        if status.state == "failed":  # a server that nothing can ever compute for should not stay
            os.kill(os.getpid(), signal.SIGTERM)

    group = Group([spec], on_change=report)
    try:
        status = run_server(config, on_started=group.start)
    finally:
        group.stop()
    group.check()
    leave_within(LEAVE_SECONDS)
    return status
