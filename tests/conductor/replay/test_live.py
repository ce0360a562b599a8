"""Live replay: what is sent for a trace, what a client makes of the answers, and which options go with it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tanghulu.conductor.replay.live import LiveConfig, Prompts, check_lengths, replay_live, scaled
from tanghulu.conductor.replay.main import COMMAND, ReplayConfig
from tanghulu.conductor.replay.trace import TraceRequest
from tanghulu.errors import ConfigError, InvalidRequest, NodeUnavailable

VOCABULARY = list(range(5, 205))


def request(num_tokens: int, blocks: tuple[int, ...], output_tokens: int = 4, arrival_s: float = 0.0) -> TraceRequest:
    return TraceRequest(arrival_s, num_tokens, output_tokens, blocks, "s", True)


def prompts(seed: int = 0, run: str = "") -> Prompts:
    return Prompts(VOCABULARY, seed, run)


class TestPrompts:
    """Token ids as a function of the trace."""

    def test_equal_ids_are_equal_tokens_and_others_are_not(self):
        long, short, other = request(1100, (7, 8, 9)), request(1024, (7, 8)), request(1024, (7, 10))
        first, second, third = (prompts().tokens(each, n) for n, each in enumerate((long, short, other)))
        assert len(first) == 1100
        assert first[:1024] == second
        assert first[:512] == third[:512]
        assert first[512:522] != third[512:522]
        assert set(first) <= set(VOCABULARY)

    def test_seed_and_run_change_all_of_it_and_nothing_else_does(self):
        one = request(600, (1, 2))
        assert prompts().tokens(one, 0) == prompts().tokens(one, 5)
        assert prompts().tokens(one, 0)[:8] != prompts(seed=1).tokens(one, 0)[:8]
        assert prompts().tokens(one, 0)[:8] != prompts(run="linear").tokens(one, 0)[:8]

    def test_what_has_no_id_is_the_requests_own(self):
        one = request(600, (1,))
        assert prompts().tokens(one, 0)[:512] == prompts().tokens(one, 1)[:512]
        assert prompts().tokens(one, 0)[512:] != prompts().tokens(one, 1)[512:]

    def test_a_scale_keeps_what_is_shared(self):
        long, short = scaled([request(1100, (7, 8, 9), 40), request(1024, (7, 8), 3)], 4)
        assert (long.num_tokens, long.output_tokens) == (128 + 128 + 19, 10)
        assert (short.num_tokens, short.output_tokens) == (256, 1)
        assert prompts().tokens(long, 0)[:256] == prompts().tokens(short, 1)

    @pytest.mark.parametrize("scale", [1, 3, 7, 512])
    def test_lengths_are_those_of_the_plan(self, scale):
        for each in scaled([request(n, (1, 2, 3)) for n in (1, 511, 512, 513, 1500)], scale):
            assert len(prompts().tokens(each, 0)) == each.num_tokens >= 1

    def test_what_the_model_cannot_take_is_refused_with_the_scale_that_would_do(self):
        with pytest.raises(InvalidRequest, match="--scale 13 "):
            check_lengths([request(100_000, ())], 8192, 1)
        check_lengths(scaled([request(100_000, ())], 13), 8192, 13)


Answer = Callable[[dict[str, Any]], tuple[int, list[str]]]


def _event(text: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def _whole(body: dict[str, Any]) -> tuple[int, list[str]]:
    usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 64}}
    events = [_event("x") for _ in range(body["max_tokens"])] + [_event("", "length")]
    return 200, [*events, json.dumps({"choices": [], "usage": usage}), "[DONE]"]


@contextmanager
def served(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that speaks as a conductor does; yields its URL and the bodies that it was sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/tokenize":
                return self._say(200, json.dumps({"tokens": VOCABULARY}).encode())
            bodies.append(body)
            status, events = answer(body)
            return self._say(status, "".join(f"data: {event}\n\n" for event in events).encode())

        def _say(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            with suppress(ConnectionError):  # an interrupted client has gone
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own answer to SIGINT, also where the tests run behind a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestClient:
    """Answers of every kind."""

    def test_each_request_is_sent_as_planned(self):
        with served(_whole) as (url, bodies):
            requests = [request(1000, (1, 2), 9), request(600, (1, 3), 6)]
            found = replay_live(LiveConfig(url=url, policy="linear", scale=2, connections=1), requests)
        assert [len(body["prompt"]) for body in bodies] == [500, 300]
        assert bodies[0]["prompt"][:256] == bodies[1]["prompt"][:256]
        assert [body["max_tokens"] for body in bodies] == [4, 3]
        assert bodies[0]["routing"] == {"policy": "linear"}
        assert bodies[0]["prompt_cache_key"] == "s"
        assert [job.hit_tokens for job in found.jobs] == [64, 64]
        assert all(job.ttft_s is not None and job.ttft_s > 0 for job in found.jobs)

    def test_they_come_at_their_times(self):
        with served(_whole) as (url, _):
            found = replay_live(LiveConfig(url=url), [request(9, (1,)), request(9, (1,), arrival_s=2.0)])
        first, second = found.jobs
        assert first.first_s < 2.0 <= second.first_s
        assert second.ttft_s == pytest.approx(second.first_s - 2.0)

    def test_nothing_is_asked_of_the_policy_unless_named(self):
        with served(_whole) as (url, bodies):
            replay_live(LiveConfig(url=url), [request(9, (1,))])
        assert "routing" not in bodies[0]

    @pytest.mark.parametrize(
        ("answer", "expected"),
        [
            (lambda body: (429, []), (True, False)),
            (lambda body: (500, []), (False, True)),
            (lambda body: (200, [_event("x"), '{"error": {"code": "X", "message": "lost"}}']), (False, True)),
            (lambda body: (200, [_event("x")]), (False, True)),
            (lambda body: (200, ["{"]), (False, True)),
        ],
        ids=["refused", "failed", "broken off with an error", "broken off", "nonsense"],
    )
    def test_refused_and_failed_are_told_apart(self, answer, expected):
        with served(answer) as (url, _):
            (job,) = replay_live(LiveConfig(url=url), [request(9, (1,))]).jobs
        assert (job.rejected, job.failed, job.ttft_s) == (*expected, None)

    def test_a_text_with_every_kind_of_line_end_is_one_answer(self):
        choice = {"text": "a\x85b\u2028c\u2029d", "finish_reason": "length"}
        text = json.dumps({"choices": [choice]}, ensure_ascii=False)
        last = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})
        with served(lambda body: (200, [text, last, "[DONE]"])) as (url, _):
            (job,) = replay_live(LiveConfig(url=url), [request(9, (1,))]).jobs
        assert not job.failed

    def test_no_more_than_so_many_connections(self):
        together, most, lock = 0, 0, threading.Lock()
        two = threading.Barrier(2)

        def answer(body: dict[str, Any]) -> tuple[int, list[str]]:
            nonlocal together, most
            with lock:
                together += 1
                most = max(most, together)
            two.wait(30)
            with lock:
                together -= 1
            return _whole(body)

        with served(answer) as (url, _):
            found = replay_live(LiveConfig(url=url, connections=2), [request(9, (1,))] * 8)
        assert (most, len(found.jobs)) == (2, 8)

    @pytest.mark.usefixtures("interruptible")
    def test_interrupted_it_tells_what_was_done(self):
        def stop(done: int) -> None:
            if done == 2:
                signal.raise_signal(signal.SIGINT)

        with served(_whole) as (url, _):
            requests = [request(9, (1,), arrival_s=at) for at in (0.0, 0.05, 60.0)]
            found = replay_live(LiveConfig(url=url), requests, stop)
        assert (len(found.jobs), found.interrupted) == (2, True)

    def test_nobody_there(self):
        with pytest.raises(NodeUnavailable, match="no model answers"):
            replay_live(LiveConfig(url="http://127.0.0.1:9"), [request(9, (1,))])


class TestCommand:
    """``tanghulu replay --live``."""

    @staticmethod
    def trace(folder: Path) -> str:
        path = folder / "few.jsonl"
        row = {"input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
        path.write_text("".join(json.dumps({"timestamp": at, **row}) + "\n" for at in (0, 10, 60_000)))
        return str(path)

    @pytest.mark.usefixtures("interruptible")
    def test_ctrl_c_reports_what_was_done(self, tmp_path):
        def answer(body: dict[str, Any]) -> tuple[int, list[str]]:
            if len(bodies) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return _whole(body)

        with served(answer) as (url, bodies):
            arguments = [self.trace(tmp_path), "--live", url, "--warmup", "0", "--connections", "1"]
            result = CliRunner().invoke(COMMAND, arguments)
        assert result.exit_code == 130
        assert re.search(r"few, [12] requests", result.output)
        assert "(conductor's)" in result.output

    def test_refused_requests_stand_in_the_report(self, tmp_path):
        with served(lambda body: (429, [])) as (url, _):
            arguments = [self.trace(tmp_path), "--live", url, "--warmup", "0", "--speedup", "1000", "--json"]
            result = CliRunner().invoke(COMMAND, arguments, catch_exceptions=False)
        row = json.loads(result.output)
        assert (row["num_requests"], row["rejected_requests"], row["failed_requests"]) == (3, 1.0, 0.0)

    def test_a_live_run_is_compared_with_the_same_in_virtual_time(self, tmp_path):
        with served(_whole) as (url, _):
            arguments = [self.trace(tmp_path), "--live", url, "--warmup", "0", "--speedup", "1000", "--compare"]
            result = CliRunner().invoke(COMMAND, [*arguments, "--workers", "2"], catch_exceptions=False)
        assert "ttft-min (simulated)" in result.output
        assert re.search(r"mean TTFT [+-][\d.]+% from the simulated one, hits [+-]", result.output)


class TestOptions:
    """Those that go with --live, and those that do not."""

    LIVE = ReplayConfig(live="http://127.0.0.1:8000")

    @pytest.mark.parametrize(
        ("name", "value"),
        [("prefill", 3), ("fetch", False), ("noise", 0.5), ("alpha", 0.1), ("order", "sjf"), ("layers", 3)],
    )
    def test_what_means_nothing_live_is_refused(self, name, value):
        with pytest.raises(ConfigError, match=f"--{name}.*--live"):
            replace(self.LIVE, **{name: value})

    @pytest.mark.parametrize(("name", "value"), [("scale", 2), ("connections", 4), ("compare", True)])
    def test_what_means_nothing_in_virtual_time_is_refused(self, name, value):
        with pytest.raises(ConfigError, match=f"--{name} needs --live"):
            ReplayConfig(**{name: value})
        assert getattr(replace(self.LIVE, **{name: value}), name) == value

    def test_a_compared_trace_is_not_scaled(self):
        assert replace(self.LIVE, compare=True, workers=3, chunk_tokens=256).cluster.num_workers == 3
        with pytest.raises(ConfigError, match="--scale"):
            replace(self.LIVE, compare=True, scale=4)

    def test_a_block_can_be_divided_no_further_than_into_tokens(self):
        with pytest.raises(ConfigError, match="--scale"):
            replace(self.LIVE, scale=513)

    def test_policies(self):
        assert self.LIVE.policies == ("",)
        assert ReplayConfig().policies == ("ttft-min",)
        assert replace(self.LIVE, policy="linear, random").policies == ("linear", "random")
