"""Runs in SGLang's environment: one scenario for each line of JSON on the standard input, one line of JSON back.

The first argument is the master's address. A line is ``[scenario, arguments]``; the answer ``{"said": ...}`` is what
the scenario returned, ``{"error": ...}`` its traceback. ``begin`` keeps a controller for the lines behind it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import interface
import stand_ins

stand_ins.install()

import controller as real  # noqa: E402
import sglang.srt.mem_cache.hicache_storage as storage  # noqa: E402
import sglang.srt.observability.metrics_collector as collector  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402

from tanghulu.errors import ConfigError  # noqa: E402

MASTER = sys.argv[1]
PAGES = 8
FAILURES = "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"
KEPT: dict[str, Any] = {}


def prompt(salt: str) -> list[int]:
    """A prompt of eight pages that no other scenario has."""
    first = sum(salt.encode()) * 1000
    return list(range(first, first + PAGES * real.PAGE_TOKENS))


def equal(one: Any, other: Any, moved: list[int]) -> list[bool]:
    """Whether page ``at`` of one pool has the bytes of page ``moved[at]`` of another."""
    return [bool((real.contents(one, at) == real.contents(other, to)).all()) for at, to in enumerate(moved)]


def round_trip(layout: str, interface_v1: int = 1) -> dict[str, Any]:
    """Eight pages go out of one pool and come into other places of another."""
    extra = {"namespace": "trip", "interface_v1": interface_v1}
    first, second, tokens = real.host_pool(layout), real.host_pool(layout), prompt(layout)
    with real.attached(first, MASTER, **extra) as one, real.attached(second, MASTER, **extra) as two:
        saved = real.save(one, tokens, list(range(8)))
        names, moved = real.find(two, tokens), list(range(15, 7, -1))
        return {
            "saved": saved,
            "found": len(names),
            "loaded": real.load(two, names, moved),
            "equal": equal(first, second, moved),
        }


def seconds_of_a_load() -> float:
    """The shortest of some loads of eight pages of 192 KiB."""
    pool, tokens, times = real.host_pool(), prompt("seconds"), []
    with real.attached(pool, MASTER) as one:
        real.save(one, tokens, list(range(8)))
        names = real.find(one, tokens)
        for _ in range(20):
            began_s = time.perf_counter()
            assert real.load(one, names, list(range(8, 16))) == PAGES
            times.append(time.perf_counter() - began_s)
    return min(times)


def removed_page() -> list[int]:
    """A page goes between the query and the load."""
    pool, tokens = real.host_pool(), prompt("removed")
    with real.attached(pool, MASTER) as one:
        real.save(one, tokens, list(range(8)))
        names, backend = real.find(one, tokens), one.storage_backend
        assert backend._store.remove(backend._pools["kv"].keys(names[5:6])) == [True]
        return [len(names), real.load(one, names, list(range(8, 16))), len(real.find(one, tokens))]


def failure_injector() -> dict[str, Any]:
    """Half of all calls fail, by SGLang's own injector: what is counted as loaded has its bytes."""
    pool, tokens = real.host_pool(), prompt("injector")
    with real.attached(pool, MASTER) as one:
        real.save(one, tokens, list(range(8)))
    os.environ[FAILURES] = "0.5"
    try:
        lengths, wrong = set(), 0
        with real.attached(pool, MASTER) as one:
            wrapped = type(one.storage_backend).__name__
            for _ in range(40):
                pool.kv_buffer[:, 8 * real.PAGE_TOKENS :] = 0
                names = real.find(one, tokens)
                loaded = real.load(one, names, list(range(8, 16))[: len(names)]) if names else 0
                lengths.add(loaded)
                wrong += equal(pool, pool, list(range(8, 16)))[:loaded].count(False)
    finally:
        del os.environ[FAILURES]
    return {"backend": wrapped, "lengths": sorted(lengths), "wrong": wrong}


def hybrid_query(one: Any, tokens: list[int], transfers: list[Any]) -> list[Any]:
    """What SGLang's controller of hybrid models makes of what is stored: pages after all ranks agreed, by pool."""
    operation = SimpleNamespace(
        token_ids=tokens,
        last_hash=None,
        assume_stored=False,
        prefix_keys=None,
        pool_transfers=transfers,
        pool_storage_result=storage.PoolTransferResult.empty(),
    )
    _, num_tokens = HybridCacheController._storage_hit_query(one, operation)
    agreed = HybridCacheController._sync_prefetch_hit_query(one, operation, num_tokens)
    pools = {name.value: pages for name, pages in operation.query_pool_hit_pages.items()}
    return [agreed // one.page_size, operation.pool_storage_result.restorable_prefix_pages, pools]


def hybrid_pools() -> dict[str, Any]:
    """A pool with a window beside KV, stored up to page 4 alone; and groups that stand for 4 pages each."""
    pool, beside, tokens = real.host_pool(), real.host_pool("page_first_direct"), prompt("hybrid")
    name, policy = storage.PoolName, storage.PoolHitPolicy
    with real.attached(pool, MASTER) as one:
        backend, names = one.storage_backend, real.hashes_of(one, tokens)
        backend.register_mem_host_pool_v2(pool, name.KV)
        backend.register_mem_host_pool_v2(beside, name.SWA)
        kv = storage.PoolTransfer(name.KV, real.indices_of(list(range(8))), keys=names)
        window = storage.PoolTransfer(name.SWA, real.indices_of([2, 3]), keys=names[2:4])
        saved = backend.batch_set_v2([kv, window])
        trailing = storage.PoolTransfer(name.SWA, keys=names[:2], hit_policy=policy.TRAILING_PAGES)
        groups = storage.PoolTransfer(name.SWA, hit_policy=policy.BLOCK_GROUPS, block_pages=4, group_pages=2)
        back = storage.PoolTransfer(name.SWA, real.indices_of([8, 9]), keys=names[2:4])
        loaded = backend.batch_get_v2([back])
        return {
            "saved": {each.value: pages for each, pages in saved.items()},
            "trailing": hybrid_query(one, tokens, [trailing]),
            "groups": hybrid_query(one, tokens, [groups]),
            "loaded": {each.value: pages for each, pages in loaded.items()},
            "equal": [bool((real.contents(beside, at) == real.contents(beside, at + 6)).all()) for at in (2, 3)],
        }


def tensor_ranks(mla: bool) -> dict[str, Any]:
    """Two ranks: what each saves, and what the other finds of it."""
    pools, tokens = [real.host_pool(), real.host_pool()], prompt(f"ranks {mla}")
    split = {"tp_size": 2, "namespace": f"ranks {mla}", "device": real.MlaDevice() if mla else real.Device()}
    with (
        real.attached(pools[0], MASTER, tp_rank=0, **split) as zero,
        real.attached(pools[1], MASTER, tp_rank=1, **split) as one,
    ):
        skips = [zero.backup_skip, one.backup_skip]
        saved = real.save(zero, tokens, list(range(8)))
        found = [len(real.find(rank, tokens)) for rank in (zero, one)]
        loaded = real.load(one, real.find(zero, tokens), list(range(8, 16)))
        same = equal(pools[0], pools[1], list(range(8, 16)))
        return {"skips": skips, "saved": saved, "found": found, "loaded": loaded, "same": same}


def threads() -> list[int]:
    """A backup and a prefetch by SGLang's own threads."""
    pool, tokens = real.host_pool(), prompt("threads")
    with real.attached(pool, MASTER) as one:
        one.write_storage(real.indices_of(list(range(8))), tokens, hash_value=real.hashes_of(one, tokens))
        saved = one.ack_backup_queue.get(timeout=60).completed_tokens
        operation = one.prefetch("request", tokens)
        hit = one.prefetch_hit_queue.get(timeout=60)
        assert hit is operation
        operation.host_indices = real.indices_of(list(range(8, 16)))
        one.prefetch_buffer.put(operation)
        loaded = one.ack_prefetch_queue.get(timeout=60).completed_tokens
        assert equal(pool, pool, list(range(8, 16))) == [True] * 8
        return [saved, operation.storage_hit_count, loaded]


def clear() -> list[int]:
    """One server clears; another with a namespace of its own keeps its pages."""
    tokens, pools = prompt("clear"), [real.host_pool(), real.host_pool()]
    with (
        real.attached(pools[0], MASTER, namespace="mine") as mine,
        real.attached(pools[1], MASTER, namespace="theirs") as theirs,
    ):
        for each in (mine, theirs):
            real.save(each, tokens, list(range(8)))
        mine.storage_backend.clear()
        return [len(real.find(each, tokens)) for each in (mine, theirs)]


def metrics() -> dict[str, Any]:
    """SGLang's own collector takes our figures."""
    from prometheus_client import REGISTRY

    tokens = prompt("metrics")
    with real.attached(real.host_pool(), MASTER) as one:
        real.save(one, tokens, list(range(8)))
        real.load(one, real.find(one, tokens), list(range(8, 16)))
        shows = collector.StorageMetricsCollector({"rank": "0"})
        shows.log_storage_metrics(one.storage_backend.get_stats())
    ours = {"outcome": "keys_loaded", "tp_rank": "0", "pp_rank": "0"}
    return {
        "theirs": REGISTRY.get_sample_value("sglang:prefetch_pgs_sum", {"rank": "0"}),
        "ours": REGISTRY.get_sample_value("tanghulu_hicache_outcomes_total", ours),
    }


def recording() -> list[str]:
    """Where the recorded interface differs from the installed one."""
    modules = {interface.STORAGE: storage, interface.METRICS: collector}
    return [
        f"{kind.__name__}: {each}"
        for name, kinds in interface.RECORDED.items()
        for kind in kinds
        for each in interface.differences(kind, getattr(modules[name], kind.__name__))
    ]


def bad_option() -> str:
    """The error out of SGLang's own attaching."""
    try:
        with real.attached(real.host_pool(), MASTER, mastre="x"):
            return "attached"
    except ConfigError as error:
        return f"{type(error).__name__}: {error}"


def begin() -> int:
    """Save eight pages, and keep the controller."""
    held: AbstractContextManager[Any] = real.attached(
        real.host_pool(), MASTER, lookup_deadline_s=0.5, load_deadline_s=1, save_deadline_s=1
    )
    KEPT.update(held=held, one=held.__enter__())
    return real.save(KEPT["one"], prompt("kept"), list(range(8)))


def attempt() -> dict[str, Any]:
    """What is found, loaded and saved by the controller that was kept; and whether the store is left alone."""
    one = KEPT["one"]
    tokens, fresh = prompt("kept"), prompt(f"fresh {time.monotonic_ns()}")
    return {
        "found": len(real.find(one, tokens)),
        "loaded": real.load(one, real.hashes_of(one, tokens), list(range(8, 16))),
        "saved": real.save(one, fresh, list(range(8))),
        "counts": dict(one.storage_backend._store.counts),
        "is_healthy": one.storage_backend._store.is_healthy,
    }


def end() -> None:
    KEPT.pop("held").__exit__(None, None, None)


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"said": globals()[name](**arguments)}
        except Exception:  # noqa: BLE001 - the test that asked fails with it
            answer = {"error": traceback.format_exc()}
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
