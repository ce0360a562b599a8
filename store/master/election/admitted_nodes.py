"""The nodes admitted by the leader, kept in etcd for its successor and for the owners of ranges.

They are written before a node's registration is answered, so the next leader knows which nodes may hold acknowledged
chunks, and its directory is complete as soon as all of them have reported. Only the leader may write them: etcd
compares the leader's key, so a write under an old term fails.

Their ids are in one value, which distinguishes a cluster without nodes from one that never had a leader, and each node
has a key of its own with its Instance; both are written in one transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice

import structlog

from tanghulu.discovery.base import Instance
from tanghulu.discovery.etcd_client import EtcdClient
from tanghulu.discovery.instance_wire import instance_to_bytes
from tanghulu.discovery.masters import masters_prefix
from tanghulu.errors import MasterUnavailable, NotLeader
from tanghulu.protos import etcd_pb2
from tanghulu.store.master.election.masters_view import ADMITTED, NODES

_log = structlog.get_logger(__name__)
#: Nodes named in one log line.
MAX_NAMED = 8
#: Nodes forgotten in one transaction; etcd takes 128 operations.
MAX_FORGOTTEN = 100


class AdmittedNodes:
    """The nodes, by id. ``leads`` returns whether this master leads now."""

    def __init__(
        self, client: EtcdClient, namespace: str, leader_key: bytes, term: Callable[[], int], leads: Callable[[], bool]
    ) -> None:
        self._client = client
        self._ids_key = masters_prefix(namespace) + ADMITTED.encode()
        self._prefix = masters_prefix(namespace) + NODES.encode()
        self._leader_key = leader_key
        self._term = term
        self._leads = leads
        self._ids: set[str] = set()
        self._written: dict[str, bytes] = {}  # the key of each, as it is in etcd
        self._lock = asyncio.Lock()

    def begin_term(self, known: Iterable[str]) -> None:
        """Begin a term with the ids left by the predecessor."""
        self._ids = set(known)

    def seen(self, nodes: Iterable[Instance]) -> None:
        """Take ``nodes`` as those with a key in etcd, as reported by a watch."""
        self._written = {each.id: instance_to_bytes(each) for each in nodes}

    @property
    def ids(self) -> frozenset[str]:
        """The ids of the nodes, including those admitted by a predecessor."""
        return frozenset(self._ids | self._written.keys())

    @contextlib.asynccontextmanager
    async def admitting(self, node: Instance) -> AsyncIterator[None]:
        """Write ``node``, and forget no node while the body enters it into the directory.

        Raises MasterUnavailable or NotLeader; then the node must not be admitted.
        """
        async with self._lock:
            value = instance_to_bytes(node)
            if node.id not in self._ids or self._written.get(node.id) != value:
                await self._write(self._ids | {node.id}, {node.id: value})
            yield

    async def keep(self, present: Callable[[], frozenset[str]]) -> None:
        """Forget nodes that are not ``present`` when it is their turn; the next call completes what is left."""
        async with self._lock:
            gone = sorted((self._ids | self._written.keys()) - present())
            if self._leads() and gone:
                _log.info("nodes.gone", nodes=gone[:MAX_NAMED], num_nodes=len(gone))
                with contextlib.suppress(MasterUnavailable, NotLeader):
                    await self._write(self._ids.difference(gone), {}, list(islice(gone, MAX_FORGOTTEN)))

    async def _write(self, node_ids: set[str], puts: dict[str, bytes], gone: Iterable[str] = ()) -> None:
        mine = etcd_pb2.Compare(
            result=etcd_pb2.Compare.EQUAL,
            target=etcd_pb2.Compare.CREATE,
            key=self._leader_key,
            create_revision=self._term(),
        )
        request = etcd_pb2.TxnRequest(compare=[mine])
        ids = "\n".join(sorted(node_ids)).encode()
        request.success.add(request_put=etcd_pb2.PutRequest(key=self._ids_key, value=ids))
        for node_id, value in puts.items():
            request.success.add(request_put=etcd_pb2.PutRequest(key=self._prefix + node_id.encode(), value=value))
        for node_id in gone:
            key = self._prefix + node_id.encode()
            request.success.add(request_delete_range=etcd_pb2.DeleteRangeRequest(key=key))
        self._written |= dict.fromkeys(puts, b"")  # perhaps, if there is no answer
        if not (await self._client.transact(request)).succeeded:
            raise NotLeader.naming("")
        self._ids = node_ids
        self._written |= puts
        for node_id in gone:
            self._written.pop(node_id, None)

    def __repr__(self) -> str:
        return f"AdmittedNodes({len(self.ids)})"
