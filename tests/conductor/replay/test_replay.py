"""Replay: the model's own figures, the cluster's parts, and whole runs on an excerpt of a real trace."""

from __future__ import annotations

import functools
import gzip
import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.conductor.replay.decode import DecodeInstance
from tanghulu.conductor.replay.main import COMMAND, ReplayConfig, replay
from tanghulu.conductor.replay.model import Job, LatencyModel
from tanghulu.conductor.replay.prefill import BlockCache
from tanghulu.conductor.replay.simulation import ClusterConfig, make_simulation
from tanghulu.conductor.replay.trace import TraceRequest, read_trace
from tanghulu.conductor.routing.policies.base import Decision
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES, make_policy
from tanghulu.errors import ConfigError, InvalidRequest

EXCERPT = Path(__file__).parent / "data" / "conversation_excerpt.jsonl.gz"
#: Four workers of each kind with small caches, at a load of about 0.9.
SMALL = ReplayConfig(traces=(EXCERPT,), prefill=4, decode=4, speedup=0.45, blocks=700, warmup="0.3")


@functools.cache
def run(**changed: object):
    (report,) = replay(replace(SMALL, **changed))
    return report


def request(arrival_s: float, num_tokens: int, output_tokens: int = 1, blocks: tuple[int, ...] = ()) -> TraceRequest:
    return TraceRequest(arrival_s, num_tokens, output_tokens, blocks, "", True)


_LINE = b'{"timestamp": 1, "input_length": %s, "output_length": %s, "hash_ids": %s}'


class TestModel:
    """The constants of the module's docstring."""

    def test_prefill(self):
        profile = LatencyModel().profile
        assert profile.token_s == pytest.approx(94.6e-6, rel=1e-3)
        assert profile.pair_s == pytest.approx(2.1e-9, rel=1e-2)
        assert profile.seconds(8192, 0) == pytest.approx(0.936, abs=2e-3)
        assert LatencyModel().kv_token_bytes == 327_680

    def test_loading_bounds_a_full_hit(self):
        assert LatencyModel().profile.seconds(100_000, 100_000) == pytest.approx(99_999 * 327_680 / 128e9)

    def test_decode_step_and_transfer(self):
        assert LatencyModel().step_s(0, 0) == 0
        assert LatencyModel().step_s(100, 1e6) == pytest.approx(0.02 + 0.01 + 0.029)
        assert LatencyModel().transfer_s(1) == pytest.approx(512 * 327_680 / 70e9)


class TestBlockCache:
    """LRU with tail-first touches."""

    def test_leaves_go_before_the_prefix_they_stand_on(self):
        cache = BlockCache(4)
        cache.insert([1, 2, 3])
        cache.insert([1, 9])
        cache.insert([8])
        assert [b in cache for b in (1, 2, 3, 9, 8)] == [True, True, False, True, True]
        assert cache.leading([1, 2, 3]) == 2

    def test_copies_go_before_all_others_unless_they_were_there(self):
        cache = BlockCache(4)
        cache.insert([1, 2])
        cache.insert_copies([1, 7, 8])
        cache.insert([3])
        assert [b in cache for b in (1, 2, 3, 7, 8)] == [True, True, True, True, False]
        cache.insert([4])
        assert [b in cache for b in (1, 2, 3, 4, 7)] == [True, True, True, True, False]

    @given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=5, unique=True)), max_size=30))
    def test_like_a_plain_model(self, steps):
        cache, model = BlockCache(5), OrderedDict()
        for insert, blocks in steps:
            (cache.insert if insert else cache.touch)(blocks)
            for block in reversed(blocks):
                if insert or block in model:
                    model[block] = model.pop(block, None)
            while len(model) > 5:
                model.popitem(last=False)
            assert [b for b in range(10) if b in cache] == sorted(model)


class TestDecode:
    """A fluid batch, by hand."""

    def test_two_sequences(self):
        model = LatencyModel(c=0.02, d=0.0, e=0.0)
        worker = DecodeInstance(0, model)
        first, second = Job(request(0, 100, 21), 0), Job(request(0, 100, 11), 1)
        for job in (first, second):
            worker.reserve(job)
        assert worker.arrive(0.0, first) == pytest.approx(0.4)
        assert worker.arrive(0.1, second) == pytest.approx(0.3)  # step 5 + 10 = step 15
        ended, next_s = worker.leave(0.3)
        assert (ended, next_s) == ([second], pytest.approx(0.4))
        worker.check()
        assert worker.leave(0.4) == ([first], None)
        assert first.tbt_s == pytest.approx(0.02)
        worker.check()
        assert (worker.num_jobs, worker.reserved_tokens) == (0, 0)

    def test_a_full_worker_lets_wait(self):
        worker = DecodeInstance(0, LatencyModel(kv_tokens=1000))
        jobs = [Job(request(0, 600, 11), n) for n in range(2)]
        for job in jobs:
            worker.reserve(job)
            worker.arrive(0.0, job)
            worker.check()
        assert (worker.batch, worker.num_jobs) == (1, 2)
        ended, _ = worker.leave(1.0)
        assert ended == [jobs[0]]
        assert worker.batch == 1


class TestWholeWorker:
    """A worker of both phases, against steps counted by hand."""

    @staticmethod
    def serve(*requests: TraceRequest, **model: object) -> list[Job]:
        config = ClusterConfig(num_workers=1, model=LatencyModel(**model))
        return make_simulation(config, make_policy("ttft-min")).run(requests, check=True)

    def test_a_prompt_is_computed_in_chunks_and_decoded(self):
        (job,) = self.serve(request(0, 1024, 3, (1, 2)))
        model = LatencyModel()
        prefill_s = model.profile.seconds(1024, 0) + model.c  # two steps, each with its fixed part
        assert job.ttft_s == pytest.approx(prefill_s)
        assert job.tbt_s == pytest.approx(model.step_s(1, 1024), rel=1e-4)

    def test_a_prefill_delays_the_running_answer_and_a_decode_the_prefill(self):
        long, late = self.serve(request(0, 512, 101, (1,)), request(1.0, 512, 1, (2,)))
        alone, _ = self.serve(request(0, 512, 101, (1,)), request(9.0, 512, 1, (2,)))
        model = LatencyModel()
        assert long.tbt_s * 100 == pytest.approx(alone.tbt_s * 100 + model.profile.seconds(512, 0) - model.t0, rel=0.01)
        # It begins at the next step; one token of the step's budget is the decoding sequence's, so it takes two.
        assert 2 * model.step_s(1, 512) < late.ttft_s - model.profile.seconds(512, 0) + model.t0 < 3.1 * model.c

    def test_a_request_without_a_seat_waits_for_one(self):
        first, second = self.serve(request(0, 512, 51, (1,)), request(0, 512, 1, (2,)), max_batch=1)
        assert second.ttft_s > first.ttft_s + 50 * first.tbt_s
        first, second = self.serve(request(0, 512, 51, (1,)), request(0, 512, 1, (2,)), kv_tokens=1000)
        assert second.ttft_s > first.ttft_s + 50 * first.tbt_s

    def test_an_answer_decoded_elsewhere_moves_there(self):
        class Apart:
            name, ranks = "apart", True

            def choose(self, request, workers):
                return Decision(workers[0].id, workers[1].id)

            def choose_decode(self, request, workers):
                return workers[1].id

        simulation = make_simulation(ClusterConfig(num_workers=2), Apart())
        (job,) = simulation.run([request(0, 1024, 11, (1, 2))], check=True)
        move_s = LatencyModel().hand_over_s(1024, 0, job.prefill_s)
        assert move_s > 0
        assert job.join_s == pytest.approx(job.first_s + move_s)
        assert job.tbt_s * 10 == pytest.approx(move_s + 10 * LatencyModel().step_s(1, 1024), rel=1e-3)


class TestSimulation:
    """Whole runs."""

    def test_one_request_by_hand(self):
        simulation = make_simulation(ClusterConfig(), make_policy("ttft-min"))
        cold, warm = simulation.run([request(0, 1024, 1, (1, 2)), request(10, 1024, 1, (1, 2))], check=True)
        profile = LatencyModel().profile
        assert cold.ttft_s == pytest.approx(profile.seconds(1024, 0))
        assert warm.ttft_s == pytest.approx(profile.seconds(1024, 1023))
        assert (cold.prefill, cold.hit_tokens, warm.hit_tokens) == (warm.prefill, 0, 1023)

    def test_a_prefix_in_flight_is_waited_for(self):
        twins = [request(0, 51_200, 1, tuple(range(100))), request(0.1, 51_200, 1, tuple(range(100)))]
        together = make_simulation(ClusterConfig(num_prefill=1), make_policy("ttft-min")).run(twins)
        assert together[1].hit_tokens == 51_199

    def test_a_hot_prefix_is_copied_ahead_of_demand(self):
        """Eight workers take turns; once one has read a document, twice a second another one is asked about it."""
        document = tuple(range(64))
        arrivals = [0.0, *(10 + n / 2 for n in range(8))]
        asked = [request(at, 33_280, 1, (*document, 1000 + n)) for n, at in enumerate(arrivals)]
        configs = {rate: ClusterConfig(hot_prefix_rate=rate) for rate in (0.0, 0.05)}
        runs = {rate: make_simulation(config, make_policy("round-robin")) for rate, config in configs.items()}
        ttft = {rate: sum(j.ttft_s for j in simulation.run(asked, check=True)) for rate, simulation in runs.items()}
        assert runs[0.0].copied_blocks == 0
        assert runs[0.05].copied_blocks > 0
        assert runs[0.05].fetched_blocks < runs[0.0].fetched_blocks, "who has it need not fetch it"
        assert ttft[0.05] < ttft[0.0]

    @pytest.mark.parametrize("workers", [0, 5], ids=["pairs", "whole"])
    @pytest.mark.parametrize("name", POLICY_NAMES)
    def test_invariants_hold_under_every_policy(self, name, workers):
        requests = read_trace(EXCERPT, 0.4, "0", 150)
        config = ClusterConfig(num_prefill=3, num_decode=2, num_workers=workers, blocks=500, noise=0.5)
        jobs = make_simulation(config, make_policy(name)).run(requests, check=True)
        assert all(job.ttft_s is not None and job.ttft_s > 0 for job in jobs)
        assert all(0 <= job.hit_tokens < job.request.num_tokens for job in jobs)

    def test_the_same_seed_gives_the_same_and_another_one_another(self):
        few = replace(SMALL, limit=300, noise=0.5)
        assert list(replay(few)) == list(replay(few))
        assert list(replay(few)) != list(replay(replace(few, seed=1)))

    #: Mean TTFT, computed independently on the same requests by another implementation of the same model.
    @pytest.mark.parametrize(
        ("policy", "ttft_s"),
        [
            ("round-robin", 26.575556033),
            ("random", 28.094257072),
            ("least-loaded", 17.752014041),
            ("linear", 17.758794509),
            ("dynamo", 18.192265672),
            ("mooncake", 17.752014041),
        ],
    )
    def test_figures_of_another_implementation(self, policy, ttft_s):
        same = {"prefill": 2, "decode": 2, "speedup": 0.25, "blocks": 600, "warmup": "0", "limit": 600}
        assert run(policy=policy, **same).ttft_mean_s == pytest.approx(ttft_s, rel=1e-8)

    def test_the_default_is_near_the_ideal_and_far_from_round_robin(self):
        """The excerpt is a cold start with few repeated prompts: it cannot tell good policies apart."""
        ttft = {name: run(policy=name).ttft_mean_s for name in ("ttft-min", "dynamo", "linear", "round-robin")}
        assert ttft["ttft-min"] < 0.5 * ttft["round-robin"]
        assert ttft["ttft-min"] < 1.05 * min(ttft["dynamo"], ttft["linear"])
        assert ttft["ttft-min"] < 1.15 * run(shared_cache=True).ttft_mean_s


#: Every option with a value that must change the figures, and what else must be set for it to matter.
CHANGES = [
    ("prefill", 3, {}),
    ("decode", 1, {}),
    ("speedup", 0.5, {}),
    ("blocks", 300, {}),
    ("warmup", "0.5", {}),
    ("noise", 0.5, {}),
    ("seed", 1, {"noise": 0.1}),
    ("limit", 300, {}),
    ("fetch", False, {"policy": "linear"}),
    ("in_flight", False, {"speedup": 4.0}),
    ("shared_cache", True, {}),
    ("hot_prefix_rate", 0.01, {"policy": "round-robin"}),
    ("order", "sjf", {}),
    ("ageing", 5.0, {"order": "sjf"}),
    ("reject", True, {}),
    ("ttft_slo", 1.0, {}),
    ("tbt_slo", 0.02, {}),
    ("replica_weight", 0.0, {}),
    ("load_weight", 0.0, {"fetch": False}),
    ("balance_threshold", 20.0, {"policy": "mooncake"}),
    ("overlap_weight", 5.0, {"policy": "dynamo"}),
    ("temperature", 0.5, {"policy": "dynamo"}),
    ("alpha", 0.1, {"policy": "linear"}),
    ("beta", 2.0, {"policy": "linear"}),
    ("layers", 40, {}),
    ("dim", 4096, {}),
    ("gqa", 1, {}),
    ("gflops", 1e15, {}),
    ("mfu", 0.6, {}),
    ("t0", 0.1, {}),
    ("h2d", 1e9, {}),
    ("nic", 1e9, {}),
    ("c", 0.03, {}),
    ("d", 1e-3, {}),
    ("e", 1e-7, {}),
    ("kv_tokens", 3e4, {}),
    ("max_batch", 2, {}),
    ("workers", 4, {}),
    ("chunk_tokens", 1024, {"workers": 4}),
    ("max_batch", 4, {"workers": 4}),
    ("blocks", 300, {"workers": 4}),
    ("shared_cache", True, {"workers": 4}),
    ("speeds", "0.5", {"workers": 4}),
]


@pytest.mark.parametrize(("name", "value", "more"), CHANGES, ids=["-".join((c[0], *c[2])) for c in CHANGES])
def test_every_option_changes_the_result(name, value, more):
    small = {"limit": 350, "warmup": "0", "speedup": 0.8, **more}
    if "workers" in (name, *more):
        small |= {"prefill": ReplayConfig.prefill, "decode": ReplayConfig.decode}
    assert run(**small) != run(**{**small, name: value})


def test_gamma_and_patience_reach_their_policies():
    options = replace(SMALL, gamma=0.3, patience_s=7.0).policy_options
    assert (options.gamma, options.patience_s) == (0.3, 7.0)


class TestTrace:
    """What is read and what is refused."""

    def test_warm_up_by_share(self):
        requests = read_trace(EXCERPT, 2.0, "0.5")
        first = next(r for r in requests if r.counted)
        assert len(requests) == 1500
        assert first.arrival_s == pytest.approx(requests[-1].arrival_s / 2, rel=0.02)

    def test_warm_up_by_another_trace(self, tmp_path):
        later = tmp_path / "later.jsonl"
        row = {"timestamp": 600_000, "input_length": 10, "output_length": 1, "hash_ids": [0]}
        later.write_text(json.dumps(row) + "\n")
        requests = read_trace(later, 1.0, str(EXCERPT))
        assert [r.counted for r in requests] == [False] * 1500 + [True]
        assert requests[-1].arrival_s == 600

    @pytest.mark.parametrize(
        "line",
        [
            b"{",
            b"[]",
            b"\xff",
            b"[" * 100_000,
            b'{"timestamp": 1}',
            _LINE % (b"-1", b"1", b"[]"),
            _LINE % (b"9" * 5000, b"1", b"[]"),
            _LINE % (b"9" * 400, b"1", b"[]"),
            _LINE % (b"NaN", b"1", b"[]"),
            _LINE % (b"true", b"1", b"[]"),
            _LINE % (b"1", b"Infinity", b"[]"),
            _LINE % (b"1", b"1e300", b"[]"),
            _LINE % (b"1", b"1", b"[[1]]"),
            _LINE % (b"1", b"1", b"null"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path, line):
        path = tmp_path / "bad.jsonl"
        path.write_bytes(line + b"\n")
        with pytest.raises(InvalidRequest, match=r"bad\.jsonl:1"):
            read_trace(path, 1.0, "0")

    def test_files_that_are_no_traces(self, tmp_path):
        (tmp_path / "empty.jsonl").write_text("")
        (tmp_path / "text.jsonl.gz").write_text("plain")
        (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 1000)[:-20])
        for name in ("empty.jsonl", "text.jsonl.gz", "cut.jsonl.gz", "absent.jsonl"):
            with pytest.raises(InvalidRequest):
                read_trace(tmp_path / name, 1.0, "0")
        with pytest.raises(InvalidRequest, match="share"):
            read_trace(EXCERPT, 1.0, "1.5")


class TestCommand:
    """``tanghulu replay``."""

    ARGUMENTS = (str(EXCERPT), "--limit", "100", "--warmup", "0", "--policy", "ttft-min,round-robin")

    def test_json(self):
        result = CliRunner().invoke(COMMAND, [*self.ARGUMENTS, "--json"], catch_exceptions=False)
        rows = [json.loads(line) for line in result.output.splitlines()]
        assert [row["policy"] for row in rows] == ["ttft-min", "round-robin"]
        assert rows[0]["num_requests"] == 100
        assert 0 < rows[0]["ttft_mean_s"] < rows[0]["ttft_p99_s"]

    def test_table(self):
        result = CliRunner().invoke(COMMAND, self.ARGUMENTS, catch_exceptions=False)
        assert result.exit_code == 0
        assert "conversation_excerpt, 100 requests" in result.output
        assert "round-robin" in result.output

    @pytest.mark.parametrize(
        ("given", "named"),
        [({"workers": 4}, "--decode"), ({"workers": 4, "prefill": 8, "decode": 8, "order": "sjf"}, "--order"),
         ({"chunk_tokens": 256}, "--chunk-tokens"), ({"speeds": "1"}, "--speeds"),
         ({"workers": 1, "speeds": "1,1", "prefill": 8, "decode": 8}, "--speeds"),
         ({"workers": 2, "speeds": "1,-1", "prefill": 8, "decode": 8}, "--speeds"),
         ({"workers": 2, "speeds": "1,fast", "prefill": 8, "decode": 8}, "--speeds")],
    )  # fmt: skip
    def test_options_of_the_other_kind_of_cluster_are_refused(self, given, named):
        with pytest.raises(ConfigError, match=f"{named} .*--workers"):
            replace(SMALL, **given)

    def test_a_trace_is_needed(self):
        assert CliRunner().invoke(COMMAND, []).exit_code == 2

    @pytest.mark.parametrize(("name", "value"), [("policy", "best"), ("prefill", 0), ("speedup", 0.0), ("noise", -1.0)])
    def test_bad_values_name_themselves(self, name, value):
        with pytest.raises(ConfigError, match=f"--{name}"):
            replace(SMALL, **{name: value})
