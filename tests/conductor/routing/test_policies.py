"""One contract for all policies, and what is particular to each."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from msgspec import structs

from tanghulu.conductor.dispatch.router import with_both_phases
from tanghulu.conductor.routing.policies.base import PeerFetch, nearness, place_of_least
from tanghulu.conductor.routing.policies.published import Dynamo, LinearPolicy, Mooncake
from tanghulu.conductor.routing.policies.registry import PolicyOptions, make_policy
from tanghulu.conductor.routing.policies.simple import LeastLoaded, Random, RoundRobin, SessionAffinity
from tanghulu.conductor.routing.policies.ttft_min import TtftMin
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.session.load import WorkerLoad
from tanghulu.types import InstanceId, Place, Role
from tests.contracts.routing_policy import (
    REQUEST,
    TestContract,  # noqa: F401 - pytest collects it from here
    worker,
)


def test_every_score_prefers_less_load_all_else_equal():
    workers = [worker("a", queue_tokens=5000, num_requests=3), worker("b", queue_tokens=100, num_requests=1)]
    for name in ("ttft-min", "mooncake", "dynamo", "linear", "least-loaded", "power-of-two"):
        assert make_policy(name).choose(REQUEST, workers).prefill == "b", name


def test_ties_are_drawn_by_seed():
    workers = [worker(n) for n in "abcd"]
    for name in ("ttft-min", "mooncake", "dynamo", "linear", "least-loaded"):
        drawn = [make_policy(name, PolicyOptions(seed=s)).choose(REQUEST, workers).prefill for s in range(20)]
        assert len(set(drawn)) > 1, name


def test_with_one_kind_alive_it_does_both():
    alone = with_both_phases([worker("p", Role.PREFILL)])
    assert (alone[0].can_prefill, alone[0].can_decode) == (True, True)
    both = [worker("p", Role.PREFILL), worker("d", Role.DECODE)]
    assert with_both_phases(both) == both


def test_round_robin_takes_turns_over_comings_and_goings():
    policy = make_policy("round-robin")
    workers = [worker(n) for n in "abc"]
    assert [policy.choose(REQUEST, workers).prefill for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.choose(REQUEST, [workers[0], workers[2]]).prefill == "c"
    assert policy.choose(REQUEST, [*workers, worker("d")]).prefill == "d"


def test_random_uses_everybody_and_its_seed():
    workers = [worker(n) for n in "abc"]

    def draws(seed: int) -> list[str]:
        policy = Random(seed)
        return [policy.choose(REQUEST, workers).prefill for _ in range(30)]

    assert set(draws(1)) == {"a", "b", "c"}
    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_least_loaded():
    workers = [worker("a", queue_tokens=10, num_requests=1), worker("b", queue_tokens=5, num_requests=9)]
    policy = make_policy("least-loaded")
    assert policy.choose(REQUEST, workers).prefill == "b"
    assert policy.choose_decode(REQUEST, workers) == "a"


class TestTtftMin:
    """The worked example of the module."""

    A = worker("a", Role.PREFILL, hit_blocks=20)
    B = worker("b", Role.PREFILL, hit_blocks=90, queue_tokens=8000)
    D = worker("d", Role.DECODE)

    def test_an_idle_worker_beats_a_warm_but_busy_one(self):
        decision = TtftMin(load_weight=0).choose(REQUEST, [self.A, self.B, self.D])
        assert decision.prefill == "a"
        scores = {c.worker: round(c.score, 3) for c in decision.candidates if c.phase == "prefill"}
        assert scores == {"a": 0.512, "b": 0.864}

    def test_a_warm_one_beats_an_idle_one_when_its_queue_is_short(self):
        assert (
            TtftMin(load_weight=0).choose(REQUEST, [self.A, replace(self.B, queue_tokens=1000), self.D]).prefill == "b"
        )

    def test_what_the_store_has_is_fetched_where_it_pays(self):
        request = structs.replace(REQUEST, store_hit_blocks=100)
        decision = TtftMin(load_weight=0).choose(request, [self.A, self.D])
        terms = dict(decision.candidates[0].terms)
        assert terms["fetch_s"] == pytest.approx(80 * (2 << 20) / 2e9)
        assert terms["compute_s"] == pytest.approx(1e-4)
        slow = TtftMin(load_weight=0).choose(request, [replace(self.A, store_bytes_per_s=1e6), self.D])
        assert dict(slow.candidates[0].terms)["fetch_s"] == 0

    def test_decode_goes_where_the_kv_is_unless_it_is_full_or_crowded(self):
        p = worker("p", Role.PREFILL)
        d, e = worker("d", Role.DECODE, hit_blocks=90), worker("e", Role.DECODE)
        assert TtftMin(load_weight=0).choose(REQUEST, [p, d, e]).decode == "d"
        assert TtftMin(load_weight=0).choose(REQUEST, [p, replace(d, blocks_free=5), e]).decode == "e"
        assert TtftMin(load_weight=0).choose(REQUEST, [p, replace(d, num_requests=30), e]).decode == "e"

    def test_a_worker_that_can_keeps_what_it_prefilled(self):
        decision = TtftMin(load_weight=0).choose(REQUEST, [worker("x"), worker("y")])
        assert decision.prefill == decision.decode

    def test_what_is_being_computed_there_counts(self):
        a = worker("a", Role.PREFILL, queue_tokens=2000)
        b = worker("b", Role.PREFILL, queue_tokens=2000, coming_blocks=90)
        decision = TtftMin(load_weight=0).choose(REQUEST, [a, b, self.D])
        assert decision.prefill == "b"
        assert {c.worker: round(c.score, 3) for c in decision.candidates if c.phase == "prefill"} == {
            "a": 0.84,
            "b": 0.264,
        }

    def test_a_fetch_runs_beside_the_queue(self):
        holder = worker("a", Role.PREFILL, hit_blocks=90, queue_tokens=50_000, peer_bytes_per_s=1e9)
        other = worker("b", Role.PREFILL, queue_tokens=1000, peer_bytes_per_s=1e9)
        decision = TtftMin(replica_weight=0, load_weight=0).choose(REQUEST, [holder, other, self.D])
        assert decision.fetch == PeerFetch(InstanceId("a"), 90)
        fetch_s = 90 * (2 << 20) / 1e9
        score = next(c.score for c in decision.candidates if c.worker == "b")
        assert score == pytest.approx(max(0.1, fetch_s) + 0.064)
        taken = replace(holder, send_wait_s=5.0)
        assert TtftMin(replica_weight=0, load_weight=0).choose(REQUEST, [taken, other, self.D]).fetch is None

    def test_computing_is_charged_for_those_who_come_behind(self):
        holder = worker("a", Role.PREFILL, hit_blocks=90, queue_tokens=9000)
        idle = worker("b", Role.PREFILL, queue_tokens=0)
        assert TtftMin(load_weight=0).choose(REQUEST, [holder, idle, self.D]).prefill == "b"
        decision = TtftMin(load_weight=6).choose(REQUEST, [holder, idle, self.D])
        assert decision.prefill == "a"
        scores = {c.worker: c.score for c in decision.candidates if c.phase == "prefill"}
        assert scores == pytest.approx({"a": 0.9 + 7 * 0.064, "b": 7 * 0.64})

    def test_a_copy_is_charged_what_it_saves(self):
        holder = worker("a", hit_blocks=90, queue_tokens=3000, peer_bytes_per_s=1e12)
        other = worker("b", peer_bytes_per_s=1e12)
        assert TtftMin(replica_weight=0, load_weight=0).choose(REQUEST, [holder, other]).fetch is not None
        assert TtftMin(replica_weight=1, load_weight=0).choose(REQUEST, [holder, other]).prefill == "a"
        busy = replace(holder, queue_tokens=8000)
        decision = TtftMin(replica_weight=1, load_weight=0).choose(REQUEST, [busy, other])
        assert (decision.prefill, decision.fetch) == ("b", PeerFetch(InstanceId("a"), 90))


class TestMooncake:
    """The worked example of the module: fetch only where the best prefix is longer by more than the threshold."""

    @pytest.mark.parametrize(("own", "fetches"), [(20, False), (19, True), (0, True), (30, False)])
    def test_threshold(self, own, fetches):
        holder = worker("a", hit_blocks=30, queue_tokens=100_000, peer_bytes_per_s=1e12)
        decision = Mooncake(1.5).choose(REQUEST, [holder, worker("b", hit_blocks=own, peer_bytes_per_s=1e12)])
        assert decision.prefill == "b"
        assert decision.fetch == (PeerFetch(InstanceId("a"), 30) if fetches else None)

    def test_the_transfer_adds_to_the_queue(self):
        holder = worker("a", hit_blocks=90, queue_tokens=50_000, peer_bytes_per_s=1e9)
        other = worker("b", queue_tokens=1000, peer_bytes_per_s=1e9)
        scores = {c.worker: c.score for c in Mooncake().choose(REQUEST, [holder, other]).candidates[:2]}
        assert scores["b"] == pytest.approx(0.1 + 90 * (2 << 20) / 1e9 + 0.064)


class TestDynamo:
    """The worked example of the module."""

    A = worker("a", hit_blocks=40, queue_tokens=640, active_blocks=200, active_hit_blocks=40)
    B = worker("b")

    def test_cost(self):
        decision = Dynamo().choose(REQUEST, [self.A, self.B])
        assert {c.worker: c.score for c in decision.candidates if c.phase == "prefill"} == {"a": 330, "b": 200}
        assert decision.prefill == "b"
        assert Dynamo(overlap_weight=10).choose(REQUEST, [self.A, self.B]).prefill == "a"

    def test_store_credit(self):
        request = structs.replace(REQUEST, store_hit_blocks=100)
        assert Dynamo(store_credit=0.5).choose(request, [self.B]).candidates[0].score == 50 + 100

    def test_temperature_draws(self):
        policy = Dynamo(temperature=1.0)
        drawn = [policy.choose(REQUEST, [self.A, self.B]).prefill for _ in range(200)]
        assert 20 < drawn.count("a") < 100  # exp(-1) / (1 + exp(-1)) of 200 are 54


class TestLinear:
    """Hit against load, and nearness among equals."""

    NEAR, FAR = Place("z", "rack-1", "h1"), Place("z", "rack-2", "h2")

    def test_weights(self):
        a, b = worker("a", hit_blocks=60, queue_tokens=1000), worker("b", queue_tokens=500)
        assert LinearPolicy().choose(REQUEST, [a, b]).prefill == "a"
        assert LinearPolicy(alpha=0.2, beta=0.8).choose(REQUEST, [a, b]).prefill == "b"

    def test_of_two_racks_the_near_one_is_chosen_when_equally_loaded(self):
        request = structs.replace(REQUEST, place=Place("z", "rack-1", "conductor"))
        far, near = worker("a", queue_tokens=500, place=self.FAR), worker("b", queue_tokens=500, place=self.NEAR)
        assert LinearPolicy().choose(request, [far, near]).prefill == "b"
        assert LinearPolicy().choose(structs.replace(request, place=self.FAR), [far, near]).prefill == "a"
        assert LinearPolicy().choose(request, [replace(far, hit_blocks=50), near]).prefill == "a"
        assert LinearPolicy().choose(request, [replace(far, queue_tokens=100), near]).prefill == "a"

    def test_nearness(self):
        places = [self.NEAR, Place("z", "rack-1", "h2"), self.FAR, Place("y", "rack-1", "h1")]
        assert [nearness(self.NEAR, p) for p in places] == [1, 2 / 3, 1 / 3, 0]


def test_power_of_two_looks_at_two():
    workers = [worker(f"w{i}", queue_tokens=1000 * i) for i in range(4)]
    policy = make_policy("power-of-two")
    chosen = [policy.choose(REQUEST, workers).prefill for _ in range(300)]
    assert set(chosen) == {"w0", "w1", "w2"}  # the most loaded one never wins
    assert chosen.count("w0") == pytest.approx(150, abs=40)


class TestSessionAffinity:
    """A session stays while its worker is there and not far behind."""

    REQUEST = structs.replace(REQUEST, session="s")

    def test_stays_and_leaves(self):
        policy = SessionAffinity(LeastLoaded(), patience_s=1.0)
        a, b = worker("a", queue_tokens=100), worker("b", queue_tokens=200)
        assert policy.choose(self.REQUEST, [a, b]).prefill == "a"
        assert policy.choose(self.REQUEST, [replace(a, queue_tokens=9000), b]).prefill == "a"
        assert policy.choose(REQUEST, [replace(a, queue_tokens=9000), b]).prefill == "b"
        assert policy.choose(self.REQUEST, [replace(a, queue_tokens=10_300), b]).prefill == "b"
        assert policy.choose(self.REQUEST, [a, b]).prefill == "b"
        assert policy.choose(self.REQUEST, [a]).prefill == "a"

    def test_a_copy_changes_nothing(self):
        policy = SessionAffinity(RoundRobin())
        workers = [worker("a"), worker("b")]
        policy.choose(self.REQUEST, workers)
        other = copy.deepcopy(policy)
        for number in range(3):
            other.choose(structs.replace(REQUEST, session=str(number)), workers)
        assert (len(policy._homes), len(other._homes)) == (1, 4)
        assert policy.choose(structs.replace(REQUEST, session="t"), workers).prefill == "b"

    def test_memory_is_bounded(self):
        policy = SessionAffinity(RoundRobin(), max_sessions=3)
        workers = [worker("a"), worker("b")]
        for number in range(10):
            policy.choose(structs.replace(REQUEST, session=str(number)), workers)
            policy.check()


def test_own_dispatches_count_until_the_worker_has_seen_them():
    load = LoadTracker()
    load.report(WorkerLoad(num_running=2, blocks_free=50, prefill_tokens_waiting=100))

    def figures() -> tuple[int, int, int]:
        view = load.view(InstanceId("w"), Role.BOTH, 0)
        return view.queue_tokens, view.num_requests, view.blocks_free

    load.sent("r.1", 400, 10)
    load.sent("r.2", 600, 45)
    assert figures() == (1100, 4, 0)
    load.on_report("r.2")
    assert figures() == (500, 3, 40)
    load.report(load.reported)  # may have crossed the submission on the wire
    assert figures() == (500, 3, 40)
    load.check()
    load.report(WorkerLoad(prefill_tokens_waiting=400))
    assert figures() == (400, 0, 0)
    load.sent("r.3", 1, 1)
    load.reset(WorkerLoad())
    assert figures() == (0, 0, 0)


def test_reports_under_way_do_not_erase_what_was_sent_behind_them():
    load = LoadTracker()
    for number in range(1, 6):
        load.sent(f"r.{number}", 8000, 125)
        load.numbered(f"r.{number}", number)
    load.sent("peer/r.1", 100, 2)  # another conductor's has no number here
    shown = []
    for taken in (0, 0, 0, 3, 5):
        load.report(WorkerLoad(), taken)
        load.check()
        shown.append(load.view(InstanceId("w"), Role.BOTH, 0).queue_tokens)
    assert shown == [40_100, 40_000, 40_000, 16_000, 0]


def test_draws_that_are_not_needed_are_passed_over_as_if_they_were_made():
    for num_scores in (1, 2, 7, 64, 300):
        drawn, passed = random.Random(5), random.Random(5)
        for _ in range(num_scores):
            drawn.random()
        assert place_of_least([0.0] + [1.0] * (num_scores - 1), passed) == 0
        assert drawn.getstate() == passed.getstate()
