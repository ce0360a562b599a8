"""Measure what could hold the directory of a large cluster: one master, several, Redis, or nobody.

    python -m benchmarks.master.directories [--keys 200000] [--rounds 3] [--seed 1] [--only masters,redis] [--no-keep]

In one run, in turns, with real processes on this host: (masters) one master, and two and four that have a share of
the keys each; (redis) a Redis and a Cluster of three, Debian's, with functions that keep versions and holders; (nobody)
nodes that are asked themselves, by rendezvous; (tables) one table of a master beside one for each range of slots;
(etcd) what the keys of leaders cost there; (failover) what a killed primary of Redis takes along. Every figure is the
median over rounds; CPU is counted by the kernel for each process, and matters more than times where other load runs.
The rows are kept in results/directories.json; docs/design/0015-several-masters.md says what follows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import keep
from benchmarks.master.directory_cases import (
    DEADLINE_S,
    GROUP_KEYS,
    NUM_NODES,
    NUM_RANGES,
    PIECE_KEYS,
    Case,
    MasterDirectory,
    group_of_keys,
    in_turns,
    key_of,
    range_of,
    report_row,
)
from benchmarks.master.scale import CHUNK_BYTES, ProcessMeter
from benchmarks.peers import redis_directory as redis
from benchmarks.peers.redis_failover import kill_cluster_primaries, lose_hosts
from benchmarks.store.store_bench import Started, cluster, process
from tanghulu.auth.credentials import NOTHING_TO_SHOW
from tanghulu.discovery.etcd_client import EtcdClient
from tanghulu.protos import etcd_pb2
from tanghulu.rpc.fast_client import Call, FastConnection
from tanghulu.store.client.logic.messages import hello
from tanghulu.store.master.directory.chunk_table import DirectoryTable
from tanghulu.store.master.directory.inventories import Inventories
from tanghulu.store.master.directory.key_order import KeyOrder
from tanghulu.store.protocol import messages as m
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.types import CommitResult
from tanghulu.types import Address

PREFIX_KEYS = 1000
BATCH = GROUP_KEYS
#: Puts or gets of so many clients that a busy master finds before it.
AT_ONCE = 16
#: Nodes of the large cluster in the arithmetic without a directory.
MANY_NODES = 100
PARTS = ("masters", "redis", "nobody", "tables", "etcd", "failover")
#: Prefixes that are asked for, one after the other.
NUM_PREFIXES = 20


def drawn(keys: Sequence[str], rng: random.Random) -> Iterator[list[str]]:
    """Prefixes of ``PREFIX_KEYS`` keys, without end; drawn at once, so that drawing is not measured."""
    return itertools.cycle([rng.sample(keys, PREFIX_KEYS) for _ in range(NUM_PREFIXES)])


# --- masters


def master_cases(master: MasterDirectory, keys: Sequence[str], rng: random.Random) -> list[Case]:
    """What one master does for clients."""
    pids = (master.pid,)

    def commit() -> None:
        reply = master.ask(methods.COMMIT_KEYS.call(m.CommitKeysRequest(master.commits([key_of(rng)]))))
        assert reply.results == [CommitResult.ACCEPTED]

    prefixes = drawn(keys, rng)

    def locate(count: int) -> None:
        reply = master.ask(methods.LOCATE.call(m.LocateRequest(next(prefixes)[:count], False)))
        assert None not in reply.locations

    return [
        Case("master", "commit of one key", pids, commit, after=master.confirm),
        Case("master", "location of one key", pids, lambda: locate(1)),
        Case("master", f"location of {PREFIX_KEYS} keys", pids, lambda: locate(PREFIX_KEYS), 30, PREFIX_KEYS),
    ]


#: (number of the master, what it is asked), and a way to ask.
Calls: TypeAlias = Sequence[tuple[int, Call[Any]]]
Together: TypeAlias = Callable[[Calls], Sequence[Any]]


class SplitCalls:
    """Calls that name many keys, where each range of slots belongs to one of several masters."""

    def __init__(
        self,
        masters: Sequence[MasterDirectory],
        prefixes: Iterator[list[str]],
        new_keys: Callable[[], list[str]],
        which: str = "",
    ) -> None:
        self._masters, self._prefixes, self._new_keys, self._which = masters, prefixes, new_keys, which
        self._threads = ThreadPoolExecutor(len(masters))

    def split(self, keys: Sequence[str]) -> list[list[int]]:
        """The positions of each master's keys."""
        parts: list[list[int]] = [[] for _ in self._masters]
        num_masters = len(parts)
        for index, key in enumerate(keys):
            parts[range_of(key) % num_masters].append(index)
        return parts

    def _parts(self, keys: Sequence[str]) -> list[tuple[int, Sequence[int]]]:
        """(master, positions of its keys), of those that have any."""
        parts = [range(len(keys))] if len(self._masters) == 1 else self.split(keys)
        return [(number, part) for number, part in enumerate(parts) if part]

    def exists(self, together: Together) -> None:
        """Ask each master for its part of a prefix, and join the answers."""
        keys = next(self._prefixes)
        parts = self._parts(keys)
        calls = [(i, methods.LOCATE.call(m.LocateRequest([keys[each] for each in part], True))) for i, part in parts]
        found = bytearray(PREFIX_KEYS)
        for (_, part), reply in zip(parts, together(calls), strict=True):
            for index, byte in zip(part, reply.message.found, strict=True):
                found[index] = byte
        assert found.count(1) == PREFIX_KEYS

    def locate(self, together: Together, num_gets: int = 1) -> None:
        """The holders of the keys of gets of several values."""
        calls: list[tuple[int, Call[Any]]] = []
        for _ in range(num_gets):
            keys = next(self._prefixes)[:BATCH]
            for number, part in self._parts(keys):
                calls.append((number, methods.LOCATE.call(m.LocateRequest([keys[each] for each in part], False))))
        assert all(None not in reply.message.locations for reply in together(calls))

    def commit(self, together: Together, num_puts: int = 1) -> None:
        """Commit the keys of puts of several values."""
        calls: list[tuple[int, Call[Any]]] = []
        for _ in range(num_puts):
            keys = self._new_keys()
            for number, part in self._parts(keys):
                said = self._masters[number].commits([keys[each] for each in part])
                calls.append((number, methods.COMMIT_KEYS.call(m.CommitKeysRequest(said))))
        assert all(set(reply.message.results) == {CommitResult.ACCEPTED} for reply in together(calls))

    def confirm(self) -> None:
        """The nodes announce what was committed."""
        for master in self._masters:
            master.confirm()

    def by_threads(self, calls: Calls) -> Sequence[Any]:
        """A thread a master, as the blocking driver asks several peers."""
        asked = [self._threads.submit(self._masters[number].connection.call_one, call) for number, call in calls]
        return [each.result() for each in asked]

    def begun_together(self, calls: Calls) -> Sequence[Any]:
        """All sent by this thread, then all answers taken."""
        begun = [self._masters[number].connection.begin(call) for number, call in calls]
        replies = []
        for each in begun:
            replies.append(each.end())
            each.close()
        return replies

    def master_by_master(self, calls: Calls) -> Sequence[Any]:
        """One master after the other, the calls to each in a row: a busy master, as of many clients."""
        by_master: dict[int, list[Call[Any]]] = {}
        for number, call in calls:
            by_master.setdefault(number, []).append(call)
        asked = (self._masters[number].connection.call_many(own) for number, own in by_master.items())
        return [reply for replies in asked for reply in replies]

    def cases(self) -> list[Case]:
        """Both ways."""
        num_masters, pids = len(self._masters), [master.pid for master in self._masters]
        what, name = f"existence of {PREFIX_KEYS} keys{self._which}", f"{num_masters} masters"
        name = name if num_masters > 1 else "master"
        together = []
        for verb, call in (("commit", self.commit), ("location", self.locate)):
            after = self.confirm if verb == "commit" else lambda: None
            keys = f"{verb} of {BATCH} keys{self._which}"
            alone, many = partial(call, self.begun_together), partial(call, self.master_by_master, AT_ONCE)
            together.append(Case(name, keys, pids, alone, 100, BATCH, after))
            together.append(Case(name, f"{keys}, {AT_ONCE} at once", pids, many, 30, BATCH * AT_ONCE, after))
        if num_masters == 1:
            exists = Case(name, what, pids, lambda: self.exists(self.begun_together), 60, PREFIX_KEYS)
            return [*together, exists]
        return [
            *together,
            Case(name, f"{what}, sent together", pids, lambda: self.exists(self.begun_together), 60, PREFIX_KEYS),
            Case(name, f"{what}, by threads", pids, lambda: self.exists(self.by_threads), 60, PREFIX_KEYS),
            Case(name, f"splitting {PREFIX_KEYS} keys{self._which}", (), lambda: self.split(next(self._prefixes)), 30),
        ]


# --- Redis


class RedisDirectory:
    """One Redis, or a Cluster whose keys carry their range as a hash tag."""

    def __init__(self, primaries: Sequence[redis.Server]) -> None:
        self.pids = [each.pid for each in primaries]
        self._primaries = primaries
        self._links = [each.connect() for each in primaries]
        firsts = [redis.owned(each) for each in primaries] if len(primaries) > 1 else [(0, redis.NUM_HASH_SLOTS - 1)]
        self._owners = [
            next(i for i, (first, last) in enumerate(firsts) if first <= slot <= last)
            for slot in range(redis.NUM_HASH_SLOTS)
        ]

    @property
    def is_cluster(self) -> bool:
        """Whether there are several."""
        return len(self._primaries) > 1

    def name(self, key: str) -> bytes:
        """``key`` with its range as its tag, so that keys of one range may stand in one command."""
        return b"{r%d}%b" % (range_of(key), key.encode()) if self.is_cluster else key.encode()

    def ask(self, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """Every command to the owner of its first key (the fourth word of FCALL), all sent before the first answer."""
        by_owner: dict[int, list[int]] = {}
        for index, words in enumerate(commands):
            key = words[3] if words[0] == b"FCALL" else words[1]
            by_owner.setdefault(self._owners[redis.hash_slot(key)] if self.is_cluster else 0, []).append(index)
        replies: list[Any] = [None] * len(commands)
        for owner, own in by_owner.items():
            self._links[owner].send(b"".join(redis.command(*commands[index]) for index in own))
        for owner, own in by_owner.items():
            for index, reply in zip(own, self._links[owner].receive(len(own)), strict=True):
                replies[index] = reply
        return replies

    def together(self, word: bytes, keys: Sequence[str]) -> list[tuple[bytes, ...]]:
        """``word`` of all ``keys``: one command, or one for each range."""
        by_tag: dict[int, list[bytes]] = {}
        for key in keys:
            by_tag.setdefault(range_of(key) if self.is_cluster else 0, []).append(self.name(key))
        return [(word, *names) for names in by_tag.values()]

    def report(self, system: str, keys: Sequence[str]) -> dict[str, Any]:
        """What a node's report of ``keys`` costs a key."""
        meters, before = [ProcessMeter(pid) for pid in self.pids], self._used_bytes()
        cpu_s = sum(meter.cpu_s for meter in meters)
        for start in range(0, len(keys), PIECE_KEYS):
            part = keys[start : start + PIECE_KEYS]
            node, commands = b"%x" % (start // PIECE_KEYS % NUM_NODES), []
            for _, *names in self.together(b"", part):
                figures = (b"1", b"30d40") * len(names)
                commands.append((b"FCALL", b"report", b"%d" % len(names), *names, node, *figures))
            refused = self.ask(commands)
            assert not any(refused), refused
        cpu_s = sum(meter.cpu_s for meter in meters) - cpu_s
        return report_row(system, cpu_s / len(keys), (self._used_bytes() - before) / len(keys))

    def _used_bytes(self) -> int:
        return sum(int(link.info("memory")["used_memory"]) for link in self._links)

    def cases(self, system: str, keys: Sequence[str], rng: random.Random) -> list[Case]:
        """What it does for clients."""

        def commit(count: int, *words: bytes) -> None:
            names = [self.name(key_of(rng)) for _ in range(count)]
            if words:
                replies = self.ask([(words[0], name, *words[1:]) for name in names])
            else:
                replies = self.ask([(b"FCALL", b"commit", b"1", name, b"7", b"30d40", b"2") for name in names])
            assert not [each for each in replies if each not in (1, b"OK")]

        prefixes = drawn(keys, rng)

        def locate(count: int) -> None:
            replies = self.ask(self.together(b"MGET", next(prefixes)[:count]))
            assert all(None not in each for each in replies)

        def locate_each() -> None:
            replies = self.ask([(b"GET", self.name(key)) for key in next(prefixes)])
            assert None not in replies

        pids, many = self.pids, f"location of {PREFIX_KEYS} keys"
        return [
            Case(system, "SET NX of one key", pids, lambda: commit(1, b"SET", b"7 30d40 2", b"NX")),
            Case(system, "commit of one key", pids, lambda: commit(1)),
            Case(system, f"commit of {BATCH} keys", pids, lambda: commit(BATCH), 100, BATCH),
            Case(system, "location of one key", pids, lambda: locate(1)),
            Case(system, many, pids, lambda: locate(PREFIX_KEYS), 30, PREFIX_KEYS),
            Case(system, f"{many}, one command each", pids, locate_each, 15, PREFIX_KEYS),
        ]


def commits_that_wait(servers: redis.Servers, rng: random.Random) -> list[Case]:
    """A commit alone, and one whose answer waits until a replica has it too."""
    primary = servers.loaded()
    replica = servers.start("--replicaof", f"127.0.0.1 {primary.port}")
    redis.eventually(lambda: bool(redis.replicas_in_step(primary)))
    link, pids = primary.connect(), (primary.pid, replica.pid)

    def commit(waits: bool) -> None:
        key = key_of(rng).encode()
        link.send(redis.command(b"FCALL", b"commit", b"1", key, b"7", b"30d40", b"2"))
        assert link.receive() == [1]
        assert not waits or link.ask(b"WAIT", b"1", b"1000") == 1

    return [
        Case("Redis and a replica", "commit of one key", pids, lambda: commit(False)),
        Case("Redis and a replica", "commit of one key, and WAIT 1", pids, lambda: commit(True)),
    ]


# --- no directory: nodes are asked themselves


def rendezvous(keys: Sequence[str], seeds: np.ndarray) -> np.ndarray:
    """For each key the index of its node: the one with the highest mixture of both hashes."""
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(key.encode()) for key in keys), np.uint64, len(keys))
    mixed = hashes[:, None] ^ seeds[None, :]
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    found: np.ndarray = mixed.argmax(axis=1)
    return found


def nobody_cases(node: Started, keys: Sequence[str], rng: random.Random) -> list[Case]:
    """What a client computes, and what a node answers that is asked whether it has keys."""
    connection, pids = FastConnection(Address.parse(node.address)), (node.pid,)
    connection.call_one(hello("directories", NOTHING_TO_SHOW, "elsewhere", False, ()))

    prefixes = drawn(keys, rng)

    def exists(count: int) -> None:
        request = m.KeysRequest(next(prefixes)[:count])
        reply = connection.call_one(methods.EXISTS.call(request), deadline_s=DEADLINE_S)
        assert len(reply.message.found) == count  # type: ignore[union-attr]

    def pin() -> None:
        reply = connection.call_one(methods.GET.call(m.GetRequest([rng.choice(keys)], 0)), deadline_s=DEADLINE_S)
        assert len(reply.message.items) == 1  # type: ignore[union-attr]

    cases = [Case("node", "pin that misses", pids, pin)]
    for count in (PREFIX_KEYS // MANY_NODES, PREFIX_KEYS // NUM_NODES, PREFIX_KEYS):
        cases.append(Case("node", f"existence of {count} keys", pids, lambda c=count: exists(c), 60, count))  # type: ignore[misc]
    for num_nodes in (NUM_NODES, MANY_NODES):
        seeds = np.array([rng.getrandbits(64) for _ in range(num_nodes)], np.uint64)
        for count in (1, PREFIX_KEYS):
            part, what = keys[:count], f"node of {count} keys among {num_nodes}"
            cases.append(Case("client", what, (), lambda p=part, s=seeds: rendezvous(p, s), 60, count))  # type: ignore[misc]
    return cases


# --- one table or one a range, in this process


def table_rows(keys: Sequence[str], rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    """Existence of a prefix in one table, in 64, and in 64 whose caller has sorted the keys."""
    inventories = Inventories()
    one, *many = [DirectoryTable(inventories, KeyOrder()) for _ in range(1 + NUM_RANGES)]
    inventory = inventories.open("node")
    for key in keys:
        one.add(inventory, key, 1, CHUNK_BYTES)
        many[range_of(key)].add(inventory, key, 1, CHUNK_BYTES)
    prefix = rng.sample(keys, PREFIX_KEYS)
    sorted_keys: dict[int, list[str]] = {}
    for key in prefix:
        sorted_keys.setdefault(range_of(key), []).append(key)

    def hashed_here() -> None:
        bytes([many[range_of(key)].holds(key) for key in prefix])

    def sorted_there() -> None:
        for number, part in sorted_keys.items():
            bytes(map(many[number].holds, part))

    def unhashed() -> None:
        bytes(map(one.holds, prefix))

    cases = [
        Case("one table", f"existence of {PREFIX_KEYS} keys", (), unhashed, 100, PREFIX_KEYS),
        Case("64 tables", f"existence of {PREFIX_KEYS} keys, hashed by the master", (), hashed_here, 100, PREFIX_KEYS),
        Case("64 tables", f"existence of {PREFIX_KEYS} keys, sorted by the client", (), sorted_there, 100, PREFIX_KEYS),
    ]
    return in_turns(cases, rounds, rng)


def insertion_rows() -> list[dict[str, Any]]:
    """How long one insertion stands still where a dict grows: one of all keys, and one of each range."""
    numbers, rows = list(range(1_500_000)), []
    for num_tables in (1, NUM_RANGES):
        worst_s = min(_longest_insertion_s(numbers, num_tables) for _ in range(2))
        what = f"longest insertion of {len(numbers):,} keys, CPU"
        rows.append({"system": f"{num_tables} tables", "what": what, "client_cpu_us_a_call": round(worst_s * 1e6)})
    return rows


def _longest_insertion_s(numbers: Sequence[int], num_tables: int) -> float:
    tables: list[dict[int, int]] = [{} for _ in range(num_tables)]
    worst_s = 0.0
    for number in numbers:
        begun_s = time.thread_time()
        tables[number % num_tables][number] = number
        worst_s = max(worst_s, time.thread_time() - begun_s)
    return worst_s


# --- etcd


@contextlib.contextmanager
def etcd_server() -> Iterator[tuple[Address, int]]:
    """An etcd of one member: its address and its pid."""
    folder, port, peer_port = tempfile.mkdtemp(prefix="th-etcd-"), redis.free_port(), redis.free_port()
    url, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    urls = ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer]
    quiet = ["--log-level", "error", "--initial-cluster", f"default={peer}", "--initial-advertise-peer-urls", peer]
    child = subprocess.Popen(
        ["etcd", "--data-dir", folder, *urls, *quiet], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        redis.eventually(lambda: _listens(port))
        yield Address("127.0.0.1", port), child.pid
    finally:
        child.kill()
        child.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def etcd_rows(rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    """What leadership costs: renewals, one range that changes hands, and all ranges of a master at once."""
    with asyncio.Runner() as runner, etcd_server() as (address, pid):

        async def begin() -> tuple[EtcdClient, int]:
            client = EtcdClient([address])
            await client.range(b"ready")
            return client, await client.grant(60.0)

        client, lease = runner.run(begin())

        def writes(count: int) -> etcd_pb2.TxnRequest:
            keys = [b"/ranges/%02d" % number for number in range(count)]
            put = [etcd_pb2.PutRequest(key=key, value=rng.randbytes(100), lease=lease) for key in keys]
            return etcd_pb2.TxnRequest(success=[etcd_pb2.RequestOp(request_put=each) for each in put])

        def case(what: str, calls: int, call: Callable[[], Any]) -> Case:
            return Case("etcd", what, (pid,), lambda: runner.run(call()), calls)

        cases = [
            case("renewal of a lease", 60, lambda: client.keep_alive(lease)),
            case("one range changes hands", 30, lambda: client.transact(writes(1))),
            case("16 ranges in one transaction", 30, lambda: client.transact(writes(16))),
            case("64 ranges in one transaction", 30, lambda: client.transact(writes(NUM_RANGES))),
            case("all 64 ranges read", 30, lambda: client.range(b"/ranges/", b"/ranges0")),
        ]
        rows = in_turns(cases, rounds, rng)
        runner.run(client.close())
    return rows


# --- all of it


def measure(options: argparse.Namespace, rng: random.Random) -> list[dict[str, Any]]:
    """The rows of the parts that are wanted."""
    keys = [key_of(rng) for _ in range(options.keys)]
    with contextlib.ExitStack() as stack:
        rows: list[dict[str, Any]] = []
        cases: list[Case] = []
        for part, begin in (("masters", begin_masters), ("redis", begin_redis), ("nobody", begin_nobody)):
            if part in options.only:
                begun = begin(stack, keys, rng)
                rows += begun[0]
                cases += begun[1]
        rows += in_turns(cases, options.rounds, rng)
    if "tables" in options.only:
        rows += table_rows(keys, options.rounds, rng) + insertion_rows()
    if "etcd" in options.only:
        rows += etcd_rows(options.rounds, rng)
    if "failover" in options.only:
        rows += [{"system": "Redis", **each} for each in lose_hosts(2 * options.rounds)]
        rows += [{"system": "Redis Cluster", **each} for _ in range(2) for each in kill_cluster_primaries(3)]
    return rows


Begun: TypeAlias = tuple[list[dict[str, Any]], list[Case]]


def begin_masters(stack: contextlib.ExitStack, keys: Sequence[str], rng: random.Random) -> Begun:
    """One master, two and four, each of which has been told its share of the keys."""
    rows, cases = [], []  # type: list[dict[str, Any]], list[Case]
    grouped = [key for _ in range(len(keys) // 4 // BATCH) for key in group_of_keys(rng)]
    for num_masters in (1, 2, 4):
        masters = []
        for number in range(num_masters):
            master = MasterDirectory(stack.enter_context(process("tanghulu.store.master.main", "--port", "0")))
            stack.callback(master.close)
            row = master.report([key for key in (*keys, *grouped) if range_of(key) % num_masters == number])
            rows += [row] if num_masters == 1 else []
            masters.append(master)
        cases += master_cases(masters[0], keys, rng) if num_masters == 1 else []
        cases += SplitCalls(masters, drawn(keys, rng), lambda: [key_of(rng) for _ in range(BATCH)]).cases()
        if num_masters == 4:
            starts = [rng.randrange((len(grouped) - PREFIX_KEYS) // BATCH) * BATCH for _ in range(NUM_PREFIXES)]
            prefixes = itertools.cycle([grouped[start : start + PREFIX_KEYS] for start in starts])
            cases += SplitCalls(masters, prefixes, lambda: group_of_keys(rng), ", in groups").cases()
    return rows, cases


def begin_redis(stack: contextlib.ExitStack, keys: Sequence[str], rng: random.Random) -> Begun:
    """A Redis and a Cluster of three that have been told all keys, and a Redis with a replica."""
    rows, cases = [], []  # type: list[dict[str, Any]], list[Case]
    servers = stack.enter_context(redis.Servers())
    alone = RedisDirectory([servers.loaded()])
    spread = RedisDirectory(redis.start_cluster(servers, 3, replicas=0)[0])
    for system, directory in (("Redis", alone), ("Redis Cluster", spread)):
        rows.append(directory.report(system, keys))
        cases += directory.cases(system, keys, rng)
    return rows, cases + commits_that_wait(servers, rng)


def begin_nobody(stack: contextlib.ExitStack, keys: Sequence[str], rng: random.Random) -> Begun:
    """A node."""
    _, node = stack.enter_context(cluster())
    return [], nobody_cases(node, keys, rng)


def lacking(parts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The parts that this machine can run, and a line for each that it cannot."""
    programs = {"redis": "redis-server", "failover": "redis-server", "etcd": "etcd"}
    packages = {"redis-server": "redis-server", "etcd": "etcd-server"}
    missing = {part: program for part, program in programs.items() if part in parts and not shutil.which(program)}
    lines = [f"{part}: left out; apt-get install {packages[program]}" for part, program in missing.items()]
    return [part for part in parts if part not in missing], lines


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    """The figures for people."""
    columns = ["server_cpu_us", "client_cpu_us_a_call", "p50_us", "bytes_a_key", "acknowledged", "gone", "promoted_s"]
    table = Table("system", "what", *columns)
    for row in rows:
        table.add_row(row["system"], row["what"], *(f"{row[name]:,}" if name in row else "" for name in columns))
    return table


def main() -> None:
    """Measure, show, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=PARTS)
    parser.add_argument("--no-keep", action="store_true")
    options = parser.parse_args()
    options.only, left_out = lacking(options.only)
    rows = measure(options, random.Random(options.seed))
    Console(width=150).print(shown(rows), *left_out)
    if not options.no_keep:
        facts = {"keys": options.keys, "rounds": options.rounds, "left_out": left_out, "redis": _version()}
        print("kept in", keep("directories", rows, seed=options.seed, load_average=os.getloadavg()[0], facts=facts))


def _version() -> str:
    if not shutil.which("redis-server"):
        return ""
    return subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
