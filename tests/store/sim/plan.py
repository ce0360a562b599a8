"""How a simulated life goes (`Plan`), and what is remembered of each key (`KeyLife`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

FAULTS = ("crash", "cut", "cut", "isolate", "slow", "tear", "tear", "master", "kill", "kill", "mend")
#: Disturbances after which chunks move from node to node, and nothing is lost.
MOVES = ("join", "drain")
MASTER_FAULTS = ("stop", "freeze", "hold", "etcd away", "etcd cut", "fall", "leave", "master cut")
SIZES = (10, 100, 3000, 70_000, 120_000)


@dataclass(frozen=True)
class Plan:
    """How large a world is and how much happens in it."""

    num_nodes: int
    num_clients: int
    num_keys: int
    seconds: float
    node_bytes: int
    fault_every_s: float
    faults: tuple[str, ...] = FAULTS
    sizes: tuple[int, ...] = SIZES
    removals: float = 0.6  # beside 4 puts and 6 gets
    waits: float = 0.0  # for keys, each followed by a get
    near: float = 0.4  # how many clients live on a node's host, where they map its memory
    batch: int = 0  # put so many values a call; 0: one, of one to three replicas
    num_masters: int = 0  # that share the ranges of keys, see ``shared_world``; 0: one owns everything
    master_faults: float = 0.0  # how many of the faults are of those masters, or of their etcd
    master_kinds: tuple[str, ...] = MASTER_FAULTS
    disk_bytes: int = 0  # of each node's SSD tier, which a node that starts again finds; 0: there is none
    idle: float = 0.0  # how often a client rests for seconds, and knows old things when it goes on
    doubled: float = 0.0  # how many of the removals are made twice at the same time
    pins: float = 0.0  # how many of the puts are pinned, softly or hard
    cuts_frames: bool = False  # a torn connection brings a part of what was on its way
    moves: bool = False  # nodes make the copies that masters order, join and drain; many keys are removed at once

    def value(self, rng: Random, key: str) -> bytes:
        """One that names its key."""
        size = rng.choice(self.sizes)
        head = f"{key}|{rng.random()}|".encode()
        return head + rng.randbytes(8) * (size // 8)

    @property
    def calm(self) -> bool:
        """Whether nothing fails, nothing is removed, and everything fits: then what was put is there, and stays."""
        return not self.faults and not self.removals

    @property
    def orderly(self) -> bool:
        """Whether nothing fails: chunks may move, and make room for others."""
        return not set(self.faults) - set(MOVES) and not self.master_faults

    @classmethod
    def of(cls, rng: Random, num_nodes: int = 0) -> Plan:
        """A drawn plan: mostly small worlds, in which more can meet."""
        nodes = num_nodes or rng.choice((1, 2, 3, 3, 5, 8, 13))
        small = rng.random() < 0.4
        return cls(
            num_nodes=nodes,
            num_clients=rng.randint(1, 4) if nodes < 50 else 12,
            num_keys=rng.choice((4, 20, 80)) if nodes < 50 else 400,
            seconds=rng.uniform(6, 20),
            node_bytes=(256 << 10) if small else (4 << 20),
            fault_every_s=rng.choice((0.3, 1.0, 3.0)),
            sizes=SIZES if small or rng.random() < 0.7 else (100, 1_200_000),
        )

    @classmethod
    def moving(cls, rng: Random, *, shared: bool) -> Plan:
        """A drawn plan of a store whose chunks move while they are removed; in some of these lives nothing fails."""
        plan = cls.shared(rng) if shared else cls.of(rng)
        quiet = rng.random() < 0.5
        faults = MOVES if quiet else tuple(rng.choice((*MOVES, *plan.faults)) for _ in range(6))
        return replace(
            plan,
            num_nodes=rng.choice((1, 2, 2, 3)),
            num_keys=rng.choice((40, 150, 400)),
            node_bytes=rng.choice((512 << 10, 2 << 20)),
            fault_every_s=rng.choice((1.0, 3.0)),
            faults=faults,
            master_faults=0.0 if quiet else plan.master_faults,
            sizes=rng.choice(((3000, 10_000), (10, 3000, 20_000), (20_000, 70_000))),
            removals=rng.choice((1.0, 3.0)),
            batch=rng.choice((0, 5)),
            moves=True,
        )

    @classmethod
    def shared(cls, rng: Random) -> Plan:
        """A drawn plan of a store with several masters."""
        faults = tuple(each for each in FAULTS if each != "master")
        plan = cls.of(rng)
        num_masters, master_faults = rng.choice((1, 2, 2, 3, 3, 4)), rng.choice((0.3, 0.6, 1.0))
        return replace(
            plan,
            num_nodes=min(plan.num_nodes, 5),
            num_masters=num_masters,
            master_faults=master_faults,
            faults=_some(faults, rng),
            master_kinds=_some(MASTER_FAULTS, rng),
            disk_bytes=rng.choice((0, 0, 4 << 20)),
            idle=rng.choice((0.0, 0.03)),
            doubled=rng.choice((0.0, 0.3)),
            pins=rng.choice((0.0, 0.2)),
            cuts_frames=rng.random() < 0.5,
        )


def _some(kinds: tuple[str, ...], rng: Random) -> tuple[str, ...]:
    """All of the kinds, or some: what seldom meets among all of them does where there are few."""
    return kinds if rng.random() < 0.5 else tuple(rng.choices(kinds, k=rng.randint(1, 4)))


@dataclass
class KeyLife:
    """What became of a key. ``acked``: version-free record of puts that returned: (time, nodes that may hold it)."""

    values: set[bytes] = field(default_factory=set)
    acked_s: float | None = None
    removes_begun: int = 0
    removes_open: int = 0
    removes_land_s: float = 0.0  # until then one that failed may still be on its way
    removed_s: float | None = None  # of the last remove that returned
    gone_s: float | None = None  # of one beside which, and after which, nobody put it
    removed_by: list[Any] = field(default_factory=list)  # the simulated nodes that made the last remove that returned
    puts_begun: int = 0
    put_since_remove: bool = False  # or at the same time
    puts_open: int = 0
    read: bytes | None = None  # first

    def put(self, value: bytes, now_s: Callable[[], float]) -> Callable[[], None]:
        """A put begins; what it returns is called when it has returned.

        One that fails may still be on its way, and land after a remove.
        """
        self.values.add(value)
        self.put_since_remove, self.gone_s = True, None
        self.puts_begun += 1
        begun, alone = self.removes_begun, not self.removes_open and self.removes_land_s < now_s()
        self.puts_open += 1

        def ended() -> None:
            self.puts_open -= 1
            if alone and self.removes_begun == begun:
                self.acked_s = now_s()

        return ended

    @contextlib.contextmanager
    def removing(self, now_s: Callable[[], float], lingers_s: float) -> Iterator[Callable[[bool], None]]:
        """A remove is under way; call what it gives when it has returned, with whether the key is gone then.

        Without that it may still land for ``lingers_s``.
        """
        self.removes_begun += 1
        self.removes_open += 1
        self.acked_s, self.put_since_remove = None, self.puts_open > 0
        lands_s, begun, alone = now_s() + lingers_s, self.puts_begun, not self.puts_open

        def ended(is_gone: bool) -> None:
            nonlocal lands_s
            lands_s = now_s()
            if is_gone and alone and self.puts_begun == begun:
                self.gone_s = lands_s

        try:
            yield ended
        finally:
            self.removes_open -= 1
            self.removes_land_s = max(self.removes_land_s, lands_s)
