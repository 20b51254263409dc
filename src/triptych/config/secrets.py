"""Addresses as people may see them: without what lets somebody in."""

from __future__ import annotations

import re
from urllib.parse import unquote

_USER = re.compile(r"(?<=://)\S*@")
_QUERY = re.compile(r"(://[^\s?]*)\?\S+")
_HIDDEN = "***"
_SHORTEST = 3
"""Characters of a password that is looked for outside of its URL; shorter ones are part of too many words."""


def without_secrets(text: str, url: str | None = None) -> str:
    """``text`` with users, passwords and queries of all URLs in it hidden, and wherever else it stands the password of
    ``url``: errors of libraries repeat addresses in forms of their own."""
    text = _QUERY.sub(rf"\1?{_HIDDEN}", _USER.sub(f"{_HIDDEN}@", text))
    for secret in _passwords(url or ""):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, _HIDDEN)
    return text


def _passwords(url: str) -> tuple[str, ...]:
    found = _USER.search(url)
    password = "" if found is None else found[0][:-1].partition(":")[2]
    return (password, unquote(password))
