"""A worker that has measured nothing counts as the median of its kind, until it has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tanghulu.conductor.routing.kind import TOLERANCE, KindOfWorkers
from tanghulu.conductor.routing.policies.base import RequestView
from tanghulu.conductor.routing.policies.registry import make_policy
from tanghulu.conductor.routing.worker_views import WorkerViews
from tanghulu.session.load import PrefillProfile, WorkerLoad
from tanghulu.types import InstanceId, Role
from tests.conductor.routing.test_worker_views import Member

REQUEST = RequestView(1000, 64, 1 << 20)


def _member(name: str, role: Role = Role.BOTH, **load: object) -> Member:
    member = Member(InstanceId(name), role)
    member.load.report(WorkerLoad(blocks_total=5000, blocks_free=5000, **load))
    return member


def test_a_new_idle_worker_gets_work_beside_fast_ones_that_are_busy():
    old = [_member(f"old{n}", prefill_tokens_per_s=20_000.0, prefill_tokens_waiting=5000) for n in range(4)]
    fleet = WorkerViews([*old, _member("new")])
    assert make_policy("ttft-min").choose(REQUEST, fleet.views({}, {})).prefill == "new"
    fleet.check()


def test_it_is_taken_for_the_median_of_its_role_and_follows_it():
    profile = PrefillProfile(0.01, 1e-4, 1e-9)
    members = [
        _member("p1", Role.PREFILL, prefill_tokens_per_s=10_000.0, prefill=profile),
        _member("p2", Role.PREFILL),
        _member("d1", Role.DECODE, decode_step_s=0.01),
        _member("d2", Role.DECODE),
    ]
    fleet = WorkerViews(members)
    shown = fleet.views({}, {})
    assert (shown[1].prefill_tokens_per_s, shown[1].cost, shown[1].decode_step_s) == (10_000.0, profile, 0.0)
    assert (shown[3].prefill_tokens_per_s, shown[3].decode_step_s) == (0.0, 0.01)
    members[0].load.report(WorkerLoad(prefill_tokens_per_s=3000.0))
    fleet.check()
    assert fleet.views({}, {})[1].prefill_tokens_per_s == 3000.0
    members[1].load.report(WorkerLoad(prefill_tokens_per_s=5000.0))
    assert fleet.views({}, {})[1].prefill_tokens_per_s == 5000.0
    fleet.check()


def test_what_a_file_says_goes_before_the_median():
    members = [_member("a", prefill_tokens_per_s=10_000.0), _member("b")]
    known = PrefillProfile(token_s=1e-3)
    members[1].load.known = type(members[1].load.known)(prefill=known)
    assert WorkerViews(members).views({}, {})[1].cost == known


SPEEDS = st.sampled_from([0.0, 900.0, 1000.0, 1050.0, 4000.0])


@given(st.lists(st.tuples(st.integers(0, 4), SPEEDS, SPEEDS), max_size=30))
def test_it_stays_near_the_median(reports):
    kind, loads = KindOfWorkers(), {}
    for number, prefill, decode in reports:
        loads[number] = WorkerLoad(prefill_tokens_per_s=prefill, decode_step_s=decode)
        before = kind.typical
        assert kind.report(number, loads[number]) == (kind.typical != before) or before == kind.typical
        kind.check()
        for found, of in (
            (kind.typical.prefill_tokens_per_s, [each.prefill_tokens_per_s for each in loads.values()]),
            (kind.typical.decode_step_s, [each.decode_step_s for each in loads.values()]),
        ):
            measured = sorted(filter(None, of))
            median = measured[len(measured) // 2] if measured else 0.0
            assert abs(found - median) <= TOLERANCE * max(found, median)
        assert kind.unmeasured == {
            n for n, load in loads.items() if not (load.prefill_tokens_per_s and load.decode_step_s)
        }
