"""A whole cluster in virtual time: builds it, lets things go wrong, and checks what must always hold.

After each event: the router's books add up, states move legally, no request goes on after its end, no lease is booked
beyond a slot, and no two instances hold the same lease of one server life. At the end: every accepted request ended
exactly once, no lease, slot, queue entry or staged copy is left anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from triptych.core.events import (
    CancelRequest,
    JobView,
    MigrateRequest,
    PauseRequest,
    ResumeRequest,
    Submit,
)
from triptych.ids import InstanceId, RequestId
from triptych.sim.holders import Holders
from triptych.sim.instance import SimInstance
from triptych.sim.network import Message, Network
from triptych.sim.plan import Plan
from triptych.sim.server import SimServer
from triptych.sim.world import Violation, World

_LIMIT = 1500.0
"""Virtual seconds after which a request that has not ended never will."""

_REST = 12.0
"""Virtual seconds of calm after the last end within which everything must be freed."""

_QUIET = 1.5
"""Virtual seconds for which everything must then stay free."""


class Simulation:
    """One cluster and its fate, which follow from the seed alone."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        random = Random(seed)
        self.plan = plan or Plan.drawn(random)
        self.world = World(seed, self.plan, random)
        self.instances: dict[InstanceId, SimInstance] = {}
        self.network = Network(self.world)
        self.server = SimServer(self.world, self.network, self.instances)
        holders = Holders(self.world)
        for roles in self.plan.roles:
            kind = roles[0] if len(roles) == 1 else "universal"
            number = sum(name.startswith(f"{kind}-") for name in self.instances)
            name = InstanceId(f"{kind}-{number}")
            self.instances[name] = SimInstance(
                self.world, self.network, holders, name, roles, self.instances, self._to_server
            )
        self._plan_clients()
        self._plan_faults()

    def run(self) -> dict[RequestId, JobView]:
        """Run until everything has ended and come to rest; returns the last view of each request.

        Raises `Violation` with the replay command when something that must hold does not.
        """
        while self.server.live or self.world.now < max(self.plan.calm_at, self.plan.arrivals):
            self.step()
            if self.world.now > _LIMIT:
                raise self.world.violation(f"never ended: {self.server.router.views()}")
        end = self.world.now + _REST
        while self._left() and self.world.now < end:
            self.run_for(0.5)
        self.run_for(_QUIET)
        if left := self._left():
            raise self.world.violation("not at rest: " + "; ".join(left))
        return self.server.ended

    def run_for(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        end = self.world.now + seconds
        while self.world.now < end:
            self.step()

    def step(self) -> None:
        """Let the next thing happen; whatever must hold is checked where it could be broken.

        Raises `Violation`, also for any other error of a machine: none of them may ever raise.
        """
        try:
            happened = self.world.step()
        except Violation:
            raise
        except Exception as error:
            raise self.world.violation(f"{type(error).__name__}: {error}") from error
        if not happened:
            raise self.world.violation("nothing will ever happen again")

    # -- what happens ------------------------------------------------------------------------------------------------

    def submit(self, name: str, *, queue_timeout: float | None = None, run_timeout: float | None = None) -> RequestId:
        """Have a request accepted now."""
        request = RequestId(name)
        self.server.submit(
            Submit(
                request=request,
                params={},
                queue_timeout=queue_timeout or self.plan.queue_timeout,
                run_timeout=run_timeout or self.plan.run_timeout,
            )
        )
        return request

    def _to_server(self, message: Message) -> None:
        self.server.receive(message)

    def _plan_clients(self) -> None:
        world, plan = self.world, self.plan
        for number in range(plan.jobs):
            name = f"job-{number}"
            when = world.random.random() * plan.arrivals
            timeout = world.random.uniform(0.3, 2.0) if world.random.random() < plan.impatient else None
            submit = partial(self.submit, name, queue_timeout=timeout, run_timeout=timeout)
            world.at(when, partial(self.server.ask, submit))
            if world.random.random() < plan.cancels:
                cancel = CancelRequest(request=RequestId(name))
                for _ in range(world.random.choice((1, 2))):
                    self._ask(when + world.random.random() * 3.0, partial(self.server.feed, cancel))
            if world.random.random() < plan.deletions:
                self._ask(when + world.random.random() * 3.0, partial(self.server.delete, RequestId(name)))
            if world.random.random() < plan.preemptions:
                self._plan_preemption(RequestId(name), when)

    def _plan_preemption(self, request: RequestId, when: float) -> None:
        """A request is paused for a while, and moved twice, at any time of its life."""
        world = self.world
        moments = sorted(when + world.random.random() * 3.0 for _ in range(2))
        self._ask(moments[0], partial(self.server.feed, PauseRequest(request=request)))
        self._ask(moments[1], partial(self.server.feed, ResumeRequest(request=request)))
        # A client that sees its request paused again says it once more: the server may have been killed with the word.
        self._ask(max(moments[1], self.plan.calm_at) + 5.0, partial(self.server.feed, ResumeRequest(request=request)))
        for _ in range(2):
            moment = when + world.random.random() * 3.0
            self._ask(moment, partial(self.server.feed, MigrateRequest(request=request)))

    def _ask(self, when: float, wish: Callable[[], object]) -> None:
        self.world.at(when, partial(self.server.ask, wish))

    def _plan_faults(self) -> None:
        world, plan, random = self.world, self.plan, self.world.random
        instances = list(self.instances.values())
        for _ in range(plan.crashes):
            victim, when = random.choice(instances), random.random() * plan.calm_at
            world.at(when, victim.crash if random.random() < 0.7 else victim.break_down)
            if random.random() < 0.5:
                world.at(when + 0.05, partial(self.server.refused, victim.id))
            world.at(when + random.choice((0.1, 1.0, 4.0)), victim.start)
        for _ in range(plan.departures):
            leaver, when = random.choice(instances), random.random() * plan.calm_at
            world.at(when, partial(leaver.leave, back_in=random.random() * 2.0))
        for _ in range(plan.freezes):
            sleeper, seconds = random.choice(instances), random.choice((0.5, 2.0, 5.0))
            world.at(random.random() * plan.calm_at, partial(sleeper.freeze, seconds))
        for _ in range(plan.partitions):
            side = random.sample(instances, random.randint(1, len(instances)))
            cut = partial(self.network.cut, [i.id for i in side], random.choice((0.5, 2.0, 5.0)))
            when = random.random() * plan.calm_at
            world.at(when, partial(cut, holds=random.random() < 0.5))
            if random.random() < 0.3:  # somebody on the way refuses in their name
                for instance in side:
                    world.at(when + 0.05, partial(self.server.refused, instance.id))
        for _ in range(plan.clock_jumps):
            jump = random.choice([self.server.jump, *(instance.jump for instance in instances)])
            world.at(random.random() * plan.calm_at, partial(jump, random.choice((0.5, 3.0, 30.0))))
        for _ in range(plan.server_restarts):
            back_in = random.random() * plan.server_downtime
            world.at(random.random() * plan.calm_at, partial(self.server.crash, back_in=back_in))

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _left(self) -> list[str]:
        """What has not been freed or ended."""
        router = self.server.router
        left: list[str] = [f"live request {view}" for view in router.views()]
        left += [f"{role} queue of {depth}" for role, depth in router.queue_depths().items() if depth]
        for view in router.instances():
            if view.free_slots != view.slots or view.copies:
                left.append(f"router books of {view}")
        known = {view.epoch for view in router.instances()}
        left += [f"{i.id} is not known as {i.epoch}" for i in self.instances.values() if i.epoch not in known]
        if not self.server.alive:
            left.append("no server")
        if not self.network.whole:
            left.append("a part of the network is cut off, or something is late")
        for instance in self.instances.values():
            if not instance.awake:
                left.append(f"{instance.id} is not awake")
            if instance.leaving:
                left.append(f"{instance.id} is leaving")
            left += [f"{instance.id} holds {lease}" for lease in instance.machine.leases]
            left += [f"{instance.id} keeps {copy}" for copy in instance.pool]
        missing = {f"job-{number}" for number in range(self.plan.jobs)} - self.server.ended.keys()
        return left + [f"never ended: {name}" for name in sorted(missing)]
