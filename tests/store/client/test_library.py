"""The client as a library: what users get wrong, tensors that say what they are, names at the top. A real node."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tanghulu
from tanghulu import aio
from tanghulu.errors import ChunkNotFound, InvalidRequest
from tanghulu.store.client import Client
from tests.store.cluster import Cluster

MIB = 1 << 20


def test_names_at_the_top() -> None:
    from tanghulu.store import client

    assert tanghulu.Client is client.Client
    assert tanghulu.Chunk is client.Chunk
    assert tanghulu.Status is client.Status
    assert tanghulu.PutItem is client.PutItem
    assert set(tanghulu.__all__) <= set(dir(tanghulu))
    code = """
import sys, tanghulu
assert "google.protobuf" not in sys.modules and "numpy" not in sys.modules
assert issubclass(tanghulu.errors.ChunkNotFound, tanghulu.errors.TanghuluError)
assert "numpy" not in sys.modules
tanghulu.aio.connect
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- keys and items


@pytest.mark.parametrize("keys", ["abc", b"abc", bytearray(b"abc"), 7, None])
def test_a_single_key_is_no_list_of_keys(client: Client, keys: Any) -> None:
    calls: list[Callable[[Any], object]] = [
        client.get_many,
        client.exists_many,
        client.match_prefix,
        client.wait_for_many,
        client.remove_many,
        client.replicate,
        lambda keys: client.get_many_into(keys, [bytearray(1)] * 3),
        lambda keys: client.evict(client.nodes()[0].id, keys),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="expected a list of keys"):
            call(keys)


@pytest.mark.parametrize("key", [b"k", 7, None, ["k"]])
def test_a_key_is_a_str(client: Client, key: Any) -> None:
    calls: list[Callable[[Any], object]] = [
        client.get,
        client.exists,
        client.remove,
        client.stat,
        client.wait_for,
        lambda key: client.put(key, b"1"),
        lambda key: client.get_into(key, bytearray(1)),
        lambda key: client.exists_many(["a", key]),
        lambda key: client.get_many([key, "a"], raise_errors=True),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="a key is a str"):
            call(key)


def test_any_iterable_of_keys_will_do(client: Client) -> None:
    client.put("lib/a", b"1")
    assert client.exists_many(key for key in ("lib/a", "lib/b")) == [True, False]  # type: ignore[arg-type]
    assert client.exists_many({"lib/a": 0}) == [True]  # type: ignore[arg-type]


def test_put_many_takes_a_dict_and_nothing_odd(client: Client) -> None:
    assert all(client.put_many({"lib/1": b"one", "lib/2": b"two"}))
    assert client.get("lib/2") == b"two"
    for odd in ("ab", b"ab", [("lib/3",)], ["ab"], [7]):
        with pytest.raises(InvalidRequest, match=r"put_many\(\) takes"):
            client.put_many(odd)  # type: ignore[arg-type]
    assert not client.exists("a")


def test_errors_of_many_are_raised_if_asked_for(client: Client) -> None:
    items: list[tuple[str, Any]] = [("lib/good", b"1"), ("lib/bad", b""), ("lib/worse", 7)]
    good, bad, _ = statuses = client.put_many(items)
    assert [bool(each) for each in statuses] == [True, False, False]
    assert good.check() is good
    with pytest.raises(InvalidRequest, match="empty"):
        bad.check()
    with pytest.raises(InvalidRequest, match="empty") as caught:
        client.put_many(items, raise_errors=True)
    assert caught.value.__notes__ == ["2 of 3 failed, the first with this"]
    with pytest.raises(ChunkNotFound):
        client.get_many(["lib/good", "lib/none"], raise_errors=True)
    with pytest.raises(ChunkNotFound):
        client.get_many_into(["lib/good", "lib/none"], [bytearray(1), bytearray(1)], raise_errors=True)
    (chunk,) = client.get_many(["lib/good"], raise_errors=True)
    assert chunk == b"1"
    assert client.remove_many(["lib/good", "lib/none"], raise_errors=True) == [True, False]


@pytest.mark.parametrize(
    "value", [np.array([{}, []], object), memoryview(b"abcdef")[::2], np.arange(8)[::2], 7, "text", None]
)
def test_what_is_no_value(client: Client, value: Any) -> None:
    with pytest.raises(InvalidRequest):
        client.put("lib/odd", value)


# --- servers


@pytest.mark.parametrize("master", [None, 7, b"127.0.0.1:1"])
def test_a_master_has_an_address(master: Any) -> None:
    for connect in (tanghulu.connect, aio.connect):
        with pytest.raises(InvalidRequest, match="a master is written"):
            connect(master)


async def test_a_node_or_an_http_port_is_no_master(cluster: Cluster) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        for address in (cluster.nodes[0].address, f"{host}:{port}"):
            with pytest.raises(InvalidRequest, match=f"{address} is not a master"):
                await asyncio.to_thread(tanghulu.connect, address)
    with pytest.raises(InvalidRequest, match="give the master's address"):
        await aio.connect(cluster.nodes[0].address)


def test_an_asyncio_client_belongs_to_one_loop(cluster: Cluster) -> None:
    async def use() -> None:
        async with aio.connect(cluster.address) as store:
            said: list[str] = []

            def elsewhere() -> None:
                try:
                    asyncio.run(store.exists("k"))  # type: ignore[arg-type]
                except InvalidRequest as error:
                    said.append(error.message)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            await asyncio.to_thread(thread.join)
            assert "belongs to another event loop" in said[0]
            assert not await store.exists("k")

    asyncio.run(use())


def test_a_client_left_open_is_named(cluster: Cluster) -> None:
    client = tanghulu.connect(cluster.address)
    client.put("lib/left", b"1")
    left = [client]
    del client
    with pytest.warns(ResourceWarning, match=rf"unclosed Client\({cluster.address}\)"):
        left.clear()


@pytest.mark.parametrize("deadline_s", [0.05, 0.1, 0.3])
def test_wait_for_waits_until_its_deadline(client: Client, deadline_s: float) -> None:
    began = time.monotonic()
    assert not client.wait_for("lib/never", deadline_s=deadline_s)
    assert time.monotonic() - began >= deadline_s * 0.99


def test_wait_for_sees_what_comes_late(client: Client) -> None:
    putting = threading.Timer(0.03, client.put, ("lib/late", b"1"))
    putting.start()
    assert client.wait_for("lib/late", deadline_s=1.0)
    putting.join()


# --- tensors

torch = pytest.importorskip("torch", reason="extra: torch")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [1024, 4 * MIB])
def test_a_tensor_of_a_chunk_is_the_callers_own(cluster: Cluster, transport: str, size: int) -> None:
    with tanghulu.connect(cluster.address, transport=transport) as store:
        key = f"lib/own-{transport}-{size}"
        store.put(key, bytes(size))
        with store.get(key) as chunk, store.get(key) as other:
            chunk.torch().add_(1)
            chunk.torch(torch.float32, (size // 4,)).add_(1)
            assert not other.numpy().any()
            assert not chunk.numpy().any()
            shared = chunk.torch(shared=True)
            assert shared.data_ptr() == chunk.numpy().__array_interface__["data"][0]
            del shared
        assert store.get(key) == bytes(size)
        assert store.remove(key)


TENSORS = {
    "bfloat16": lambda: torch.randn(3, 5, 7).to(torch.bfloat16),
    "float8": lambda: torch.randn(16, 16).to(torch.float8_e4m3fn),
    "zero-dim": lambda: torch.tensor(3.5, dtype=torch.float64),
    "empty": lambda: torch.empty(0, 4, dtype=torch.int16),
    "transposed": lambda: torch.arange(24, dtype=torch.int32).reshape(4, 6).t(),
    "strided": lambda: torch.arange(100)[::3],
    "bool": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "grad": lambda: torch.randn(2, 2, requires_grad=True),
    "large": lambda: torch.randn(2, MIB, dtype=torch.float32),
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_as_they_were(cluster: Cluster, transport: str, name: str) -> None:
    tensor = TENSORS[name]()
    key = f"lib/tensor-{transport}-{name}"
    with tanghulu.connect(cluster.address, transport=transport) as store:
        assert not store.put_tensor(key, tensor, ttl_s=60).existed
        for shared in (False, True):
            again = store.get_tensor(key, shared=shared)
            assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
            assert again.is_contiguous()
            wanted = tensor.detach().resolve_conj().contiguous()
            assert torch.equal(again.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
            if not shared and again.numel():
                again.zero_()
        del again
        assert store.put_tensor(key, tensor).existed
        assert store.remove(key)


async def test_tensors_by_asyncio(cluster: Cluster) -> None:
    tensor = torch.randn(3, 3)
    async with aio.connect(cluster.address) as store:
        await store.put_tensor("lib/aio", tensor)
        assert torch.equal(await store.get_tensor("lib/aio"), tensor)
        await store.remove("lib/aio")


def test_what_is_no_tensor(client: Client) -> None:
    for odd in (torch.eye(3).to_sparse(), np.zeros(3), b"bytes", torch.empty(2, device="meta")):
        with pytest.raises(InvalidRequest):
            client.put_tensor("lib/odd", odd)
    values = [b"x", bytes(100), b"THTENSOR" + bytes(100), b"THTENSOR\x40\0\0\0" + b"[]".ljust(52) + bytes(8)]
    values.append(b"THTENSOR\x40\0\0\0" + b'{"dtype":"nn","shape":[1]}'.ljust(52) + bytes(8))
    values.append(b"THTENSOR\x40\0\0\0" + b'{"dtype":"int32","shape":[7]}'.ljust(52) + bytes(8))
    for number, value in enumerate(values):
        client.put(f"lib/plain-{number}", value)
        with pytest.raises(InvalidRequest):
            client.get_tensor(f"lib/plain-{number}")
    with pytest.raises(ChunkNotFound):
        client.get_tensor("lib/absent")
