"""A worker's view is kept while nothing changes, and never outlives a change."""

from dataclasses import replace

from tanghulu.conductor.requests import WorkerLoad
from tanghulu.conductor.worker_state import LoadTracker
from tanghulu.types import InstanceId, Role

WORKER = InstanceId("w")


def _view(tracker: LoadTracker, hit_blocks: int = 0):
    return tracker.view(WORKER, Role.PREFILL, hit_blocks)


def test_a_view_is_made_once_a_change():
    tracker = LoadTracker()
    tracker.report(WorkerLoad(blocks_free=9))
    view = _view(tracker)
    assert _view(tracker) is view
    assert _view(tracker, 3) == replace(view, hit_blocks=3)
    assert _view(tracker) is view
    assert tracker.view(WORKER, Role.BOTH, 0).can_decode
    tracker.sent("r", 100, 2)
    assert (_view(tracker).queue_tokens, _view(tracker).blocks_free) == (100, 7)
    tracker.heard_of("r")
    assert _view(tracker) == view
    tracker.sent("r", 100, 2)
    tracker.report(WorkerLoad(blocks_free=5))
    assert _view(tracker).blocks_free == 3
    tracker.report(WorkerLoad(blocks_free=5))
    assert _view(tracker).blocks_free == 5
    tracker.reset(WorkerLoad(blocks_free=1))
    assert _view(tracker).blocks_free == 1
    tracker.check()
