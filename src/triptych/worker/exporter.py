"""The HTTP port of an instance: its metrics for Prometheus, and whether it lives and serves for whoever probes it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from triptych.config import InstanceConfig, host_port
from triptych.errors import ConfigError
from triptych.worker.metrics import InstanceMetrics

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)


class Exporter:
    """The HTTP server of the metrics and of probes, with threads of its own."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self.port: int = server.server_port

    def close(self) -> None:
        """Let go of the port."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, so that a slow reader holds up nobody."""

    daemon_threads = True


class _Server6(_Server):
    """The same at an address of IPv6."""

    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    """Logs no scrapes."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _answers(metrics: InstanceMetrics) -> WSGIApplication:
    """``/metrics``; ``/health``, that the process lives; ``/ready``, whether the server has this instance."""
    render = make_wsgi_app(metrics.registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        match environ.get("PATH_INFO", ""):
            case "/metrics":
                return render(environ, start_response)
            case "/health":
                status, text = "200 OK", "alive"
            case "/ready" if metrics.standing.welcomed:
                status, text = "200 OK", "the server has this instance"
            case "/ready":
                status, text = (
                    "503 Service Unavailable",
                    "the model is being loaded, or the server has not answered yet",
                )
            case _:
                status, text = "404 Not Found", "there are /metrics, /health and /ready"
        start_response(status, [("content-type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return app


def serve_metrics(metrics: InstanceMetrics, config: InstanceConfig) -> Exporter | None:
    """Answer scrapes and probes on the port that ``config`` says; None where it says none.

    Raises `ConfigError` when the port was asked for and cannot be had. That serving needs no metrics, a default port
    that is taken is only a warning.
    """
    port, host = config.own_metrics_port, config.transfer.hostname
    if not port:
        return None
    try:
        server = make_server(host, port, _answers(metrics), _Server6 if ":" in host else _Server, _Quiet)
    except OSError as error:
        problem = f"--metrics-port {port} on {host}: {error.strerror or error}"
        if config.metrics_port is not None:
            raise ConfigError(problem) from error
        log.warning("no metrics: %s", problem)
        return None
    threading.Thread(target=server.serve_forever, name="triptych-metrics", daemon=True).start()
    log.info("metrics on http://%s/metrics", host_port(host, port))
    return Exporter(server)
