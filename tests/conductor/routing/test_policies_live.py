"""What the live conductor shows its policy beyond workers' reports: blocks in flight, sessions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tanghulu.conductor.dispatch.admission import Admission, forecast
from tanghulu.conductor.routing.in_flight import InFlightBlocks
from tanghulu.conductor.routing.policies.base import Decision, RequestView, WorkerView
from tanghulu.conductor.routing.policies.decode import decode_costs
from tanghulu.conductor.routing.worker_views import shortlist
from tanghulu.session.load import DecodeProfile
from tanghulu.types import InstanceId, Role
from tests.conductor.cluster import running_cluster

PROMPT = "a prompt of many tokens that fills several blocks of four tokens each"


def chain(text: str) -> list[str]:
    """Chained hashes in miniature: block i is named by everything up to it."""
    return [text[: i + 1] for i in range(len(text))]


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.text("ab", max_size=6)), max_size=8), st.text("ab", max_size=6))
def test_in_flight_blocks_are_the_longest_common_prefix_of_each_worker(sent, wanted):
    blocks = InFlightBlocks()
    for number, (worker, text) in enumerate(sent):
        blocks.begin(f"r{number}", InstanceId(worker), chain(text))
        blocks.check()
    expected: dict[str, int] = {}
    for worker, text in sent:
        shared = sum(a == b for a, b in zip(chain(text), chain(wanted), strict=False))
        if shared:
            expected[worker] = max(expected.get(worker, 0), shared)
    assert blocks.match(chain(wanted)) == expected
    for number in range(len(sent)):
        blocks.end(f"r{number}")
        blocks.end(f"r{number}")  # the second time says nothing new
        blocks.check()
    assert len(blocks) == 0
    assert blocks.match(chain(wanted)) == {}


async def test_a_prompt_follows_its_like_that_is_still_being_computed(cluster):
    first, second = await cluster.add(), await cluster.add()
    for worker in (first, second):
        worker.hold()
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
    answer = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
    await cluster.until(lambda: first.submits or second.submits)
    busy = first if first.submits else second
    seen = (await cluster.http.post("/route", json=body)).json()
    coming = {w["id"]: w["coming_blocks"] for w in seen["workers"]}
    assert coming == {first.id: 0, second.id: 0, busy.id: seen["num_blocks"] - (seen["num_prompt_tokens"] % 4 > 0)}
    for worker in (first, second):
        worker.release()
    assert (await answer).status_code == 200
    seen = (await cluster.http.post("/route", json=body)).json()
    assert not any(w["coming_blocks"] for w in seen["workers"])


async def test_what_would_be_late_is_refused_at_once(tmp_path):
    async with running_cluster(tmp_path, ttft_slo_s=2.0) as cluster:
        worker = await cluster.add()
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
        assert (await cluster.http.post("/v1/completions", json=body)).status_code == 200
        load = cluster.registry.workers[worker.id].load
        load.report(structs.replace(load.reported, prefill_tokens_waiting=30_000, prefill_tokens_per_s=10_000.0))
        answer = await cluster.http.post("/v1/completions", json=body)
        assert answer.status_code == 429
        assert cluster.metric("refused_prompt_tokens_total") > 0
        assert cluster.metric("requests_total", outcome="overloaded") == 1
        assert "the first token would come after 3.0" in answer.text
        assert len(worker.submits) == 1


class TestAdmission:
    """The worked example of the module."""

    REQUEST = RequestView(11_000, 64, 1 << 20)
    PREFILL = WorkerView(InstanceId("p"), True, False, queue_s=4.2, prefill_tokens_per_s=10_000.0)
    DECODE = WorkerView(InstanceId("d"), False, True, 0, 9, 900, 1000, decode_profile=DecodeProfile(0.02, 1e-3, 1e-6))
    DECISION = Decision(InstanceId("p"), InstanceId("d"))

    def test_ttft(self):
        seen = forecast(self.REQUEST, [self.PREFILL, self.DECODE], self.DECISION)
        assert seen.ttft_s == pytest.approx(5.3)
        assert "5.30 s" in Admission(5.0, 0.1).objection(seen)
        assert Admission(5.5, 0.1).objection(seen) == ""
        assert "6.30 s" in Admission(5.5, 0.1).objection(seen, waited_s=1.0)
        assert Admission().objection(seen, waited_s=1e9) == ""

    def test_tbt(self):
        seen = forecast(self.REQUEST, [self.PREFILL, self.DECODE], self.DECISION)
        assert seen.tbt_s == pytest.approx(0.02 + 10 * 1e-3 + (100 * 64 + 11_000) * 1e-6)
        assert "47 ms" in Admission(0, 0.04).objection(seen)
        assert Admission(0, 0.05).objection(seen) == ""


async def test_a_session_stays_where_it_was(tmp_path):
    async with running_cluster(tmp_path, policy="round-robin+session-affinity") as cluster:
        workers = [await cluster.add() for _ in range(3)]
        for turn in range(4):
            body = {"model": "tiny", "prompt": f"{turn}", "max_tokens": 1}
            await cluster.http.post("/v1/completions", json={**body, "prompt_cache_key": "mine"})
            await cluster.http.post("/v1/completions", json=body)
        assert [len(w.submits) for w in workers] == [4, 4, 0]  # without sessions 3, 3, 2


@dataclass(frozen=True)
class Pressed:
    pressure: float


@dataclass(frozen=True)
class Listed:
    id: InstanceId
    role: Role
    load: Pressed


class TestShortlist:
    """Of very many workers those that can win."""

    WORKERS = tuple(Listed(InstanceId(f"w{n:04d}"), Role.BOTH, Pressed(n * 37 % 1000)) for n in range(1000))

    def test_few_are_all_shown(self):
        assert shortlist(self.WORKERS[:256], {}, {}) == list(self.WORKERS[:256])

    def test_holders_and_the_least_loaded_are_on_it(self):
        hits = {w.id: n for n, w in enumerate(self.WORKERS[500:], 1)}
        coming = {self.WORKERS[3].id: 5}
        kept = shortlist(self.WORKERS, hits, coming)
        assert len(kept) <= 256
        assert {self.WORKERS[3], *self.WORKERS[936:], *sorted(self.WORKERS, key=lambda w: w.load.pressure)[:64]} == set(
            kept
        )
        assert kept == sorted(kept, key=lambda w: w.id)

    def test_both_phases_are_on_it(self):
        idle = [replace(w, role=Role.DECODE, load=Pressed(0)) for w in self.WORKERS[:500]]
        busy = [replace(w, role=Role.PREFILL, load=Pressed(9)) for w in self.WORKERS[500:]]
        assert {w.role for w in shortlist([*idle, *busy], {}, {})} == {Role.DECODE, Role.PREFILL}


class TestCompany:
    """What those who decode beside a request cost it, as measured and as long as the answer is."""

    PROFILE = DecodeProfile(fixed_s=0.006, sequence_s=6e-5, token_s=8e-9)
    ALONE = WorkerView(
        InstanceId("a"), False, True, 0, 4, 900, 1000, 1e5, 0.006, 1e9, decode_profile=PROFILE, context_tokens=32_768
    )

    def test_is_what_sequences_and_their_contexts_add_to_a_step(self) -> None:
        added_s = 4 * 6e-5 + 32_768 * 8e-9
        assert self.ALONE.batch_s == pytest.approx(64 * added_s)
        assert replace(self.ALONE, decode_profile=None).batch_s == pytest.approx(64 * 4 * 0.006 / 16)

    def test_never_counts_for_nothing_where_a_profile_says_so(self) -> None:
        flat = replace(self.ALONE, decode_profile=DecodeProfile(fixed_s=0.006))
        assert flat.batch_s == pytest.approx(64 * 4 * 0.006 / 64)

    def test_a_worker_that_prefilled_keeps_what_another_would_only_copy(self) -> None:
        prefilled, idle = (
            replace(self.ALONE, can_prefill=True),
            WorkerView(InstanceId("b"), True, True, 0, 0, 900, 1000, 1e5, 0.006, 1e9),
        )
        request = RequestView(8192, 64, 1 << 20)
        assert decode_costs(request, [prefilled], prefilled)[0] < decode_costs(request, [idle], prefilled)[0]

    @pytest.mark.parametrize(("expected", "most", "share"), [(256.0, 8, 1 / 8), (32.0, 0, 1 / 2), (0.0, 0, 1.0)])
    def test_lasts_as_long_as_the_answer(self, expected: float, most: int, share: float) -> None:
        request = RequestView(8192, 64, 1 << 20, expected_output=expected, most_output=most)
        assert request.judged_share == share
        # Who prefilled moves nothing and has room, so the batch is all that there is.
        assert decode_costs(request, [self.ALONE], self.ALONE) == [pytest.approx(share * self.ALONE.batch_s)]
