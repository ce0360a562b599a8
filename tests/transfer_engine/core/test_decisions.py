"""Slicing, paths and runs in virtual time, without a socket."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import ConfigError, DeadlineExceeded, LeaseExpired, NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.client.batch_state import AdmittedRequest, BatchLimits, BatchState, Post
from tanghulu.transfer_engine.core import paths as paths_module
from tanghulu.transfer_engine.core import slices as slices_module
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.config import EngineConfig, TransportLimits
from tanghulu.transfer_engine.core.paths import (
    LATENCY_BOUNDS_S,
    Path,
    PathEvent,
    PathState,
    PathStats,
    PathTable,
    PauseRule,
)
from tanghulu.transfer_engine.core.segment import Endpoint
from tanghulu.transfer_engine.core.slices import Opcode, Slice, SliceEvent, SliceState, cut

RULE = PauseRule(after_errors=2, pause_s=1.0, pause_max_s=4.0)
SHM = Path(Endpoint("shm", "/listener"), "", 0, 0)
FIRST, SECOND = (Path(Endpoint("tcp", "a:1"), "", stream, 1) for stream in range(2))
LIMITS = BatchLimits(
    {"shm": TransportLimits(1000, 4000, 8), "tcp": TransportLimits(100, 250, 2)}, retries_max=2, slice_deadline_s=5.0
)
GONE = NodeUnavailable("gone")


def idle(path: Path) -> int:
    return 0


def all_paths() -> PathTable:
    return PathTable([FIRST, SHM, SECOND], RULE)


def tcp_paths() -> PathTable:
    return PathTable([SECOND, FIRST], RULE)


def run_of(*lengths: int, table: PathTable | None = None) -> BatchState:
    table = table or tcp_paths()
    buffer = Buffer(bytearray(max(lengths)))
    return BatchState([AdmittedRequest(Opcode.READ, buffer, 0, 0, length, 0, table) for length in lengths], LIMITS)


class TestCutting:
    @pytest.mark.parametrize(
        ("length", "pieces"),
        [(1, [1]), (100, [100]), (149, [149]), (150, [100, 50]), (225, [100, 125]), (300, [100] * 3)],
    )
    def test_the_short_tail_is_merged(self, length: int, pieces: list[int]):
        assert [size for _, size in cut(length, 100)] == pieces

    @given(length=st.integers(1, 1 << 40), number=st.integers(1, 50))
    def test_pieces_cover_the_request(self, length: int, number: int):
        slice_bytes = max(1, length // number)
        position = 0
        for offset, size in cut(length, slice_bytes):
            assert offset == position
            assert 0 < size < slice_bytes * 3 // 2 + 1 or size == length
            position += size
        assert position == length


class TestPaths:
    def test_the_best_rank_wins_and_is_waited_for(self):
        table = all_paths()
        assert table.choose(0, [], idle) is SHM
        assert table.choose(0, [], idle, 1, lambda path: path is SHM) is None

    def test_least_bytes_in_flight_then_the_first(self):
        table = tcp_paths()
        assert table.choose(0, [], idle) is FIRST
        assert table.choose(0, [], lambda path: {FIRST: 10, SECOND: 5}[path]) is SECOND
        assert (
            table.choose(0, [], lambda path: {FIRST: 900, SECOND: 500}[path], 1, lambda path: path is FIRST) is SECOND
        )

    def test_the_path_on_which_it_ends_first_and_a_full_one_is_waited_for(self):
        """The example of the module, in units of 100: rates 400 and 100."""
        table = tcp_paths()
        table.measured(FIRST, 400.0, 0.0)
        assert table.choose(0, [], lambda path: {FIRST: 100, SECOND: 0}[path], 100) is SECOND  # not measured: as fast
        table.measured(SECOND, 100.0, 0.0)
        assert table.choose(0, [], lambda path: {FIRST: 400, SECOND: 0}[path], 100) is SECOND
        assert table.choose(0, [], lambda path: {FIRST: 400, SECOND: 100}[path], 100) is FIRST
        assert (
            table.choose(0, [], lambda path: {FIRST: 400, SECOND: 100}[path], 100, lambda path: path is FIRST) is None
        )
        assert table.choose(20.0, [], lambda path: {FIRST: 400, SECOND: 100}[path], 100) is SECOND  # rates are old

    def test_rates_follow_what_is_measured(self):
        table = tcp_paths()
        table.measured(FIRST, 100.0, 0.0)
        table.measured(FIRST, 200.0, 1.0)
        assert table.stats(FIRST).bytes_per_s == pytest.approx(130.0)
        table.measured(FIRST, 50.0, 99.0)
        assert table.stats(FIRST).bytes_per_s == 50.0

    def test_what_happened_is_counted(self):
        table = tcp_paths()
        table.succeeded(FIRST, 70)
        table.succeeded(FIRST)
        table.failed(FIRST, 0.0, 2)
        table.failed(FIRST, 0.0, 1)
        stats = table.stats(FIRST)
        assert stats.latencies == [1] + [0] * len(LATENCY_BOUNDS_S)
        assert stats == PathStats(
            num_bytes=70, num_slices=1, num_lost=3, num_errors=2, num_pauses=1, latencies=stats.latencies
        )
        assert table.stats(SECOND) == PathStats()

    def test_paths_that_lost_the_slice_are_avoided(self):
        table = all_paths()
        assert table.choose(0, [SHM], idle) is FIRST
        assert table.choose(0, [SHM, FIRST], idle) is SECOND
        assert table.choose(0, [SHM, FIRST, SECOND], idle) is SHM

    def test_errors_in_a_row_pause_and_a_probe_brings_back(self):
        table = tcp_paths()
        table.failed(FIRST, 10.0)
        assert table.choose(10.0, [], idle) is FIRST
        table.failed(FIRST, 10.0)
        assert table.state(FIRST) is PathState.PAUSED
        assert table.choose(10.9, [], idle) is SECOND
        assert table.choose(11.0, [], idle) is FIRST
        assert table.state(FIRST) is PathState.PROBING
        assert table.choose(11.0, [], idle) is SECOND  # one probe at a time
        table.check()
        table.succeeded(FIRST)
        assert table.state(FIRST) is PathState.UP
        assert table.choose(11.0, [], idle) is FIRST

    def test_a_failed_probe_doubles_the_pause_up_to_the_maximum(self):
        table = tcp_paths()
        now_s, pauses = 0.0, []
        table.failed(FIRST, now_s)
        for _ in range(5):
            table.failed(FIRST, now_s)
            start_s = now_s
            while table.choose(now_s, [], idle) is not FIRST:
                now_s += 0.5
            pauses.append(now_s - start_s)
            table.check()
        assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]

    def test_when_all_are_paused_the_first_to_return_is_tried(self):
        table = tcp_paths()
        for path, at_s in ((FIRST, 1.0), (FIRST, 1.0), (SECOND, 0.0), (SECOND, 0.0)):
            table.failed(path, at_s)
        assert table.choose(1.0, [], idle) is SECOND

    def test_a_success_between_errors_forgives(self):
        table = tcp_paths()
        for _ in range(5):
            table.failed(FIRST, 0.0)
            table.succeeded(FIRST)
        assert table.state(FIRST) is PathState.UP


class TestRun:
    def test_windows_bound_what_is_posted(self):
        run = run_of(1000)
        posts = run.advance(0.0)
        assert [(post.path, post.piece.slice_id) for post in posts] == [
            (FIRST, 1),
            (SECOND, 2),
            (FIRST, 3),
            (SECOND, 4),
        ]
        assert run.advance(0.0) == []
        run.arrived(1, 0.1)
        assert [(post.path, post.piece.slice_id) for post in run.advance(0.1)] == [(FIRST, 5)]
        run.check()

    def test_a_lost_slice_goes_over_another_path(self):
        run = run_of(50)
        run.advance(0.0)
        run.lost(FIRST, GONE, 1.0)
        assert not run.finished
        assert [post.path for post in run.advance(1.0)] == [SECOND]
        run.arrived(1, 2.0)
        assert run.errors() == [None]
        assert run.story(0) == [
            "0.000000 slice 1 post tcp a:1 #0",
            "1.000000 slice 1 lost tcp a:1 #0 gone",
            "1.000000 slice 1 post tcp a:1 #1",
            "2.000000 slice 1 arrived tcp a:1 #1",
        ]

    def test_losing_ends_after_retries_max(self):
        run = run_of(50, 60)
        for attempt in range(3):
            for post in run.advance(float(attempt)):
                run.lost(post.path, GONE, float(attempt))
            run.check()
        assert run.finished
        assert [type(error) for error in run.errors()] == [NodeUnavailable, NodeUnavailable]
        assert "failed on 3 paths, last tcp a:1" in str(run.errors()[0])

    def test_a_refusal_is_final_and_cancels_what_waits(self):
        run = run_of(1000, 50)
        run.advance(0.0)
        run.refused(1, LeaseExpired("too late"), 0.1)
        run.check()
        assert not run.finished  # three slices are posted still
        for slice_id in (2, 3, 4):
            run.arrived(slice_id, 0.2)
        assert run.request_state(0)[0]
        assert [post.piece.request_index for post in run.advance(0.2)] == [1]
        run.arrived(11, 0.3)
        assert isinstance(run.errors()[0], LeaseExpired)
        assert run.errors()[1] is None
        assert run.done_bytes == 350

    def test_a_path_without_progress_stalls(self):
        run = run_of(300)
        run.advance(0.0)
        run.arrived(1, 4.0)
        assert run.next_stall_s() == 5.0
        assert run.stalled(4.9) == []
        assert run.stalled(5.0) == [SECOND]
        assert run.next_stall_s() == 9.0
        run.check()
        assert [post.path for post in run.advance(5.0)] == [FIRST]

    def test_giving_up_ends_everything_and_names_what_to_cut(self):
        run = run_of(1000, 50)
        run.advance(0.0)
        run.arrived(1, 0.1)
        assert run.give_up(DeadlineExceeded("late"), 1.0) == [FIRST, SECOND]
        run.check()
        assert run.finished
        assert [type(error) for error in run.errors()] == [DeadlineExceeded, DeadlineExceeded]
        assert run.give_up(DeadlineExceeded("late"), 2.0) == []

    def test_a_request_that_failed_at_the_listener(self):
        run = BatchState([GONE], LIMITS)
        assert run.finished
        assert run.errors() == [GONE]

    @settings(max_examples=150, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=6), seed=st.integers(0, 1 << 30), mix=st.booleans()
    )
    def test_any_order_of_events_ends_and_reports_the_truth(self, lengths: list[int], seed: int, mix: bool):
        chance = random.Random(seed)
        run = run_of(*lengths, table=all_paths() if mix else None)
        flying: dict[int, Post] = {}
        arrived_bytes = dict.fromkeys(range(len(lengths)), 0)
        now_s = 0.0
        for _ in range(2000):
            for post in run.advance(now_s):
                assert post.piece.slice_id not in flying
                flying[post.piece.slice_id] = post
            run.check()
            if run.finished:
                break
            now_s += chance.random()
            chosen = chance.choice(list(flying.values()))
            event = chance.choices(["arrived", "lost", "refused", "stalled"], [70, 15, 2, 5])[0]
            lost: list[Path] = []
            if event == "arrived":
                run.arrived(chosen.piece.slice_id, now_s)
                arrived_bytes[chosen.piece.request_index] += chosen.piece.length
                del flying[chosen.piece.slice_id]
            elif event == "refused":
                run.refused(chosen.piece.slice_id, LeaseExpired("no"), now_s)
                del flying[chosen.piece.slice_id]
            elif event == "lost":
                run.lost(chosen.path, GONE, now_s)
                lost = [chosen.path]
            else:
                lost = run.stalled(now_s)
            flying = {key: post for key, post in flying.items() if post.path not in lost}
            run.check()
        assert run.finished
        for index, error in enumerate(run.errors()):
            assert (error is None) == (arrived_bytes[index] == lengths[index])
            assert error is None or isinstance(error, LeaseExpired | NodeUnavailable | TransferFailed)


@pytest.mark.parametrize(
    ("table", "states", "events"),
    [(slices_module.TRANSITIONS, SliceState, SliceEvent), (paths_module.TRANSITIONS, PathState, PathEvent)],
)
def test_every_state_is_reached_and_no_end_is_left(table, states, events):
    assert {state for state, _ in table} | set(table.values()) == set(states)
    assert {event for _, event in table} == set(events)


def test_an_unknown_pair_asserts():
    piece = Slice(1, 0, Opcode.READ, Buffer(b"x"), 0, 0, 1, 0)
    with pytest.raises(AssertionError):
        piece.step(SliceEvent.ARRIVED, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [{"retries_max": -1}, {"streams_per_peer": 0}, {"pause_s": 0}, {"tcp_devices": ()},
     {"limits": {"tcp": TransportLimits(0, 1, 1)}}],
)  # fmt: skip
def test_config_is_checked(wrong: dict[str, object]):
    with pytest.raises(ConfigError):
        EngineConfig(**wrong)  # type: ignore[arg-type]
    assert issubclass(ConfigError, TanghuluError)


def test_copies_are_counted_by_whoever_holds_the_lock():
    """Nobody waits for it, and no copy is forgotten or counted twice."""
    paths, lock = PathTable([SHM], RULE), threading.Lock()
    with lock:
        paths.succeeded_soon(SHM, 5, 1e-5, lock)
        assert paths.stats(SHM).num_slices == 0
    paths.succeeded_soon(SHM, 7, 1e-5, lock)
    assert (paths.stats(SHM).num_slices, paths.stats(SHM).num_bytes) == (2, 12)
    with ThreadPoolExecutor(8) as callers:
        for _ in range(8):
            callers.submit(lambda: [paths.succeeded_soon(SHM, 3, 1e-5, lock) for _ in range(2000)])
    assert (paths.stats(SHM).num_slices, paths.stats(SHM).num_bytes) == (16_002, 48_012)
    assert not lock.locked()
