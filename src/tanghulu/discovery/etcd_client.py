"""The calls to etcd used by Discovery and the masters' election. Handles keys and leases, not their meaning.

Several endpoints of one etcd may be given: after a failure the next call uses the next endpoint.

A watch is silent while nothing changes, so silence is probed: every ``BEAT_S`` a key is read over the same connection.
gRPC's own pings would not do, because etcd disconnects clients that ping more often than every 5 s.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import grpc
import grpc.aio

from tanghulu.errors import DeadlineExceeded, MasterUnavailable
from tanghulu.protos import etcd_pb2, etcd_pb2_grpc
from tanghulu.rpc.grpc_edge import channel, typed_errors
from tanghulu.runtime.tasks import cancelled
from tanghulu.types import Address

CALL_DEADLINE_S = 3.0
#: A watch silent for this long probes etcd; its loss is detected within 4.5 s, including the deadline of the probe.
BEAT_S = 1.5
#: gRPC's pings are rarer than the beats and hardly ever sent. Data undelivered by the kernel for ``_SILENCE_MS`` ends
#: the connection, so that nobody waits for TCP's late retransmissions when the path is restored.
_PING_MS, _SILENCE_MS = 10_000, 3_000


class EtcdClient:
    """A client of etcd. Every call raises MasterUnavailable if etcd does not answer in time."""

    def __init__(self, addresses: Sequence[Address], call_deadline_s: float = CALL_DEADLINE_S) -> None:
        self._addresses = tuple(addresses)
        self._deadline_s = call_deadline_s
        self._channels: list[grpc.aio.Channel] = [
            channel(address, _PING_MS, _SILENCE_MS) for address in self._addresses
        ]
        self._index = 0

    @property
    def peer(self) -> str:
        """The endpoint in use, for error messages."""
        return f"etcd at {self._addresses[self._index]}"

    async def close(self) -> None:
        """Close all connections."""
        for each in self._channels:
            await each.close()

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[grpc.aio.Channel]:
        index = self._index
        try:
            async with typed_errors(self.peer, MasterUnavailable):
                try:
                    yield self._channels[index]
                except asyncio.InvalidStateError as error:  # grpc's error for a write to an ended stream
                    raise MasterUnavailable(f"{self.peer} ended the call; try again") from error
        except (MasterUnavailable, DeadlineExceeded) as error:
            if self._index == index:
                self._index = (index + 1) % len(self._channels)
            raise MasterUnavailable(error.message) from error

    # --- leases

    async def grant(self, ttl_s: float) -> int:
        """Create a lease of ``ttl_s`` rounded up to seconds (etcd may grant more, never less)."""
        request = etcd_pb2.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        async with self._asking() as link:
            stub = etcd_pb2_grpc.LeaseStub(link)
            return int((await stub.LeaseGrant(request, timeout=self._deadline_s)).ID)

    async def keep_alive(self, lease: int) -> bool:
        """Renew ``lease``; return False if it has expired."""
        async with self._asking() as link:
            call = etcd_pb2_grpc.LeaseStub(link).LeaseKeepAlive(timeout=self._deadline_s)
            await call.write(etcd_pb2.LeaseKeepAliveRequest(ID=lease))
            await call.done_writing()
            reply = await call.read()
            call.cancel()
        return reply is not grpc.aio.EOF and reply.TTL > 0

    async def revoke(self, lease: int) -> None:
        """End ``lease`` and delete the keys under it."""
        async with self._asking() as link:
            stub = etcd_pb2_grpc.LeaseStub(link)
            await stub.LeaseRevoke(etcd_pb2.LeaseRevokeRequest(ID=lease), timeout=self._deadline_s)

    # --- keys

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        """Write ``key`` under ``lease``."""
        async with self._asking() as link:
            request = etcd_pb2.PutRequest(key=key, value=value, lease=lease)
            await etcd_pb2_grpc.KVStub(link).Put(request, timeout=self._deadline_s)

    async def range(self, key: bytes, end: bytes = b"") -> etcd_pb2.RangeResponse:
        """Read the key, or all keys from it up to ``end``."""
        async with self._asking() as link:
            request = etcd_pb2.RangeRequest(key=key, range_end=end)
            reply: etcd_pb2.RangeResponse = await etcd_pb2_grpc.KVStub(link).Range(request, timeout=self._deadline_s)
            return reply

    async def transact(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        """Compare and write atomically."""
        async with self._asking() as link:
            reply: etcd_pb2.TxnResponse = await etcd_pb2_grpc.KVStub(link).Txn(request, timeout=self._deadline_s)
            return reply

    async def watch(self, key: bytes, end: bytes, revision: int) -> AsyncGenerator[etcd_pb2.Event, None]:
        """Yield changes of the keys from ``revision`` on; ends when etcd cancels the watch. Close it to stop.

        Also raises MasterUnavailable if etcd has not answered for ``BEAT_S`` and the deadline of a call.
        """
        async with aclosing(self.watch_together(key, end, revision)) as responses:
            async for changes in responses:
                for change in changes:
                    yield change

    async def watch_together(
        self, key: bytes, end: bytes, revision: int
    ) -> AsyncGenerator[Sequence[etcd_pb2.Event], None]:
        """Watch like ``watch``, yielding the changes of one revision together."""
        create = etcd_pb2.WatchCreateRequest(key=key, range_end=end, start_revision=revision)
        async with self._asking() as link:
            call = etcd_pb2_grpc.WatchStub(link).Watch()
            reading: asyncio.Task[etcd_pb2.WatchResponse] | None = None
            try:
                await call.write(etcd_pb2.WatchRequest(create_request=create))
                while True:
                    reading = reading or asyncio.create_task(call.read())
                    if not (await asyncio.wait({reading}, timeout=BEAT_S))[0]:
                        await self._beat(link, key)
                        continue
                    response, reading = reading.result(), None
                    if response is grpc.aio.EOF:
                        return
                    yield response.events
                    if response.canceled:
                        return
            finally:
                call.cancel()
                if reading is not None:
                    await cancelled(reading)

    async def _beat(self, link: grpc.aio.Channel, key: bytes) -> None:
        """Raise gRPC's error unless etcd, with a majority of its members, answers over ``link``."""
        await etcd_pb2_grpc.KVStub(link).Range(etcd_pb2.RangeRequest(key=key), timeout=self._deadline_s)


def read_blocking(addresses: Sequence[Address], key: bytes, deadline_s: float) -> bytes | None:
    """Return the value of ``key`` for callers without an event loop; None if absent. Raises MasterUnavailable."""
    failure = ""
    for address in addresses:
        with grpc.insecure_channel(str(address), options=[("grpc.enable_http_proxy", 0)]) as link:
            try:
                reply = etcd_pb2_grpc.KVStub(link).Range(etcd_pb2.RangeRequest(key=key), timeout=deadline_s)
            except grpc.RpcError as error:
                failure = f"etcd at {address}: {error.details() if isinstance(error, grpc.Call) else error}"
                continue
        return bytes(reply.kvs[0].value) if reply.kvs else None
    raise MasterUnavailable(failure)
