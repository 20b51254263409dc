"""HTTP requests with the patience that a busy machine needs: httpx by itself gives up after five seconds."""

from __future__ import annotations

import functools

import httpx

PATIENCE = 60.0
"""Seconds."""

get = functools.partial(httpx.get, timeout=PATIENCE)
post = functools.partial(httpx.post, timeout=PATIENCE)
delete = functools.partial(httpx.delete, timeout=PATIENCE)
request = functools.partial(httpx.request, timeout=PATIENCE)
stream = functools.partial(httpx.stream, timeout=PATIENCE)
