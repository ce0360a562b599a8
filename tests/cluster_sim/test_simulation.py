"""Seeded lives of a whole cluster in virtual time (``world``): new ones each day, all that ever failed, mutations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.lifecycle import Flight, Loss
from tanghulu.conductor.dispatch.request_counts import RequestCounts
from tanghulu.types import Role
from tanghulu.workers.engine.pulls import Pulls
from tanghulu.workers.engine.scheduler import Scheduler
from tanghulu.workers.kv.connector import KvConnector
from tanghulu.workers.kv.peer_server import PeerServer
from tanghulu.workers.sessions.outbox import SessionOutbox
from tests.cluster_sim.plan import Plan
from tests.cluster_sim.world import World

#: Seeds that once failed.
PAST_FAILURES = (5, 20)
#: Seeds of the slow suite, about a minute of a core; by hand any others (docs/faults.md).
_FIRST, _LIVES = 1000, 100
#: Mutations are looked for in so many lives at most.
_MUTANT_LIVES = 20
_SPLIT = (Role.PREFILL, Role.DECODE, Role.DECODE)
_CALM = Plan(_SPLIT, seconds=2.0, faults=(), num_blocks=200)
_LEAVING = replace(_CALM, hang_ups=0.7, num_clients=6)
_DYING = Plan(_SPLIT, seconds=3.0, fault_every_s=0.3, faults=("kill", "tear"), num_blocks=200)
_FULL = Plan(_SPLIT, seconds=2.0, faults=("mend",), num_blocks=50, max_in_flight=2, num_clients=6, queue_timeout_s=1.0)
_REFUSING = Plan((Role.BOTH,), seconds=2.0, faults=(), num_waiting=1, num_seqs=2, num_clients=8, pause_s=0.02)
_SLOW = replace(_DYING, faults=("slow",))
_TORN = replace(_CALM, torn=0.3)


@pytest.mark.parametrize("seed", PAST_FAILURES)
def test_a_life_that_failed_once(seed: int) -> None:
    World(seed).run()


def test_a_life_without_faults() -> None:
    counts = World(1, _CALM).run()
    assert counts["length"] > 10
    assert counts["hung up"] > 0


def test_a_life_in_which_workers_die() -> None:
    assert World(1, _DYING).run()["moved: death"] > 0


@pytest.mark.slow
def test_a_seed_gives_one_life() -> None:
    assert World(3).run() == World(3).run()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_lives() -> None:
    """A seed that fails is named, and can be repeated."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.cluster_sim", "--first", str(_FIRST), "--seeds", str(_LIVES)]
    ended = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _moves_without_the_last_token(original: Any) -> Any:
    def all_tokens(self: Flight) -> Any:
        tokens = original(self)
        return tokens[:-1] if len(self.generated) > 1 else tokens

    return all_tokens


def _leaves_pulls_behind(original: Any) -> Any:
    def forgo(self: Flight) -> Sequence[Any]:
        self.ahead = None
        return []

    return forgo


def _keeps_exports(original: Any) -> Any:
    return lambda self, peer, bytes_read, *, keep: None


def _keeps_reservations(original: Any) -> Any:
    return lambda self, entry: setattr(entry, "reserved", None)


def _keeps_the_queue_s_deadline(original: Any) -> Any:
    def leave(self: Dispatcher, entry: Any) -> None:
        self._queue.discard(entry.flight.request.id)
        entry.deadline = None

    return leave


def _leaves_requests_with_the_dead(original: Any) -> Any:
    return lambda self, error, loss: original(self, error, loss) if loss is not Loss.DEATH else []


def _counts_no_move_that_went_well(original: Any) -> Any:
    def count(self: RequestCounts, outcome: str) -> None:
        if outcome != "resumed":
            original(self, outcome)

    return count


def _refuses_in_silence(original: Any) -> Any:
    return lambda self, request_id, error: None


def _tells_the_last_step_alone(original: Any) -> Any:
    def output(self: SessionOutbox, output: Any) -> None:
        self._outputs.pop(output.request_id, None)
        original(self, output)

    return output


def _trusts_what_did_not_come(original: Any) -> Any:
    def fetch_done(self: Scheduler, request_id: Any, num_blocks_ok: int, loads: Sequence[Any] = ()) -> None:
        original(self, request_id, len(self._fetches[request_id].block_ids), loads)

    return fetch_done


def _forgets_what_was_not_pulled(original: Any) -> Any:
    def done(self: Pulls, name: Any) -> None:
        self._pool.end_transfer(self._pulls[name].coming)
        self._pulls[name].coming = []
        original(self, name)

    return done


def _forgets_freed_leases(original: Any) -> Any:
    return lambda self, freed: None


MUTATIONS: list[tuple[Any, str, Callable[[Any], Any], Plan]] = [
    (Flight, "all_tokens", _moves_without_the_last_token, _DYING),
    (Flight, "_cancel_pull", _leaves_pulls_behind, _LEAVING),
    (KvConnector, "_released", _keeps_exports, _CALM),
    (Dispatcher, "_withdraw", _keeps_reservations, _CALM),
    (Dispatcher, "_leave_queue", _keeps_the_queue_s_deadline, _FULL),
    (Flight, "on_worker_lost", _leaves_requests_with_the_dead, _DYING),
    (RequestCounts, "_count_move", _counts_no_move_that_went_well, _DYING),
    (SessionOutbox, "refusal", _refuses_in_silence, _REFUSING),
    (SessionOutbox, "output", _tells_the_last_step_alone, _SLOW),
    (Scheduler, "fetch_done", _trusts_what_did_not_come, _TORN),
    (Pulls, "done", _forgets_what_was_not_pulled, _CALM),
    (PeerServer, "on_freed", _forgets_freed_leases, _CALM),
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
        except AssertionError:
            return
    pytest.fail(f"{_MUTANT_LIVES} lives passed with {owner.__name__}.{name} broken")
