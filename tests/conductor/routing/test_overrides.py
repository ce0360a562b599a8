"""What a request may ask of routing for itself: a policy, weights, workers; and what is reserved at decode workers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from tanghulu.conductor.dispatch.admission import forecast
from tanghulu.conductor.main import Conductor, ConductorConfig
from tanghulu.conductor.routing.expected_output import FIRST_EXPECTED_OUTPUT
from tanghulu.conductor.routing.overrides import (
    MAX_POLICIES,
    RoutingOverrides,
    RoutingPolicies,
    parse_weights,
    restricted,
)
from tanghulu.conductor.routing.policies.base import Decision, RequestView, WorkerView
from tanghulu.conductor.routing.policies.registry import PolicyOptions
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.errors import ConfigError
from tanghulu.session.load import WorkerLoad
from tanghulu.types import InstanceId, Role

BODY = {"model": "tiny", "prompt": "a prompt of some blocks of four tokens", "max_tokens": 2}


class TestPolicies:
    """A wished combination has a policy of its own."""

    def test_the_same_wish_has_the_same_policy(self):
        policies = RoutingPolicies("ttft-min", PolicyOptions(alpha=0.9))
        assert policies.of(RoutingOverrides()) is policies.default
        overrides = RoutingOverrides("linear", weights=(("beta", 0.1),))
        assert policies.of(overrides) is policies.of(overrides)
        assert policies.of(overrides).name == "linear"
        assert (policies.of(overrides)._alpha, policies.of(overrides)._beta) == (0.9, 0.1)
        assert policies.of(RoutingOverrides(weights=(("alpha", 0.2),))).name == "ttft-min"

    def test_their_number_is_bounded(self):
        policies = RoutingPolicies("linear", PolicyOptions())
        for number in range(3 * MAX_POLICIES):
            policies.of(RoutingOverrides(weights=(("alpha", float(number)),)))
            policies.check()

    @pytest.mark.parametrize("text", ["speed=1", "alpha", "alpha=x", "alpha=-1", "alpha=inf"])
    def test_bad_weights_name_themselves(self, text):
        with pytest.raises(ConfigError, match=text.partition("=")[0]):
            ConductorConfig(policy_weights=text)

    def test_weights(self):
        live = PolicyOptions(replica_weight=PolicyOptions().load_weight + 1)
        assert parse_weights("alpha=0.7, temperature=0.2") == replace(live, alpha=0.7, temperature=0.2)
        assert parse_weights("") == live
        assert parse_weights("replica_weight=1") == PolicyOptions()


def test_only_the_wished_workers_are_able():
    shown = [WorkerView(InstanceId(n), True, True) for n in "abc"]
    able = restricted(shown, RoutingOverrides(prefill=InstanceId("a"), decode=InstanceId("b")))
    assert [(w.can_prefill, w.can_decode) for w in able] == [(True, False), (False, True), (False, False)]
    assert restricted(shown, RoutingOverrides(prefill=InstanceId("gone"))) == shown


async def test_a_request_chooses_workers_policy_and_weights(cluster):
    workers = [await cluster.add() for _ in range(3)]
    for worker in (workers[2], workers[0], workers[2]):
        answer = await cluster.http.post("/v1/completions", json={**BODY, "routing": {"worker": worker.id}})
        assert answer.status_code == 200
    assert [len(w.submits) for w in workers] == [1, 0, 2]
    routing = {"policy": "linear", "weights": {"alpha": 3.0, "beta": 0.0}}
    seen = (await cluster.http.post("/route", json={**BODY, "routing": routing})).json()
    assert seen["policy"] == "linear"
    scores = {c["worker"]: c["score"] for c in seen["candidates"] if c["phase"] == "prefill"}
    assert scores[workers[0].id] == pytest.approx(-3.0 - 0.05)
    assert (await cluster.http.post("/route", json=BODY)).json()["policy"] == "ttft-min"


async def test_prefill_and_decode_may_be_wished_apart(cluster):
    prefills = [await cluster.add(Role.PREFILL) for _ in range(2)]
    decodes = [await cluster.add(Role.DECODE) for _ in range(2)]
    routing = {"prefill_worker": prefills[1].id, "decode_worker": decodes[0].id}
    for _ in range(3):
        assert (await cluster.http.post("/v1/completions", json={**BODY, "routing": routing})).status_code == 200
    assert [len(w.submits) for w in (*prefills, *decodes)] == [0, 3, 3, 0]


@pytest.mark.parametrize(
    ("routing", "text"),
    [
        ({"policy": "best"}, "best"),
        ({"weights": {"speed": 1.0}}, "speed"),
        ({"weights": {"alpha": -1.0}}, "alpha"),
        ({"worker": "nobody"}, "nobody"),
        ({"wroker": "w"}, "wroker"),
    ],
)
async def test_a_wish_that_cannot_be_fulfilled_is_refused(cluster, routing, text):
    await cluster.add()
    answer = await cluster.http.post("/v1/completions", json={**BODY, "routing": routing})
    assert answer.status_code == 400
    assert text in answer.text


async def test_a_request_on_its_way_counts_at_the_decode_worker_it_will_go_to(cluster):
    prefill, decode = await cluster.add(Role.PREFILL), await cluster.add(Role.DECODE)
    prefill.hold()
    answer = asyncio.create_task(cluster.http.post("/v1/completions", json=BODY))
    await cluster.until(lambda: prefill.submits)

    async def coming() -> dict[str, int]:
        seen = (await cluster.http.post("/route", json=BODY)).json()
        return {w["id"]: w["coming_requests"] for w in seen["workers"]}

    assert await coming() == {prefill.id: 0, decode.id: 1}
    prefill.release()
    assert (await answer).status_code == 200
    assert await coming() == {prefill.id: 0, decode.id: 0}
    assert cluster.dispatcher.router.output.tokens == pytest.approx(FIRST_EXPECTED_OUTPUT + 0.02 * (2 - 256))


def test_reservations_take_room_until_they_are_retracted():
    load = LoadTracker()
    load.report(WorkerLoad(num_running=3, blocks_free=50))
    load.reserve_decode("r", 20)
    view = load.view(InstanceId("d"), Role.DECODE, 0)
    assert (view.num_requests, view.coming_requests, view.blocks_free) == (4, 1, 30)
    load.release_decode("r")
    load.release_decode("r")
    view = load.view(InstanceId("d"), Role.DECODE, 0)
    assert (view.num_requests, view.coming_requests, view.blocks_free) == (3, 0, 50)


def test_the_decode_load_is_forecast_for_the_end_of_the_prefill():
    """The worked example of the admission module: of 40 that decode 24 are left, 10 come, and the request itself."""
    prefill = WorkerView(InstanceId("p"), True, False, queue_s=4.2, prefill_tokens_per_s=10_000.0)
    decode = WorkerView(InstanceId("d"), False, True, num_requests=50, coming_requests=10, decode_step_s=0.03)
    request = RequestView(6000, 64, 1 << 20, mean_output=400)
    seen = forecast(request, [prefill, decode], Decision(prefill.id, decode.id))
    assert seen.ttft_s == pytest.approx(4.8)
    assert seen.tbt_s == pytest.approx(0.03)  # fewer than now: not shorter than what was measured
    crowd = WorkerView(InstanceId("d"), False, True, num_requests=70, coming_requests=30, decode_step_s=0.03)
    seen = forecast(request, [prefill, crowd], Decision(prefill.id, crowd.id))
    assert seen.tbt_s == pytest.approx(0.03 * (1 + (24 + 30 + 1 - 40) / 16))


async def test_services_side_by_side_draw_ties_apart():
    """Equal workers, equal requests: with equal draws all conductors would run to the same worker at once."""
    workers = [WorkerView(InstanceId(f"w{n}"), True, True) for n in range(64)]
    request = RequestView(1000, 64, 1 << 20)

    def drawn(name: str) -> list[str]:
        conductor = Conductor(ConductorConfig(), name, CollectorRegistry())
        policy = conductor.dispatcher.router.policies.default
        return [policy.choose(request, workers).prefill for _ in range(20)]

    assert drawn("conductor-1") != drawn("conductor-2")
    assert drawn("conductor-1") == drawn("conductor-1")
