"""Runs in LMCache's environment: the adapter under LMCache's own interface, driven by lines of JSON.

The first argument is the adapter's parameters, the second what LMCache's ``fault_inject`` around it shall do to loads,
``{}`` for no such adapter. Each line on the standard input is ``["store" | "lookup" | "load", first
key, number of keys]``; the answer is a line with what came of each key, read after the descriptor of that kind was
signalled.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.platform.event_notifier import consume_fd

OBJECT_BYTES = 100_000
SIGNAL_DEADLINE_S = 60


class Memory:
    """As much of LMCache's memory objects as adapters use."""

    def __init__(self, fill: int) -> None:
        self.data = bytearray([fill]) * OBJECT_BYTES

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.data)

    def get_size(self) -> int:
        return len(self.data)


def key(number: int) -> ObjectKey:
    return ObjectKey(number.to_bytes(32, "big"), "org/model", 0x01000100, cache_salt="somebody")


def wait(descriptor: int) -> None:
    assert select.select([descriptor], [], [], SIGNAL_DEADLINE_S)[0], "no signal came"
    consume_fd(descriptor)


def perform(adapter: Any, kind: str, first: int, count: int) -> list[bool]:
    keys = [key(number) for number in range(first, first + count)]
    if kind == "store":
        task = adapter.submit_store_task(keys, [Memory(number % 256) for number in range(first, first + count)])
        wait(adapter.get_store_event_fd())
        return [adapter.pop_completed_store_tasks()[task].is_successful()] * count
    if kind == "lookup":
        task = adapter.submit_lookup_and_lock_task(keys, {})
        wait(adapter.get_lookup_and_lock_event_fd())
        found = adapter.query_lookup_and_lock_result(task)
        adapter.submit_unlock(keys)
        return [found.test(at) for at in range(count)]
    objects = [Memory(0) for _ in keys]
    task = adapter.submit_load_task(keys, objects)
    wait(adapter.get_load_event_fd())
    loaded = adapter.query_load_result(task)
    right = [bytes(each.data) == bytes([(first + at) % 256]) * OBJECT_BYTES for at, each in enumerate(objects)]
    assert all(right[at] for at in range(count) if loaded.test(at)), "wrong bytes"
    return [loaded.test(at) for at in range(count)]


def main() -> None:
    spec = {
        "type": "plugin",
        "module_path": "tanghulu.engines.lmcache.adapter",
        "class_name": "TanghuluL2Adapter",
        "adapter_params": json.loads(sys.argv[1]),
    }
    faults = json.loads(sys.argv[2])
    spec = {"type": "fault_inject", "inner": spec, **faults} if faults else spec
    adapter = create_l2_adapter_from_registry(get_l2_adapter_config_class(spec["type"]).from_dict(spec))
    for line in sys.stdin:
        print(json.dumps(perform(adapter, *json.loads(line))), flush=True)
    status = adapter.report_status()
    adapter.close()
    print(json.dumps(status), flush=True)


if __name__ == "__main__":
    main()
