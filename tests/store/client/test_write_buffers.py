"""Puts by way of a write buffer, with real processes: what they promise, and clients and nodes that die or stop."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tanghulu
from tanghulu import aio
from tanghulu.errors import ChunkNotFound, TanghuluError
from tanghulu.store.client import Client
from tests.store.cluster import Cluster, Process, eventually
from tests.store.fault_tools import DEADLINE_S, child, read, says, stopped, tell, timed, value
from tests.store.guarded_cluster import Secured, write_tokens

SIZE = 4096


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1, "64MiB") as cluster:
        cluster.complete()
        yield cluster


def at_buffers(node: Process) -> int:
    return int(node.metric("tanghulu_node_write_buffer_puts_total"))


def put(client: Client, key: str, size: int = SIZE) -> bool:
    """Whether it existed."""
    return client.put(key, value(key, size)).existed


def test_what_was_put_is_there_for_everybody_at_once(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    before = at_buffers(node)
    with (
        tanghulu.connect(cluster.address) as client,
        tanghulu.connect(cluster.address) as near,
        tanghulu.connect(cluster.address, transport="tcp") as far,
    ):
        for i in range(300):
            key, size = f"once{i}", {0: 65536, 5: 262144}.get(i % 10, SIZE)
            assert not put(client, key, size)
            reader = (client, near, far)[i % 3]
            assert reader.exists(key)
            assert read(reader, key, size) is None
            assert put((near, far)[i % 2], key, size), "it existed"
            if i % 7 == 0:
                assert near.stat(key).size_bytes == size
                assert far.remove(key)
                assert not client.exists(key)
                assert isinstance(read(client, key, size), ChunkNotFound)
                assert not put(client, key, size), "it may come again"
    assert at_buffers(node) - before > 250


def test_many_share_a_proclamation(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address) as client, tanghulu.connect(cluster.address) as other:
        put(client, "many/first")
        put(other, "many/there")
        before = at_buffers(node)
        items = {f"many/{i}": value(f"many/{i}", 65536 if i % 8 == 0 else SIZE) for i in range(100)}
        statuses = client.put_many([*items.items(), ("many/there", b"x"), ("many/0", b"x"), ("many/first", b"x")])
        assert [status.existed for status in statuses] == [False] * 100 + [True] * 3
        assert all(
            chunk.bytes() == text for chunk, text in zip(other.get_many(list(items)), items.values(), strict=True)
        )
        assert all(other.exists_many(list(items)))
        assert at_buffers(node) - before > 80
        parts = [b"a" * 70_000, b"b" * 70_000]
        assert client.put_many([("many/parts", parts), ("many/large", bytes(3 << 20))])[0].ok
        client.put("many/part", parts)
        assert client.get("many/part").bytes() == other.get("many/parts").bytes() == b"".join(parts)
        assert client.get("many/large").bytes() == bytes(3 << 20)


async def test_the_asyncio_client_has_buffers_too(cluster: Cluster) -> None:
    before = at_buffers(cluster.nodes[0])
    async with await aio.connect(cluster.address) as client:
        for i in range(20):
            assert not (await client.put(f"aio{i}", value(f"aio{i}", SIZE))).existed
            assert await client.exists(f"aio{i}")
            with await client.get(f"aio{i}") as chunk:
                assert chunk.bytes() == value(f"aio{i}", SIZE)
    assert at_buffers(cluster.nodes[0]) - before >= 18


def test_pins_and_times_to_live_travel_along(cluster: Cluster) -> None:
    with tanghulu.connect(cluster.address) as client:
        for i in range(4):
            client.put(f"plain{i}", b"x" * SIZE)
        client.put("soft", b"x" * SIZE, pin="soft")
        client.put("short", b"x" * SIZE, ttl_s=0.2)
        client.put("hard", b"x" * SIZE, pin="hard")
        assert client.stat("soft").pin.value == "soft"
        assert client.stat("hard").pin.value == "hard"
        eventually(lambda: not client.exists("short"))
        client.remove_many(["soft", "hard"])


def test_clients_that_are_closed_give_everything_back(cluster: Cluster) -> None:
    """While their process lives on."""
    node = cluster.nodes[0]
    for number in range(5):
        with tanghulu.connect(cluster.address) as client:
            for i in range(4):
                client.put(f"closed{number}-{i}", b"x" * 64)
            assert node.metric("tanghulu_node_write_buffer_heads") > 0
    eventually(lambda: node.metric("tanghulu_node_write_buffer_heads") == 0)
    assert node.metric("tanghulu_node_write_buffers") == 0


def test_threads_of_one_client_share_a_buffer(cluster: Cluster) -> None:
    failures: list[BaseException] = []

    def use(client: Client, number: int) -> None:
        try:
            for i in range(100):
                key = f"thread{number}-{i}"
                assert not put(client, key)
                put(client, f"contended{i}")
                assert read(client, key, SIZE) is None
                assert read(client, f"contended{i}", SIZE) is None
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test is to see it
            failures.append(error)

    with tanghulu.connect(cluster.address) as client:
        threads = [threading.Thread(target=use, args=(client, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


def test_far_more_than_the_node_holds(cluster: Cluster) -> None:
    """Write buffers are carved out of what is evicted; nothing fails, and what is left is whole."""
    with tanghulu.connect(cluster.address) as client:
        for i in range(1500):
            assert not put(client, f"many{i}", 65536)
        outcomes = [read(client, f"many{i}", 65536) for i in range(1500)]
    assert all(each is None or isinstance(each, ChunkNotFound) for each in outcomes)
    assert outcomes[-600:] == [None] * 600, "the youngest"
    node = cluster.nodes[0]
    eventually(lambda: node.metric("tanghulu_node_write_buffers") == 0)


def test_a_put_that_needs_the_whole_node_gets_the_buffers_back(cluster: Cluster) -> None:
    with tanghulu.connect(cluster.address) as client:
        for i in range(8):
            put(client, f"few{i}")
        assert cluster.nodes[0].metric("tanghulu_node_write_buffers") == 1
        assert client.put("whole", bytes(63 << 20)).ok
        client.remove("whole")


# --- clients that do not come to the end


_USES = """
from tanghulu.store.client.logic.commit import CommitCall
from tanghulu.store.protocol.write_buffer import Record, pack_record
from tanghulu.store.protocol.types import NewChunk
import xxhash

def value(key):
    return random.Random(key).randbytes(4096)

client = tanghulu.connect(sys.argv[1])
for i in range(4):
    client.put(f"{sys.argv[3]}-before{i}", value(f"{sys.argv[3]}-before{i}"))
driver = client._driver
(node,) = driver.context.write_buffers._open
writer, key = driver.context.write_buffers._open[node], sys.argv[3]
data = value(key)
place = writer.begin(len(data))
record = Record(key, 77, place, len(data), xxhash.xxh3_64_intdigest(data))

def fill():
    writer.fill(place, memoryview(data))

def commit():
    generation = driver.context.mapped[node].generation
    commit = CommitCall(driver.context, node, generation, [NewChunk(key, 77, len(data))])
    assert [each.name for each in commit.results(driver._call(commit.calls, 1.0))] == ["ACCEPTED"]

def half_a_record():
    torn = pack_record(record, writer._written)[:40]
    start = writer._written % writer._num_records * 256
    writer._records[start : start + len(torn)] = torn

def publish():
    writer.publish(record)

for step in (fill, commit, half_a_record, publish):
    if step.__name__ == sys.argv[2]:
        print(step.__name__, flush=True)
        sys.stdin.readline()
    step()
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "step",
    ["fill", "commit", *(pytest.param(step, marks=pytest.mark.slow) for step in ("half_a_record", "publish"))],
)
def test_a_client_killed_on_the_way_leaves_nothing_or_the_whole(cluster: Cluster, step: str) -> None:
    """Killed before the named step; what it had put before stays."""
    node, key = cluster.nodes[0], f"killed-{step}"
    with tanghulu.connect(cluster.address) as client:
        with child(_USES, cluster.address, step, key) as user:
            assert says(user) == step
            assert client.exists(key) == (step in ("half_a_record", "publish"))
        for i in range(4):
            assert read(client, f"{key}-before{i}", SIZE) is None
        assert isinstance(read(client, key, SIZE), ChunkNotFound)
        eventually(lambda: node.metric("tanghulu_node_write_buffers") == 0)
        eventually(lambda: not client.exists(key))
        assert not put(client, key), "the key can be put"
        assert read(client, key, SIZE) is None


def test_a_key_that_was_promised_only_can_be_put_by_another(cluster: Cluster) -> None:
    with tanghulu.connect(cluster.address) as client, child(_USES, cluster.address, "publish", "promised") as user:
        assert says(user) == "publish"
        with stopped(user.pid):
            assert not put(client, "promised"), "nobody has it"
            assert read(client, "promised", SIZE) is None
        tell(user, "go on")
        assert says(user) == "done"
        assert read(client, "promised", SIZE) is None


@pytest.mark.slow
def test_the_memory_of_a_stopped_writer_is_not_given_to_others(cluster: Cluster) -> None:
    """It was stopped before it wrote; it writes when everything else has been overwritten, and disturbs nobody."""
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address) as client, child(_USES, cluster.address, "fill", "stopped") as user:
        assert says(user) == "fill"
        with stopped(user.pid):
            keys = [f"other{i}" for i in range(100)]
            for key in keys:
                put(client, key, 1 << 20)
        tell(user, "go on")
        assert says(user) == "done"
        assert read(client, "stopped", SIZE) is None, "its put has returned"
        outcomes = [read(client, key, 1 << 20) for key in keys]
        assert all(each is None or isinstance(each, ChunkNotFound) for each in outcomes)
        assert outcomes.count(None) > 40
        eventually(lambda: node.metric("tanghulu_node_write_buffers") == 0)


# --- nodes and masters that go


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_node_that_goes_in_the_middle_of_puts(how: str) -> None:
    """Nothing hangs, another node takes what comes, and what the living hold is right."""
    with Cluster(2, "64MiB") as cluster, tanghulu.connect(cluster.address) as client:
        acknowledged = [key for key in (f"k{i}" for i in range(200)) if not put(client, key)]
        victim = cluster.nodes[0]
        lost = {info.key for info in client.list_keys("k") if info.nodes == (victim.name,)}
        assert 20 < len(lost) < 180

        def go_on(first: int) -> int:
            num_failed = 0
            for i in range(first, first + 100):
                outcome = timed(lambda i=i: client.put(f"k{i}", value(f"k{i}", SIZE), deadline_s=DEADLINE_S))  # type: ignore[misc]
                if isinstance(outcome, TanghuluError):
                    num_failed += 1
            return num_failed

        if how == "killed":
            victim.kill()
            assert go_on(1000) == 0, "the other one takes them"
        else:
            with stopped(victim.popen.pid):
                assert go_on(1000) <= 3
        for key in acknowledged:
            outcome = read(client, key, SIZE)
            assert outcome is None or (how == "killed" and key in lost), key
        with tanghulu.connect(cluster.address, transport="tcp") as far:
            for i in range(1050, 1100):
                assert read(far, f"k{i}", SIZE) is None


@pytest.mark.slow
def test_a_master_that_is_killed_in_the_middle_of_puts() -> None:
    with Cluster(1, "64MiB") as cluster, tanghulu.connect(cluster.address) as client:
        acknowledged: list[str] = []
        for i in itertools.count():
            key = f"m{i}"
            outcome = timed(lambda key=key: client.put(key, value(key, SIZE), deadline_s=0.5), 0.5)  # type: ignore[misc]
            if not isinstance(outcome, TanghuluError):
                acknowledged.append(key)
            if i == 100:
                cluster.restart_master()
            if len(acknowledged) == 300:
                break
        with tanghulu.connect(cluster.address) as fresh:
            eventually(lambda: all(fresh.exists_many(acknowledged)))
            for key in acknowledged:
                assert read(fresh, key, SIZE) is None
        before, numbers = at_buffers(cluster.nodes[0]), itertools.count()
        eventually(lambda: not put(client, f"after{next(numbers)}") and at_buffers(cluster.nodes[0]) > before + 10)


def test_a_tenant_writes_under_its_own_keys(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    write_tokens(tokens, ["operator", "node", "acme", "acme-reader", "initech"])
    with Secured(tokens) as cluster:
        cluster.complete()
        with cluster.connect("acme", "acme") as acme, cluster.connect("initech", "initech") as initech:
            for i in range(6):
                for client in (acme, initech):
                    assert not client.put(f"k{i}", client_value(client is acme, i)).existed
            for i in range(6):
                for client in (acme, initech):
                    with client.get(f"k{i}") as chunk:
                        assert chunk.bytes() == client_value(client is acme, i)
        assert 2 < at_buffers(cluster.nodes[0]) <= 5, "of the tenant that is trusted with shared memory"
        with cluster.connect("operator") as operator:
            assert {info.key for info in operator.list_keys("@acme/")} == {f"@acme/k{i}" for i in range(6)}


def client_value(is_acme: bool, number: int) -> bytes:
    return value(f"{is_acme}{number}", SIZE)


def test_values_that_are_too_large_for_a_buffer_leave_those_of_the_others_alone(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address) as client:
        for i in range(4):
            put(client, f"warm{i}")
        before = at_buffers(node)
        for i in range(20):
            assert not put(client, f"mixed{i}")
            assert not put(client, f"mixed-large{i}", 1 << 20)
        client.stat("mixed0")
        assert at_buffers(node) - before >= 19
