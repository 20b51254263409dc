"""Addresses as people may see them."""

from __future__ import annotations

import pytest

from triptych.config.secrets import without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/clips", "s3://bucket/clips"),
        ("/data/outputs", "/data/outputs"),
        ("sftp://bob:s3cret@host/x", "sftp://***@host/x"),
        ("sftp://bob:s3/cr@t@host/x is away", "sftp://***@host/x is away"),
        ("https://TOKEN@host/x", "https://***@host/x"),
        ("simplecache::sftp://bob:s3cret@host/x", "simplecache::sftp://***@host/x"),
        ("az://box/clips?sig=s3cret&x=1", "az://box/clips?***"),
        ("is it there? a@b says no", "is it there? a@b says no"),
    ],
)
def test_what_lets_somebody_in_is_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_a_password_is_hidden_wherever_a_library_repeats_it() -> None:
    url = "sftp://bob:s3cret%21@host/x"
    assert (
        without_secrets("login of bob with 's3cret!' or s3cret%21 failed", url)
        == "login of bob with '***' or *** failed"
    )
