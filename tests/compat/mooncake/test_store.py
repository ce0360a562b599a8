"""What the contract's cases do not show: life, tenants, an embedded node, a store that is away, threads, forks."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tanghulu
from tanghulu.compat.mooncake import memory
from tanghulu.compat.mooncake.options import ReplicateConfig, SetupOptions, SoftPinAction, code_of
from tanghulu.compat.mooncake.store import MooncakeDistributedStore
from tanghulu.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QuotaExceeded,
    StoreFull,
    TanghuluError,
    TransferFailed,
    Unauthorized,
)
from tests.free_ports import free_port
from tests.store.cluster import Cluster, eventually
from tests.store.guarded_cluster import TOKENS, Secured, write_tokens

#: Every call for data, by name.
CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "put": (lambda s: s.put("k", b"v"), -600),
    "put_parts": (lambda s: s.put_parts("k", b"v"), -600),
    "put_batch": (lambda s: s.put_batch(["k"], [b"v"]), -600),
    "put_from": (lambda s: s.put_from("k", 4096, 1), -600),
    "batch_put_from": (lambda s: s.batch_put_from(["k", "l"], [4096, 4096], [1, 1]), [-600, -600]),
    "batch_put_from_multi_buffers": (lambda s: s.batch_put_from_multi_buffers(["k"], [[4096]], [[1]]), [-600]),
    "upsert": (lambda s: s.upsert("k", b"v"), -600),
    "get": (lambda s: s.get("k"), b""),
    "get_batch": (lambda s: s.get_batch(["k"]), [b""]),
    "get_buffer": (lambda s: s.get_buffer("k"), None),
    "batch_get_buffer": (lambda s: s.batch_get_buffer(["k"]), [None]),
    "get_into": (lambda s: s.get_into("k", 4096, 1), -600),
    "batch_get_into": (lambda s: s.batch_get_into(["k"], [4096], [1]), [-600]),
    "multi_buffers": (lambda s: s.batch_get_into_multi_buffers(["k"], [[4096]], [[1]]), [-600]),
    "ranges": (lambda s: s.batch_get_into_multi_buffer_ranges(["k"], [[4096]], [[1]], [[0]]), [-600]),
    "session": (lambda s: s.batch_get_session_start(["k"]), [-704]),
    "is_exist": (lambda s: s.is_exist("k"), 0),
    "batch_is_exist": (lambda s: s.batch_is_exist(["k"]), [-1]),
    "get_size": (lambda s: s.get_size("k"), -600),
    "get_replica_desc": (lambda s: s.get_replica_desc("k"), []),
    "batch_get_replica_desc": (lambda s: s.batch_get_replica_desc(["k"]), {}),
    "register_buffer": (lambda s: s.register_buffer(4096, 1), -600),
    "unregister_buffer": (lambda s: s.unregister_buffer(4096), -600),
    "remove": (lambda s: s.remove("k"), -600),
    "batch_remove": (lambda s: s.batch_remove(["k"]), [-600]),
    "remove_by_regex": (lambda s: s.remove_by_regex("k"), -600),
    "remove_all": (lambda s: s.remove_all(), -600),
    "health_check": (lambda s: s.health_check(), 1),
    "get_hostname": (lambda s: s.get_hostname(), ""),
    "setup_dummy": (lambda s: s.setup_dummy(1, 1, ""), -1),
    "close": (lambda s: s.close(), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_before_setup_and_after_close_return_codes(arguments: dict[str, Any], name: str) -> None:
    call, expected = CALLS[name]
    store = MooncakeDistributedStore()
    assert call(store) == expected
    assert store.setup(**arguments) == 0
    assert [store.close(), store.close()] == [0, 0]
    assert call(store) == expected


def test_setup_takes_a_dict_and_ignores_what_it_does_not_know(cluster: Cluster) -> None:
    config = {"master_server_addr": cluster.address, "local_hostname": "host", "metadata_server": "http://nobody"}
    store = MooncakeDistributedStore()
    assert store.setup({**config, "global_segment_size": "0 MB", "future": 1}) == 0
    host, port = store.get_hostname().split(":")
    assert host == "host"
    assert 12300 <= int(port) <= 14300
    assert store.setup({**config, "local_hostname": "host:77", "global_segment_size": 0}) == 0
    assert store.get_hostname() == "host:77"
    assert store.setup({"master_server_address": cluster.address, "global_segment_size": "0"}) == 0
    store.close()


def test_setup_refuses_keywords_that_mooncake_lacks(arguments: dict[str, Any]) -> None:
    store = MooncakeDistributedStore()
    with pytest.raises(TypeError, match="unexpected keyword argument 'enable_tape'"):
        store.setup(**arguments, enable_tape=True)
    with pytest.raises(TypeError, match="multiple values for argument 'local_hostname'"):
        store.setup("localhost", **arguments)
    with pytest.raises(TypeError, match="at most 13"):
        store.setup(*range(14))
    assert store.setup(*arguments.values(), None, enable_ssd_offload=False, tenant_id="default") == 0
    store.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"master_server_addr": ""}, "master_server_addr is empty"),
        ({"master_server_addr": "nowhere"}, "nowhere"),
        ({"global_segment_size": "many"}, "global_segment_size is 'many'"),
        ({"global_segment_size": -1}, "global_segment_size is -1"),
        ({"global_segment_size": float("inf")}, "global_segment_size is inf"),
        ({"tenant_id": ""}, "tenant_id ''"),
        ({"tenant_id": 7}, "tenant_id is 7"),
    ],
)
def test_setup_names_a_bad_argument(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture, changed: dict[str, Any], reason: str
) -> None:
    assert MooncakeDistributedStore().setup({**arguments, **changed}) == -1
    assert reason in caplog.text


def test_setup_fails_at_once_without_a_master(arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    arguments["master_server_addr"] = f"127.0.0.1:{free_port()}"
    assert MooncakeDistributedStore().setup(**arguments) == -1
    assert "MASTER_UNAVAILABLE" in caplog.text


def test_a_bad_variable_fails_setup(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANGHULU_TOKEN", "@/nowhere/token")
    assert MooncakeDistributedStore().setup(**arguments) == -1
    assert "/nowhere/token" in caplog.text


def test_tenants_do_not_see_each_other(arguments: dict[str, Any], cluster: Cluster) -> None:
    stores = [MooncakeDistributedStore(), MooncakeDistributedStore()]
    for store, tenant in zip(stores, ("a", "a/b"), strict=True):
        assert store.setup(**arguments, tenant_id=tenant) == 0
    one, other = stores
    assert [one.put("b/k", b"1"), other.put("k", b"2")] == [0, 0]
    assert [one.get("b/k"), one.get("k"), other.get("k"), other.get("b/k")] == [b"1", b"", b"2", b""]
    with tanghulu.connect(cluster.address) as client:
        client.put("kv/of-an-engine", b"kept")
        assert one.remove_by_regex("^b/") == 1
        assert one.put("again", b"1") == 0
        assert one.remove_all() == 1
        assert other.get("k") == b"2"
        assert other.remove_all(force=True) == 1
        assert bytes(client.get("kv/of-an-engine")) == b"kept"
        client.remove("kv/of-an-engine")
    for store in stores:
        store.close()


@pytest.mark.slow
def test_tokens_decide_who_may_do_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokens(tmp_path / "tokens.toml", list(TOKENS))
    store, other = MooncakeDistributedStore(), MooncakeDistributedStore()
    with Secured(tmp_path / "tokens.toml") as cluster:

        def setup(store: MooncakeDistributedStore, token: str, tenant: str, segment: int = 0) -> int:
            monkeypatch.setenv("TANGHULU_TOKEN", f"secret-{token}" if token else "")
            return store.setup("localhost", "", segment, 0, "tcp", "", cluster.address, tenant_id=tenant)

        assert setup(store, "", "default") == -1
        assert setup(store, "wrong", "default") == -1
        assert setup(store, "initech", "acme") == -1
        assert setup(store, "acme", "acme") == 0
        assert setup(other, "initech", "default") == 0
        assert [store.put("k", b"acme"), other.put("k", b"initech")] == [0, 0]
        assert [store.get("k"), other.get("k"), store.remove_all(), other.get("k")] == [
            b"acme",
            b"initech",
            1,
            b"initech",
        ]
        assert setup(store, "acme-reader", "acme") == 0
        assert store.put("k", b"v") == -1
        caplog.clear()
        assert setup(store, "worker", "default", 32 << 20) == -1
        assert "would serve everybody" in caplog.text
        monkeypatch.setenv("TANGHULU_TOKENS", str(tmp_path / "tokens.toml"))
        assert setup(store, "worker", "default", 32 << 20) == 0
        node = ReplicateConfig(preferred_segment=store.get_hostname())
        assert [store.put("here", b"v", node), store.get("here")] == [0, b"v"]
        with pytest.raises(Unauthorized):
            tanghulu.connect(cluster.address)
        store.close()
        other.close()


@pytest.mark.slow
def test_a_segment_is_a_node_as_long_as_the_store_is_open(arguments: dict[str, Any], cluster: Cluster) -> None:
    arguments["global_segment_size"] = 32 << 20
    store = MooncakeDistributedStore()
    assert store.setup(**arguments) == 0
    name = store.get_hostname()
    assert 12300 <= int(name.removeprefix("localhost:")) <= 14300  # as Mooncake picks one
    config = ReplicateConfig(preferred_segment=name, with_hard_pin=True)
    assert store.put("here", b"v" * (1 << 20), config) == 0
    (replica,) = store.get_replica_desc("here")
    with tanghulu.connect(cluster.address) as client:
        addresses = {node.id: node.address for node in client.nodes()}
        assert addresses[replica.node].endswith(name.rpartition(":")[2])
        assert client.stat("mooncake/default/here").pin.value == "hard"
        store.close()
        eventually(lambda: replica.node not in {node.id for node in client.nodes()})
    assert store.setup(**{**arguments, "global_segment_size": 0}) == 0
    assert store.get("here") == b""
    assert store.put("here", b"again") == 0
    assert store.remove("here") == 0
    store.close()


@pytest.mark.slow
def test_a_node_that_cannot_start_fails_setup(arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert MooncakeDistributedStore().setup({**arguments, "global_segment_size": 5}) == -1
    assert "--memory 5 is less than one page" in caplog.text


@pytest.mark.slow
def test_a_store_that_is_away_is_a_code(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Cluster(1, "32MiB") as cluster:
        store = MooncakeDistributedStore()
        assert store.setup("localhost", "", 0, 0, "tcp", "", cluster.address) == 0
        assert store.put("k", b"v") == 0
        buffer = ctypes.create_string_buffer(8)
        cluster.nodes[0].kill()
        cluster.master.kill()
        assert store.put("l", b"v") == -900
        assert store.put("l", b"v") == -900  # skipped: the store did not answer a moment ago
        assert store.upsert("k", b"w") == -900
        assert [store.is_exist("k"), store.batch_is_exist(["k"])] == [0, [-1]]
        assert store.get("k") == b""
        assert store.get_into("k", ctypes.addressof(buffer), 8) < 0
        assert store.get_buffer("k") is None
        assert store.health_check() == 2
        assert caplog.text.count("code -900") == 1
        store.close()


def test_threads_share_a_store(store: MooncakeDistributedStore) -> None:
    size, failures = 100_000, []

    def use(number: int) -> None:
        source, target = ctypes.create_string_buffer(bytes([number]) * size, size), ctypes.create_string_buffer(size)
        for turn in range(20):
            key = f"{number}-{turn}"
            put = store.batch_put_from([key], [ctypes.addressof(source)], [size])
            got = store.batch_get_into([key], [ctypes.addressof(target)], [size])
            if (put, got, target.raw) != ([0], [size], source.raw):
                failures.append((key, put, got))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_codes_and_ends_nobodys_node(arguments: dict[str, Any]) -> None:
    store = MooncakeDistributedStore()
    assert store.setup(**{**arguments, "global_segment_size": 32 << 20}) == 0
    child = os.fork()
    if child == 0:
        codes = [store.put("k", b"v"), store.is_exist("k"), store.close()]
        os._exit(0 if codes == [-600, 0, 0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.put("k", b"v", ReplicateConfig(preferred_segment=store.get_hostname())) == 0
    assert store.remove("k") == 0
    store.close()


def test_more_keys_than_a_call_takes(store: MooncakeDistributedStore) -> None:
    keys = [f"key {number}" for number in range(1000)]
    assert store.put_batch(keys, [key.encode() for key in keys]) == 0
    assert store.batch_is_exist(keys) == [1] * 1000
    assert store.get_batch(keys) == [key.encode() for key in keys]
    assert store.remove_all() == 1000


def test_one_bad_key_or_buffer_spares_the_others(store: MooncakeDistributedStore) -> None:
    buffer = ctypes.create_string_buffer(b"0123", 4)
    at = ctypes.addressof(buffer)
    assert store.batch_put_from(["a", "", "b", "c"], [at, at, 0, at], [4, 4, 4, 4]) == [0, -600, -600, 0]
    assert store.batch_is_exist(["a", "", "b", "c"]) == [1, -1, 0, 1]
    assert store.batch_get_into_multi_buffers(["a", "c"], [[at], [at, at]], [[4], [4]]) == [4, -600]


def test_options_of_a_put() -> None:
    config = ReplicateConfig()
    assert (config.replicas, config.pin, config.segment) == (1, "none", "")
    config.replica_num, config.preferred_segments, config.soft_pin_action = 0, ["a:1", "b:2"], SoftPinAction.ENABLE
    assert (config.replicas, config.pin, config.segment) == (1, "soft", "a:1")
    config.replica_num = 1000
    assert config.replicas == 64
    assert not hasattr(ReplicateConfig, "group_ids")  # callers look for it before they rely on groups
    assert "replica_num=1000" in str(config)


def test_codes() -> None:
    expected = {QuotaExceeded: -200, StoreFull: -200, TransferFailed: -800, DeadlineExceeded: -900, TanghuluError: -1}
    assert {kind: code_of(kind("")) for kind in expected} == expected


def test_names_of_keys() -> None:
    setup = SetupOptions(master_server_addr="h:1", tenant_id="a/b")
    assert setup.key("model@tp0@hash") == "mooncake/a%2Fb/model@tp0@hash"
    long = [setup.key("x" * 2000 + end) for end in "yz"]
    assert long[0] != long[1]
    assert all(len(each) < 200 for each in long)
    assert setup.key(b"\xff\n").startswith("mooncake/a%2Fb/")
    with pytest.raises(InvalidRequest):
        setup.key("")


def test_hosts() -> None:
    hosts = {name: SetupOptions(name, 0, "h:1").host for name in ("host", "host:77", "10.0.0.1:5", "[::1]")}
    assert hosts == {"host": "host", "host:77": "host", "10.0.0.1:5": "10.0.0.1", "[::1]": "[::1]"}


def test_memory_of_a_gpu_is_refused(store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Names odd addresses device memory; knows nothing of those below 4096."""

        def cuPointerGetAttribute(self, kind: Any, attribute: int, address: Any) -> int:
            kind._obj.value = 1 + address.value % 2
            return int(address.value < 4096)

    monkeypatch.setattr(memory, "_cuda", Driver)
    assert [store.register_buffer(at, 1) for at in (8191, 8190, 4095)] == [-600, 0, 0]
    assert store.put_from("k", 8191, 1) == -600
    assert store.batch_get_into_multi_buffers(["k"], [[8191]], [[1]]) == [-600]


def test_without_a_driver_all_memory_is_the_hosts() -> None:
    if memory._cuda() is not None:
        pytest.skip("hardware: this process has loaded CUDA")
    memory.refuse_device_memory(4096)
