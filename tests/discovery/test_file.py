from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from tanghulu.discovery import file
from tanghulu.discovery.base import EventKind
from tanghulu.discovery.file import LITTER_S, FileDiscovery, _Reader, decode, encode
from tanghulu.errors import InvalidRequest, MasterUnavailable
from tests.store.master.running_master import instance, until


def test_contents_survive_the_round() -> None:
    one = instance("x", attributes={"k": "ü"}, unix_path="/tmp/s")
    assert decode(encode(one, 3.0)) == (one, 3.0)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", json.dumps({"id": 3}).encode()])
def test_what_is_no_instance(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not an instance file"):
        decode(data)


def test_what_killed_writers_leave_is_passed_over_and_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = tmp_path / "default"
    space.mkdir()
    (space / "broken.json").write_bytes(b'{"id": "half')
    (space / "young.json.1.tmp").write_bytes(b"")
    for name in ("old.json.2.tmp", "dead.json"):
        (space / name).write_bytes(encode(instance("dead"), 3.0))
        os.utime(space / name, (time.time() - LITTER_S - 1,) * 2)
    now_s = time.monotonic()
    monkeypatch.setattr(file.time, "monotonic", lambda: now_s)
    reader = _Reader(space)
    assert reader.scan() == []
    now_s += LITTER_S
    os.utime(space / "broken.json")
    assert reader.scan() == []
    now_s += 1
    (space / "young.json.1.tmp").write_bytes(b"")
    os.utime(space / "young.json.1.tmp", (1, 1))
    reader.scan()
    assert {path.name for path in space.iterdir()} == {"broken.json", "young.json.1.tmp"}


@pytest.mark.parametrize(
    "changed",
    [
        {"id": 3},
        {"attributes": []},
        {"attributes": {"scheme": 3}},
        {"ttl_s": float("nan")},
        {"ttl_s": "long"},
        {"address": "h:99999"},
        {"namespace": None},
    ],
)
def test_a_value_of_another_kind_is_no_instance(changed: dict[str, object]) -> None:
    values = {**json.loads(encode(instance(), 3.0)), **changed}
    with pytest.raises(InvalidRequest, match="not an instance file"):
        decode(json.dumps(values).encode())


async def test_a_host_whose_clock_is_ahead_sees_the_living_and_deletes_nothing(tmp_path: Path) -> None:
    async with FileDiscovery(tmp_path) as discovery:
        await discovery.register(instance(), ttl_s=30)
        path, reader = tmp_path / "default" / "n1.json", _Reader(tmp_path / "default")
        behind_s = time.time() - LITTER_S - 300
        for step in range(3):
            os.utime(path, (behind_s + step, behind_s + step))
            assert reader.scan() == ([instance()] if step else [])
        assert path.exists()


async def test_a_file_that_was_taken_for_litter_comes_back(tmp_path: Path) -> None:
    async with FileDiscovery(tmp_path, poll_s=0.02) as discovery:
        await discovery.register(instance(), ttl_s=0.3)
        path = tmp_path / "default" / "n1.json"
        path.unlink()
        await until(path.exists)
    assert not path.exists()


def test_a_writer_with_a_wrong_clock_is_believed_once_it_moves(tmp_path: Path) -> None:
    path = tmp_path / "n1.json"
    path.write_bytes(encode(instance(), 3.0))
    reader = _Reader(tmp_path)
    behind_s = time.time() - 100
    os.utime(path, (behind_s, behind_s))
    assert reader.scan() == []
    os.utime(path, (behind_s + 1, behind_s + 1))
    assert reader.scan() == [instance()]
    assert reader.scan() == [instance()]


async def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with FileDiscovery(tmp_path / "file") as discovery:
        with pytest.raises(MasterUnavailable, match="cannot register"):
            await discovery.register(instance())


async def test_watching_survives_a_source_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "default").write_text("in the way")
    stream = FileDiscovery(tmp_path, poll_s=0.01).watch()
    first = asyncio.create_task(anext(stream))
    await until(lambda: not first.done())
    (tmp_path / "default").unlink()
    assert (await asyncio.wait_for(first, 5)).kind is EventKind.SYNCED
    await stream.aclose()
