"""Views that outlive their client: each lease ends with its last view, in whatever order things are closed."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import tanghulu
from tanghulu.store.client import Client
from tanghulu.store.client.chunk import Chunk
from tests.store.cluster import Cluster, eventually

SIZE = 300_000


def read_closing(address: str, keys: list[str]) -> list[Chunk]:
    with tanghulu.connect(address) as reader:
        return [reader.get(key) for key in keys]


def read_dropping(address: str, keys: list[str]) -> list[Chunk]:
    reader = tanghulu.connect(address)
    chunks = [reader.get(key) for key in keys]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del reader
        gc.collect()
    return chunks


def read_async(address: str, keys: list[str]) -> list[Chunk]:
    async def read() -> list[Chunk]:
        async with await tanghulu.aio.connect(address) as reader:
            return [await reader.get(key) for key in keys]

    return asyncio.run(read())


def num_leases(client: Client, keys: list[str]) -> list[int]:
    return [client.stat(key).num_leases for key in keys]


@pytest.fixture
def keys(client: Client) -> Iterator[list[str]]:
    names = [f"k{number}" for number in range(3)]
    for name in names:
        client.put(name, name.encode() * (SIZE // 2))
    yield names
    eventually(lambda: num_leases(client, names) == [0, 0, 0])


@pytest.mark.parametrize("read", [read_closing, read_dropping, read_async])
def test_a_lease_ends_with_its_last_view(
    cluster: Cluster, client: Client, keys: list[str], read: Callable[[str, list[str]], list[Chunk]]
) -> None:
    chunks = read(cluster.address, keys)
    array = np.asarray(chunks[1].numpy())[10:20]
    assert num_leases(client, keys) == [1, 1, 1]
    chunks[0].close()
    eventually(lambda: num_leases(client, keys) == [0, 1, 1])
    chunks[1].close()
    del chunks[2]
    eventually(lambda: num_leases(client, keys) == [0, 1, 0])
    assert array.tobytes() == b"k1" * 5, "an array keeps its chunk's memory"
    del array, chunks


def test_what_is_dropped_beside_the_close_is_given_back(cluster: Cluster, client: Client, keys: list[str]) -> None:
    with tanghulu.connect(cluster.address) as reader:
        arrays = [reader.get(key).numpy() for key in keys]
        del arrays
    eventually(lambda: num_leases(client, keys) == [0, 0, 0])


def test_a_child_gives_back_its_own_leases_and_not_its_parents(
    cluster: Cluster, client: Client, keys: list[str]
) -> None:
    chunks = read_closing(cluster.address, keys[:1])
    child = os.fork()
    if not child:
        chunks.clear()
        gc.collect()
        own = read_closing(cluster.address, keys[1:])
        own.clear()
        with tanghulu.connect(cluster.address) as looking:
            eventually(lambda: num_leases(looking, keys) == [1, 0, 0])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert num_leases(client, keys) == [1, 0, 0]
    chunks.clear()
