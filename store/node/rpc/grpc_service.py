"""The node's gRPC edge for third parties: whole values inside messages, no session, no leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import grpc.aio

from tanghulu.errors import ChunkNotFound, InvalidRequest, Overloaded, TanghuluError
from tanghulu.protos import store_pb2, store_pb2_grpc
from tanghulu.rpc import grpc_edge
from tanghulu.store.node.rpc.metrics import TrafficCounters
from tanghulu.store.node.rpc.service import DEFAULT_DEADLINE_S, cut_values
from tanghulu.store.node.rpc.stats import check_count, stat_reply
from tanghulu.store.node.rpc.verifying import Verifier
from tanghulu.store.node.ssd.promotion import Promoter
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.writes.puts import PutOutcome, PutService, remaining_s
from tanghulu.store.protocol.wire import checksums_to_wire, new_chunk_from_wire, set_error
from tanghulu.types import ChunkKey

#: All values of one answer; below gRPC's own limit for a message.
MAX_ANSWER_BYTES = 60 << 20
#: Calls under way at one time, those included that wait for their requests to be received (see ``CallAdmission``).
MAX_CALLS = 64
#: Values in the answers of all calls under way, whether or not they are taken yet.
MAX_ANSWERS_BYTES = 256 << 20
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class GrpcStoreNode(store_pb2_grpc.StoreNodeServicer):
    """Put, Get, Exists, Remove and Stat over gRPC; larger values than a message can hold need the fast lane."""

    def __init__(
        self, state: NodeState, puts: PutService, traffic: TrafficCounters, promoter: Promoter | None = None
    ) -> None:
        self._promoter = promoter
        self._state, self._chunks = state, state.chunks
        self._puts = puts
        self._traffic = traffic
        self._answer_bytes = 0

    async def Put(self, request: store_pb2.PutRequest, context: _Context) -> store_pb2.PutReply:
        """Put the values in ``inline_data``."""
        data = request.inline_data
        try:
            items = cut_values([new_chunk_from_wire(item) for item in request.items], memoryview(data))
            until_s = asyncio.get_running_loop().time() + remaining_s(request.deadline_ms, DEFAULT_DEADLINE_S)
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
            raise AssertionError("abort raises") from error
        self._state.drain_buffers()
        outcomes = await self._puts.put_all(items, visible=request.visible, until_s=until_s)
        self._puts.room_changed()
        self._traffic.bytes_written["grpc"] += len(data)
        return store_pb2.PutReply(results=[_put_result(outcome) for outcome in outcomes])

    async def Get(self, request: store_pb2.GetRequest, context: _Context) -> store_pb2.GetReply:
        """The values of all keys, one behind the other in ``inline_data``."""
        await _bounded(request.keys, context)
        self._state.drain_buffers()
        reply = store_pb2.GetReply()
        verifier = Verifier(self._chunks, self._puts)
        values: list[bytes] = []
        touched: list[Chunk] = []
        size = 0
        async for key, error in self._in_memory(request):
            item = reply.items.add()
            if error is not None:
                set_error(item.status, error)
                continue
            if request.verify and (found := self._chunks.find(ChunkKey(key))) is not None:
                await verifier.drop_if_corrupt(found)
            chunk = self._chunks.look_up(ChunkKey(key))
            if chunk is None:
                set_error(item.status, ChunkNotFound(f"{key!r} is not on this node"))
                continue
            size += chunk.size_bytes
            if size > MAX_ANSWER_BYTES:
                set_error(
                    item.status, InvalidRequest("the values do not fit into one gRPC message; ask for fewer keys")
                )
                continue
            try:
                self._hold(context, chunk.size_bytes)
            except Overloaded as busy:
                set_error(item.status, busy)
                continue
            item.size_bytes, item.version = chunk.size_bytes, chunk.version
            item.checksums.CopyFrom(checksums_to_wire(chunk.checksums))
            values.append(bytes(self._puts.bytes_of(chunk)))
            touched.append(chunk)
        self._chunks.touch(touched)
        reply.inline_data = b"".join(values)
        self._traffic.bytes_read["grpc"] += len(reply.inline_data)
        return reply

    async def _in_memory(self, request: store_pb2.GetRequest) -> AsyncIterator[tuple[str, TanghuluError | None]]:
        """The keys, one by one; those on the SSD come up first, or with what kept them from it."""
        if self._promoter is None:
            for key in request.keys:
                yield key, None
            return
        until_s = asyncio.get_running_loop().time() + remaining_s(request.deadline_ms, DEFAULT_DEADLINE_S)
        async for each in self._promoter.each(request.keys, until_s):
            yield each

    async def Exists(self, request: store_pb2.ExistsRequest, context: _Context) -> store_pb2.ExistsReply:
        """One byte a key."""
        await _bounded(request.keys, context)
        self._state.drain_buffers()
        found = (self._chunks.holds(ChunkKey(key)) for key in request.keys)
        return store_pb2.ExistsReply(found=bytes(found))

    async def Remove(self, request: store_pb2.RemoveRequest, context: _Context) -> store_pb2.RemoveReply:
        """Drop chunks; one byte a key."""
        await _bounded(request.keys, context)
        self._state.drain_buffers()
        try:
            until_s = asyncio.get_running_loop().time() + remaining_s(request.deadline_ms, DEFAULT_DEADLINE_S)
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
        removed = bytes(self._chunks.remove(ChunkKey(key)) for key in request.keys)
        self._puts.room_changed()
        try:
            await self._puts.told_removals(until_s)
            if self._promoter is not None:
                await self._promoter.settled(until_s)
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
        return store_pb2.RemoveReply(removed=removed)

    async def Stat(self, request: store_pb2.StatRequest, context: _Context) -> store_pb2.StatReply:
        """What the node knows of each chunk."""
        await _bounded(request.keys, context)
        self._state.drain_buffers()
        return stat_reply(self._chunks, request)

    def _hold(self, context: _Context, num_bytes: int) -> None:
        """Count ``num_bytes`` of an answer until the call is over; raises Overloaded if there are too many."""
        if self._answer_bytes and self._answer_bytes + num_bytes > MAX_ANSWERS_BYTES:
            raise Overloaded("other answers over gRPC, which their callers have not taken, fill the room; try again")
        self._answer_bytes += num_bytes

        def over(_: object) -> None:
            self._answer_bytes -= num_bytes

        context.add_done_callback(over)


async def _bounded(keys: Sequence[str], context: _Context) -> None:
    """End the call if it has too many keys."""
    try:
        check_count(len(keys))
    except InvalidRequest as error:
        await grpc_edge.abort(context, error)


def _put_result(outcome: PutOutcome) -> store_pb2.PutResult:
    if not isinstance(outcome, TanghuluError):
        return store_pb2.PutResult(existed=outcome)
    result = store_pb2.PutResult()
    set_error(result.status, outcome)
    return result
