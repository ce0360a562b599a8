"""How a simulated life of a cluster goes (`Plan`)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tanghulu.types import Role

#: What may happen. ``kill``: a worker's process ends; ``silent``: and its host with it; ``drain``: it ends in order.
FAULTS = (
    "kill",
    "kill",
    "silent",
    "drain",
    "tear",
    "cut",
    "cut",
    "hole",
    "slow",
    "crawl",
    "hang",
    "conductor",
    "store",
    "lease",
    "mend",
)
_ROLES = (
    (Role.BOTH,),
    (Role.BOTH, Role.BOTH),
    (Role.BOTH, Role.BOTH, Role.BOTH),
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.BOTH),
)
#: So many moves in a row that none is the last.
ENDLESS_MOVES = 1000


@dataclass(frozen=True)
class Plan:
    """How large a cluster is, what its limits are, and how much happens in it."""

    roles: tuple[Role, ...]
    num_conductors: int = 1
    num_clients: int = 4
    seconds: float = 4.0
    fault_every_s: float = 0.7
    faults: tuple[str, ...] = FAULTS
    num_blocks: int = 60
    num_seqs: int = 8
    num_waiting: int = 1024
    max_in_flight: int = 1024
    moves: int = ENDLESS_MOVES
    timeout_s: float = 0.0
    queue_timeout_s: float = 600.0
    policy: str = "ttft-min"
    hang_ups: float = 0.15
    has_store: bool = True
    moves_preempted: bool = False
    pause_s: float = 0.1  # of a client between two requests
    torn: float = 0.0  # share of blocks that come from another worker otherwise than they were sent
    reset_s: float = 2.0  # until a cut connection breaks
    checks: bool = True  # of an engine after each step

    @property
    def calm(self) -> bool:
        """Whether nothing fails: then every request is answered."""
        return not self.faults

    @property
    def patient(self) -> bool:
        """Whether no request may fail but those that kill workers."""
        return self.moves == ENDLESS_MOVES and not self.timeout_s and self.queue_timeout_s > 100

    @classmethod
    def of(cls, rng: Random) -> Plan:
        """A drawn plan: small clusters, in which more can meet."""
        patient = rng.random() < 0.7
        return cls(
            roles=rng.choice(_ROLES),
            num_conductors=rng.choice((1, 1, 1, 2)),
            num_clients=rng.randint(1, 6),
            seconds=rng.uniform(2, 5),
            fault_every_s=rng.choice((0.2, 0.5, 1.0)),
            num_blocks=rng.choice((40, 70, 200)),
            num_seqs=rng.choice((2, 4, 8)),
            num_waiting=rng.choice((1, 4, 1024)),
            max_in_flight=rng.choice((2, 1024, 1024)),
            moves=ENDLESS_MOVES if patient else rng.choice((0, 1, 3)),
            timeout_s=0.0 if patient else rng.choice((0.0, 1.0, 4.0)),
            queue_timeout_s=600.0 if patient else rng.choice((0.5, 600.0)),
            policy=rng.choice(("ttft-min", "ttft-min", "round-robin", "mooncake")),
            has_store=rng.random() < 0.7,
            moves_preempted=rng.random() < 0.3,
            torn=rng.choice((0.0, 0.0, 0.05)),
            reset_s=rng.choice((1.0, 2.0, 20.0)),
            checks=rng.random() < 0.3,
        )
