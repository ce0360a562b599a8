"""Events are what differs from a second before."""

from tanghulu.store.dashboard.history import MAX_EVENTS, EventLog


def _texts(log):
    return [event["text"] for event in log.last(10)]


def test_states_are_told_when_they_change():
    log = EventLog()
    log.states(1.0, "worker", {"a": "connected", "b": "not connected"})
    log.states(2.0, "node", {"a": "up"})
    assert _texts(log) == ["node a is up", "worker b is not connected", "worker a is connected"]
    log.states(3.0, "worker", {"a": "connected", "b": "connected"})
    log.states(4.0, "worker", {"b": "connected"})
    assert _texts(log)[:2] == ["worker a is gone", "worker b is connected"]
    log.states(5.0, "worker", {"a": "connected", "b": "connected"})
    assert _texts(log)[0] == "worker a is connected"
    log.states(6.0, "worker", {"a": "connected", "b": "connected"})
    assert log.last(1)[0]["number"] == 6


def test_counters_are_told_when_they_grow():
    log = EventLog()
    log.count(1.0, "migration", 5, "{} moved")
    assert _texts(log) == []
    log.count(2.0, "migration", 8, "{} moved")
    log.count(3.0, "migration", 8, "{} moved")
    log.count(4.0, "migration", 0, "{} moved")  # its process began anew
    log.count(5.0, "migration", 1, "{} moved")
    assert _texts(log) == ["1 moved", "3 moved"]


def test_old_events_are_forgotten():
    log = EventLog()
    for number in range(2 * MAX_EVENTS):
        log.count(float(number), "x", number, "{}")
    assert len(log.last(10 * MAX_EVENTS)) == MAX_EVENTS
