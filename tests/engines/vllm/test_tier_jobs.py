"""Jobs of the tier: each ends once with what came of it, whatever the store does. A store in memory."""

from __future__ import annotations

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.engines.common.options import LevelOptions
from tanghulu.engines.vllm.tier_jobs import EndedJob, TierJobs
from tanghulu.errors import MasterUnavailable
from tanghulu.runtime.clock import Clock
from tanghulu.store.client.block_store import BlockStore
from tanghulu.types import ChunkKey
from tests.store.client.test_block_store import Chunks
from tests.virtual.clock import ManualClock

ROW_BYTES, NUM_ROWS = 100, 8
DEADLINE_S = 30


def a_tier(chunks: Chunks, clock: Clock | None = None, **options: object) -> tuple[TierJobs, memoryview]:
    memory = memoryview(bytearray(ROW_BYTES * NUM_ROWS))
    parsed = LevelOptions.parse({"master": "nowhere:1", **options})
    store = BlockStore(chunks, parsed.load_deadline_s, parsed.save_deadline_s, clock)
    return TierJobs(store, memory, ROW_BYTES, parsed), memory


def fill(memory: memoryview, row: int, value: int) -> None:
    memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = bytes([value]) * ROW_BYTES


def row_of(memory: memoryview, row: int) -> bytes:
    return bytes(memory[row * ROW_BYTES : (row + 1) * ROW_BYTES])


def keys(*numbers: int) -> list[ChunkKey]:
    return [ChunkKey(f"kv/f/{number}/0") for number in numbers]


def ended(jobs: TierJobs, num_jobs: int = 1) -> dict[int, EndedJob]:
    told, until_s = list[EndedJob](), time.monotonic() + DEADLINE_S
    while len(told) < num_jobs and time.monotonic() < until_s:
        told += jobs.take_ended()
        time.sleep(0.001)
    assert len(told) == num_jobs
    return {job.job_id: job for job in told}


class Slow(Chunks):
    """Puts and gets wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def put_many(self, items, *, deadline_s=None):
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        return super().put_many(items, deadline_s=deadline_s)

    def get_many_into(self, keys, buffers, *, deadline_s=None):
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        return super().get_many_into(keys, buffers, deadline_s=deadline_s)


def test_rows_are_stored_and_loaded_into_others() -> None:
    jobs, memory = a_tier(Chunks())
    for row in range(3):
        fill(memory, row, row + 1)
    jobs.store(7, keys(0, 1, 2), [0, 1, 2])
    assert ended(jobs)[7].good == (True,) * 3
    jobs.load(8, keys(2, 9, 0), [5, 6, 7])
    job = ended(jobs)[8]
    assert (job.good, job.moved_bytes) == ((True, False, True), 2 * ROW_BYTES)
    assert [row_of(memory, row)[0] for row in (5, 7)] == [3, 1]
    jobs.close()


def test_a_chunk_of_another_size_is_lost() -> None:
    chunks = Chunks()
    jobs, _ = a_tier(chunks)
    chunks.kept |= {keys(0)[0]: b"short", keys(1)[0]: bytes(ROW_BYTES + 1)}
    jobs.load(1, keys(0, 1), [0, 1])
    assert ended(jobs)[1].good == (False, False)
    jobs.close()


def test_a_load_ends_at_its_deadline_though_others_were_before_it() -> None:
    chunks, clock = Slow(), ManualClock()
    chunks.kept |= {key: bytes(ROW_BYTES) for key in keys(0, 1)}
    jobs, _ = a_tier(chunks, clock, threads=1, load_deadline_s=5.0)
    jobs.load(1, keys(0), [0])
    assert chunks.begun.wait(DEADLINE_S)
    jobs.load(2, keys(1), [1])
    clock.advance(5.0)
    chunks.go.set()
    assert {number: job.good for number, job in ended(jobs, 2).items()} == {1: (True,), 2: (False,)}
    assert chunks.num_calls == 1
    jobs.close()


def test_stores_beyond_the_budget_are_shed_and_drained_ones_fail() -> None:
    chunks = Slow()
    jobs, _ = a_tier(chunks, save_pending_bytes=3 * ROW_BYTES)
    jobs.store(1, keys(0), [0])
    assert chunks.begun.wait(DEADLINE_S)
    jobs.store(2, keys(1, 2), [1, 2])
    jobs.store(3, keys(3), [3])
    assert jobs.num_shed == 1, "3 rows wait"
    drained = threading.Thread(target=jobs.drain)
    drained.start()
    jobs_left = ended(jobs, 2)
    assert {number: job.good for number, job in jobs_left.items()} == {2: (False, False), 3: (False,)}
    assert drained.is_alive(), "the first one reads its row still"
    chunks.go.set()
    drained.join(DEADLINE_S)
    assert ended(jobs)[1].good == (True,)
    jobs.store(4, keys(1, 2, 3), [1, 2, 3])
    assert ended(jobs)[4].good == (True,) * 3, "nothing waits any more"
    jobs.close()


@settings(max_examples=30, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, NUM_ROWS - 1), max_size=4, unique=True)), max_size=9
    ),
    fails_at=st.integers(0, 9),
    drains_at=st.integers(0, 9),
    closes_at=st.integers(0, 9),
)
def test_every_job_ends_once(asked, fails_at: int, drains_at: int, closes_at: int) -> None:
    chunks, told = Chunks(), list[EndedJob]()
    jobs, memory = a_tier(chunks, save_pending_bytes=4 * ROW_BYTES)
    for row in range(NUM_ROWS):
        fill(memory, row, row)
    for job_id, (is_load, rows) in enumerate(asked):
        if job_id == fails_at:
            chunks.error = MasterUnavailable("gone")
        if job_id == drains_at:
            jobs.drain()
        if job_id == closes_at:
            jobs.close()
        (jobs.load if is_load else jobs.store)(job_id, keys(*rows), rows)
        told += jobs.take_ended()
    jobs.close()
    told += jobs.take_ended()
    assert sorted(job.job_id for job in told) == list(range(len(asked)))
    assert all(len(job.good) == len(asked[job.job_id][1]) for job in told)
    assert all(row_of(memory, row) == bytes([row]) * ROW_BYTES for row in range(NUM_ROWS)), "each row its own key"
