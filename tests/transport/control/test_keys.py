"""Key files: what is written, who can read it, and what is said of those that are missing or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.errors import ConfigError
from triptych.transport.control.keys import Side, load_keys, make_keys

FILES = {"server.public", "server.secret", "instance.public", "instance.secret"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_four_files_are_made_that_only_their_owner_can_read(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_each_side_knows_the_other(folder: Path) -> None:
    server, instance = load_keys(folder, "server"), load_keys(folder, "instance")
    assert server.peer == instance.public
    assert instance.peer == server.public
    assert len({server.public, server.secret, instance.public, instance.secret}) == 4


@pytest.mark.parametrize(
    ("side", "enough"),
    [("server", {"server.secret", "instance.public"}), ("instance", {"instance.secret", "server.public"})],
)
def test_a_machine_needs_its_own_secret_and_the_other_public_key_alone(
    folder: Path, side: Side, enough: set[str]
) -> None:
    for name in FILES - enough:
        (folder / name).unlink()
    assert load_keys(folder, side).peer
    for name in enough:
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(ConfigError, match=rf"disagg-key-dir='.*keys': {name} is missing.*`triptych keygen DIR`"):
            load_keys(folder, side)
        (folder / name).write_bytes(kept)
        (folder / name).chmod(0o600)


def test_keys_that_are_there_are_not_overwritten(folder: Path) -> None:
    before = load_keys(folder, "server")
    (folder / "instance.secret").unlink()
    with pytest.raises(ConfigError, match=r"server\.public exists already"):
        make_keys(folder)
    assert load_keys(folder, "server") == before
    assert not (folder / "instance.secret").exists()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 41, b"\xff" * 40, b"x" * 39 + b"~"])
def test_a_file_that_holds_no_key_is_named(folder: Path, content: bytes) -> None:
    (folder / "instance.public").write_bytes(content)
    with pytest.raises(ConfigError, match=r"instance\.public holds no key of 40 characters"):
        load_keys(folder, "server")


def test_a_secret_that_everybody_can_read_is_refused(folder: Path) -> None:
    (folder / "server.secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"server\.secret can be read by every user of this machine; chmod 600"):
        load_keys(folder, "server")
    (folder / "server.secret").chmod(0o440)  # a group of its own is how orchestrators hand out secrets
    load_keys(folder, "server")


def test_one_pair_for_both_sides_is_refused(folder: Path) -> None:
    (folder / "instance.public").write_bytes((folder / "server.public").read_bytes())
    with pytest.raises(ConfigError, match="server and instances have the same key"):
        load_keys(folder, "server")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/keys: keys cannot be written there"):
        make_keys(tmp_path / "file" / "keys")


def test_a_secret_is_not_shown(folder: Path) -> None:
    keys = load_keys(folder, "server")
    assert keys.secret.decode() not in repr(keys)
