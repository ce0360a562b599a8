"""The tier's aligned buffers, whose file it takes, and what it says when that fails."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tanghulu.errors import ConfigError, NodeUnavailable
from tanghulu.eviction import make_policy
from tanghulu.store.node.ssd.admission import TierAdmission
from tanghulu.store.node.ssd.file import Arena, TierFile
from tanghulu.store.node.ssd.tier import SsdPlace, open_tier
from tanghulu.store.node.state.chunk import Chunk, compact
from tanghulu.store.node.state.ssd_record import UNIT
from tanghulu.store.protocol.checksums import compute
from tanghulu.store.protocol.types import Pin
from tanghulu.types import ChunkKey
from tests.virtual.clock import ManualClock

CAPACITY = 64 * UNIT
QUEUE = 16 * UNIT


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 * UNIT)
    yield arena
    arena.close()


def test_the_arena_is_bounded_and_aligned(arena: Arena) -> None:
    first, second = arena.take(4 * UNIT), arena.take(3 * UNIT)
    assert first is not None
    assert second is not None
    assert arena.take(2 * UNIT) is None
    assert arena.largest_free_bytes == UNIT
    arena.give_back(first)
    assert arena.used_bytes == 3 * UNIT
    arena.give_back(second)


def test_a_populated_arena_has_its_pages() -> None:
    """A fault is a microsecond and more: 64 MiB of them in one step would hold up a node's loop for 60 ms."""
    num_pages = 4096
    arena = Arena(num_pages * mmap.PAGESIZE)
    arena.populate()
    buffer = arena.take(num_pages * mmap.PAGESIZE)
    assert buffer is not None
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for page in range(num_pages):
        buffer.view[page * mmap.PAGESIZE] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < num_pages // 8
    arena.give_back(buffer)
    arena.close()


def test_a_file_that_others_could_read_is_narrowed(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    path.touch(mode=0o644)
    path.chmod(0o644)
    TierFile(path, CAPACITY).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "tier").symlink_to(victim)
    with pytest.raises(ConfigError, match="choose another"):
        TierFile(tmp_path / "tier", CAPACITY)
    assert victim.read_bytes() == b"mine"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tier").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="is not a file of user"):
        TierFile(tmp_path / "tier", CAPACITY)
    assert (tmp_path / "tier").stat().st_size == 0


async def test_a_wipe_that_failed_is_reported_to_whoever_removed_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = TierAdmission("all", CAPACITY)
    place, view = SsdPlace(tmp_path / "tier", CAPACITY, 0), memoryview(bytes(2))
    tier = open_tier(place, view, admission, lambda: make_policy("lru"), ManualClock(), lambda entry: None)
    until_s = asyncio.get_running_loop().time() + 30.0
    for number in range(2):
        sums = compact(compute(view[number : number + 1]))
        tier.demote(Chunk.reserved(ChunkKey(f"k{number}"), 1, number, 1, sums, Pin.NONE, 0.0), None)
    await tier.performed(until_s)
    first, second = tier.entries()
    since = tier.num_given
    with monkeypatch.context() as broken:
        broken.setattr(tier.file, "wipe", partial(os.posix_fallocate, -1, 0))
        tier.drop(first)
        await tier.performed(until_s)
    since_then = tier.num_given
    tier.drop(second)
    await tier.settled(since_then, until_s)
    for _ in range(2):
        with pytest.raises(NodeUnavailable, match="could not forget"):
            await tier.settled(since, until_s)
    await tier.close()
