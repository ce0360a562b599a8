"""A worker's view is kept while nothing changes, and never outlives a change."""

from dataclasses import replace

from tanghulu.conductor.policies.base import RequestView
from tanghulu.conductor.policies.registry import make_policy
from tanghulu.conductor.requests import WorkerLoad
from tanghulu.conductor.routing import with_both_phases
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


def test_blocks_of_requests_under_way_are_active():
    """What the dynamo policy weighs: what is in use, and what was sent or promised but is not reported yet."""
    tracker = LoadTracker()
    tracker.report(WorkerLoad(blocks_total=100, blocks_free=70))
    tracker.sent("r", 10, 5)
    tracker.promise("q", 8)
    assert _view(tracker).active_blocks == 43
    busy, idle = replace(_view(tracker), id=InstanceId("a")), replace(_view(tracker), active_blocks=0)
    assert make_policy("dynamo").choose(RequestView(640, 64, 1024), with_both_phases([busy, idle])).prefill == WORKER
