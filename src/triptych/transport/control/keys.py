"""CURVE keys of the control plane: one pair for the server, one for all instances, in four small files of a folder.

Each side proves that it has its own secret key and accepts exactly one key of the other side, so an instance that
joins later needs no entry anywhere, and one instance cannot give another instance work. A file holds one key of 40
characters in Z85, the text form of ZMQ (rfc.zeromq.org/spec/32).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq

from triptych.errors import ConfigError

Side = Literal["server", "instance"]

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_OTHERS = 0o007


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """What one side knows: its own pair and the public key of the other side, each 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    peer: bytes


def make_keys(folder: Path) -> tuple[Path, ...]:
    """Write a new pair for the server and one for the instances; returns the files, readable by their owner only.

    Raises `ConfigError` when the folder holds a key already, so that no deployment is locked out by accident, or when
    it cannot be written.
    """
    _check_curve()
    paths = [folder / f"{side}.{part}" for side in ("server", "instance") for part in ("public", "secret")]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in paths:
            if path.exists():
                raise ConfigError(f"{path} exists already: remove it to make new keys, or name another folder")
        keys = [*zmq.curve_keypair(), *zmq.curve_keypair()]
        for path, key in zip(paths, keys, strict=True):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(key + b"\n")
    except OSError as error:
        raise ConfigError(f"{folder}: keys cannot be written there: {error.strerror}") from error
    return tuple(paths)


def load_keys(folder: Path, side: Side) -> Keys:
    """The keys of one side: its secret and the other side's public key; the two other files need not be there.

    Raises `ConfigError` that names the file that is missing, unreadable, no key, or a secret that everybody can read.
    """
    _check_curve()
    secret = _read(folder / f"{side}.secret", folder)
    peer = _read(folder / ("instance.public" if side == "server" else "server.public"), folder)
    public = zmq.curve_public(secret)
    if public == peer:
        raise ConfigError(f"disagg-key-dir={str(folder)!r}: server and instances have the same key; {_REMEDY}")
    return Keys(public=public, secret=secret, peer=peer)


_REMEDY = "make new ones with `triptych keygen DIR` and give every machine the files of that one folder"


def _read(path: Path, folder: Path) -> bytes:
    where = f"disagg-key-dir={str(folder)!r}: {path.name}"
    try:
        if path.suffix == ".secret" and path.stat().st_mode & _OTHERS:
            raise ConfigError(f"{where} can be read by every user of this machine; chmod 600 {path}")
        key = path.read_bytes().strip()
    except FileNotFoundError as error:
        raise ConfigError(f"{where} is missing there; {_REMEDY}") from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where} holds no key of 40 characters in Z85; {_REMEDY}")
    return key


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("disagg-key-dir: this build of libzmq has no CURVE; install the pyzmq wheel from PyPI")
