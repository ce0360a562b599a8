"""A hand-over across a real, shaped wire: most of the KV has crossed it when the prefill ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.workers.hand_over import NUM_TOKENS, Sides, sides, words
from tests.netns.wires import Wires

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]

KV_TOKEN_BYTES = 4096


def pulled_bytes(made: Sides) -> float:
    return made.metric("decode", "tanghulu_worker_fetch_bytes_total", source="peer")


def test_blocks_cross_the_wire_while_the_rest_is_computed(wires: Wires) -> None:
    with sides(wires, KV_TOKEN_BYTES, 512, 1000) as made, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(made.token_times, words(1))
        made.until(lambda: pulled_bytes(made) > 0)
        computed = made.metric("prefill", "tanghulu_worker_computed_tokens_total")
        assert computed < NUM_TOKENS, "bytes arrived before the prefill ended"
        assert len(asked.result(120)) == 4
        assert pulled_bytes(made) == NUM_TOKENS * KV_TOKEN_BYTES, "each block once"
        made.until(lambda: not made.metric("prefill", "tanghulu_worker_exports"))
