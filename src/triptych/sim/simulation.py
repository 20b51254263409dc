"""A whole cluster in virtual time: builds it, lets things go wrong, and checks what must always hold.

After each event: the router's books add up, states move legally, no request goes on after its end, and no two instances
hold the same lease of one server life. At the end: every accepted request ended exactly once, no lease, slot, queue
entry or staged copy is left anywhere.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

from triptych.core.events import CancelRequest, JobView, MigrateRequest, PauseRequest, Received, ResumeRequest, Submit
from triptych.core.states import IllegalTransition
from triptych.ids import Epoch, InstanceId, RequestId
from triptych.sim.plan import Plan
from triptych.sim.server import SimServer
from triptych.sim.worker import SimInstance
from triptych.sim.world import World
from triptych.wire.messages import Lease

_LIMIT = 1500.0
"""Virtual seconds after which a request that has not ended never will."""

_REST = 12.0
"""Virtual seconds of calm after the last end in which everything must be freed."""


class Simulation:
    """One cluster and its fate, which follow from the seed alone."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        random = Random(seed)
        self.plan = plan or Plan.drawn(random)
        self.world = World(seed, self.plan, random)
        self.instances: dict[InstanceId, SimInstance] = {}
        self.server = SimServer(self.world, self.instances)
        for roles in self.plan.roles:
            kind = roles[0] if len(roles) == 1 else "universal"
            number = sum(name.startswith(f"{kind}-") for name in self.instances)
            name = InstanceId(f"{kind}-{number}")
            self.instances[name] = SimInstance(self.world, name, roles, self.instances, self._to_server)
        self._plan_clients()
        self._plan_faults()

    def run(self) -> dict[RequestId, JobView]:
        """Run until everything has ended and come to rest; returns the last view of each request.

        Raises `Violation` with the replay command when something that must hold does not.
        """
        while self.server.journal or self.world.now < max(self.plan.calm_at, self.plan.arrivals):
            self.step()
            if self.world.now > _LIMIT:
                raise self.world.violation(f"never ended: {self.server.router.views()}")
        self.run_for(_REST)
        self._check_rest()
        return self.server.ended

    def run_for(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        end = self.world.now + seconds
        while self.world.now < end:
            self.step()

    def step(self) -> None:
        """Let the next thing happen and check what must always hold."""
        try:
            if not self.world.step():
                raise self.world.violation("nothing will ever happen again")
        except IllegalTransition as error:
            raise self.world.violation(str(error)) from error
        self._check_leases()

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

    def _to_server(self, message: Received) -> None:
        self.world.send(message, self.server.receive)

    def _plan_clients(self) -> None:
        world, plan = self.world, self.plan
        for number in range(plan.jobs):
            name = f"job-{number}"
            when = world.random.random() * plan.arrivals
            timeout = world.random.uniform(0.3, 2.0) if world.random.random() < plan.impatient else None
            world.at(when, partial(self.submit, name, queue_timeout=timeout, run_timeout=timeout))
            if world.random.random() < plan.cancels:
                cancel = CancelRequest(request=RequestId(name))
                for _ in range(world.random.choice((1, 2))):
                    world.at(when + world.random.random() * 3.0, partial(self.server.feed, cancel))
            if world.random.random() < plan.preemptions:
                self._plan_preemption(RequestId(name), when)

    def _plan_preemption(self, request: RequestId, when: float) -> None:
        """A request is paused for a while, and moved twice, at any time of its life."""
        world = self.world
        moments = sorted(when + world.random.random() * 3.0 for _ in range(2))
        world.at(moments[0], partial(self.server.feed, PauseRequest(request=request)))
        # Until it is over: a server that has restarted meanwhile knows nothing of the pause.
        world.at(moments[1], partial(self.server.feed, ResumeRequest(request=request)))
        for _ in range(2):
            moment = when + world.random.random() * 3.0
            world.at(moment, partial(self.server.feed, MigrateRequest(request=request)))

    def _plan_faults(self) -> None:
        world, plan, random = self.world, self.plan, self.world.random
        instances = list(self.instances.values())
        for _ in range(plan.crashes):
            victim, when = random.choice(instances), random.random() * plan.calm_at
            world.at(when, victim.crash)
            world.at(when + random.choice((0.1, 1.0, 4.0)), victim.start)
        for _ in range(plan.departures):
            leaver, when = random.choice(instances), random.random() * plan.calm_at
            world.at(when, partial(leaver.leave, back_in=random.random() * 2.0))
        for _ in range(plan.freezes):
            sleeper, seconds = random.choice(instances), random.choice((0.5, 2.0, 5.0))
            world.at(random.random() * plan.calm_at, partial(sleeper.freeze, seconds))
        for _ in range(plan.server_restarts):
            world.at(random.random() * plan.calm_at, self.server.start)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _check_leases(self) -> None:
        held: Counter[tuple[Epoch | None, Lease]] = Counter()
        for instance in self.instances.values():
            if instance.alive:
                held.update((instance.server_of.get(lease), lease) for lease in instance.machine.leases)
        if held and max(held.values()) > 1:
            twice = [lease for lease, times in held.items() if times > 1]
            raise self.world.violation(f"held by two instances: {twice}")

    def _check_rest(self) -> None:
        router = self.server.router
        left: list[str] = [f"live request {view}" for view in router.views()]
        left += [f"{role} queue of {depth}" for role, depth in router.queue_depths().items() if depth]
        for view in router.instances():
            if view.free_slots != view.slots or view.copies:
                left.append(f"router books of {view}")
        if len(router.instances()) != len(self.instances):
            left.append(f"only {[view.instance for view in router.instances()]} have come back")
        for instance in self.instances.values():
            left += [f"{instance.id} holds {lease}" for lease in instance.machine.leases]
            left += [f"{instance.id} keeps {copy}" for copy in instance.pool]
        if left:
            raise self.world.violation("not at rest: " + "; ".join(left))
        missing = {f"job-{number}" for number in range(self.plan.jobs)} - self.server.ended.keys()
        if missing:
            raise self.world.violation(f"never ended: {sorted(missing)}")
