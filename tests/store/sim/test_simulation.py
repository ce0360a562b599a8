"""Seeded lives of a whole store in virtual time (``world``): new ones each day, all that ever failed, mutations."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tanghulu.store.client.logic import carriers, directory_client, get
from tanghulu.store.client.logic.commit import CommitCall
from tanghulu.store.client.logic.effects import Sleep
from tanghulu.store.master.directory.directory import Directory
from tanghulu.store.master.directory.pending_commits import PendingCommits
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import Rebuild
from tanghulu.store.node.rpc import service
from tanghulu.store.node.space.allocator import OffsetAllocator
from tanghulu.store.node.state.node_chunks import NodeChunks
from tanghulu.store.node.state.outbox import MasterOutbox
from tanghulu.store.node.state.slot_report import SlotReport
from tanghulu.store.node.state.write_buffers import WriteBuffers
from tanghulu.store.node.writes.incoming import IncomingValues
from tanghulu.store.protocol.key_slots import NUM_RANGES, RANGE_SLOTS
from tanghulu.store.protocol.types import CommitResult
from tests.store.sim.plan import Plan
from tests.store.sim.world import World

#: Seeds that once failed.
PAST_FAILURES = (6, 43, 62, 400_457, 1_200_475, 1_300_173)
#: Mutations are looked for in so many lives at most: where values crowd
#: each other out, where holders come and go, where they are cut off,
#: where masters follow one another.
_MUTANT_LIVES = 60
_CROWDED = Plan(2, 4, 8, 8.0, 4 << 20, 1.0, faults=("slow", "slow", "tear", "mend"), sizes=(100, 1_200_000))
_MIXED = Plan(2, 4, 40, 8.0, 2 << 20, 1.0, faults=("slow", "tear", "mend"), sizes=(3000, 70_000, 400_000, 1_000_000))
_STORMY = Plan(3, 4, 6, 8.0, 4 << 20, 0.5)
_REBORN = Plan(5, 4, 40, 14.0, 4 << 20, 1.0, faults=("master",), sizes=(10, 3000), removals=0.1)
#: The same with so many clients that puts of one key meet at a master that rebuilds, though most wait for it.
_CONTESTED = Plan(5, 12, 12, 10.0, 4 << 20, 1.0, faults=("master",), sizes=(10, 3000), removals=1.0)
_LONELY = Plan(3, 4, 150, 14.0, 4 << 20, 1.5, faults=("isolate",), removals=2.0, sizes=(10, 3000))
_CALM = Plan(2, 4, 300, 8.0, 8 << 20, 1.0, faults=(), sizes=(10, 3000, 20_000), removals=0.0, near=0.75)
_STREAMING = Plan(2, 4, 60, 8.0, 8 << 20, 0.2, faults=("kill", "tear"), sizes=(70_000, 300_000), removals=0.0, near=0.0)
_CALM_MANY = Plan(2, 4, 600, 8.0, 8 << 20, 1.0, faults=(), sizes=(10, 3000), removals=0.0, near=1.0, batch=8)
_TIDY = Plan(2, 4, 100, 8.0, 8 << 20, 1.0, faults=(), sizes=(10, 3000), removals=3.0, near=1.0)
_WAITING = Plan(2, 6, 30, 8.0, 64 << 20, 1.0, faults=(), sizes=(3000, 70_000, 1_200_000), removals=0.0, waits=4.0)
_MURDEROUS = Plan(1, 4, 300, 8.0, 8 << 20, 0.1, faults=("kill",), sizes=(10, 3000), removals=0.0, near=1.0)

#: Messages are lost on their way, or a part of one arrives.
_TORN = Plan(
    2, 6, 200, 8.0, 8 << 20, 0.1, faults=("tear", "tear", "slow"), sizes=(10, 3000), removals=3.0, cuts_frames=True
)

#: Nodes join and are filled, or drain, while keys are removed, one and many.
_FILLING = Plan(
    1, 6, 400, 8.0, 4 << 20, 0.4, ("join", "drain", "drain"), (3000, 10_000), removals=1.0, batch=8, moves=True
)

_KILLS = ("kill", "kill", "slow")
_DYING = Plan(2, 12, 5000, 8.0, 32 << 20, 0.02, faults=_KILLS, sizes=(300_000, 1_200_000), removals=0.0, near=0.5)


@pytest.mark.parametrize("seed", PAST_FAILURES)
def test_a_life_that_failed_once(seed: int) -> None:
    World(seed).run()


def test_a_moving_life_that_failed_once() -> None:
    """A put returned that its key exists before the master knew it, and a remove after it found nothing."""
    World(700585, Plan.moving(Random("700585 moving"), shared=False)).run()


def test_a_seed_gives_one_life() -> None:
    assert World(3).run() == World(3).run()


@pytest.mark.slow
@pytest.mark.parametrize("plan", [_CALM, _MURDEROUS, _CALM_MANY], ids=["calm", "murderous", "many"])
def test_puts_at_buffers(plan: Plan) -> None:
    for seed in range(4):
        assert World(seed, plan).run()["put in buffers"] > 20


@pytest.mark.slow
def test_values_of_mixed_sizes_make_others_move() -> None:
    for seed in range(4):
        world = World(seed, _MIXED)
        world.run()
        assert sum(node.state.chunks.space.num_moved for node in world.nodes.values()) > 0


@pytest.mark.slow
def test_large_values_in_messages() -> None:
    for seed in range(4):
        assert World(seed, _STREAMING).run()["bytes inline"] > 1_000_000


@pytest.mark.slow
def test_what_dying_clients_have_committed_is_retracted() -> None:
    assert sum(World(seed, _DYING).run()["retracted"] for seed in range(6)) > 0


@pytest.mark.slow
def test_who_waits_for_a_key_gets_it() -> None:
    for seed in range(4):
        assert World(seed, _WAITING).run()["told"] > 20


@pytest.mark.slow
def test_what_was_put_can_be_removed() -> None:
    for seed in range(4):
        assert World(seed, _TIDY).run()["remove"] > 50


def test_what_is_removed_while_it_moves_is_gone() -> None:
    counts = World(7, _FILLING).run()
    assert counts["copied"] > 100
    assert counts["remove_many"]


def test_a_removal_wins_against_moves_however_slow_its_client_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_client, "locate", _slow_to_remove(directory_client.locate))
    for seed in (6, 8, 9):  # in which the mutation below is caught
        World(seed, _FILLING).run()


@pytest.mark.slow
def test_a_hundred_nodes() -> None:
    counts = World(4, Plan(100, 12, 400, seconds=6.0, node_bytes=1 << 20, fault_every_s=0.4)).run()
    assert counts["put"] > 100


@pytest.mark.slow
def test_many_seeds() -> None:
    """As many as fit into a minute, the same every time; new ones run by hand (``__main__``)."""
    root = Path(__file__).parents[3]
    for which, seconds in (("--first=1000000", "45"), ("--moves", "15")):
        command = [sys.executable, "-m", "tests.store.sim", which, "--seeds", "100", "--seconds", seconds]
        ended = subprocess.run(
            command, cwd=root, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert int(ended.stdout.splitlines()[-1].split()[0]) > 0


def _forgets_to_announce(original: Callable[..., Any]) -> Callable[..., Any]:
    def requeue(self: MasterOutbox) -> None:
        self._in_flight = None  # a message that failed is thought to have arrived

    return requeue


def _forgets_removals_of_a_torn_message(original: Callable[..., Any]) -> Callable[..., Any]:
    def requeue(self: MasterOutbox) -> None:
        assert self._in_flight is not None
        self._in_flight = dataclasses.replace(self._in_flight, removed=[], deleted=[])
        original(self)

    return requeue


def _keeps_the_range_of_a_torn_put(original: Callable[..., Any]) -> Callable[..., Any]:
    def gone(self: IncomingValues, peer: Any) -> None:
        chunk = self._by_peer.pop(peer)
        self._num_bytes -= 0 if chunk is None else chunk.size_bytes

    return gone


def _frees_what_is_leased(original: Callable[..., Any]) -> Callable[..., Any]:
    def drop(self: NodeChunks, chunk: Any, *, evicted: bool = False) -> None:
        leases, chunk.num_leases = chunk.num_leases, 0
        original(self, chunk, evicted=evicted)
        chunk.num_leases = leases

    return drop


def _hands_out_too_much(original: Callable[..., Any]) -> Callable[..., Any]:
    def free(self: OffsetAllocator, offset: int, size: int) -> None:
        original(self, offset, size - 64 if size > 4096 else size)

    return free


def _lets_removed_chunks_return(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, key, version: None


def _slow_to_remove(original: Any, *, removing_said: bool = True) -> Any:
    """A client that takes its time between locating a key and removing it, while the key's chunk moves."""

    def locate(*arguments: Any, removing: bool = False, **more: Any) -> Any:
        found = yield from original(*arguments, removing=removing and removing_said, **more)
        if removing:
            yield Sleep(0.3)
        return found

    return locate


def _removes_where_the_key_was_seen(original: Any) -> Any:
    return _slow_to_remove(original, removing_said=False)  # a copy under way becomes a holder all the same


def _is_never_incomplete(original: Any) -> Any:
    return lambda self, key: True  # a new master believes that it knows all


def _takes_time_for_knowledge(original: Any) -> Any:
    def update(self: Rebuild, num_slots: int) -> None:
        original(self, RANGE_SLOTS)  # whatever has been reported

    return update


def _keeps_what_was_known_once(original: Any) -> Any:
    return lambda self, num_slots: original(self, max(self.num_known_slots, num_slots))


def _decides_before_it_knows(original: Any) -> Any:
    def put_in(self: Directory, inventory: Any, node_id: str, entry: Any, changes: Any) -> Any:
        return original(self, inventory, node_id, entry._replace(unconfirmed=False), changes)

    return put_in


def _leaves_undecided_puts_parked(original: Any) -> Any:
    def granted(self: MasterOutbox, num_keys: int, known: bytes) -> None:
        original(self, num_keys, bytes(NUM_RANGES))

    return granted


def _passes_over_a_chunk(original: Any) -> Any:
    def take(self: SlotReport, num_keys: int) -> Any:
        piece = original(self, num_keys)
        return dataclasses.replace(piece, chunks=piece.chunks[1:])

    return take


def _denies_what_it_does_not_know(original: Any) -> Any:
    return lambda self, keys, held: False


def _answers_without_looking_at_buffers(original: Any) -> Any:
    return lambda state, handler: handler


def _publishes_what_was_refused(original: Any) -> Any:
    return lambda self, answer: [CommitResult.ACCEPTED] * len(original(self, answer))


def _accepts_and_forgets(original: Any) -> Any:
    return lambda self, said, inventory, now_s: CommitResult.ACCEPTED


def _publishes_without_committing(original: Any) -> Any:
    def commit(context: Any, deadline: Any, node: Any, generation: Any, items: Any) -> Any:
        return [CommitResult.ACCEPTED] * len(items)
        yield

    return commit


def _frees_what_is_still_coming(original: Any) -> Any:
    def begin(self: IncomingValues, *arguments: Any) -> Any:
        chunk = original(self, *arguments)
        if chunk is not None:  # as if time alone freed a range
            self._state.chunks.space.allocator.free(chunk.offset, chunk.size_bytes)
        return chunk

    return begin


def _keeps_pending_commits_for_ever(original: Any) -> Any:
    return lambda self, node_id: []


def _forgets_the_rest_of_a_buffer(original: Any) -> Any:
    def free(self: WriteBuffers, buffer: Any) -> None:
        buffer.taken[-1:] = []  # what became a chunk last is freed with the rest
        original(self, buffer)

    return free


def _does_not_ask_again(original: Any) -> Any:
    return -1.0


MUTATIONS = [
    (MasterOutbox, "requeue", _forgets_to_announce, _STORMY),
    (MasterOutbox, "requeue", _forgets_removals_of_a_torn_message, _TORN),
    (IncomingValues, "_gone", _keeps_the_range_of_a_torn_put, _STREAMING),
    (NodeChunks, "_drop", _frees_what_is_leased, _CROWDED),
    (OffsetAllocator, "free", _hands_out_too_much, _CROWDED),
    (Directory, "entomb", _lets_removed_chunks_return, _LONELY),
    (directory_client, "locate", _removes_where_the_key_was_seen, _FILLING),
    (Rebuild, "knows", _is_never_incomplete, _REBORN),
    (Rebuild, "update", _takes_time_for_knowledge, _REBORN),
    (Rebuild, "update", _keeps_what_was_known_once, _LONELY),
    (Directory, "put_in", _decides_before_it_knows, _CONTESTED),
    (MasterOutbox, "granted", _leaves_undecided_puts_parked, _REBORN),
    (SlotReport, "take", _passes_over_a_chunk, _REBORN),
    (RangeDirectories, "is_incomplete", _denies_what_it_does_not_know, _REBORN),
    (service, "after_drain", _answers_without_looking_at_buffers, _TIDY),
    (CommitCall, "results", _publishes_what_was_refused, _CALM),
    (carriers, "commit_by_client", _publishes_without_committing, _CALM),
    (IncomingValues, "begin", _frees_what_is_still_coming, _STREAMING),
    (Directory, "commit_by_client", _accepts_and_forgets, _CALM),
    (CommitCall, "results", _publishes_what_was_refused, _CALM_MANY),
    (PendingCommits, "take_overdue", _keeps_pending_commits_for_ever, _MURDEROUS),
    (WriteBuffers, "_free_range", _forgets_the_rest_of_a_buffer, _MURDEROUS),
    (get, "LATE_S", _does_not_ask_again, _WAITING),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "mutate", "plan"), MUTATIONS, ids=[m[2].__name__.strip("_") for m in MUTATIONS]
)
def test_mutations_are_caught(owner: Any, name: str, mutate: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name)))
    for seed in range(_MUTANT_LIVES):
        try:
            World(seed, plan).run()
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{_MUTANT_LIVES} lives passed with {owner.__name__}.{name} broken")
