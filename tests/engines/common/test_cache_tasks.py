"""Tasks in threads: each has one outcome and one signal, however it ends."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.engines.common.cache_tasks import Tasks


class Signals:
    def __init__(self) -> None:
        self.count = threading.Semaphore(0)

    def wait(self, times: int) -> None:
        for _ in range(times):
            assert self.count.acquire(timeout=30)


def _break() -> str:
    raise RuntimeError("a programmer's error")


@settings(max_examples=30, deadline=None)
@given(kinds=st.lists(st.booleans(), max_size=20), close_at=st.integers(0, 20))
def test_each_ends_once(kinds: list[bool], close_at: int) -> None:
    signals = Signals()
    tasks: Tasks[str] = Tasks("test", 2, signals.count.release)
    numbers = []
    for at, breaks in enumerate(kinds):
        if at == close_at:
            tasks.close()
        numbers.append(tasks.begin(_break if breaks else (lambda: "done"), "failed"))
        tasks.check()
    signals.wait(len(kinds))
    tasks.close()
    assert tasks.num_open == 0
    wanted = ["done" if at < close_at and not breaks else "failed" for at, breaks in enumerate(kinds)]
    assert [tasks.take(number) for number in numbers] == wanted
    assert [tasks.take(number) for number in numbers] == [None] * len(kinds)
    assert not signals.count.acquire(blocking=False)


def test_what_has_not_ended_has_no_outcome() -> None:
    go, signals = threading.Event(), Signals()
    tasks: Tasks[str] = Tasks("test", 1, signals.count.release)
    number = tasks.begin(lambda: "done" if go.wait(30) else "late", "failed")
    assert tasks.take(number) is None
    assert tasks.take_all() == {}
    go.set()
    signals.wait(1)
    assert tasks.take_all() == {number: "done"}
    tasks.close()


def test_what_is_drained_has_ended() -> None:
    begun, go, signals = threading.Event(), threading.Event(), Signals()
    tasks: Tasks[str] = Tasks("test", 1, signals.count.release)

    def wait_to_go() -> str:
        begun.set()
        return "done" if go.wait(30) else "late"

    first, second = tasks.begin(wait_to_go, "failed"), tasks.begin(lambda: "done", "failed")
    assert begun.wait(30)
    drained = threading.Thread(target=tasks.drain)
    drained.start()
    signals.wait(1)
    assert tasks.take_all() == {second: "failed"}, "it had not begun"
    assert drained.is_alive()
    go.set()
    drained.join(30)
    assert tasks.take_all() == {first: "done"}
    third = tasks.begin(lambda: "done", "failed")
    signals.wait(2)
    assert tasks.take_all() == {third: "done"}, "further tasks begin as before"
    tasks.close()


def test_work_that_found_no_thread_does_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    go, signals, ran = threading.Event(), Signals(), threading.Event()
    tasks: Tasks[str] = Tasks("test", 2, signals.count.release)
    begun = threading.Event()

    def wait_to_go() -> str:
        begun.set()
        return "done" if go.wait(30) else "late"

    first = tasks.begin(wait_to_go, "failed")
    assert begun.wait(30)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        second = tasks.begin(lambda: "done" if ran.set() else "ran", "failed")
    signals.wait(1)
    assert tasks.take(second) == "failed", "at once"
    go.set()
    tasks.close()
    assert tasks.take(first) == "done"
    assert not ran.is_set()
    tasks.check()


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
