"""The admitted nodes: the ids of the nodes that the leader has let in, kept in etcd for its successor.

They are written before a node's registration is answered, so the next leader knows which nodes may hold acknowledged
chunks, and its directory is complete as soon as all of them have reported. Only the leader may write them: etcd
compares the leader's key, so a write under an old term fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from tanghulu.discovery.etcd_client import EtcdClient
from tanghulu.errors import MasterUnavailable, NotLeader
from tanghulu.protos import etcd_pb2
from tanghulu.store.master.election.election import Election


class AdmittedNodes:
    """The ids, one a line of a value in etcd. ``leads`` tells whether this master leads now."""

    def __init__(
        self, client: EtcdClient, namespace: str, leader_key: bytes, election: Election, leads: Callable[[], bool]
    ) -> None:
        self._client = client
        self._key = f"/tanghulu-masters/{namespace}/nodes".encode()
        self._leader_key = leader_key
        self._election = election
        self._leads = leads
        self._ids: set[str] = set()
        self._lock = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def reading(self) -> etcd_pb2.RequestOp:
        """The operation of a transaction that reads the ids in etcd."""
        return etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=self._key))

    @staticmethod
    def read(response: etcd_pb2.ResponseOp) -> frozenset[str] | None:
        """The ids that ``reading`` has found; None if they were never written."""
        found = response.response_range.kvs
        return frozenset(found[0].value.decode().split()) if found else None

    def begin_term(self, known: frozenset[str] | None) -> None:
        """Begin a term with the ids that the predecessor has left."""
        self._ids = set(known or ())

    @contextlib.asynccontextmanager
    async def admitting(self, node_id: str) -> AsyncIterator[None]:
        """Write ``node_id``, and forget no node while the body enters it into the directory.

        Raises MasterUnavailable or NotLeader; then the node must not be let in.
        """
        async with self._lock:
            if node_id not in self._ids:
                await self._write(self._ids | {node_id})
            yield

    async def keep(self, present: Callable[[], frozenset[str]]) -> None:
        """Forget the nodes that are not ``present`` when it is their turn; the next call makes a failure good."""
        async with self._lock:
            node_ids = present()
            if self._leads() and self._ids - node_ids:
                with contextlib.suppress(MasterUnavailable, NotLeader):
                    await self._write(self._ids & node_ids)

    async def _write(self, node_ids: set[str]) -> None:
        mine = etcd_pb2.Compare(
            result=etcd_pb2.Compare.EQUAL,
            target=etcd_pb2.Compare.CREATE,
            key=self._leader_key,
            create_revision=self._election.term,
        )
        put = etcd_pb2.PutRequest(key=self._key, value="\n".join(sorted(node_ids)).encode())
        request = etcd_pb2.TxnRequest(compare=[mine], success=[etcd_pb2.RequestOp(request_put=put)])
        if not (await self._client.transact(request)).succeeded:
            raise NotLeader.naming("")
        self._ids = node_ids

    def __repr__(self) -> str:
        return f"AdmittedNodes({len(self._ids)})"
