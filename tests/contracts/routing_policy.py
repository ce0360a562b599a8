"""What every routing policy keeps to, and the views that show it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.conductor.routing.policies.base import PeerFetch, RequestView, WorkerView
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES, make_policy
from tanghulu.types import InstanceId, Role

REQUEST = RequestView(num_tokens=6400, block_tokens=64, block_bytes=2 << 20)


def worker(name: str, role: Role = Role.BOTH, **more: float) -> WorkerView:
    view = WorkerView(InstanceId(name), role.prefills, role.decodes, blocks_free=1000, blocks_total=1000)
    return replace(view, prefill_tokens_per_s=10_000, store_bytes_per_s=2e9, decode_step_s=0.02, **more)


WORKERS = st.lists(
    st.builds(
        WorkerView,
        id=st.sampled_from([InstanceId(f"w{i}") for i in range(6)]),
        can_prefill=st.booleans(),
        can_decode=st.booleans(),
        queue_tokens=st.integers(0, 100_000),
        num_requests=st.integers(0, 64),
        blocks_free=st.integers(0, 200),
        blocks_total=st.just(200),
        prefill_tokens_per_s=st.sampled_from([0.0, 1000.0, 50_000.0]),
        decode_step_s=st.sampled_from([0.0, 0.01, 0.1]),
        store_bytes_per_s=st.sampled_from([0.0, 1e8, 1e10]),
        hit_blocks=st.integers(0, 100),
    ),
    max_size=6,
    unique_by=lambda w: w.id,
)
VIEWS = st.builds(RequestView, st.integers(1, 6400), st.just(64), st.just(1 << 20), st.integers(0, 100))


@pytest.mark.parametrize("name", POLICY_NAMES)
class TestContract:
    @settings(max_examples=25)
    @given(views=st.lists(st.tuples(VIEWS, WORKERS), min_size=1, max_size=4))
    def test_choices_are_able_and_can_be_repeated(self, name, views):
        policy, twin = make_policy(name), make_policy(name)
        for request, workers in views:
            decision = policy.choose(request, workers)
            assert decision == twin.choose(request, workers)
            able = {w.id for w in workers if w.can_prefill}, {w.id for w in workers if w.can_decode}
            if decision is None:
                assert not all(able)
            else:
                assert decision.prefill in able[0]
                assert decision.decode in able[1]
            choice = policy.choose_decode(request, workers)
            assert choice == twin.choose_decode(request, workers)
            assert choice in able[1] if able[1] else choice is None

    def test_nobody(self, name):
        assert make_policy(name).choose(REQUEST, []) is None
        assert make_policy(name).choose_decode(REQUEST, []) is None
        assert make_policy(name).choose(REQUEST, [worker("p", Role.PREFILL)]) is None

    def test_a_peer_is_only_named_where_there_is_something_to_fetch(self, name):
        full = worker("a", hit_blocks=90, peer_bytes_per_s=1e12, queue_tokens=50_000)
        empty = worker("b", peer_bytes_per_s=1e12)
        decision = make_policy(name).choose(REQUEST, [full, empty])
        if decision.fetch is not None:
            assert (decision.prefill, decision.fetch) == ("b", PeerFetch(InstanceId("a"), 90))
        apart = [replace(w, peer_bytes_per_s=0.0) for w in (full, empty)]
        assert make_policy(name).choose(REQUEST, apart).fetch is None

    def test_two_kinds(self, name):
        workers = [worker("p", Role.PREFILL), worker("d", Role.DECODE)]
        decision = make_policy(name).choose(REQUEST, workers)
        assert (decision.prefill, decision.decode) == ("p", "d")

    def test_explaining_changes_nothing(self, name):
        policy = make_policy(name)
        workers = [worker("a"), worker("b"), worker("c")]
        expected = copy.deepcopy(policy).choose(REQUEST, workers)
        assert policy.choose(REQUEST, workers) == expected
