"""HTTP client of a Triptych server: blocking `Client` and asyncio `AsyncClient`, one implementation under both."""

from triptych.client.answers import (
    ClientTimeout,
    ConnectionBroken,
    Job,
    JobFailed,
    Progress,
    RequestRefused,
    Result,
    ServerUnreachable,
)
from triptych.client.shells import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "Client",
    "ClientTimeout",
    "ConnectionBroken",
    "Job",
    "JobFailed",
    "Progress",
    "RequestRefused",
    "Result",
    "ServerUnreachable",
]
