"""Large values by mapped memory: committed while they are copied; clients that die between any two steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import tanghulu
import tanghulu.aio
from tanghulu.errors import ChunkNotFound, TanghuluError
from tanghulu.rpc.fast_client import Reply
from tanghulu.store.client import Client
from tanghulu.store.client.logic.commit import CommitCall
from tanghulu.store.client.logic.key_owners import KnownMasters
from tanghulu.store.master.directory.pending_commits import PENDING_S
from tanghulu.store.protocol.messages import CommitKeysReply
from tanghulu.store.protocol.types import RELIED_S, CommitResult, NewChunk
from tanghulu.types import ChunkKey
from tests.store.cluster import Cluster, eventually
from tests.store.fault_tools import MIB, child, read, says, stopped, tell, value

SIZE = 6 * MIB
#: Says where it stands and waits there, in a put of a large value.
_PUTTING = """
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.store.client.drivers import blocking
from tanghulu.store.client.logic import carriers, put

def wait():
    print(sys.argv[2], flush=True)
    sys.stdin.readline()

def before(owner, name, number=1):
    original = getattr(owner, name)
    def called(*arguments, **named):
        nonlocal number
        number -= 1
        if not number:
            wait()
        return original(*arguments, **named)
    setattr(owner, name, called)

client = tanghulu.connect(sys.argv[1], deadline_s=60)
client.put("before", bytes(4096))
before(*{
    "reserved": (put, "transfer_all"),  # the node has made room
    "asked": (blocking, "_move"),  # the master has been asked
    "moved": (FastConnection, "end", 2),  # all bytes are there; the first answer is the node's
    "accepted": (carriers, "_commit_at_nodes"),  # the master's answer, too
}[sys.argv[2]])
client.put(sys.argv[3], random.Random(sys.argv[3]).randbytes(4096) * (6 * 256))
print("done", flush=True)
sys.stdin.readline()
"""
STEPS = ["reserved", "asked", "moved", "accepted"]


def committed(cluster: Cluster) -> float:
    """How many chunks clients have committed; a master that is new takes none."""
    eventually(lambda: cluster.master.metric("tanghulu_master_rebuilding") == 0)
    return cluster.master.metric("tanghulu_master_announced_chunks_total", outcome="client_commit")


def test_large_values_are_committed_by_their_client(cluster: Cluster, client: Client) -> None:
    before = committed(cluster)
    assert not client.put("large/bytes", value("large/bytes", SIZE)).existed
    text = value("large/pieces", SIZE)
    assert not client.put("large/pieces", [text[: 5 * MIB], text[5 * MIB :]], pin="soft", ttl_s=60.0).existed
    assert not client.put("large/parts", client.register(bytearray(text)), part_bytes=MIB + 1).existed
    assert committed(cluster) - before == 3
    assert client.put("large/bytes", value("large/bytes", SIZE)).existed
    assert not client.put("large/unseen", text, visible=False).existed
    assert committed(cluster) - before == 3
    assert len(client.stat("large/parts").checksums.parts) == 6
    for key in ("pieces", "parts", "unseen"):
        assert client.get(f"large/{key}").bytes() == text


def test_large_values_together(cluster: Cluster, client: Client) -> None:
    keys = [f"many/{number}" for number in range(4)]
    client.put(keys[1], value(keys[1], SIZE))
    before = committed(cluster)
    statuses = client.put_many([(key, value(key, SIZE)) for key in keys])
    assert [status.existed for status in statuses] == [False, True, False, False]
    assert committed(cluster) - before == 3
    for key in keys:
        assert read(client, key, SIZE) is None


async def test_asyncio_commits_too(cluster: Cluster, client: Client) -> None:
    before = committed(cluster)
    async with tanghulu.aio.connect(cluster.address) as putter:
        assert not (await putter.put("large/aio", value("large/aio", SIZE))).existed
    assert committed(cluster) - before == 1
    assert read(client, "large/aio", SIZE) is None


@pytest.mark.parametrize("step", STEPS)
def test_a_client_killed_on_the_way_leaves_nothing(cluster: Cluster, client: Client, step: str) -> None:
    key, node = f"killed/{step}", cluster.nodes[0]
    before = cluster.master.metric("tanghulu_master_announced_chunks_total", outcome="retracted")
    eventually(lambda: node.metric("tanghulu_node_write_buffers") == 0)
    with child(_PUTTING, cluster.address, step, key) as victim:
        assert says(victim) == step
    assert isinstance(read(client, key, SIZE), ChunkNotFound)
    eventually(lambda: not client.exists(key))
    was_promised = step != "reserved"
    assert cluster.master.metric("tanghulu_master_announced_chunks_total", outcome="retracted") - before == was_promised
    assert not client.put(key, value(key, SIZE)).existed
    assert read(client, key, SIZE) is None
    eventually(lambda: node.metric("tanghulu_node_leases") == 0)


@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_was_stopped_on_the_way_goes_on(cluster: Cluster, client: Client, step: str) -> None:
    """For longer than its promise is believed: then the node announces it before the put returns."""
    key = f"stopped/{step}"
    with child(_PUTTING, cluster.address, step, key) as putter:
        assert says(putter) == step
        with stopped(putter.pid):
            if step in ("moved", "accepted"):
                eventually(lambda: not client.exists(key))
        tell(putter, "go on")
        assert says(putter) == "done"
        assert client.exists(key)
        assert read(client, key, SIZE) is None


def test_answers_of_the_master() -> None:
    items = [NewChunk(ChunkKey(f"k{n}"), n + 1, 100) for n in range(2)]
    context = SimpleNamespace(masters=KnownMasters())
    one, two = (CommitCall(context, "n", 1, news) for news in (items[:1], items))  # type: ignore[arg-type]
    accepted, exists = CommitResult.ACCEPTED, CommitResult.EXISTS
    assert one.results([Reply(CommitKeysReply([accepted]), memoryview(b""))]) == [accepted]
    assert two.results([Reply(CommitKeysReply([accepted, exists]), memoryview(b""))]) == [accepted, exists]
    for nothing in (None, TanghuluError("away"), Reply(CommitKeysReply([accepted]), memoryview(b""))):
        assert two.results([nothing]) == [CommitResult.ASK_NODE] * 2
    assert RELIED_S < PENDING_S / 2
