"""The plan of `tanghulu up`, in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.cli.supervision import MAX_RESTARTS, STABLE_S, ChildState, EndAll, Spawn, Supervision


@pytest.fixture
def plan():
    supervision = Supervision()
    supervision.add("master")
    supervision.add("node", needs=["master"])
    return supervision


def test_a_child_waits_for_what_it_needs(plan):
    assert plan.tick(0.0) == [Spawn("master")]
    assert plan.tick(1.0) == []
    plan.ready("master", 1.5)
    assert plan.tick(1.5) == [Spawn("node")]
    assert not plan.all_ready
    plan.ready("node", 2.0)
    assert plan.all_ready


def test_a_dead_child_comes_back_with_growing_delays_and_then_ends_all(plan):
    now_s, delays = 0.0, []
    plan.tick(now_s)
    for _ in range(MAX_RESTARTS):
        assert plan.exited("master", 1, now_s) == []
        due_s = plan.next_tick_s()
        delays.append(due_s - now_s)
        assert plan.tick(due_s - 1e-6) == []
        assert plan.tick(due_s) == [Spawn("master")]
        now_s = due_s
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2])
    [end] = plan.exited("master", 1, now_s)
    assert isinstance(end, EndAll)
    assert "restarted 5 times" in end.because
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
    [end] = plan.refused("master", "bad --port")
    assert end == EndAll("master: bad --port")


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
        assert plan.children["master"].num_restarts <= MAX_RESTARTS
    plan.stop()
    assert plan.children["master"].state in (ChildState.STOPPED, ChildState.DEAD)
