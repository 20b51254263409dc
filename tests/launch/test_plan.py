"""The processes that a pool is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.cli.arguments import said_options
from triptych.cli.main import build_parser
from triptych.config import InstanceConfig
from triptych.errors import ConfigError
from triptych.launch.args import ServerArgs
from triptych.launch.plan import plan_pool


def value(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def read(command: tuple[str, ...]) -> InstanceConfig:
    """What the process of such a ``command`` makes of it."""
    words = command[command.index("serve") :]
    return ServerArgs.from_kwargs(**said_options(build_parser().parse_args(words))).instance_config(
        default_device="cpu"
    )


def test_each_gpu_list_becomes_an_instance_that_the_server_waits_for() -> None:
    args = ServerArgs.from_kwargs(model_path="tiny", device="cuda", scheduler_port=21000, port=22000)
    plan = plan_pool(args, encoder_gpus=[[0]], denoiser_gpus=[[1], [2]], decoder_gpus=[[0]], first_work_port=19000)
    assert [p.name for p in plan.processes] == ["server", "encoder-0", "denoiser-0", "denoiser-1", "decoder-0"]
    assert [value(p.command, "--base-gpu-id") for p in plan.instances] == ["0", "1", "2", "0"]
    assert [p.address for p in plan.instances] == [f"tcp://127.0.0.1:{port}" for port in range(19000, 19004)]
    assert value(plan.server.command, "--denoiser-urls") == "tcp://127.0.0.1:19001;tcp://127.0.0.1:19002"
    assert {value(p.command, "--disagg-server-addr") for p in plan.instances} == {"tcp://127.0.0.1:21000"}
    assert plan.url == "http://127.0.0.1:22000"


def test_a_list_of_several_gpus_is_one_instance_and_only_denoisers_hear_how_to_share_them() -> None:
    args = ServerArgs.from_kwargs(model_path="tiny", device="cuda", denoiser_cfg=2)
    plan = plan_pool(args, encoder_gpus=[[0]], denoiser_gpus=[[1, 2], [3, 4]], decoder_gpus=[[0]])
    denoisers = [p.command for p in plan.instances if p.name.startswith("denoiser")]
    assert [value(command, "--base-gpu-id") for command in denoisers] == ["1", "3"]
    assert [value(command, "--num-gpus") for command in denoisers] == ["2", "2"]
    assert [value(command, "--denoiser-cfg") for command in denoisers] == ["2", "2"]
    assert not [
        p.name
        for p in plan.instances
        if p.name[0] in "de" and "denoiser" not in p.name and "--denoiser-cfg" in p.command
    ]


def test_the_documented_pool_of_nine_gpus_has_two_denoisers_that_share_four_each() -> None:
    """The keywords of the published Python example, word for word."""
    server_args = ServerArgs.from_kwargs(
        model_path="tiny", device="cuda", denoiser_sp=4, denoiser_ulysses=2, denoiser_ring=2, disagg_ib_device="mlx5_0"
    )
    plan = plan_pool(server_args, encoder_gpus=[[0]], denoiser_gpus=[[1, 2, 3, 4], [5, 6, 7, 8]], decoder_gpus=[[0]])
    said = {p.name: p.command for p in plan.instances}
    assert list(said) == ["encoder-0", "denoiser-0", "denoiser-1", "decoder-0"]
    for name, first in (("denoiser-0", 1), ("denoiser-1", 5)):
        config = read(said[name])
        assert config.gpu_ids == tuple(range(first, first + 4))
        degrees = config.parallel
        assert (degrees.cfg, degrees.sp, degrees.ulysses, degrees.ring, degrees.tp) == (None, 4, 2, 2, 1)
        assert config.transfer.ib_device == "mlx5_0"
    for name in ("encoder-0", "decoder-0"):
        config = read(said[name])
        assert config.gpu_ids == (0,)
        assert not config.parallel.of_denoiser
        assert config.transfer.ib_device == "mlx5_0"


@pytest.mark.parametrize(
    "degrees",
    [
        {"cfg": 2, "sp": 4, "ulysses": 2, "ring": 2},
        {"cfg": 1, "sp": 8, "ulysses": 4, "ring": 2},
        {"cfg": 2, "tp": 4},
        {"tp": 8},
        {"ulysses": 8},
    ],
)
def test_each_degree_of_a_denoiser_of_eight_gpus_reaches_its_process(degrees: dict[str, int]) -> None:
    said = {f"denoiser_{name}": degree for name, degree in degrees.items()}
    args = ServerArgs.from_kwargs(model_path="tiny", device="cuda", **said)
    plan = plan_pool(args, encoder_gpus=[[0]], denoiser_gpus=[list(range(8))], decoder_gpus=[[0]])
    (denoiser,) = (read(p.command) for p in plan.instances if p.name == "denoiser-0")
    assert denoiser.ranks == 8
    for name in ("cfg", "sp", "ulysses", "ring", "tp"):
        unsaid = 1 if name == "tp" else None
        assert getattr(denoiser.parallel, name) == degrees.get(name, unsaid), name


def test_degrees_that_do_not_fit_the_gpus_of_a_list_are_refused_before_anything_starts() -> None:
    args = ServerArgs.from_kwargs(model_path="tiny", device="cuda", denoiser_cfg=2, denoiser_sp=4)
    with pytest.raises(
        ConfigError, match="num-gpus=4: denoiser-cfg x denoiser-sp x denoiser-tp = 2 x 4 x 1 must equal"
    ):
        plan_pool(args, encoder_gpus=[[0]], denoiser_gpus=[[0, 1, 2, 3], [4, 5, 6, 7]], decoder_gpus=[[0]])


def test_ranks_on_the_cpu_share_its_cores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    args = ServerArgs.from_kwargs(model_path="tiny", device="cpu")
    (replica,) = plan_pool(args, replica_gpus=[[0, 1]]).instances
    assert replica.environment == {"OMP_NUM_THREADS": "4"}
    assert value(replica.command, "--num-gpus") == "2"


def test_a_replica_is_named_for_every_role() -> None:
    plan = plan_pool(ServerArgs.from_kwargs(model_path="tiny", device="cpu"), replica_gpus=[[0], [1]])
    (one, two) = plan.instances
    assert value(one.command, "--disagg-role") == "encoder,denoiser,decoder"
    for role in ("encoder", "denoiser", "decoder"):
        assert value(plan.server.command, f"--{role}-urls") == f"{one.address};{two.address}"


def test_one_instance_can_encode_and_decode() -> None:
    args = ServerArgs.from_kwargs(model_path="tiny", device="cpu", drain_timeout=7.0)
    plan = plan_pool(args, denoiser_gpus=[[0]], encoder_decoder_gpus=[[0]])
    denoiser, both = plan.instances
    assert value(both.command, "--disagg-role") == "encoder,decoder"
    for role, instance in (("encoder", both), ("denoiser", denoiser), ("decoder", both)):
        assert value(plan.server.command, f"--{role}-urls") == instance.address
    assert denoiser.stop_turn < both.stop_turn < plan.server.stop_turn  # what is denoised by then is still decoded


def test_instances_on_the_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    args = ServerArgs.from_kwargs(model_path="tiny", device="cpu")
    plan = plan_pool(args, encoder_gpus=[[0]], denoiser_gpus=[[0], [0]], decoder_gpus=[[0]])
    assert [p.environment for p in plan.instances] == [{"OMP_NUM_THREADS": "2"}] * 4


def test_a_pool_without_a_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="no instance for denoiser"):
        plan_pool(ServerArgs.from_kwargs(model_path="tiny"), encoder_gpus=[[0]], decoder_gpus=[[0]])


def test_a_server_reachable_by_all_is_reached_on_this_machine_by_its_loopback() -> None:
    args = ServerArgs.from_kwargs(model_path="tiny", host="0.0.0.0", insecure=True)
    plan = plan_pool(args, replica_gpus=[[0]])
    assert plan.url == "http://127.0.0.1:30000"
    assert value(plan.instances[0].command, "--disagg-server-addr") == "tcp://127.0.0.1:5555"


def keys(folder: Path) -> Path:
    file = folder / "keys"
    file.write_text("a-secret-key\n")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("with_file", [True, False])
def test_a_server_with_keys_may_be_reached_by_all(tmp_path: Path, with_file: bool) -> None:
    """Symptom: `triptych up --host 0.0.0.0` with keys on both doors asked for --api-key-file, which it had."""
    said = {"api_key_file": keys(tmp_path)} if with_file else {"api_key": "a-secret-key"}
    args = ServerArgs.from_kwargs(model_path="tiny", device="cpu", host="0.0.0.0", disagg_key_dir=tmp_path, **said)
    plan = plan_pool(args, replica_gpus=[[0]])
    assert plan.url == "http://127.0.0.1:30000"
    assert ("--api-key-file" if with_file else "--api-key") in plan.server.command


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"max_rate_per_key": 5}, "needs --api-key"),
        ({"task_ports": "8002,8003,60000"}, "task-ports=60000"),
        ({"port": 5557}, "collides with the scheduler ports"),
        ({"api_key_file": "no-such-file"}, "cannot be read"),
        ({"max_live_requests": 0}, "must be greater than 0"),
    ],
)
def test_what_the_server_would_refuse_is_said_before_it_starts(said: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plan_pool(ServerArgs.from_kwargs(model_path="tiny", device="cpu", **said), replica_gpus=[[0]])


@pytest.mark.parametrize("host", ["::", "::1", "[::1]"])
def test_a_server_at_an_ipv6_address_is_reached_there(host: str) -> None:
    """Symptom: `--host ::1` was refused for a --disagg-server-addr that nobody had given."""
    args = ServerArgs.from_kwargs(model_path="tiny", device="cpu", host=host, disagg_p2p_hostname="::1", insecure=True)
    plan = plan_pool(args, replica_gpus=[[0]], first_work_port=19000)
    (instance,) = plan.instances
    assert plan.url == "http://[::1]:30000"
    assert value(instance.command, "--disagg-server-addr") == "tcp://[::1]:5555"
    assert instance.address == "tcp://[::1]:19000"
    assert value(plan.server.command, "--denoiser-urls") == "tcp://[::1]:19000"


@pytest.mark.parametrize("name", ["host", "disagg_p2p_hostname"])
@pytest.mark.parametrize("host", ["localhost:5555", "::1:99999", "127.0.0.1:80"])
def test_a_host_with_a_port_is_refused(name: str, host: str) -> None:
    args = ServerArgs.from_kwargs(model_path="tiny", device="cpu", insecure=True, **{name: host})
    with pytest.raises(ConfigError, match="must be a host without a port"):
        plan_pool(args, replica_gpus=[[0]])


def test_roles_leave_one_after_the_other_when_it_is_said_how_long_their_work_may_take() -> None:
    said = {"model_path": "tiny", "device": "cpu"}
    lists = {"encoder_gpus": [[0]], "denoiser_gpus": [[0], [0]], "decoder_gpus": [[0]]}
    plan = plan_pool(ServerArgs.from_kwargs(**said, drain_timeout=120), **lists)
    assert [(p.name, p.stop_turn) for p in plan.processes] == [
        ("server", 3), ("encoder-0", 0), ("denoiser-0", 1), ("denoiser-1", 1), ("decoder-0", 2)
    ]  # fmt: skip
    assert {p.stop_seconds for p in plan.instances} == {130.0}
    assert {p.stop_turn for p in plan_pool(ServerArgs.from_kwargs(**said), **lists).processes} == {0}


def test_a_lone_instance_has_nobody_to_leave_its_work_to() -> None:
    with pytest.raises(ConfigError, match="--drain-timeout does not apply to --disagg-role monolithic"):
        ServerArgs.from_kwargs(model_path="tiny", drain_timeout=60).check_applies()


def test_an_instance_is_told_what_concerns_its_roles() -> None:
    args = ServerArgs.from_kwargs(
        model_path="tiny",
        device="cuda",
        quant="encoder=int8,denoiser=fp8",
        offload="block",
        vae_tiling=True,
        previews=True,
    )
    plan = plan_pool(args, encoder_gpus=[[0]], denoiser_gpus=[[1]], decoder_gpus=[[2]])
    encoder, denoiser, decoder = (instance.command for instance in plan.instances)
    assert value(encoder, "--quant") == "encoder=int8"
    assert value(denoiser, "--quant") == "denoiser=fp8"
    assert "--quant" not in decoder
    assert [value(command, "--offload") for command in (encoder, denoiser, decoder)] == [
        "encoder=block",
        "denoiser=block",
        "decoder=block",
    ]
    assert ["--vae-tiling" in command for command in (encoder, denoiser, decoder)] == [True, False, True]
    assert ["--previews" in command for command in (encoder, denoiser, decoder)] == [False, True, False]
    assert "--offload" not in plan.server.command


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"disagg_role": "encoder", "quant": "int8"}, "--quant denoiser=int8: this instance serves encoder only"),
        ({"disagg_role": "encoder", "offload": "decoder=block"}, "--offload decoder=block: this instance serves"),
        ({"disagg_role": "denoiser", "vae_tiling": True}, "--vae-tiling: a denoiser has no VAE"),
        (
            {"disagg_role": "denoiser", "lora": "a=a.safetensors", "num_gpus": 2, "denoiser_tp": 2},
            "denoiser-tp=2 and lora: layers that adapters may change cannot be spread",
        ),
        ({"disagg_role": "denoiser", "offload": "denoiser=block", "device": "cpu"}, "--offload: needs --device cuda"),
    ],
)
def test_what_would_change_nothing_is_refused(said: dict[str, object], complaint: str) -> None:
    args = ServerArgs.from_kwargs(model_path="tiny", disagg_server_addr="tcp://127.0.0.1:5555", **said)
    with pytest.raises(ConfigError, match=complaint):
        args.instance_config(default_device="cpu")
