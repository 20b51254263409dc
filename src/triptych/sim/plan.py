"""What one simulation is made of: the cluster, its work, and how much goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from triptych.config import DispatchPolicy
from triptych.ids import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Times are virtual seconds; the chances are per message, per pull, per stage or per store."""

    roles: tuple[tuple[Role, ...], ...] = ((Role.ENCODER,), (Role.DENOISER,), (Role.DECODER,))
    """The role set of each instance."""
    slots: int = 2
    pool_bytes: int = 1000
    copy_bytes: int = 100
    """Size of each staged copy; pools drop the oldest when they are full."""
    policy: DispatchPolicy = "round_robin"
    max_kills: int = 2
    """Deaths of instances that a stage survives; where they die by chance, two are no proof against a request."""
    encoder_feeds_decoder: bool = False
    """The decoder also reads what the encoder made."""

    jobs: int = 6
    arrivals: float = 4.0
    """Requests arrive during the first so many seconds."""
    queue_timeout: float = 600.0
    run_timeout: float = 600.0
    impatient: float = 0.0
    """Chance that a request has timeouts of a second or two."""
    cancels: float = 0.0
    deletions: float = 0.0
    """Chance that a client deletes a request, live or not."""
    steps: int = 4
    step_seconds: float = 0.1
    checkpoint_interval: float = 0.0
    """Of denoisers; 0: they make none."""
    resumable: float = 1.0
    """Chance that a denoising stage can give a checkpoint at the time."""
    preemptions: float = 0.0
    """Chance that a client pauses and resumes a request, and that it is moved while it runs."""
    stage_seconds: float = 0.1
    """Of an encoder or decoder stage."""

    latency: float = 0.002
    jitter: float = 0.0
    """Up to so many seconds more, which lets messages of one link overtake each other."""
    drop: float = 0.0
    duplicate: float = 0.0
    pull_failure: float = 0.0
    stage_failure: float = 0.0
    hopeless: float = 0.0
    """Chance that a stage fails for good."""
    store_failure: float = 0.0
    crashes: int = 0
    freezes: int = 0
    departures: int = 0
    """Instances that are asked to stop and come back as another life."""
    drain_seconds: float = 3.0
    """How long such an instance may take to leave; 0: at once."""
    partitions: int = 0
    """Cuts between some of the instances and everybody else."""
    clock_jumps: int = 0
    """Of any one process, by up to half a minute."""
    server_restarts: int = 0
    server_downtime: float = 0.0
    """Up to so many seconds pass between two lives of the server."""
    killed_midway: float = 0.0
    """Chance that the server dies between two writes that belong together: files stored and the request's end, a
    deletion and its end."""
    unjournalled: float = 0.0
    """Chance that a lease, a finished stage, a pause or an end is missing in the journal after a restart."""
    calm_at: float = 8.0
    """When things stop going wrong, so that everything must come to rest."""

    @staticmethod
    def drawn(random: Random) -> Plan:
        """A cluster of a few instances and a mix of faults, some of them absent."""

        def sometimes(chance: float, high: float) -> float:
            return random.random() * high if random.random() < chance else 0.0

        fixed = [(role,) for role in Role for _ in range(random.choice((1, 1, 2)))]
        universal = [tuple(Role)] * random.choice((0, 0, 1, 2))
        pairs = [(Role.ENCODER, Role.DECODER)] * random.choice((0, 0, 1))
        roles = tuple(universal if universal and random.random() < 0.4 else fixed + universal + pairs)
        return Plan(
            roles=roles,
            slots=random.choice((1, 2, 2, 4)),
            pool_bytes=random.choice((150, 300, 1000)),
            policy=random.choice(("round_robin", "max_free_slots", "least_work")),
            encoder_feeds_decoder=random.random() < 0.5,
            jobs=random.randint(1, 6),
            arrivals=2.0,
            calm_at=4.0,
            impatient=sometimes(0.3, 0.4),
            cancels=sometimes(0.5, 0.5),
            deletions=sometimes(0.3, 0.3),
            jitter=sometimes(0.7, random.choice((0.01, 0.3, 1.5))),
            drop=sometimes(0.6, 0.2),
            duplicate=sometimes(0.6, 0.3),
            pull_failure=sometimes(0.4, 0.3),
            stage_failure=sometimes(0.4, 0.3),
            hopeless=sometimes(0.2, 0.1),
            store_failure=sometimes(0.3, 0.5),
            crashes=random.choice((0, 0, 1, 2, 3)),
            freezes=random.choice((0, 0, 1, 2)),
            departures=random.choice((0, 0, 0, 1, 2)),
            partitions=random.choice((0, 0, 0, 1, 2)),
            clock_jumps=random.choice((0, 0, 0, 1, 2)),
            server_restarts=random.choice((0, 0, 0, 1, 2)),
            server_downtime=random.choice((0.0, 1.0, 4.0)),
            killed_midway=sometimes(0.3, 0.2),
            unjournalled=sometimes(0.3, 0.5),
            steps=random.choice((2, 4, 12)),
            checkpoint_interval=random.choice((0.0, 0.05, 0.3)),
            resumable=random.choice((1.0, 1.0, 0.5, 0.0)),
            preemptions=sometimes(0.4, 0.5),
            drain_seconds=random.choice((0.0, 0.5, 3.0)),
        )
