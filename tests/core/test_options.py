"""Parameters that come of how instances were launched: the roles that take part need them, others serve beside."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from triptych.core.options import told
from triptych.ids import ROLES, Role
from triptych.wire.messages import Goodbye, Refused, RunStage
from triptych.wire.schema import LaunchOption, Param, RequestSchema

from .harness import SCHEMA as BARE
from .harness import SERVER, Bench, hello

E, D, V = ROLES
SEED = Param(name="seed", type="integer")
SCHEMA = replace(BARE, params=(SEED,))


def adapted(*names: str, roles: tuple[Role, ...] = (D,)) -> RequestSchema:
    """The schema of an instance that was launched with these adapters."""
    option = LaunchOption(flag="--lora", roles=roles)
    return SCHEMA.with_options([Param(name="lora", type="adapters", nullable=True, choices=names, option=option)])


def lora(bench: Bench) -> Param | None:
    """What the door knows."""
    assert bench.router.schema is not None
    return bench.router.schema.param("lora")


@pytest.mark.parametrize("order", [(E, D, V), (V, D, E), (D, V, E)])
def test_only_who_takes_part_is_launched_with_an_option_and_told_of_it(order: tuple[Role, ...]) -> None:
    """Symptom: a denoiser with adapters was refused beside an encoder and a decoder that have no use for them."""
    bench = Bench()
    for role in order:
        bench.join(role, schema=adapted("fox") if role is D else SCHEMA)
        assert not bench.sent(role, Refused)
    assert lora(bench) == adapted("fox").param("lora")
    request = bench.submit("r", lora="fox", seed=1)
    assert bench.run("encoder").params == {"seed": 1}
    bench.encode(request)
    assert bench.run("denoiser").params == {"lora": "fox", "seed": 1}
    bench.denoise(request)
    assert bench.run("decoder").params == {"seed": 1}


def test_instances_of_one_role_must_be_launched_alike() -> None:
    bench = Bench()
    bench.join("encoder", schema=SCHEMA)
    bench.join("denoiser-0", schema=adapted("fox"))
    bench.join("denoiser-1", schema=SCHEMA)
    (refused,) = bench.sent("denoiser-1", Refused)
    assert refused.reason == (
        "request parameter 'lora': denoiser-0 has it and this instance has not, but every denoiser takes part: launch "
        "both with the same --lora"
    )
    bench.join("denoiser-1", schema=adapted("fox", "snow"))
    (refused,) = bench.sent("denoiser-1", Refused)
    assert refused.reason == (
        "request parameter 'lora' is not that of denoiser-0: fox, snow here, fox there; launch both with the same "
        "--lora"
    )
    bench.join("denoiser-1", schema=adapted("fox"))
    assert not bench.sent("denoiser-1", Refused)


def test_an_encoder_whose_model_adapters_change_must_have_them() -> None:
    both = adapted("fox", roles=(E, D))
    bench = Bench()
    bench.join("denoiser", schema=both)
    bench.join("encoder", schema=SCHEMA)
    (refused,) = bench.sent("encoder", Refused)
    assert "denoiser has it and this instance has not, but every encoder takes part" in refused.reason
    bench.join("encoder", schema=both)
    bench.join("decoder", schema=SCHEMA)
    assert not bench.sent("decoder", Refused)
    other = Bench()
    other.join("encoder", schema=SCHEMA)
    other.join("denoiser", schema=both)
    (refused,) = other.sent("denoiser", Refused)
    assert "this instance has it and encoder has not, but every encoder takes part" in refused.reason


def test_an_option_stays_while_those_who_have_it_are_started_again() -> None:
    bench = Bench()
    bench.join("encoder", schema=SCHEMA)
    bench.join("denoiser", schema=adapted("fox"))
    gone = hello("denoiser")
    bench.receive(Goodbye(instance=gone.instance, epoch=gone.epoch, server_epoch=SERVER, reason="restart"))
    bench.join("encoder", life=2, schema=SCHEMA)
    assert lora(bench) is not None
    bench.join("denoiser", life=2, schema=SCHEMA)
    assert lora(bench) is None, "it was launched without"


def test_a_denoiser_is_told_of_an_option_that_it_has_not() -> None:
    """It refuses the request then, which is better than to leave out what was asked for."""
    bench = Bench()
    bench.join("denoiser", schema=SCHEMA)
    bench.join("encoder", schema=SCHEMA)
    bench.encode(bench.submit("r", lora="fox"))
    assert bench.sent("denoiser", RunStage)[0].params == {"lora": "fox"}


def test_who_takes_no_part_is_not_told_of_an_option_either_that_nobody_has_brought_back_yet() -> None:
    """As after a restart of the server whose first to come back is a decoder."""
    assert told({"lora": "fox", "seed": 1}, V, SCHEMA, [None, SCHEMA]) == {"seed": 1}
    assert told({"lora": "fox", "seed": 1}, E, SCHEMA, [adapted("fox", roles=(E,))]) == {"lora": "fox", "seed": 1}


def test_the_parameters_that_differ_are_named() -> None:
    bench = Bench()
    bench.join("encoder", schema=SCHEMA)
    bench.join("denoiser", schema=replace(SCHEMA, params=(SEED, Param(name="fps", type="integer"))))
    (refused,) = bench.sent("denoiser", Refused)
    assert refused.reason == "model='m': the others serve 'm' with other request parameters: fps"
