"""A master that is killed and restarted: how soon it knows every key again, and whether it ever denies one.

    python -m benchmarks.master.rebuild --keys 3000000 --nodes 3

starts a master and nodes (real processes), fills the nodes with tiny chunks, kills the master with SIGKILL, starts it
again at the same port, and asks for known keys all the time until it has counted every key: ``exists`` must never say
no, what is put meanwhile must be there afterwards, and nothing may fail. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tanghulu
from tanghulu.errors import TanghuluError
from tests.store.cluster import Cluster

BATCH = 2000
#: Of a call, so that it outlives the restart and the rebuilding behind it.
DEADLINE_S = 60.0


def key_of(number: int) -> str:
    return f"kv/0123456789abcdef0123456789abcdef/{number:032x}"


def fill(address: str, node: str, numbers: range) -> None:
    """Put one tiny chunk a number at ``node``."""
    with tanghulu.connect(address) as client:
        for start in range(numbers.start, numbers.stop, BATCH):
            part = range(start, min(start + BATCH, numbers.stop))
            outcomes = client.put_many([(key_of(n), b"%16d" % n) for n in part], prefer_node=node)
            failed = [each for each in outcomes if not each.ok]
            assert not failed, failed[0]


class Asking(threading.Thread):
    """Asks for known keys until it is ended; counts what was denied."""

    def __init__(self, address: str, num_keys: int, seed: int) -> None:
        super().__init__()
        self._client = tanghulu.connect(address, deadline_s=DEADLINE_S)
        self._num_keys = num_keys
        self._rng = random.Random(seed)
        self.ended = threading.Event()
        self.num_asked = self.num_denied = self.num_unanswered = 0
        self.put: list[tuple[str, bytes]] = []
        self.put_s: list[float] = []
        self.failures: list[str] = []

    def run(self) -> None:
        while not self.ended.is_set():
            self._ask()
            self._put()
            time.sleep(0.02)
        self._client.close()

    def _ask(self) -> None:
        numbers = [self._rng.randrange(self._num_keys) for _ in range(200)]
        try:
            held = self._client.exists_many([key_of(n) for n in numbers])
        except TanghuluError:
            self.num_unanswered += 1
            return
        self.num_asked += len(held)
        self.num_denied += held.count(False)

    def _put(self) -> None:
        key, value = f"kv/new/{self._rng.getrandbits(64):x}", self._rng.randbytes(64)
        began_s = time.monotonic()
        try:
            self._client.put(key, value)
        except TanghuluError as error:
            self.failures.append(f"{error.code} after {time.monotonic() - began_s:.2f} s")
        else:
            self.put.append((key, value))
        self.put_s.append(time.monotonic() - began_s)


def measure(num_keys: int, num_nodes: int, seed: int) -> dict[str, Any]:
    """The figures of one restart."""
    memory = f"{max(num_keys // num_nodes * 64 * 2 >> 20, 64) + 64}MiB"
    with Cluster(num_nodes, memory, checked=False) as cluster:
        parts = [range(num_keys * i // num_nodes, num_keys * (i + 1) // num_nodes) for i in range(num_nodes)]
        began_s = time.monotonic()
        with ThreadPoolExecutor(num_nodes) as pool:
            list(pool.map(fill, [cluster.address] * num_nodes, [n.name for n in cluster.nodes], parts))
        filled_s = time.monotonic() - began_s
        before = cluster.master.metric("tanghulu_master_keys")
        asking = Asking(cluster.address, num_keys, seed)
        asking.start()
        cluster.restart_master()
        began_s, ready_s, known_s = time.monotonic(), 0.0, 0.0
        while not (ready_s and known_s):
            seconds = time.monotonic() - began_s
            if not ready_s and cluster.master.metric("tanghulu_master_rebuilding") == 0:
                ready_s = seconds
            if not known_s and cluster.master.metric("tanghulu_master_keys") >= before:
                known_s = seconds
            time.sleep(0.2)
        time.sleep(2.0)
        asking.ended.set()
        asking.join()
        with tanghulu.connect(cluster.address) as client:
            num_wrong = sum(bytes(client.get(key)) != value for key, value in asking.put)
            sample = random.Random(seed).sample(range(num_keys), min(num_keys, 20_000))
            held = client.exists_many([key_of(n) for n in sample])
        after = cluster.master.metric("tanghulu_master_keys")
        return {
            "keys": num_keys,
            "nodes": num_nodes,
            "fill_s": round(filled_s, 1),
            "all_known_s": round(known_s, 2),
            "ready_s": round(ready_s, 2),
            "asked": asking.num_asked,
            "denied": asking.num_denied,
            "unanswered_calls": asking.num_unanswered,
            "puts_meanwhile": len(asking.put),
            "puts_failed": asking.failures,
            "put_p50_s": round(statistics.median(asking.put_s), 4),
            "put_max_s": round(max(asking.put_s), 2),
            "puts_wrong_afterwards": num_wrong,
            "lost_of_sample": held.count(False),
            "keys_before": int(before),
            "keys_after": int(after),
            "master_bytes_per_key": round(cluster.master.metric("process_resident_memory_bytes") / max(after, 1)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=300_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.keys, arguments.nodes, arguments.seed), indent=2))


if __name__ == "__main__":
    main()
