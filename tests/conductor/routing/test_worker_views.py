"""The kept views are those made anew, whatever happened; what is decided on them is what the plain way decides."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.conductor.routing.policies.base import RequestView, any_of_least, decoders, place_of_least, prefillers
from tanghulu.conductor.routing.policies.decode import Ties, decode_costs, moving, near_places
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES, make_policy
from tanghulu.conductor.routing.policies.ttft_min import TtftMin
from tanghulu.conductor.routing.worker_state import LoadTracker, views
from tanghulu.conductor.routing.worker_views import WorkerViews
from tanghulu.session.load import WorkerLoad
from tanghulu.types import InstanceId, Place, Role


@dataclass(eq=False)
class Member:
    """A worker without its process."""

    id: InstanceId
    role: Role
    place: Place = Place()
    load: LoadTracker = field(default_factory=LoadTracker)


IDS = [InstanceId(f"w{number}") for number in range(10)]
#: Few values, so that equal scores are common.
LOADS = st.builds(
    WorkerLoad,
    num_running=st.sampled_from([0, 1, 9]),
    blocks_free=st.sampled_from([20, 5000]),
    blocks_total=st.just(5000),
    prefill_tokens_waiting=st.sampled_from([0, 0, 700, 60_000]),
    prefill_tokens_per_s=st.sampled_from([0.0, 3000.0, 3001.0]),
    decode_step_s=st.sampled_from([0.0, 0.03]),
    store_bytes_per_s=st.sampled_from([0.0, 5e9]),
    peer_bytes_per_s=st.sampled_from([0.0, 1e8, 1e11]),
)
NUMBERS = st.integers(0, 9)
EVENTS = st.one_of(
    st.tuples(st.just("report"), NUMBERS, LOADS),
    st.tuples(st.just("sent"), NUMBERS, st.sampled_from([10, 5000])),
    st.tuples(st.just("reserve_decode"), NUMBERS, st.just(30)),
    st.tuples(st.just("place"), NUMBERS, st.sampled_from(["r1", "r2"])),
)
OVERLAPS = st.dictionaries(st.sampled_from([*IDS, InstanceId("nobody")]), st.sampled_from([1, 30, 99]), max_size=6)
REQUESTS = st.builds(
    RequestView,
    st.sampled_from([10, 6400]),
    st.just(64),
    st.just(1 << 20),
    st.sampled_from([0, 0, 60, 100]),
    mean_output=st.sampled_from([0.0, 300.0]),
    most_output=st.sampled_from([0, 1, 40]),
)


def happen(members: list[Member], event: tuple[str, int, object], number: int) -> None:
    what, at, value = event
    member = members[at]
    if what == "report":
        member.load.report(value)
    elif what == "sent":
        member.load.sent(f"r{number}", value, 40)
    elif what == "reserve_decode":
        member.load.reserve_decode(f"p{number}", value)
    else:
        member.place = Place(rack=value)
        member.load.renew()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]), min_size=10, max_size=10),
    st.lists(st.tuples(st.lists(EVENTS, max_size=5), OVERLAPS, OVERLAPS, REQUESTS), min_size=1, max_size=6),
)
def test_kept_views_are_made_views_and_lead_to_the_same_decisions(roles, rounds):
    members = [Member(*each) for each in zip(IDS, roles, strict=True)]
    worker_views = WorkerViews(members)
    by_name = {name: (make_policy(name), make_policy(name)) for name in POLICY_NAMES}
    for number, (events, hits, coming, request) in enumerate(rounds):
        for event in events:
            happen(members, event, number)
        plain = views(members, hits, coming)
        shown = worker_views.views(hits, coming)
        assert shown == plain
        worker_views.check()
        for name, (one, other) in by_name.items():
            decision, expected = one.choose(request, shown), other.choose(request, plain)
            assert decision == expected, name
            assert decision is None or decision.candidates == expected.candidates, name
            assert one.choose_decode(request, shown) == other.choose_decode(request, plain), name


def test_a_later_prompt_shows_nothing_of_the_one_before():
    members = [Member(id, Role.BOTH) for id in IDS]
    worker_views = WorkerViews(members)
    assert [w.id for w in worker_views.views({IDS[3]: 7}, {IDS[4]: 2}) if w.match_blocks] == [IDS[3], IDS[4]]
    assert worker_views.views({}, {}).prefill.holders == []
    assert worker_views.views({IDS[3]: 7}, {})[3].hit_blocks == 7


PEERS = st.lists(
    st.tuples(
        st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]),
        LOADS,
        st.sampled_from([0, 0, 0, 30, 99]),
        st.sampled_from([0, 0, 50]),
        st.sampled_from([0.0, 1e8, 1e11]),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(PEERS, REQUESTS, st.sampled_from([0.0, 1.0, 3.0]), st.sampled_from([0.0, 6.0]), st.integers(0, 3))
def test_looking_at_few_decides_as_scoring_all(parts, request, weight, load_weight, seed):
    members = [Member(InstanceId(f"w{n}"), role) for n, (role, *_) in enumerate(parts)]
    for member, (_, load, *_) in zip(members, parts, strict=True):
        member.load.report(load)
    made = zip(views(members, {}, {}), parts, strict=True)
    shown = [replace(v, hit_blocks=h, coming_blocks=c, peer_bytes_per_s=bw) for v, (_, _, h, c, bw) in made]
    able, deciders, ties = prefillers(shown), decoders(shown), Ties(seed)
    decision = TtftMin(weight, seed, load_weight).choose(request, shown)
    if not able or not deciders:
        assert decision is None
        return
    scores = TtftMin(weight, seed, load_weight)._scores(request, able, shown)
    prefill = able[place_of_least([scores.of(w) for w in able], ties.prefill)]
    seen = moving(request, prefill, decision.fetch)
    decode = deciders[any_of_least(decode_costs(seen, deciders, prefill), ties.decode)].id
    assert (decision.prefill, decision.decode) == (prefill.id, decode)


def test_of_many_workers_few_are_looked_at():
    """128 workers at random loads: a handful could win a phase, the others have no finite score."""
    roles, chance = (Role.PREFILL, Role.DECODE), random.Random(1)
    members = [Member(InstanceId(f"w{n}"), roles[n % 2]) for n in range(128)]
    for member in members:
        waiting, speed = chance.randrange(20_000), chance.uniform(9500, 10_500)
        member.load.report(WorkerLoad(chance.randrange(32), 0, 8192, 4096, waiting, speed, 0.02, 2e9))
    request, policy = RequestView(8448, 64, 2 << 20), TtftMin()
    shown = WorkerViews(members).views({members[70].id: 128}, {})
    able, deciders = prefillers(shown), decoders(shown)
    scores = policy._scores(request, able, shown).that_could_win(able)
    assert sum(map(math.isfinite, scores)) < 8
    assert len(near_places(request, deciders, shown[70])) < 16
