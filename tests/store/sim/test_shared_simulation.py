"""Seeded lives of a store whose ranges of keys several masters share: new ones each day, some of always, mutations."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import Rebuild
from tanghulu.store.master.election.range_election import RangeElection, RangeState
from tanghulu.store.node.space.space import Space
from tanghulu.store.node.state import outbox
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.node.state.outbox import MasterOutbox
from tanghulu.store.protocol.announcements import NodeAnnouncement, Removal
from tanghulu.store.protocol.key_slots import RANGE_SLOTS
from tanghulu.store.protocol.terms import LeaseProofs
from tanghulu.store.protocol.types import Pin
from tests.store.sim.plan import Plan
from tests.store.sim.shared_world import SharedWorld

#: Lives of every run; seeds that fail join them.
SEEDS = (10, 53, 5003, 10133, 10230, 40241)
_MUTANT_LIVES = 100
#: Masters come and go, and stand still, while nodes, clients and the links between them stay.
_MOVING = Plan(2, 6, 40, 8.0, 8 << 20, 0.5, faults=(), sizes=(10, 3000), removals=0.1, num_masters=3, master_faults=1.0)
#: Their machines stand still with their clocks, so that they take themselves for owners when they wake.
_FROZEN = Plan(
    2, 12, 40, 10.0, 8 << 20, 0.5, (), (10, 3000), num_masters=3, master_faults=1.0, master_kinds=("freeze",)
)
#: Beside clients that rest meanwhile, and go on with the map and the proofs that they had.
_RESTING = replace(_FROZEN, idle=0.1)
#: Nodes come back with their SSD files while ranges move.
_DISKS = Plan(
    3, 4, 40, 8.0, 256 << 10, 0.5, ("crash", "crash", "tear"), (3000, 20_000), removals=0.2, num_masters=2,
    master_faults=0.5, master_kinds=("fall", "leave"), disk_bytes=4 << 20, cuts_frames=True, pins=0.2,
)  # fmt: skip
#: Few keys that are removed twice at once, and put again, pinned or not, by clients that rest in between.
_DOUBLED = Plan(
    2, 6, 4, 8.0, 4 << 20, 0.5, ("tear", "slow"), (10, 3000), removals=4.0, num_masters=2,
    master_faults=0.5, master_kinds=("fall", "leave", "etcd cut"), doubled=0.5, idle=0.02, pins=0.3, cuts_frames=True,
)  # fmt: skip
#: Few keys that are removed twice at once, and put again at once, while nodes' messages wait for masters.
_REMOVED_TWICE = Plan(
    2, 6, 4, 20.0, 8 << 20, 0.3, (), (10, 3000), removals=4.0, num_masters=2,
    master_faults=1.0, master_kinds=("stop",), near=1.0, doubled=0.5,
)  # fmt: skip
#: Few keys that are removed and put again elsewhere, while links tear and masters stand still: what was told, and was
#: not answered, is told again behind what has happened meanwhile.
_REMOVED_LATE = Plan(
    2, 6, 4, 8.0, 4 << 20, 0.15, ("tear",), (10, 3000), removals=4.0, num_masters=2,
    master_faults=0.3, master_kinds=("stop",), doubled=0.5,
)  # fmt: skip


def _live(first: int, *arguments: str) -> str:
    """Live from seed ``first`` on, in a process whose sets of strings have one order; returns what it says of that."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.store.sim", "--shared", "--first", str(first), *arguments]
    ended = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_life(seed: int) -> None:
    assert "'ranges owned': " in _live(seed, "--seeds", "1")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "kind"), [(_DISKS, "crash"), (_DOUBLED, "doubled")], ids=["disks", "doubled"])
def test_lives_of_a_kind(plan: Plan, kind: str) -> None:
    assert all(SharedWorld(seed, plan).run()[kind] > 0 for seed in range(2))


@pytest.mark.slow
@pytest.mark.by_hand
def test_new_seeds() -> None:
    """As many as fit into a minute, other ones every day; the seed that fails is named, and can be repeated."""
    first = datetime.datetime.now(datetime.UTC).toordinal() * 100_000
    assert int(_live(first, "--seeds", "100000", "--seconds", "60").split()[0]) > 0


def _answers_on_after_a_hand_over(original: Any) -> Any:
    def owned(self: RangeElection, now_s: float) -> frozenset[int]:
        given_up = self._in(RangeState.HANDING_OVER) + self._in(RangeState.FOLLOWING)
        return original(self, now_s) | {number for number in given_up if self._given_up[number] and self._lease}

    return owned


def _takes_a_moved_range_for_known(original: Any) -> Any:
    return lambda self, num_slots: original(self, RANGE_SLOTS)


def _reports_to_the_former_owner_alone(original: Any) -> Any:
    def taken(pending: dict[Any, Any], numbers: Any, key_of: Any) -> dict[Any, Any]:
        original(pending, numbers, key_of)
        return {}  # the new owner gets nothing of it

    return taken


def _believes_without_proof(original: Any) -> Any:
    return lambda self, term, now_s: True


def _keeps_what_is_under_way_to_the_former_owner(original: Any) -> Any:
    def move(self: MasterOutbox, numbers: frozenset[int], heir: MasterOutbox) -> None:
        message, self._in_flight = self._in_flight, None
        original(self, numbers, heir)
        self._in_flight = message

    return move


def _reports_memory_alone(original: Any) -> Any:
    def begin_reports(self: NodeChunks) -> None:
        self._reports.begin_reports([*self.table], self._is_reported)

    return begin_reports


def _evicts_hard_pins(original: Any) -> Any:
    def settle(self: Space[Any], chunk: Any) -> None:
        original(self, chunk)
        if chunk.pin is Pin.HARD:
            self._noted.append(chunk)

    return settle


def _drops_whatever_has_the_key_of_a_removed_chunk(original: Any) -> Any:
    def let_go(self: NodeChunks, key: Any, version: int, *, removed: bool = False) -> None:
        current = self.current_anywhere(key)
        original(self, key, version if current is None else current.version, removed=removed)

    return let_go


def _ignores_the_versions_of_removals(original: Any) -> Any:
    def of_any_version(removals: Sequence[Removal]) -> list[Removal]:
        return [removal._replace(version=None) for removal in removals]

    def take_out(self: RangeDirectories, said: NodeAnnouncement, changes: dict[str, bool]) -> None:
        said = structs.replace(said, removed=of_any_version(said.removed), deleted=of_any_version(said.deleted))
        original(self, said, changes)

    return take_out


def _keeps_a_proof_for_ever(original: Any) -> Any:
    return lambda self, term, now_s: original(self, term, 0.0)


MUTATIONS = [
    (NodeChunks, "begin_reports", _reports_memory_alone, _DISKS),
    (Space, "settle", _evicts_hard_pins, _DOUBLED),
    (NodeChunks, "let_go", _drops_whatever_has_the_key_of_a_removed_chunk, _REMOVED_TWICE),
    (RangeDirectories, "_take_out", _ignores_the_versions_of_removals, _REMOVED_LATE),
    (LeaseProofs, "is_proven", _keeps_a_proof_for_ever, _RESTING),
    (RangeElection, "owned", _answers_on_after_a_hand_over, _MOVING),
    (Rebuild, "update", _takes_a_moved_range_for_known, _MOVING),
    (outbox, "_taken", _reports_to_the_former_owner_alone, _MOVING),
    (LeaseProofs, "is_proven", _believes_without_proof, _FROZEN),
    (MasterOutbox, "move", _keeps_what_is_under_way_to_the_former_owner, _MOVING),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "mutate", "plan"), MUTATIONS, ids=[m[2].__name__.strip("_") for m in MUTATIONS]
)
def test_mutations_are_caught(owner: Any, name: str, mutate: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name)))
    for seed in range(_MUTANT_LIVES):
        try:
            SharedWorld(seed, plan).run()
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{_MUTANT_LIVES} lives passed with {owner.__name__}.{name} broken")
