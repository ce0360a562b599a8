"""What goes down to the SSD, and when a node begins to make room ahead of need."""

from __future__ import annotations

from tanghulu.store.node.ssd.admission import MAX_REMEMBERED, Demotion, EvictedChunk, TierAdmission
from tanghulu.store.node.state.limits import Watermarks
from tanghulu.store.node.state.ssd_record import UNIT
from tanghulu.types import ChunkKey


def test_admission_says_why_not() -> None:
    admission = TierAdmission("reused", 10 * UNIT, write_bytes_per_s=2 * UNIT)

    def decide(key: str, now_s: float, size: int = UNIT, hits: int = 1, left_s: float | None = None) -> Demotion:
        verdict = admission.decide(EvictedChunk(ChunkKey(key), size, hits, left_s, 4 * UNIT), now_s)
        admission.check()
        return verdict

    assert decide("a", 0.0, size=11 * UNIT) is Demotion.TOO_LARGE
    assert decide("b", 0.0, left_s=0.5) is Demotion.ENDS_SOON
    assert decide("c", 0.0, hits=0) is Demotion.NOT_REUSED
    assert decide("c", 0.0, hits=0) is Demotion.ADMIT, "it came back"
    assert decide("d", 0.0, size=5 * UNIT) is Demotion.QUEUE_FULL
    assert decide("e", 0.0) is Demotion.ADMIT
    assert decide("f", 0.0) is Demotion.OVER_RATE
    assert decide("f", 0.5) is Demotion.ADMIT
    assert admission.decide(EvictedChunk(ChunkKey("x"), 2 * UNIT, 0, None, 4 * UNIT), 0.5) is Demotion.NOT_REUSED
    assert (
        admission.decide(EvictedChunk(ChunkKey("y"), 2 * UNIT, 0, None, 4 * UNIT, pinned=True), 0.5) is Demotion.ADMIT
    )
    assert (
        admission.decide(EvictedChunk(ChunkKey("z"), 2 * UNIT, 0, None, UNIT, pinned=True), 0.5) is Demotion.QUEUE_FULL
    )
    admission.write_ended(False, 1.0)
    assert decide("g", 1.9) is Demotion.PAUSED
    assert decide("g", 2.1) is Demotion.ADMIT
    admission.write_ended(False, 2.1)
    assert decide("h", 4.0) is Demotion.PAUSED, "two seconds the second time"
    admission.write_ended(True, 4.2)
    for i in range(MAX_REMEMBERED + 10):
        admission.decide(EvictedChunk(ChunkKey(str(i)), UNIT, 0, None, UNIT), 5.0)
    admission.check()


def test_watermarks_have_a_hysteresis_and_a_budget() -> None:
    marks = Watermarks(100, 0.9, 0.8)
    assert [marks.wanted(used, 1000) for used in (90, 91, 85, 80, 90, 95)] == [0, 11, 5, 0, 0, 15]
    assert marks.wanted(95, 4) == 4
    assert Watermarks(100, 1.0, 0.95).wanted(100, 1000) == 0
