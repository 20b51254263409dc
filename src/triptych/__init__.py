"""Triptych serves diffusion pipelines split into encoder, denoiser and decoder processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.client import AsyncClient, Client
    from triptych.launch.args import ServerArgs
    from triptych.launch.pool import launch_pool_disagg_server

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "ServerArgs", "__version__", "launch_pool_disagg_server"]


def __getattr__(name: str) -> Any:
    """Load the client and the launching part on first use, so that ``import triptych`` stays instant."""
    match name:
        case "AsyncClient":
            from triptych.client import AsyncClient

            return AsyncClient
        case "Client":
            from triptych.client import Client

            return Client
        case "ServerArgs":
            from triptych.launch.args import ServerArgs

            return ServerArgs
        case "launch_pool_disagg_server":
            from triptych.launch.pool import launch_pool_disagg_server

            return launch_pool_disagg_server
        case _:
            raise AttributeError(f"module 'triptych' has no attribute {name!r}")
