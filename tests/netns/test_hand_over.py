"""A hand-over across a real, shaped wire: most of the KV has crossed it when the prefill ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.workers.hand_over import Case, Shape, Sides, sides, words
from tests.netns.wires import Wires

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]

#: The wire needs 13 s for it, and 3 s for a turn of a read: on a busy machine, too, it is what everybody waits for.
SLOW = Case(Shape(8192, "gpu-8b"), mbit_s=40)
#: As much KV as crosses the wire while the prompt is computed.
EVEN = Case(Shape(4096, "gpu-70b", 0.5), mbit_s=100)


def pulled_bytes(made: Sides) -> float:
    return made.metric("decode", "tanghulu_worker_fetch_bytes_total", source="peer")


def all_is_released(made: Sides) -> None:
    """At once, and not because nobody came in time."""
    made.until(lambda: not made.metric("prefill", "tanghulu_worker_exports"))
    made.until(lambda: not made.metric("prefill", "tanghulu_worker_blocks_in_use"))
    assert not made.metric("prefill", "tanghulu_worker_exports_expired_total")


def test_blocks_cross_the_wire_while_the_rest_is_computed(wires: Wires) -> None:
    with sides(wires, EVEN) as made, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(made.token_times, words(1))
        made.until(lambda: pulled_bytes(made) > 0)
        computed = made.metric("prefill", "tanghulu_worker_computed_tokens_total")
        assert computed < EVEN.num_tokens, "bytes arrived before the prefill ended"
        made.until(lambda: made.metric("prefill", "tanghulu_worker_computed_tokens_total") >= EVEN.num_tokens)
        arrived = pulled_bytes(made)
        assert arrived > 0.5 * EVEN.kv_bytes, "most of it was there when the prefill ended"
        assert len(asked.result(120)) == 4
        assert pulled_bytes(made) == EVEN.kv_bytes, "each block once"
        all_is_released(made)


def test_a_transfer_may_take_longer_than_any_deadline(wires: Wires) -> None:
    with sides(wires, SLOW) as made:
        assert len(made.token_times(words(1))) == 4
        assert pulled_bytes(made) == SLOW.kv_bytes, "each block once"
        assert made.metric("decode", "tanghulu_worker_computed_tokens_total") < 64 + 4
        all_is_released(made)
