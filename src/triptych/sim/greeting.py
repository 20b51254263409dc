"""What a modelled instance says that it is."""

from __future__ import annotations

from triptych.ids import Epoch, InstanceId, Role
from triptych.sim.plan import Plan
from triptych.wire.messages import PROTOCOL_VERSION, Hello
from triptych.wire.schema import RequestSchema

SCHEMA = RequestSchema(
    model="simulated", pipeline="Simulated", split="modular", task="text-to-video", output="video", params=()
)


def greeting(instance: InstanceId, epoch: Epoch, roles: tuple[Role, ...], plan: Plan) -> Hello:
    """The hello of one life, without what the machine fills in."""
    return Hello(
        instance=instance,
        epoch=epoch,
        server_epoch=None,
        protocol=PROTOCOL_VERSION,
        roles=roles,
        work_url=f"tcp://{instance}:5555",
        host="host",
        slots=plan.slots,
        pool_bytes=plan.pool_bytes,
        planes=("simulated",),
        schema=SCHEMA,
        fingerprint="equal",
        device="cpu",
    )
