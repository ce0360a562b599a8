"""Runs in vLLM's environment: reads a worker's KV events with vLLM's own types, as a follower of vLLM would.

The first line that it reads is the address of replays. For each further line it prints ``{"messages": …}``: a list of
[sequence number, events], all that are kept.
"""

from __future__ import annotations

import json
import sys

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def shown(number: bytes, payload: bytes) -> list[object]:
    batch = DECODER.decode(payload)
    assert batch.data_parallel_rank == 0
    return [int.from_bytes(number, "big"), [msgspec.to_builtins(event) for event in batch.events]]


def main() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(json.loads(sys.stdin.readline()))
        for _ in sys.stdin:
            found = []
            dealer.send_multipart([b"", bytes(8)])
            while (frames := dealer.recv_multipart())[2] != ZmqEventPublisher.END_SEQ:
                _, _, number, payload = frames
                found.append(shown(number, payload))
            print(json.dumps({"messages": found}), flush=True)


if __name__ == "__main__":
    main()
