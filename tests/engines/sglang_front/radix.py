"""Runs in SGLang's environment: its own prefix cache and publisher of events, without an engine.

Arguments are the ports of events and of their replay. A line of the standard input is a call as JSON; "done" follows.
"""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

import stand_ins

stand_ins.install()

from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

PAGE, VOCAB = 8, 1 << 17
EVENTS, REPLAY = (f"tcp://*:{port}" for port in sys.argv[1:3])


class Calls:
    """The calls, by name."""

    def __init__(self) -> None:
        config = {"publisher": "zmq", "endpoint": EVENTS, "replay_endpoint": REPLAY}
        self.publisher = EventPublisherFactory.create(json.dumps(config))
        memory = SimpleNamespace(device="cpu", free_segment=lambda indices, start_pos: None)
        self.cache = RadixCache.create_simulated(mock_allocator=memory, page_size=PAGE, enable_kv_cache_events=True)

    def insert(self, tokens: list[int], salt: str) -> None:
        """Have the cache hold a prompt, as far as it fills pages."""
        whole = array("q", tokens[: len(tokens) // PAGE * PAGE])
        self.cache.insert(InsertParams(key=RadixKey(whole, cache_salt=salt)))
        self.publish()

    def evict(self, num_tokens: int) -> None:
        """Have the cache drop the least recently used."""
        self.cache.evict(EvictParams(num_tokens=num_tokens))
        self.publish()

    def flush(self) -> None:
        """Have the cache drop all."""
        self.cache.reset()
        self.publish()

    def sample(self, params: dict[str, Any]) -> None:
        """Raise an error unless SGLang knows the parameters of a request."""
        made = SamplingParams(**params)
        made.verify(VOCAB)

    def publish(self) -> None:
        self.publisher.publish(KVEventBatch(ts=0.0, events=self.cache.take_events()))


if __name__ == "__main__":
    calls = Calls()
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        getattr(calls, name)(*arguments)
        print("done", flush=True)
