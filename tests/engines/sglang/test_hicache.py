"""The connector by SGLang's recorded calls: what is named how, found, loaded, saved, and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tanghulu.errors import ConfigError, InvalidRequest, MasterUnavailable
from tanghulu.store.client.block_store import MAX_FAILED_LOOKUPS
from tests.engines.sglang.conftest import Chunks, Pool, indices
from tests.engines.sglang.interface import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer, differences

NAMES = [f"{number:064x}" for number in range(8)]

Backend = Callable[..., Any]


def test_the_connector_has_every_call_of_the_interface(module: Any) -> None:
    assert differences(HiCacheStorage, module.TanghuluHiCache) == []


def test_pages_come_back_elsewhere(backend: Backend, chunks: Chunks) -> None:
    first, second = Pool(), Pool()
    assert backend(first).batch_set_v1(NAMES[:3], indices(0, 1, 2)) == [True] * 3
    two = backend(second)
    assert two.batch_exists(NAMES) == 3
    assert two.batch_get_v1(NAMES[:4], indices(9, 8, 7, 6)) == [True, True, True, False]
    assert [second.page(page) for page in (9, 8, 7)] == [first.page(page) for page in range(3)]
    assert all(key.startswith("sgl/") and key.endswith("/0") for key in chunks.kept)


def test_a_page_that_is_gone_or_short_is_a_miss(backend: Backend, chunks: Chunks) -> None:
    one = backend()
    one.batch_set_v1(NAMES, indices(*range(8)))
    short, gone = list(chunks.kept)[2], list(chunks.kept)[5]
    chunks.kept[short] = chunks.kept[short][:-1]
    del chunks.kept[gone]
    assert one.batch_get_v1(NAMES, indices(*range(8))) == [True, True, False, True, True, False, True, True]


def test_a_call_of_the_store_has_256_pages(backend: Backend, chunks: Chunks) -> None:
    names = [f"{number:064x}" for number in range(300)]
    one = backend(Pool())
    chunks.calls.clear()
    places = indices(*[number % 16 for number in range(300)])
    assert one.batch_set_v1(names, places) == [True] * 300
    assert one.batch_get_v1(names, places) == [True] * 300
    assert one.batch_exists(names) == 300
    assert chunks.calls == [
        *[("put", n) for n in (256, 44)],
        *[("get", n) for n in (256, 44)],
        ("exists", 300),
    ]


def test_indices_of_other_pages_than_named_move_nothing(backend: Backend, chunks: Chunks) -> None:
    one = backend()
    assert one.batch_set_v1(NAMES[:2], indices(0)) == [False, False]
    assert one.batch_get_v1(NAMES[:2], None) == [False, False]
    assert chunks.kept == {}


@pytest.mark.parametrize(
    "other",
    [
        {"pool": Pool(page_tokens=8)},
        {"pool": Pool(layout="page_first_direct")},
        {"pool": Pool(dtype="bfloat16")},
        {"pool": Pool(head_num=4)},
        {"pool": Pool(storage_format_tag="packed")},
        {"extra": {"namespace": "other"}},
        {"extra": {"interface_v1": 0}},
        {"model_name": "org/other"},
        {"tp_size": 2},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_size": 2},
        {"attn_cp_size": 2},
    ],
)
def test_other_bytes_have_other_keys(backend: Backend, other: dict[str, Any]) -> None:
    backend().batch_set_v1(NAMES, indices(*range(8)))
    assert backend().batch_exists(NAMES) == 8
    assert backend(**other).batch_exists(NAMES) == 0


def test_weights_and_configuration_of_a_folder_are_in_the_keys(backend: Backend, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text('{"rope_theta": 1e4, "_name_or_path": "here"}')
    backend(model_name=str(model)).batch_set_v1(NAMES, indices(*range(8)))
    moved = model.rename(tmp_path / "moved")
    (moved / "config.json").write_text('{"_name_or_path": "there", "rope_theta": 1e4}')
    assert backend(model_name=str(moved)).batch_exists(NAMES) == 8
    (moved / "config.json").write_text('{"rope_theta": 5e5}')
    assert backend(model_name=str(moved)).batch_exists(NAMES) == 0
    (moved / "config.json").write_text('{"rope_theta": 1e4}')
    (moved / "model.safetensors").write_bytes(b"WEIGHTS")
    assert backend(model_name=str(moved)).batch_exists(NAMES) == 0


def test_ranks_have_their_own_pages(backend: Backend) -> None:
    pools = [Pool(), Pool()]
    ranks = [backend(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    assert ranks[0].batch_set_v1(NAMES, indices(*range(8))) == [True] * 8
    assert [rank.batch_exists(NAMES) for rank in ranks] == [8, 0]
    ranks[1].batch_set_v1(NAMES[:4], indices(*range(4)))
    assert [rank.batch_exists(NAMES) for rank in ranks] == [8, 4]
    expected = [pool.page(0) for pool in pools]
    for pool in pools:
        pool.kv_buffer[:] = 0
    assert all(rank.batch_get_v1(NAMES[:1], indices(0)) == [True] for rank in ranks)
    assert [pool.page(0) for pool in pools] == expected


def test_what_all_ranks_of_an_mla_model_share_is_written_once(backend: Backend, chunks: Chunks) -> None:
    ranks = [backend(is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    assert ranks[1].batch_set_v1(NAMES, indices(*range(8))) == [True] * 8
    assert chunks.kept == {}
    assert ranks[0].batch_set_v1(NAMES, indices(*range(8))) == [True] * 8
    assert [rank.batch_exists(NAMES) for rank in ranks] == [8, 8]
    assert backend(is_mla_model=True, tp_rank=3, tp_size=4).batch_exists(NAMES) == 8


@pytest.mark.parametrize(
    ("name", "form", "shared"),
    [
        (PoolName.MAMBA, {}, False),
        (PoolName.DRAFT, {"head_num": 4}, False),
        (PoolName.DRAFT, {}, True),
        (PoolName.SWA, {"head_num": 4}, True),
    ],
)
def test_pools_beside_mla(backend: Backend, name: PoolName, form: dict[str, Any], shared: bool) -> None:
    ranks = [backend(is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    for rank in ranks:
        rank.register_mem_host_pool_v2(Pool(**form), name)
    transfer = PoolTransfer(name, indices(0, 1), keys=NAMES[:2])
    ranks[0].batch_set_v2([transfer])
    assert ranks[1].batch_get_v2([transfer]) == {name: [shared] * 2}


def test_a_window_ends_where_its_pages_are(backend: Backend) -> None:
    one = backend()
    one.register_mem_host_pool_v2(one.mem_pool_host, PoolName.KV)
    one.register_mem_host_pool_v2(Pool(), PoolName.SWA)
    kv = PoolTransfer(PoolName.KV, indices(*range(6)), keys=NAMES[:6])
    window = PoolTransfer(PoolName.SWA, indices(2, 3), keys=NAMES[2:4])
    assert one.batch_set_v2([kv, window]) == {PoolName.KV: [True] * 6, PoolName.SWA: [True] * 2}
    asked = PoolTransfer(PoolName.SWA, keys=NAMES[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = one.batch_exists_v2(NAMES, [asked])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 4}
    every = PoolTransfer(PoolName.SWA, keys=NAMES[:2], hit_policy=PoolHitPolicy.ALL_PAGES)
    assert one.batch_exists_v2(NAMES, [every]).kv_hit_pages == 0
    assert one.batch_exists_v2(NAMES).kv_hit_pages == 6


@pytest.mark.parametrize("named", [True, False])
def test_groups_are_counted_and_cut_nothing(backend: Backend, named: bool) -> None:
    one = backend()
    one.register_mem_host_pool_v2(Pool(), PoolName.DRAFT)
    one.batch_set_v1(NAMES, indices(*range(8)))
    one.batch_set_v2([PoolTransfer(PoolName.DRAFT, indices(0, 1), keys=[NAMES[3], NAMES[7]])])
    groups = PoolTransfer(PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=4, group_pages=1)
    groups.keys = [NAMES[3], NAMES[6]] if named else None
    found = one.batch_exists_v2(NAMES, [groups])
    assert found.kv_hit_pages == 8
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.DRAFT: 4 if named else 8}


def test_a_pool_nobody_registered_is_a_miss(backend: Backend) -> None:
    one = backend()
    one.batch_set_v1(NAMES, indices(*range(8)))
    transfer = PoolTransfer(PoolName.SWA, indices(0), keys=NAMES[:1])
    assert one.batch_get_v2([transfer]) == one.batch_set_v2([transfer]) == {PoolName.SWA: [False]}
    assert one.batch_exists_v2(NAMES, [transfer]).kv_hit_pages == 0


def test_a_policy_of_a_later_version_is_refused(backend: Backend) -> None:
    transfer = PoolTransfer(PoolName.KV, keys=NAMES)
    transfer.hit_policy = "every_other_page"  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="every_other_page"):
        backend().batch_exists_v2(NAMES, [transfer])


def test_a_pool_without_memory_needs_no_bytes(backend: Backend, chunks: Chunks) -> None:
    pool = Pool()
    pool.kv_buffer = None  # type: ignore[assignment]
    one = backend(pool)
    assert one.batch_set_v1(NAMES, None) == one.batch_get_v1(NAMES, None) == [True] * 8
    assert one.batch_exists(NAMES) == 8
    one.register_mem_host_pool_v2(Pool(), PoolName.SWA)
    one.batch_set_v2([PoolTransfer(PoolName.SWA, indices(0, 1), keys=NAMES[:2])])
    assert one.batch_exists_v2(NAMES, [PoolTransfer(PoolName.SWA)]).kv_hit_pages == 2


class Page:
    """As much of a tensor as SGLang's pages are for the connector."""

    def __init__(self, fill: int) -> None:
        self.data = np.full(Pool().page_size * 64, fill, np.uint8)

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)

    def numel(self) -> int:
        return self.data.size

    def element_size(self) -> int:
        return 1

    def contiguous(self) -> Page:
        return self


def test_pages_that_sglang_copies(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    one = backend(extra={"interface_v1": 0})
    assert "SGLang copies every page once more" in caplog.text
    assert one.set(NAMES[0], Page(7))
    assert one.batch_set(NAMES[1:3], [Page(8), Page(9)])
    targets = [Page(0) for _ in range(4)]
    assert one.batch_get(NAMES[:4], targets) == [*targets[:3], None]
    assert [target.data[0] for target in targets] == [7, 8, 9, 0]
    assert one.get(NAMES[0], targets[3]) is targets[3]
    assert (one.exists(NAMES[0]), one.exists(NAMES[5])) == (True, False)
    assert (one.get(NAMES[0]), one.set(NAMES[5])) == (None, False)


def test_a_store_that_is_away_is_misses_and_rests(backend: Backend, chunks: Chunks) -> None:
    chunks.error = MasterUnavailable("away")
    one = backend()
    chunks.calls.clear()
    for _ in range(MAX_FAILED_LOOKUPS + 5):
        assert one.batch_exists(NAMES) == 0
        assert one.batch_get_v1(NAMES, indices(*range(8))) == [False] * 8
        assert one.batch_set_v1(NAMES, indices(*range(8))) == [False] * 8
    assert [name for name, _ in chunks.calls].count("exists") == MAX_FAILED_LOOKUPS
    assert [name for name, _ in chunks.calls].count("get") == 1
    assert [name for name, _ in chunks.calls].count("put") == 0


def test_clear_removes_what_is_its_own(backend: Backend, chunks: Chunks) -> None:
    one, other = backend(extra={"namespace": "a.b"}), backend(extra={"namespace": "axb"})
    one.register_mem_host_pool_v2(Pool(), PoolName.SWA)
    for each in (one, other):
        each.batch_set_v1(NAMES, indices(*range(8)))
    one.batch_set_v2([PoolTransfer(PoolName.SWA, indices(0), keys=NAMES[:1])])
    chunks.kept["x/" + next(iter(chunks.kept))] = b"of somebody else"
    one.clear()
    assert (one.batch_exists(NAMES), other.batch_exists(NAMES)) == (0, 8)
    assert len(chunks.kept) == 9


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"mastre": "x"}, "unknown option 'mastre'"),
        ({"master": ""}, 'no "master"'),
        ({"load_deadline_s": 0}, "load_deadline_s=0 must be more than 0"),
        ({"lookup_deadline_s": -1}, "lookup_deadline_s=-1 must be more than 0"),
        ({"save_pending_bytes": "1GiB"}, "unknown option 'save_pending_bytes'"),
    ],
)
def test_bad_options_are_refused_at_the_start(backend: Backend, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        backend(extra=extra)


def test_sglangs_own_options_are_let_through(backend: Backend) -> None:
    own = {"backend_name": "tanghulu", "module_path": "m", "class_name": "c", "prefetch_threshold": 256}
    backend(extra=own)


def test_a_layout_without_addresses_is_refused(backend: Backend) -> None:
    class Odd(Pool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            raise ValueError("Unsupported layout: odd")

    with pytest.raises(ConfigError, match="page_first"):
        backend(Odd(layout="odd"))


def test_without_a_model_a_namespace_is_needed(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        backend(model_name=None)
    mine = {"model_name": None, "extra": {"namespace": "mine"}}
    backend(**mine).batch_set_v1(NAMES, indices(*range(8)))
    monkeypatch.chdir(tmp_path)  # where it was started from says nothing of the model
    (tmp_path / "config.json").write_text('{"rope_theta": 1e4}')
    assert backend(**mine).batch_exists(NAMES) == 8


def test_metrics(backend: Backend) -> None:
    from prometheus_client import REGISTRY

    one = backend(enable_storage_metrics=True)
    one.batch_set_v1(NAMES[:4], indices(*range(4)))
    one.batch_get_v1(NAMES, indices(*range(8)))
    stats = one.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
    assert all(rate > 0 for rate in (*stats.backup_bandwidth, *stats.prefetch_bandwidth))
    assert one.get_stats().backup_pgs == []
    rank = {"tp_rank": "0", "pp_rank": "0"}
    shown = REGISTRY.get_sample_value("tanghulu_hicache_outcomes_total", {"outcome": "keys_not_loaded", **rank})
    assert shown == 4
    assert REGISTRY.get_sample_value("tanghulu_hicache_store_open", rank) == 1
