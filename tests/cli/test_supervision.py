"""The plan of `tanghulu up`, in virtual time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.cli.supervision import (
    LOOKS,
    MAX_BACKOFF_S,
    MAX_RESTARTS,
    STABLE_S,
    ChildState,
    Supervision,
)
from tanghulu.cli.up import Cluster, UpConfig
from tanghulu.errors import ConfigError


@pytest.fixture
def plan():
    supervision = Supervision()
    supervision.add("master")
    supervision.add("node")
    return supervision


def test_each_child_is_started_once(plan):
    assert plan.tick(0.0) == ["master", "node"]
    assert plan.tick(1.0) == []
    plan.ready("master", 1.5)
    assert not plan.all_ready
    plan.ready("node", 2.0)
    assert plan.all_ready


def test_a_dead_child_comes_back_with_growing_delays_and_then_ends_all(plan):
    now_s, delays = 0.0, []
    plan.tick(now_s)
    for _ in range(MAX_RESTARTS):
        assert plan.exited("master", 1, now_s) is None
        due_s = plan.next_tick_s()
        delays.append(due_s - now_s)
        assert plan.tick(due_s - 1e-6) == []
        assert plan.tick(due_s) == ["master"]
        now_s = due_s
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2])
    assert "restarted 5 times" in plan.exited("master", 1, now_s)
    assert plan.children["master"].state is ChildState.DEAD


def test_a_child_that_was_stable_is_forgiven(plan):
    plan.tick(0.0)
    plan.ready("master", 0.0)
    for _ in range(3):
        plan.exited("master", 1, 1.0)
        plan.tick(100.0)
        plan.ready("master", 100.0)
    plan.exited("master", 1, 100.0 + STABLE_S)
    assert plan.children["master"].num_restarts == 1


def test_a_refused_configuration_is_not_tried_again(plan):
    plan.tick(0.0)
    assert plan.refused("master", "bad --port") == "master: bad --port"


def test_a_child_that_exits_as_a_refusal_before_it_was_ready_ends_all(plan):
    plan.tick(0.0)
    assert plan.exited("master", 2, 1.0, "Invalid value for '--port'") == "master: Invalid value for '--port'"


@pytest.mark.parametrize("name", ["master", "worker"])
def test_what_was_ready_with_its_configuration_is_started_again_when_it_refuses_it(name):
    plan = ready_cluster()
    assert plan.exited(name, -9, 1.0) is None
    plan.tick(plan.next_tick_s())
    assert plan.refused(name, "cannot listen on 127.0.0.1:7410: Address already in use") is None
    assert plan.exited(name, 1, 2.0) is None
    assert plan.tick(plan.next_tick_s()) == [name]


def ready_cluster(hung_s: float = 0.0) -> Supervision:
    plan = Supervision(hung_s=hung_s)
    plan.add("master", vital=True)
    plan.add("worker")
    plan.tick(0.0)
    plan.ready("master", 0.0)
    assert not plan.been_ready
    plan.ready("worker", 0.0)
    return plan


def test_once_all_have_been_ready_a_child_comes_back_for_ever():
    plan, now_s, delays = ready_cluster(), 1.0, []
    for _ in range(5 * MAX_RESTARTS):
        assert plan.exited("worker", -9, now_s) is None
        due_s = plan.next_tick_s()
        delays.append(due_s - now_s)
        assert plan.tick(due_s) == ["worker"]
        plan.ready("worker", due_s)
        now_s = due_s + 1
    assert delays == sorted(delays)
    assert delays[0] < 1
    assert delays[-1] == pytest.approx(MAX_BACKOFF_S)
    plan.exited("worker", -9, now_s + STABLE_S)
    assert plan.next_tick_s() < now_s + STABLE_S + 1, "and is forgiven"


def test_but_one_without_which_nothing_is_served_ends_all():
    plan, now_s = ready_cluster(), 1.0
    for _ in range(MAX_RESTARTS):
        assert plan.exited("master", 1, now_s) is None
        now_s = plan.next_tick_s()
        plan.tick(now_s)
        plan.ready("master", now_s)
    assert plan.exited("master", 1, now_s) is not None


def test_a_child_that_hangs_is_killed_once_and_restarted():
    plan = ready_cluster(hung_s=20.0)
    period_s = 20.0 / LOOKS
    now_s = 0.0
    while now_s < 60:
        now_s += period_s
        plan.alive("worker", now_s - 1)
        assert plan.look(now_s) == []
    silent_s = now_s - 1
    while not (kills := plan.look(now_s)):
        assert now_s < silent_s + 20 + period_s
        now_s += period_s
    assert kills == ["worker"]
    assert plan.look(now_s + period_s) == []
    assert plan.exited("worker", -9, now_s + 1) is None
    [spawn] = plan.tick(plan.next_tick_s())
    assert spawn == "worker"
    plan.alive("worker", now_s + 3)
    assert plan.look(now_s + 200) == [], "it is not judged before it is ready"


def test_a_supervisor_that_stood_still_blames_nobody():
    plan = ready_cluster(hung_s=20.0)
    for now_s in (5.0, 10.0):
        plan.alive("worker", now_s)
        assert plan.look(now_s) == []
    assert plan.look(500.0) == []
    assert plan.look(505.0) == []
    plan.alive("worker", 506.0)
    assert plan.look(510.0) == []


@given(st.lists(st.sampled_from(["tick", "ready", "exit"]), max_size=60))
def test_any_history_keeps_to_the_table(events):
    plan = Supervision()
    plan.add("master")
    for now_s, event in enumerate(events):
        state = plan.children["master"].state
        if event == "tick":
            plan.tick(float(now_s))
        elif event == "ready" and state is ChildState.STARTING:
            plan.ready("master", float(now_s))
        elif event == "exit" and state in (ChildState.STARTING, ChildState.READY):
            plan.exited("master", 1, float(now_s))
        assert plan.been_ready or plan.children["master"].num_restarts <= MAX_RESTARTS
    plan.stop()
    assert plan.children["master"].state in (ChildState.STOPPED, ChildState.DEAD)


def _cluster(folder: Path, **options: Any) -> Cluster:
    board: Any = SimpleNamespace(add=lambda name: None)
    return Cluster(UpConfig(state_dir=folder, **options), None, folder, board)


def test_no_child_has_its_grpc_port_from_the_environment(tmp_path: Path):
    cluster = _cluster(tmp_path, store_http_port=7480)
    cluster._add_others("127.0.0.1:1")
    for name in ("store-http", "conductor"):
        arguments = cluster._children[name].arguments
        assert arguments[arguments.index("--grpc-port") + 1] == "-1", name


def test_a_directory_in_place_of_a_log_is_named(tmp_path: Path):
    (tmp_path / "conductor.log").mkdir()
    with pytest.raises(ConfigError, match=r"cannot replace the log .*/conductor\.log: Is a directory; remove it"):
        _cluster(tmp_path)._add_others("127.0.0.1:1")


@pytest.mark.parametrize("roles", [{"prefill": 0, "decode": 0, "workers": 3}, {"prefill": 1, "decode": 2}])
def test_each_worker_is_given_its_turn_among_the_gpus(tmp_path: Path, roles: dict[str, int]):
    cluster = _cluster(tmp_path, device="cuda", **roles)
    cluster._add_others("127.0.0.1:1")
    workers = [child for child in cluster._children.values() if "--device" in child.arguments]
    turns = [child.arguments[child.arguments.index("--device-turn") + 1] for child in workers]
    assert turns == ["0", "1", "2"]
    assert all(child.arguments[child.arguments.index("--device-workers") + 1] == "3" for child in workers)
