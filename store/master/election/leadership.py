"""The driver of Election: talks to etcd, and lets the master answer only while it leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable

import structlog

from tanghulu.discovery.base import Instance
from tanghulu.discovery.etcd_client import EtcdClient
from tanghulu.discovery.instance_wire import instance_to_proto
from tanghulu.discovery.masters import leader_in, leader_key
from tanghulu.errors import MasterUnavailable, NotLeader
from tanghulu.protos import etcd_pb2
from tanghulu.runtime.clock import Clock
from tanghulu.store.master.election.admitted_nodes import AdmittedNodes
from tanghulu.store.master.election.election import (
    Apply,
    Campaign,
    Election,
    Instruction,
    KeyHolder,
    Lead,
    Renew,
    Revoke,
    StepDown,
)
from tanghulu.store.master.election.proving import ProofWaiters
from tanghulu.store.protocol.terms import Renewals
from tanghulu.types import Address

_log = structlog.get_logger(__name__)
#: Every call to etcd; less than a lease, so that a renewal that hangs is followed by another.
_CALL_DEADLINE_S = 1.0
_TICK_S = 0.02
_RETRY_S = 0.2
#: How long a closing master tries to give the key back.
_RESIGN_S = 1.0


class Leadership:
    """This master's part among several. Calls ``on_lead(term, known nodes or None)`` and ``on_step_down()``."""

    def __init__(
        self,
        addresses: Iterable[Address],
        instance: Instance,
        ttl_s: float,
        clock: Clock,
        on_lead: Callable[[int, frozenset[str] | None], None],
        on_step_down: Callable[[], None],
    ) -> None:
        self.election = Election(ttl_s)
        self.cluster = 0
        self._client = EtcdClient(tuple(addresses), _CALL_DEADLINE_S)
        self._instance = instance
        self._key = leader_key(instance.namespace)
        self._ttl_s = ttl_s
        self._clock = clock
        self._on_lead = on_lead
        self._on_step_down = on_step_down
        self._known: frozenset[str] | None = None
        self.admitted = AdmittedNodes(
            self._client, instance.namespace, self._key, lambda: self.election.term, lambda: self.leads
        )
        self._calls: set[asyncio.Task[None]] = set()
        self._proofs = ProofWaiters(
            lambda: self._perform(self.election.renew(self._clock.now_s())),
            lambda: self.election.num_asked,
            lambda: self.election.num_confirmed,
        )

    # --- questions of the calls

    @property
    def leads(self) -> bool:
        """Whether this master may answer now."""
        return self.election.leads(self._clock.now_s())

    @property
    def term(self) -> int:
        """The term of this master, while it leads."""
        return self.election.term

    @property
    def renewals(self) -> Renewals:
        """Of this master's lease, as callers count them."""
        return Renewals(self.election.num_asked, self.election.num_confirmed)

    @property
    def ttl_s(self) -> float:
        """How long a renewal keeps the lease."""
        return self._ttl_s

    def require(self) -> None:
        """Raise NotLeader unless this master leads."""
        if not self.leads:
            leader = self.election.leader
            raise NotLeader.naming("" if leader == str(self._instance.address) else leader)

    def heard_of(self, term: int, term_of: int) -> None:
        """Take note that a node has obeyed a master of ``term``; raises NotLeader if that is later than this one's."""
        if term > self.election.term and term_of == self.cluster:
            _log.warning("master.outranked", own_term=self.election.term, term=term)
            self._perform(self.election.outranked(term, self._clock.now_s()))
            self.require()

    @contextlib.asynccontextmanager
    async def admitting(self, node: Instance) -> AsyncIterator[None]:
        """Admit ``node``, which the body enters into the directory.

        Raises MasterUnavailable or NotLeader; then the node must not be let in.
        """
        async with self.admitted.admitting(node):
            self.require()
            yield

    async def prove(self) -> int:
        """Wait until etcd has confirmed a renewal that is asked for after this call; how many were asked for before.

        One renewal serves all who wait. Raises NotLeader.
        """
        self.require()
        number = await self._proofs.wait()
        self.require()
        return number

    # --- taking part

    async def run(self) -> None:
        """Take part in the election until cancelled; then resign."""
        watching = asyncio.create_task(self._watch())
        try:
            while not watching.done():
                self._perform(self.election.tick(self._clock.now_s()))
                await asyncio.sleep(_TICK_S)
            watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._perform(self.election.resign())
            if self._calls:
                await asyncio.wait(self._calls, timeout=_RESIGN_S)
            for call in self._calls:
                call.cancel()
            await self._client.close()

    async def _watch(self) -> None:
        """Tell the election who holds the key, now and whenever that changes."""
        while True:
            try:
                await self._observe()
            except MasterUnavailable as error:
                _log.warning("master.etcd_unavailable", error=error.message)
            await asyncio.sleep(_RETRY_S)

    async def _observe(self) -> None:
        now = await self._client.range(self._key)
        self.cluster = now.header.cluster_id
        self._see(_holder(now.kvs[0]) if now.kvs else None, now.header.revision)
        async with contextlib.aclosing(self._client.watch(self._key, b"", now.header.revision + 1)) as changes:
            async for change in changes:
                gone = change.type == etcd_pb2.Event.DELETE
                self._see(None if gone else _holder(change.kv), change.kv.mod_revision)

    def _see(self, holder: KeyHolder | None, revision: int) -> None:
        before = self.election.leader
        self._perform(self.election.seen(holder, revision))
        if self.election.leader not in ("", before):
            _log.info("master.follows", leader=self.election.leader)

    # --- instructions

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Lead(term):
                    _log.info("master.leads", term=term, known_nodes=len(self._known or ()))
                    self.admitted.begin_term(self._known or ())
                    self._on_lead(term, self._known)
                case StepDown():
                    _log.warning("master.stepped_down", term=self.election.term, leader=self.election.leader)
                    self._on_step_down()
                    self._proofs.settle(holds=False)
                case Apply():
                    self._spawn(self._apply())
                case Campaign(lease):
                    self._spawn(self._campaign(lease))
                case Renew():
                    self._spawn(self._renew(instruction))
                case Revoke(lease):
                    self._spawn(self._revoke(lease))

    def _spawn(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _apply(self) -> None:
        asked_s = self._clock.now_s()
        try:
            lease = await self._client.grant(self._ttl_s)
        except MasterUnavailable:
            self._perform(self.election.failed(self._clock.now_s()))
        else:
            self._perform(self.election.lease_granted(lease, asked_s))

    async def _campaign(self, lease: int) -> None:
        free = etcd_pb2.Compare(
            result=etcd_pb2.Compare.EQUAL, target=etcd_pb2.Compare.CREATE, key=self._key, create_revision=0
        )
        value = instance_to_proto(self._instance).SerializeToString()
        put = etcd_pb2.PutRequest(key=self._key, value=value, lease=lease)
        leader = etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=self._key))
        request = etcd_pb2.TxnRequest(
            compare=[free], success=[etcd_pb2.RequestOp(request_put=put), *self.admitted.reading], failure=[leader]
        )
        try:
            reply = await self._client.transact(request)
        except MasterUnavailable:
            self._perform(self.election.failed(self._clock.now_s()))
            return
        revision, now_s = reply.header.revision, self._clock.now_s()
        if reply.succeeded:
            self._known = self.admitted.read(reply.responses[1:])
            holder = KeyHolder(str(self._instance.address), revision)
        else:
            holder = _holder(reply.responses[0].response_range.kvs[0])
        self._perform(self.election.campaigned(holder, revision, won=reply.succeeded, now_s=now_s))

    async def _renew(self, renewal: Renew) -> None:
        asked_s = self._clock.now_s()
        with contextlib.suppress(MasterUnavailable):
            known = await self._client.keep_alive(renewal.lease)
            self._perform(self.election.renewed(renewal, asked_s, known=known))
        self._proofs.settle(holds=self.leads)

    async def _revoke(self, lease: int) -> None:
        with contextlib.suppress(MasterUnavailable):  # then it runs out by itself
            await self._client.revoke(lease)


def _holder(kv: etcd_pb2.KeyValue) -> KeyHolder:
    return KeyHolder(str(leader_in(kv.value)), kv.create_revision)
