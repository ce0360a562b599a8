"""Traces of ended requests: what replay reads from them, how files follow each other, and what a bad disk costs."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tanghulu.conductor.replay.main import ReplayConfig, replay
from tanghulu.conductor.replay.trace import read_trace
from tanghulu.conductor.stories import recorder
from tanghulu.conductor.stories.recorder import EndedRequest, Recorder
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.types import BlockHash
from tests.conductor.cluster import Cluster


def ended(at_s: float, blocks: str, num_tokens: int = 0, session: str = "", size: int = 64) -> EndedRequest:
    names = [BlockHash(letter.encode() * 16) for letter in blocks]
    return EndedRequest(1e9 + at_s, num_tokens or size * len(blocks), 20, names, size, session)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.open(path, "rt")]


class Counts:
    def __init__(self) -> None:
        self.written = self.dropped = 0

    def __call__(self, written: int, dropped: int) -> None:
        self.written += written
        self.dropped += dropped


def test_replay_reads_what_was_recorded(tmp_path: Path) -> None:
    counts = Counts()
    writer = Recorder(tmp_path / "traces", counts)
    for request in (ended(2, "abc", 3 * 64 + 9, "chat"), ended(0.5, "abx", 130, "chat"), ended(3, "y", 500, "other")):
        writer.add(request)
    writer.close()
    (path,) = (tmp_path / "traces").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert (counts.written, counts.dropped) == (3, 0)
    first, second, third = read_trace(path, 1.0, "0")
    assert [(each.arrival_s, each.num_tokens, each.block_tokens) for each in (first, second, third)] == [
        (0, 130, 64),
        (1.5, 201, 64),
        (2.5, 500, 64),
    ]
    assert first.blocks == second.blocks[:2]
    assert (second.answer_blocks, len(first.answer_blocks)) == ((), 1), "the answer has filled the third"
    assert len({*second.blocks, *third.blocks, *first.answer_blocks}) == 5
    assert first.session == second.session != third.session
    assert all(name not in json.dumps(rows(path)) for name in ("chat", "other", "616161"))
    (report,) = replay(ReplayConfig(traces=(path,), workers=2, speedup=1.0, warmup="0"))
    assert report.num_requests == 3


def test_files_follow_each_other_and_cannot_be_joined(tmp_path: Path) -> None:
    for _ in range(2):
        writer = Recorder(tmp_path, Counts(), file_bytes=1)
        for _ in range(2):
            writer.add(ended(0, "ab"))
        writer.close()
    one, other = tmp_path.iterdir()
    assert rows(one)[0]["hash_ids"] == rows(one)[1]["hash_ids"] != rows(other)[0]["hash_ids"]


def test_blocks_of_another_size_are_in_another_file(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, Counts())
    writer.add(ended(0, "ab"))
    writer.add(ended(0, "ab", size=16))
    writer.close()
    assert {row["block_tokens"] for path in tmp_path.iterdir() for row in rows(path)} == {16, 64}
    assert len(list(tmp_path.iterdir())) == 2
    joined = tmp_path / "joined.jsonl"
    joined.write_text("".join(json.dumps(row) + "\n" for path in tmp_path.iterdir() for row in rows(path)))
    with pytest.raises(InvalidRequest, match=r"blocks of \[16, 64\] tokens"):
        read_trace(joined, 1.0, "0")


def test_a_full_disk_drops_requests_and_spoils_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = recorder._TraceFile(tmp_path / "trace.gz")
    file.write([ended(0, "a")])
    flush = file._file.flush

    def full() -> None:
        flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file._file, "flush", full, raising=False)
    with pytest.raises(OSError, match="No space"):
        file.write([ended(1, "b")])
    monkeypatch.undo()
    file.close()
    assert len(rows(tmp_path / "trace.gz")) == 1


def test_what_a_slow_disk_leaves_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING", 10)
    counts = Counts()
    writer = Recorder(tmp_path, counts)
    monkeypatch.setattr(writer, "_write", lambda size, batch: 0)
    for _ in range(100):
        writer.add(ended(0, "abcd"))
    writer.close()
    assert counts.written + counts.dropped == 100
    assert counts.dropped == 100, "those that could not be written count, too"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--record .*file: the folder cannot be created"):
        Recorder(tmp_path / "file", Counts())


@pytest.mark.parametrize("size", [0, 1.5, "64", True])
def test_bad_block_sizes(tmp_path: Path, size: object) -> None:
    path = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [], "block_tokens": size}
    path.write_text(json.dumps(row))
    with pytest.raises(InvalidRequest, match="'block_tokens' is"):
        read_trace(path, 1.0, "0")


async def test_requests_of_a_conductor(cluster: Cluster) -> None:
    """Two turns over HTTP: the second one's prompt begins like the first one's."""
    found: list[EndedRequest] = []
    cluster.dispatcher.when_ended.append(found.append)
    await cluster.add()
    prompt = list(range(1, 200))
    for turn in (prompt, [*prompt, *range(50, 150)]):
        body = {"model": "tiny", "prompt": turn, "max_tokens": 3, "prompt_cache_key": "s"}
        assert (await cluster.http.post("/v1/completions", json=body)).status_code == 200
    assert (
        await cluster.http.post("/v1/completions", json={**body, "routing": {"worker": "nobody"}})
    ).status_code == 400
    body["routing"] = {"worker": "nobody"}
    assert (await cluster.http.post("/v1/completions", json=body)).status_code == 400, "and is no request"
    first, second = found
    assert (first.prompt_tokens, first.generated_tokens) == (199, 3)
    assert second.prompt_tokens == 299
    size = first.block_tokens
    assert first.blocks[: 199 // size] == second.blocks[: 199 // size]
    assert first.session == second.session == "s"
    assert (first.model, first.tenant, first.cached_tokens) == ("tiny", "", 0)
    assert first.ttft_s > 0 <= first.tbt_s
    assert 0 <= second.arrived_s - first.arrived_s < 60
