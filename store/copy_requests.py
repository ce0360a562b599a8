"""Asking the master to copy chunks ahead of demand, from processes that are no clients of the store (a conductor)."""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.discovery.masters import MasterFinder
from tanghulu.errors import MasterUnavailable, TanghuluError
from tanghulu.masters import Masters
from tanghulu.protos import directory_pb2 as pb
from tanghulu.protos import directory_pb2_grpc
from tanghulu.rpc.grpc_edge import channel, typed_errors
from tanghulu.types import Address

_DEADLINE_S = 5.0


class CopyRequester:
    """A connection for each request: they are few."""

    def __init__(self, masters: Masters | Address | str) -> None:
        self._finder = MasterFinder(masters)

    async def ask(self, keys: Sequence[str], holders: int, for_s: float) -> int:
        """``holders`` nodes shall hold ``keys`` for ``for_s`` seconds; returns how many keys the master took.

        Raises MasterUnavailable, Forbidden without the right to write, or InvalidRequest.
        """
        address = await self._finder.find()
        credentials = self._finder.masters.credentials
        request = pb.ReplicateRequest(keys=keys, holders=holders, for_s=for_s)
        try:
            async with (
                channel(address, tls=credentials.tls) as connection,
                typed_errors(f"master at {address}", MasterUnavailable),
            ):
                stub = directory_pb2_grpc.DirectoryStub(connection)
                reply = await stub.Replicate(request, timeout=_DEADLINE_S, metadata=credentials.metadata)
        except TanghuluError as error:
            self._finder.failed(address, error)
            raise
        return int(reply.num_taken)
