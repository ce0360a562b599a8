"""Every operation of the client as a piece of logic: arguments checked, defaults filled in, results unpacked.

The two clients (blocking, asyncio) are this file with a shell around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic import admin, ranges, waiting
from tanghulu.store.client.logic import context as common
from tanghulu.store.client.logic import get as gets
from tanghulu.store.client.logic import put as puts
from tanghulu.store.client.logic import query as directory
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import Deadline, Logic
from tanghulu.store.client.logic.putting import Putting
from tanghulu.store.client.logic.values import readable, readable_pieces, writable
from tanghulu.store.client.logic.wants import Want
from tanghulu.store.client.model import (
    ChunkInfo,
    Evicted,
    KeyInfo,
    NodeView,
    PutItem,
    PutOptions,
    Status,
    TenantView,
    VerifiedPage,
)
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, NewChunk, validate_key


class Operations:
    """The logic of every public method; ``flush`` is what a Chunk without a copy calls when it is closed."""

    def __init__(self, context: Context, flush: Callable[[], None]) -> None:
        self._context = context
        self._flush = flush

    def put(self, deadline: Deadline, item: PutItem, options: PutOptions) -> Logic[Status]:
        """One value; raises its error."""
        putting = self._putting(item, options)
        if self._context.reads:
            yield from common.tell_reads(self._context)
        yield from puts.put_one(self._context, deadline, putting, options)
        status = putting.status()
        if status.error is not None:
            raise status.error
        return status

    def put_many(
        self, deadline: Deadline, items: Iterable[PutItem | tuple[str, Any]], options: PutOptions
    ) -> Logic[list[Status]]:
        """Many values, a Status each; malformed items get theirs without disturbing the others."""
        statuses: list[Status | Putting] = []
        for each in items:
            item = each if isinstance(each, PutItem) else PutItem(*each)
            try:
                statuses.append(self._putting(item, options))
            except InvalidRequest as error:
                statuses.append(Status(item.key, error=error))
        putting = [each for each in statuses if isinstance(each, Putting)]
        if putting:
            yield from common.tell_reads(self._context)
            yield from puts.put_all(self._context, deadline, putting, options)
        return [each.status() if isinstance(each, Putting) else each for each in statuses]

    def _putting(self, item: PutItem, options: PutOptions) -> Putting:
        pieces = readable_pieces(item.value) if isinstance(item.value, list | tuple) else ()
        size = sum(map(len, pieces))
        if size > MAX_INLINE_BYTES:
            value = memoryview(b"")
        else:
            value = readable(b"".join(pieces) if pieces else item.value)
            pieces, size = (), value.nbytes
        given = item.checksums
        if given.parts:
            sums.validate(given, size)
        elif size <= MAX_INLINE_BYTES:
            given = sums.compute(value, options.part_bytes)
        else:
            sums.part_length(size, options.part_bytes)  # too many parts are refused before anything is sent
        new = NewChunk(
            validate_key(item.key),
            self._context.new_version(),
            size,
            given,
            options.pin,
            options.ttl_s,
            options.replicas,
        )
        return Putting(new, value, options.replicas, pieces)

    def get(self, deadline: Deadline, key: str) -> Logic[Chunk]:
        """One chunk; raises its error."""
        want = Want(validate_key(key))
        yield from gets.fetch_one(self._context, deadline, want, self._flush)
        assert isinstance(want.result, Chunk | TanghuluError)
        if isinstance(want.result, TanghuluError):
            raise want.result
        return want.result

    def get_many(self, deadline: Deadline, keys: Sequence[str]) -> Logic[list[Chunk | TanghuluError]]:
        """A chunk or an error for each key."""
        wants = [Want(validate_key(key)) for key in keys]
        yield from gets.fetch(self._context, deadline, wants, self._flush)
        return [want.result for want in wants]  # type: ignore[misc]  # no buffers: no sizes

    def get_range(self, deadline: Deadline, key: str, offset: int, length: int | None) -> Logic[Chunk]:
        """A part of one chunk; raises its error."""
        want = Want(validate_key(key), part=ranges.make_range(offset, length))
        yield from gets.fetch_one(self._context, deadline, want, self._flush)
        assert isinstance(want.result, Chunk | TanghuluError)
        if isinstance(want.result, TanghuluError):
            raise want.result
        return want.result

    def get_into(
        self, deadline: Deadline, key: str, buffer: Any, offset: int = 0, length: int | None = None
    ) -> Logic[int]:
        """One value, or a part of it, into ``buffer``, or into several; how much it is. Raises its error."""
        if isinstance(buffer, list | tuple):
            buffers = [writable(each) for each in buffer]
            chunk = yield from self.get_range(deadline, key, offset, length)
            with chunk:
                return ranges.scatter(chunk, buffers)
        want = Want(validate_key(key), writable(buffer), ranges.make_range(offset, length))
        yield from gets.fetch_one(self._context, deadline, want, self._flush)
        assert isinstance(want.result, int | TanghuluError)
        if isinstance(want.result, TanghuluError):
            raise want.result
        return want.result

    def get_many_into(
        self, deadline: Deadline, keys: Sequence[str], buffers: Sequence[Any]
    ) -> Logic[list[int | TanghuluError]]:
        """A size or an error for each key."""
        if len(keys) != len(buffers):
            raise InvalidRequest(f"{len(keys)} keys and {len(buffers)} buffers do not belong together")
        wants = [Want(validate_key(k), writable(b)) for k, b in zip(keys, buffers, strict=True)]
        yield from gets.fetch(self._context, deadline, wants, self._flush)
        return [want.result for want in wants]  # type: ignore[misc]  # buffers: no chunks

    def exists(self, deadline: Deadline, key: str) -> Logic[bool]:
        """Whether a live node holds the key."""
        (found,) = yield from directory.exists(self._context, deadline, [key])
        return found

    def exists_many(self, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
        """The same for many."""
        return (yield from directory.exists(self._context, deadline, keys))

    def match_prefix(self, deadline: Deadline, keys: Sequence[str]) -> Logic[int]:
        """How many leading keys exist."""
        return (yield from directory.match_prefix(self._context, deadline, keys))

    def wait_for(self, deadline: Deadline, key: str) -> Logic[bool]:
        """Wait until the key is stored; whether it is."""
        (found,) = yield from waiting.wait_for(self._context, deadline, [key])
        return found

    def wait_for_many(self, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
        """The same for many: until all are."""
        return (yield from waiting.wait_for(self._context, deadline, keys))

    def remove(self, deadline: Deadline, key: str) -> Logic[bool]:
        """Drop one chunk; whether there was one. Raises what kept a holder from it."""
        yield from common.tell_reads(self._context)
        (removed,) = yield from directory.remove(self._context, [key])
        if isinstance(removed, TanghuluError):
            raise removed
        return removed

    def remove_many(self, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool | TanghuluError]]:
        """The same for many, with an outcome each."""
        yield from common.tell_reads(self._context)
        return (yield from directory.remove(self._context, keys))

    def remove_matching(self, deadline: Deadline, pattern: str) -> Logic[int]:
        """Drop every chunk whose key the regular expression is found in; how many."""
        return (yield from directory.remove_matching(self._context, pattern))

    def stat(self, deadline: Deadline, key: str) -> Logic[ChunkInfo]:
        """What the store knows of the chunk."""
        yield from common.tell_reads(self._context)
        return (yield from directory.stat(self._context, key))

    def stat_at(self, key: str, node: str) -> Logic[ChunkInfo]:
        """What one node knows of the chunk; raises ChunkNotFound."""
        return (yield from directory.stat_at(key, node))

    def drain(self, deadline: Deadline, node: str, draining: bool) -> Logic[None]:
        """Have the node take no new chunks and its chunks go elsewhere, or undo that."""
        yield from admin.drain(self._context, node, draining)

    def evict(self, deadline: Deadline, node: str, keys: Sequence[str], num_bytes: int) -> Logic[Evicted]:
        """Evict chunks of a node."""
        return (yield from admin.evict(self._context, node, keys, num_bytes))

    def replicate(self, deadline: Deadline, keys: Sequence[str], holders: int, for_s: float) -> Logic[int]:
        """Have chunks copied ahead."""
        return (yield from admin.replicate(keys, holders, for_s))

    def verify(
        self, deadline: Deadline, node: str, after: str, drop_corrupt: bool, report: bool
    ) -> Logic[VerifiedPage]:
        """A page of what a node holds, compared with its checksums."""
        return (yield from admin.verify(self._context, node, after, drop_corrupt, report))

    def tenants(self, deadline: Deadline) -> Logic[list[TenantView]]:
        """All tenants, over all nodes."""
        return (yield from admin.tenants(self._context))

    def eviction_policy(self, deadline: Deadline, node: str, name: str | None) -> Logic[str]:
        """The eviction policy of a node, after switching to ``name`` if one is given."""
        yield from common.tell_reads(self._context)
        return (yield from directory.eviction_policy(self._context, node, name or ""))

    def nodes(self, deadline: Deadline) -> Logic[list[NodeView]]:
        """All store nodes."""
        return (yield from directory.nodes(self._context))

    def list_keys(self, deadline: Deadline, prefix: str, limit: int | None, after: str) -> Logic[list[KeyInfo]]:
        """Keys in order."""
        return (yield from directory.list_keys(prefix, limit, after))
