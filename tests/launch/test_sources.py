"""Which of flag, variable and file wins, and what is said of a file that cannot be read as options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triptych.errors import ConfigError
from triptych.launch.options import OPTIONS
from triptych.launch.sources import read_file, settle

TOML = """
disagg-role = "server"
port = 8000
encoder_urls = ["tcp://a:1", "tcp://b:2"]
disagg_transfer_pool_size = "1GiB"
insecure = true
[default]
num_inference_steps = 40
"""
YAML = """
disagg-role: server
port: 8000
encoder_urls: [tcp://a:1, tcp://b:2]
disagg_transfer_pool_size: 1GiB
insecure: true
default: {num_inference_steps: 40}
"""
SAID = {
    "disagg_role": "server",
    "port": 8000,
    "encoder_urls": ("tcp://a:1", "tcp://b:2"),
    "disagg_transfer_pool_size": 1 << 30,
    "insecure": True,
    "default": {"num_inference_steps": 40},
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def text_in(folder: Path, text: str, suffix: str = ".toml") -> str:
    return str(write(folder, f"role{suffix}", text))


def test_every_format_says_the_same(tmp_path: Path) -> None:
    as_json = json.dumps({"disagg-role": "server", "port": 8000, "encoder_urls": ["tcp://a:1", "tcp://b:2"],
                          "disagg_transfer_pool_size": "1GiB", "insecure": True,
                          "default": {"num_inference_steps": 40}})  # fmt: skip
    for name, text in (("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("a.json", as_json)):
        assert read_file(write(tmp_path, name, text)) == (SAID, ()), name


def test_flags_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = text_in(tmp_path, "port = 1\nscheduler_port = 2\nmax_live_requests = 3\ninsecure = true")
    environment = {"TRIPTYCH_PORT": "10", "TRIPTYCH_SCHEDULER_PORT": "20", "TRIPTYCH_HOST": "", "OTHER": "1"}
    settled = settle({"port": 100, "insecure": False}, environment, file)
    assert settled.values == {"port": 100, "scheduler_port": 20, "max_live_requests": 3, "insecure": False}
    assert settled.sources == {
        "port": "--port", "scheduler_port": "TRIPTYCH_SCHEDULER_PORT", "max_live_requests": file,
        "insecure": "--insecure",
    }  # fmt: skip


def test_entries_of_tables_are_put_together(tmp_path: Path) -> None:
    file = text_in(tmp_path, "[default]\nfps = 8\nnum_frames = 17\n[component]\nvae = 'a'")
    settled = settle({"default": ["fps=16", "seed=7"]}, {"TRIPTYCH_COMPONENT": "vae=b;transformer=c"}, file)
    assert settled.values["default"] == {"fps": 16, "num_frames": 17, "seed": 7}
    assert settled.values["component"] == {"vae": "b", "transformer": "c"}
    assert settled.sources["default"] == f"{file}, --default"


def test_every_option_has_a_variable_and_a_key() -> None:
    assert {option.variable for option in OPTIONS} >= {"TRIPTYCH_MODEL_PATH", "TRIPTYCH_DEFAULT"}
    assert len({option.variable for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_switches_in_the_environment(text: str, value: bool) -> None:
    assert settle({}, {"TRIPTYCH_INSECURE": text}, None).values == {"insecure": value}


def test_variables_meant_for_other_processes_are_passed_over(tmp_path: Path) -> None:
    environment = {"TRIPTYCH_PORT": "8000", "TRIPTYCH_SLOTS": "3", "TRIPTYCH_DISAGG_ROLE": "encoder"}
    assert settle({}, environment, None).values == {"disagg_role": "encoder", "slots": 3}
    assert settle({"disagg_role": "server"}, environment, None).values == {"disagg_role": "server", "port": 8000}
    assert settle({}, environment, None, only=("port",)).values == {"port": 8000}


def test_what_the_role_does_not_read_is_refused_in_its_file(tmp_path: Path) -> None:
    file = text_in(tmp_path, "disagg_role = 'server'\nslots = 3")
    settled = settle({}, {}, file)
    with pytest.raises(ConfigError, match=r"role\.toml: slots does not apply to --disagg-role server"):
        settled.server_args().check_applies(settled.sources)
    with pytest.raises(ConfigError, match=r"role\.toml: slots: is not an option of this command"):
        settle({}, {}, file, only=("port", "disagg_role"))


@pytest.mark.parametrize(
    ("suffix", "text", "fragments"),
    [
        (".toml", "prot = 1", ["prot: unknown option", "did you mean port"]),
        (".toml", "port = 'x'", ["role.toml: port 'x'", "whole number"]),
        (".toml", "port = 1\nport = 2", ["cannot be read as toml"]),
        (".toml", "disagg_role = 'encode'", ["disagg_role 'encode'", "encoder, denoiser, decoder"]),
        (".toml", "[default]\na = [1]", ["default 'a=[1]'", "a number, a text, true or false"]),
        (".toml", "disagg-timeout = 1\ndisagg_timeout = 2", ["is said twice"]),
        (".json", '{"port": 1, "port": 2}', ["port is there twice"]),
        (".json", "[1]", ["a table of option names"]),
        (".json", "{", ["cannot be read as json"]),
        (".yaml", "port: 1\nport: 2", ["port is there twice"]),
        (".yaml", "port: !!python/object/apply:os.system [ls]", ["cannot be read as yaml"]),
        (".yaml", "? [1]\n: 2", ["yaml"]),
        (".ini", "port = 1", ["is .ini", "toml, json or yaml"]),
    ],
)
def test_a_bad_file_is_refused_with_file_key_and_value(
    tmp_path: Path, suffix: str, text: str, fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        settle({}, {}, text_in(tmp_path, text, suffix))
    for fragment in (*fragments, f"role{suffix}"):
        assert fragment in caught.value.message


def test_a_bad_variable_is_named() -> None:
    for name, value in (("TRIPTYCH_PORT", "tcp://10.0.0.1:80"), ("TRIPTYCH_INSECURE", "yes")):
        with pytest.raises(ConfigError, match=f"{name} '{value}': must be"):
            settle({}, {name: value}, None)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml.*cannot be read"):
        settle({}, {}, str(tmp_path / "nothing.toml"))


def test_defaults_survive_the_way_to_a_child() -> None:
    values: dict[str, Any] = {"fps": 16, "guidance_scale": 5.5, "negative_prompt": "5", "fast": True, "style": "a=b c"}
    args = settle({"default": values}, {}, None).server_args()
    words = args.for_child("instance").words
    assert settle({"default": words[1::2]}, {}, None).server_args().default == values
