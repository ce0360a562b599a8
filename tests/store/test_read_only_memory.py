"""What a client of a node's host cannot write: others' chunks, and the index by which all of them find chunks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tanghulu
from tanghulu.errors import Forbidden
from tests.store.cluster import Cluster, eventually
from tests.store.guarded_cluster import TOKENS, Secured, write_tokens

_BEGIN = """
import ctypes, errno, mmap, os, sys
import numpy as np
import tanghulu
libc = ctypes.CDLL(None, use_errno=True)
client = tanghulu.connect(sys.argv[1])
kept = client.get("large")
(mapped,) = client._driver.context.mapped.values()
entry = mapped.index.find("k", __import__("time").monotonic())
assert entry is not None
data, index = mapped.link.view, mapped.link.remote.map_published()
def address_of(view): return np.frombuffer(view, np.uint8).__array_interface__["data"][0]
"""
_WRITES = {
    "a value": "ctypes.memset(address_of(data) + entry.offset, 0, 1)",
    "an entry": "ctypes.memset(address_of(index) + entry.position, 0, 1)",
    "a value that it holds": "ctypes.memset(kept.numpy().__array_interface__['data'][0], 0, 1)",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        with tanghulu.connect(cluster.address) as client:
            client.put("k", b"value " * 1000)
            client.put("large", b"value " * 1_000_000)
        yield cluster


def _child(cluster: Cluster, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _BEGIN + script, cluster.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("what", _WRITES)
def test_a_process_that_writes_where_it_may_read_dies_and_nobody_else(cluster: Cluster, what: str) -> None:
    child = _child(cluster, _WRITES[what])
    assert child.returncode == -signal.SIGSEGV, child.stderr
    with tanghulu.connect(cluster.address) as client:
        assert client.get("k") == b"value " * 1000
        assert client.get("large") == b"value " * 1_000_000
        assert client.put("another", b"v" * 5000).ok or client.get("another") == b"v" * 5000


def test_its_pages_cannot_be_made_writable(cluster: Cluster) -> None:
    child = _child(
        cluster,
        """
for view in (data, index):
    assert view.readonly
    assert libc.mprotect(ctypes.c_void_p(address_of(view)), ctypes.c_size_t(4096), 3) == -1
    assert ctypes.get_errno() == errno.EACCES
""",
    )
    assert child.returncode == 0, child.stderr


def test_who_writes_too_reads_by_the_same_pages_as_others(cluster: Cluster) -> None:
    with tanghulu.connect(cluster.address) as client:
        client.get("k")
        ((_, mapped),) = client._driver.context.mapped.items()
        memory = mapped.link.remote.shm._memory  # type: ignore[union-attr]
        assert memory._written is None, "nothing is mapped for writing before something is written"
        for number, size in enumerate((100, 70_000, 20 << 20)):
            client.put(f"w{number}", bytes([number]) * size)
            assert client.get(f"w{number}") == bytes([number]) * size
        eventually(lambda: memory._written is not None)
        assert mapped.link.view is not None
        assert mapped.link.view.readonly
        with client.get("large") as chunk:
            assert not chunk.numpy().flags.writeable
            assert chunk.view.readonly


def test_a_token_to_read_maps_nothing_to_write(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.toml", list(TOKENS))
    with Secured(tmp_path / "tokens.toml") as cluster:
        with cluster.connect("acme") as acme, cluster.connect("acme-reader") as reader:
            acme.put("k", b"v" * 3000)
            acme.put("large", b"v" * 3_000_000)
            assert reader.get("large") == b"v" * 3_000_000
            eventually(lambda: reader.get("k") == b"v" * 3000 and bool(reader._driver.context.mapped))
            ((_, mapped),) = reader._driver.context.mapped.items()
            assert mapped.link.remote.map() is not None
            assert mapped.link.remote.map_writable() is None
            with pytest.raises(Forbidden):
                reader.put("other", b"v" * 3000)
            ((_, mapped),) = acme._driver.context.mapped.items()
            assert mapped.link.remote.map_writable() is not None
