"""Blocks in a real store: what has another size than a block is not taken for one, and is put anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import tanghulu
from tanghulu.errors import InvalidRequest
from tanghulu.masters import Masters
from tanghulu.store.client.block_store import BlockStore
from tanghulu.store.client.settings import Settings
from tanghulu.store.client.signed_kv import KvClient
from tanghulu.types import BlockHash, Fingerprint
from tanghulu.workers.kv.store_adapter import StoreAdapter
from tests.store.cluster import Cluster

SIZE = 1000
HASHES = [BlockHash(bytes([number]) * 16) for number in range(3)]


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_block_of_another_size(size: int) -> None:
    with Cluster(1) as cluster, tanghulu.connect(cluster.address) as client:
        kv_client = KvClient(Settings(master=Masters.parse(cluster.address)))
        adapter = StoreAdapter(BlockStore(kv_client), Fingerprint(bytes(16)), 100)
        key = adapter._keys(HASHES)[1]
        client.put(key, b"x" * size)
        client.put("other", bytes(SIZE + 1))
        with pytest.raises(InvalidRequest, match=f"{SIZE + 1} bytes, the buffer to read into only {SIZE - 1}"):
            client.get_into("other", bytearray(SIZE - 1))
        values = [bytes([number + 1]) * SIZE for number in range(3)]
        adapter.save(HASHES, [memoryview(bytearray(value)) for value in values])
        buffers = [bytearray(SIZE) for _ in HASHES]
        assert adapter.load(HASHES, [memoryview(each) for each in buffers], set()) == 1
        assert buffers[0] == values[0]
        assert buffers[1] == bytes(SIZE)
        adapter.save(HASHES, [memoryview(bytearray(value)) for value in values])
        assert adapter.load(HASHES, [memoryview(each) for each in buffers], set()) == 3
        assert buffers == values
        adapter.close()


def test_blocks_that_a_node_reads_from_its_ssd_are_named(tmp_path: Path) -> None:
    with Cluster(0) as cluster, tanghulu.connect(cluster.address) as client:
        node = cluster.add_node("16MiB", "--ssd-path", str(tmp_path / "tier"), "--ssd-size", "64MiB")
        kv_client = KvClient(Settings(master=Masters.parse(cluster.address)))
        adapter = StoreAdapter(BlockStore(kv_client), Fingerprint(bytes(16)), 100)
        adapter.save(HASHES, [memoryview(bytearray([number] * SIZE)) for number in range(3)])
        assert client.evict(node.name, adapter._keys(HASHES)[1:]).num_chunks == 2
        buffers = [bytearray(SIZE) for _ in HASHES]
        for wanted in (set(HASHES[1:]), set()):
            from_ssd: set[BlockHash] = set()
            assert adapter.load(HASHES, [memoryview(each) for each in buffers], from_ssd) == 3
            assert from_ssd == wanted
        assert buffers == [bytearray([number] * SIZE) for number in range(3)]
        adapter.close()
