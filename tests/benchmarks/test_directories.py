"""The comparison of directories: what it counts is what was done, and each of its directories keeps the same rule."""

from __future__ import annotations

import shutil
import socket
import threading
from random import Random

import numpy as np
import pytest

from benchmarks.master import directories
from benchmarks.master.directory_cases import NUM_RANGES, Case, key_of, range_of
from benchmarks.peers import redis_directory as redis


def test_a_row_has_the_medians_of_the_rounds_and_counts_operations():
    case = Case("x", "keys", (), lambda: None, calls=1, num_operations=10)
    case.found = [(100.0, 5.0, 50.0), (300.0, 7.0, 40.0), (200.0, 9.0, 900.0)]
    row = case.row()
    assert (row["server_cpu_us"], row["server_cpu_us_a_call"]) == (20.0, 200.0)
    assert (row["client_cpu_us_a_call"], row["p50_us"]) == (7.0, 50.0)


def test_cases_take_turns_and_the_first_round_does_not_count():
    done: list[str] = []
    cases = [Case(name, "", (), lambda n=name: done.append(n), 2, after=lambda: done.append("tidy")) for name in "ab"]
    rows = directories.in_turns(cases, 2, Random(1))
    assert [done.count(each) for each in ("a", "b", "tidy")] == [6, 6, 6]
    assert [row["system"] for row in rows] == ["a", "b"]
    assert all(len(case.found) == 2 for case in cases)


def test_every_key_has_one_range_and_all_ranges_have_keys():
    rng = Random(1)
    assert {range_of(key_of(rng)) for _ in range(2000)} == set(range(NUM_RANGES))


def test_rendezvous_moves_only_the_keys_of_the_node_that_left():
    rng = Random(1)
    keys, seeds = [key_of(rng) for _ in range(500)], np.array([rng.getrandbits(64) for _ in range(5)], np.uint64)
    before, after = directories.rendezvous(keys, seeds), directories.rendezvous(keys, seeds[:-1])
    assert all(now == then for now, then in zip(after, before, strict=True) if then != 4)
    assert set(before) == set(range(5))


def test_redis_slots_are_those_of_its_specification():
    assert redis.hash_slot(b"123456789") == 0x31C3
    assert redis.hash_slot(b"{r7}kv/a") == redis.hash_slot(b"r7")


def test_replies_of_redis_come_in_pieces():
    ours, theirs = socket.socketpair()
    connection = object.__new__(redis.Connection)
    connection._socket, connection._lines = ours, []
    sent = b"+OK\r\n*3\r\n$2\r\nab\r\n$-1\r\n:7\r\n-ERR no\r\n"

    def send() -> None:
        for start in range(0, len(sent), 3):
            theirs.sendall(sent[start : start + 3])

    thread = threading.Thread(target=send)
    thread.start()
    ok, found, error = connection.receive(3)
    thread.join()
    assert (ok, found) == (b"OK", [b"ab", None, 7])
    assert str(error) == "ERR no"
    ours.close()
    theirs.close()


def test_what_is_missing_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "redis-server" else "/usr/bin/" + program)
    parts, lines = directories.lacking(("masters", "redis", "etcd"))
    assert list(parts) == ["masters", "etcd"]
    assert lines == ["redis: left out; apt-get install redis-server"]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="extra: apt-get install redis-server")
def test_of_two_versions_redis_keeps_the_older_one():
    with redis.Servers() as servers:
        link = servers.loaded().connect()
        said = [(b"7", b"a"), (b"8", b"b"), (b"7", b"b"), (b"7", b"b")]
        answers = [link.ask(b"FCALL", b"commit", b"1", b"k", version, b"10", node) for version, node in said]
        assert answers == [1, 0, 1, 1]
        assert link.ask(b"FCALL", b"report", b"2", b"k", b"m", b"c", b"8", b"10", b"1", b"10") == [1]
        assert link.ask(b"MGET", b"k", b"m") == [b"7 10 a b", b"1 10 c"]
        link.close()
