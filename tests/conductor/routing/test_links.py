"""Links between places: fitted from what workers read from each other, and what policies make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tanghulu.conductor.routing.links import LinkSpeeds
from tanghulu.conductor.routing.policies.base import RequestView, WorkerView
from tanghulu.conductor.routing.policies.fetching import best_source, nearest_source, peer_fetch_s
from tanghulu.conductor.routing.policies.registry import make_policy
from tanghulu.session.load import PeerRead, WorkerLoad
from tanghulu.types import InstanceId, Place
from tests.conductor.cluster import running_cluster

NEAR, FAR = 10e9, 0.1e9
RACK_A = [Place("z", "a", f"a{n}") for n in range(3)]
RACK_B = [Place("z", "b", f"b{n}") for n in range(3)]


@pytest.fixture
def two_racks():
    """Within a rack a GB takes 0.1 s, between the racks 10 s; other hosts than the last of each were seen."""
    links = LinkSpeeds()
    links.observe(RACK_A[0], RACK_A[1], int(NEAR), 1.0)
    links.observe(RACK_B[0], RACK_A[1], int(FAR), 1.0)
    return links


def worker(name: str, place: Place, **what: object) -> WorkerView:
    known = {"blocks_free": 10_000, "blocks_total": 10_000, "prefill_tokens_per_s": 10_000.0, "peer_bytes_per_s": 1e9}
    return WorkerView(InstanceId(name), True, True, place=place, **{**known, **what})


class TestLinkSpeeds:
    """What is known of a link is what is known of the narrowest one like it."""

    def test_hosts_racks_zones_and_beyond(self, two_racks):
        assert two_racks.bytes_per_s(RACK_A[0], RACK_A[1]) == NEAR
        assert two_racks.bytes_per_s(RACK_A[2], RACK_A[0]) == NEAR, "the same rack"
        assert two_racks.bytes_per_s(RACK_B[1], RACK_B[2]) == NEAR, "within a rack"
        assert two_racks.bytes_per_s(RACK_B[1], RACK_A[2]) == FAR, "the same two racks"
        assert two_racks.bytes_per_s(RACK_A[1], RACK_B[2]) == FAR, "racks of one zone"
        assert two_racks.bytes_per_s(Place("y"), RACK_A[0]) == 0, "nothing is known beyond the zone"
        two_racks.check()

    def test_the_past_fades_and_large_reads_weigh_more(self):
        links = LinkSpeeds()
        for _ in range(50):
            links.observe(RACK_A[0], RACK_B[0], 10**9, 1.0)
        for _ in range(30):
            links.observe(RACK_A[0], RACK_B[0], 10**9, 10.0)
        assert links.bytes_per_s(RACK_A[0], RACK_B[0]) == pytest.approx(1e8, rel=0.1)
        links.observe(RACK_A[0], RACK_B[0], 1000, 1.0)
        assert links.bytes_per_s(RACK_A[0], RACK_B[0]) == pytest.approx(1e8, rel=0.15)

    @given(
        st.lists(
            st.tuples(
                st.builds(Place, *[st.sampled_from("pq")] * 3),
                st.builds(Place, *[st.sampled_from("pq")] * 3),
                st.integers(-1, 10**12),
                st.floats(-1, 1e3),
            )
        )
    )
    def test_a_speed_lies_between_those_measured(self, reads):
        links = LinkSpeeds()
        for source, target, num_bytes, seconds in reads:
            links.observe(source, target, num_bytes, seconds)
            links.check()
        rates = [n / s for _, _, n, s in reads if n > 0 and s > 0]
        for source, target, _, _ in reads:
            known = links.bytes_per_s(source, target)
            assert known == 0 or min(rates) * 0.999 <= known <= max(rates) * 1.001


class TestTwoRacks:
    """Policies count what a link takes."""

    REQUEST = RequestView(6400, 64, 2 << 20)  # 100 blocks are 210 MB: 0.02 s within a rack, 2.1 s between racks

    def test_of_equal_holders_the_near_one_sends(self, two_racks):
        holders = [worker("far", RACK_B[1], hit_blocks=100), worker("near", RACK_A[1], hit_blocks=100)]
        target = worker("target", RACK_A[2])
        request = structs.replace(self.REQUEST, links=two_racks)
        assert best_source([*holders, target]) is holders[0], "nothing else tells them apart"
        assert nearest_source(request, [*holders, target], target) is holders[1]
        assert peer_fetch_s(request, holders[1], target) < 0.1 < 1 < peer_fetch_s(request, holders[0], target)

    @pytest.mark.parametrize("name", ["ttft-min", "mooncake"])
    def test_from_the_other_rack_it_is_computed_and_within_it_fetched(self, two_racks, name):
        holder = worker("holder", RACK_B[0], hit_blocks=100, queue_tokens=1_000_000)
        request = structs.replace(self.REQUEST, links=two_racks)
        for place, fetches in ((RACK_A[2], False), (RACK_B[2], True)):
            decision = make_policy(name).choose(request, [holder, worker("idle", place)])
            assert decision.prefill == "idle"
            if name == "ttft-min":
                assert (decision.fetch is not None) == fetches
        unmeasured = make_policy(name).choose(self.REQUEST, [holder, worker("idle", RACK_A[2])])
        assert unmeasured.fetch is not None, "without measured links its own speed counts"

    def test_decoding_goes_on_in_the_rack_of_the_prefill(self, two_racks):
        prefill = replace(worker("p", RACK_A[0]), can_decode=False)
        near, far = (replace(worker(n, p), can_prefill=False) for n, p in (("near", RACK_A[2]), ("far", RACK_B[2])))
        busy = replace(near, num_requests=2)
        policy, request = make_policy("ttft-min"), structs.replace(self.REQUEST, links=two_racks)
        assert policy.choose(self.REQUEST, [prefill, busy, far]).decode == "far"
        assert policy.choose(request, [prefill, busy, far]).decode == "near"
        assert policy.choose_decode(structs.replace(request, kv_place=RACK_B[0]), [busy, far]) == "far"
        assert policy.choose_decode(structs.replace(request, kv_place=RACK_A[0]), [busy, far]) == "near"


async def test_what_workers_say_of_their_reads_is_taken_for_their_places(tmp_path):
    async with running_cluster(tmp_path) as cluster:
        one, other = await cluster.add(), await cluster.add()
        address = str(cluster.registry.workers[other.id].instance.address)
        reads = (PeerRead(address, 3000, 1.5), PeerRead("?:1", 0, 1))
        one.load = WorkerLoad(blocks_total=1000, blocks_free=1000, reads=reads)
        body = {"model": "tiny", "prompt": "read from each other", "max_tokens": 2}
        links = cluster.dispatcher.router.links
        for _ in range(2):  # whoever is asked first, the other one is next
            assert (await cluster.http.post("/v1/completions", json=body | {"routing": {"worker": one.id}})).is_success
        await cluster.until(lambda: len(links))
        assert links.bytes_per_s(Place(), Place()) == pytest.approx(2000)
