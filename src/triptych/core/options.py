"""Request parameters that come of how instances were launched: who must have them, and who is told of them.

Adapters change the models of some roles, previews are made by denoisers. Instances of other roles need not be launched
with either, and join beside those that are; what a request says of it is kept from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from triptych.core.members import Member
from triptych.ids import InstanceId, Role
from triptych.wire.messages import Hello
from triptych.wire.schema import LaunchOption, Param, RequestSchema


def objection(hello: Hello, members: Iterable[Member]) -> str:
    """Why an instance cannot serve beside ``members``; empty when it can."""
    mine = {param.name: param for param in hello.schema.options}
    for member in members:
        theirs = {param.name: param for param in member.hello.schema.options}
        for name in (*mine, *(name for name in theirs if name not in mine)):
            own, other = mine.get(name), theirs.get(name)
            if own is None:
                reason = _lacking(other, hello.roles, "this instance", f"{member.id} has it")
            elif other is None:
                reason = _lacking(own, member.hello.roles, member.id, "this instance has it")
            else:
                reason = _unlike(own, other, member.id)
            if reason:
                return reason
    return ""


def _lacking(param: Param | None, roles: Collection[Role], who: str, has: str) -> str:
    """What is wrong with an instance of ``roles`` that has no ``param``."""
    option = None if param is None else param.option
    if param is None or option is None or not (needed := [role for role in option.roles if role in roles]):
        return ""
    return (
        f"request parameter {param.name!r}: {has} and {who} has not, but every {' and '.join(needed)} takes part: "
        f"launch both with the same {option.flag}"
    )


def _unlike(own: Param, other: Param, member: InstanceId) -> str:
    if _said(own) == _said(other):
        return ""
    choices = f": {', '.join(own.choices)} here, {', '.join(other.choices)} there" if own.choices else ""
    flag = "" if own.option is None else f"; launch both with the same {own.option.flag}"
    return f"request parameter {own.name!r} is not that of {member}{choices}{flag}"


def _said(param: Param) -> tuple[tuple[str, ...], LaunchOption | None]:
    return param.choices, param.option


def joined(schema: RequestSchema, members: Collection[Member]) -> RequestSchema:
    """``schema`` with the options of all members, those of encoders first because their defaults apply; and with what
    it had before, while those who take part in it are away."""
    found: dict[str, Param] = {}
    for member in sorted(members, key=lambda member: (Role.ENCODER not in member.hello.roles, member.ordinal)):
        for param in member.hello.schema.options:
            found.setdefault(param.name, param)
    served = {role for member in members for role in member.hello.roles}
    for param in schema.options:
        if param.option is not None and served.isdisjoint(param.option.roles):
            found.setdefault(param.name, param)
    return schema.with_options(found.values())


def told(
    params: dict[str, Any], role: Role, own: RequestSchema, schemas: Iterable[RequestSchema | None]
) -> dict[str, Any]:
    """What of a request's ``params`` an instance with the schema ``own`` is told, for a stage of ``role``.

    ``schemas`` tell whose an option is. Of one that is unknown now, because those who have it have not come back yet,
    denoisers are told in any case: none of them may leave it out.
    """
    unknown = params.keys() - {param.name for param in own.params}
    if not unknown:
        return params
    options = {param.name: param.option for schema in schemas if schema is not None for param in schema.options}
    left_out: set[str] = set()
    for name in unknown:
        option = options.get(name)
        if role not in ((Role.DENOISER,) if option is None else option.roles):
            left_out.add(name)
    return {name: value for name, value in params.items() if name not in left_out}
