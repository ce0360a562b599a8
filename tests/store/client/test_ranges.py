"""Parts of values and values in several buffers: over shared memory and tcp, verified by the parts that cover them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tanghulu
from tanghulu import aio
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.client import PutItem
from tanghulu.store.client.client import Client
from tanghulu.store.protocol import checksums as sums
from tests.store.cluster import Cluster, eventually

RNG = np.random.default_rng(5)
LARGE = 3 << 20
PART = 1 << 18


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1, "128MiB") as running:
        yield running


@pytest.fixture(params=["shm", "tcp"])
def store(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Client]:
    with tanghulu.connect(cluster.address, transport=str(request.param)) as client:
        yield client
        client.remove_matching("^")


def values(num_bytes: int) -> bytes:
    return RNG.bytes(num_bytes)


@pytest.mark.parametrize("size", [1, 1000, 64 << 10, 900_000, LARGE])
@pytest.mark.parametrize("part_bytes", [0, PART])
def test_any_range_is_what_was_put(store: Client, size: int, part_bytes: int) -> None:
    value = values(size)
    store.put("v", value, part_bytes=part_bytes)
    spans = [(0, None), (0, 1), (size - 1, 1), (size // 3, None), (size // 3, max(size // 2, 1)), (0, size)]
    spans += [(begin, PART) for begin in (0, PART, PART + 1) if begin + PART <= size]
    for offset, length in spans:
        wanted = value[offset:] if length is None else value[offset : offset + length]
        with store.get_range("v", offset, length) as chunk:
            assert chunk.bytes() == wanted
        room = bytearray(len(wanted) + 3)
        assert store.get_into("v", room, offset=offset, length=length) == len(wanted)
        assert bytes(room) == wanted + bytes(3)


def test_ranges_that_are_none(store: Client) -> None:
    store.put("small", b"0123456789")
    store.put("large", values(LARGE), part_bytes=PART)
    for key, size in (("small", 10), ("large", LARGE)):
        for offset, length in ((size, 1), (size, None), (size - 1, 2), (0, size + 1)):
            with pytest.raises(InvalidRequest, match="is not within"):
                store.get_range(key, offset, length)
        for offset, length in ((-1, 1), (0, 0)):
            with pytest.raises(InvalidRequest, match=r"offset=-1 is not within|length=0 is not within"):
                store.get_range(key, offset, length)
        with pytest.raises(InvalidRequest, match=r"has 2 bytes|only 1"):
            store.get_into(key, bytearray(1), offset=3, length=2)
    with pytest.raises(TanghuluError):
        store.get_range("nowhere", 0, 1)


@pytest.mark.parametrize("sizes", [(1,), (3, 4, 5), (LARGE, 1, 1000), (PART // 2, LARGE, PART)])
@pytest.mark.parametrize("part_bytes", [0, PART])
def test_many_buffers_are_one_value(store: Client, sizes: tuple[int, ...], part_bytes: int) -> None:
    pieces = [values(size) for size in sizes]
    joined = b"".join(pieces)
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
    assert not store.put("v", arrays, part_bytes=part_bytes).existed
    assert store.get("v").bytes() == joined
    expected = sums.compute(joined, part_bytes)
    assert store.stat("v").checksums == expected
    into = [bytearray(size) for size in sizes] + [bytearray(2)]
    assert store.get_into("v", into) == len(joined)
    assert b"".join(into[:-1]) == joined
    if len(joined) > 10:
        two = [bytearray(3), bytearray(100)]
        assert store.get_into("v", two, offset=2, length=8) == 8
        assert bytes(two[0]) + bytes(two[1][:5]) == joined[2:10]
    with pytest.raises(InvalidRequest, match="the buffers to read into only"):
        store.get_into("v", [bytearray(1)] if len(joined) > 1 else [])


def test_put_many_takes_them_too(store: Client) -> None:
    large = [values(LARGE // 2), values(LARGE // 2)]
    items = [PutItem("a", [b"12", b"34"]), PutItem("b", large), PutItem("c", [])]
    outcomes = store.put_many(items)
    assert [status.ok for status in outcomes] == [True, True, False]
    assert store.get("a").bytes() == b"1234"
    assert store.get("b").bytes() == b"".join(large)


async def test_asyncio(cluster: Cluster) -> None:
    async with aio.connect(cluster.address, transport="tcp") as store:
        pieces = [values(LARGE), values(10)]
        await store.put("v", pieces, part_bytes=PART)
        chunk = await store.get_range("v", LARGE - 5, 10)
        assert chunk.bytes() == pieces[0][-5:] + pieces[1][:5]
        into = [bytearray(LARGE), bytearray(10)]
        assert await store.get_into("v", into) == LARGE + 10
        assert bytes(into[0]) == pieces[0]
        assert await store.remove("v")


def test_only_the_parts_around_a_range_are_moved(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address, transport="tcp") as store:
        store.put("v", values(LARGE), part_bytes=PART)

        def num_read() -> float:
            return node.metric("tanghulu_node_read_bytes_total", transport="tcp")

        before = num_read()
        store.get_range("v", PART + 5, 10).close()
        store.get_range("v", PART - 5, 10).close()
        eventually(lambda: num_read() >= before + 3 * PART)  # the node counts what it has sent
        assert num_read() == before + 3 * PART
        assert store.remove("v")


def test_a_flipped_bit_is_found_where_it_is_read(cluster: Cluster) -> None:
    """In the covering part it is an error; elsewhere it is none of the range's business."""
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address, transport="tcp") as store:
        value = values(LARGE)
        store.put("v", value, part_bytes=PART)
        _flip(node.popen.pid, value[5 * PART : 5 * PART + 64])
        assert store.get_range("v", 4 * PART + 1, 10).bytes() == value[4 * PART + 1 : 4 * PART + 11]
        with pytest.raises(TanghuluError):
            store.get_range("v", 5 * PART + 100, 10)
        until_s = time.monotonic() + 60
        while store.exists("v"):
            assert time.monotonic() < until_s, "the node looks, and drops it"


def _flip(pid: int, pattern: bytes) -> None:
    """Change a byte of the node's segment, found by what stands there."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd" not in line:
            continue
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            content = memory.read(end - begin)
            at = content.find(pattern)
            if at >= 0:
                memory.seek(begin + at)
                memory.write(bytes([content[at] ^ 1]))
                return
    raise AssertionError("the pattern is nowhere in the segment")


@given(
    pieces=st.lists(st.binary(max_size=20), min_size=1, max_size=8).filter(lambda pieces: any(pieces)),
    part_bytes=st.integers(0, 30),
    data=st.data(),
)
def test_checksums_of_pieces_and_of_parts(pieces: list[bytes], part_bytes: int, data: st.DataObject) -> None:
    joined = b"".join(pieces)
    checksums = sums.compute_joined([memoryview(piece) for piece in pieces], part_bytes)
    assert checksums == sums.compute(joined, part_bytes)
    begin = data.draw(st.integers(0, len(joined) - 1))
    end = data.draw(st.integers(begin + 1, len(joined)))
    first, last = sums.covering(checksums, len(joined), begin, end)
    assert 0 <= first <= begin < end <= last <= len(joined)
    assert sums.matches_from(joined[first:last], checksums, first)
    damaged = bytearray(joined[first:last])
    damaged[begin - first] ^= 1
    assert not sums.matches_from(bytes(damaged), checksums, first)
    if part_bytes:
        assert last - first <= end - begin + 2 * part_bytes
