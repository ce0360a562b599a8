"""Every operation of the client as a piece of logic: check arguments, fill in defaults, unpack results.

The two clients (blocking, asyncio) are this file with a driver around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.client import tensors
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic import admin, ranges
from tanghulu.store.client.logic import get as gets
from tanghulu.store.client.logic import put as puts
from tanghulu.store.client.logic import query as directory
from tanghulu.store.client.logic.commit import PutOp
from tanghulu.store.client.logic.context import Context, report_reads
from tanghulu.store.client.logic.effects import Deadline, Logic
from tanghulu.store.client.logic.ranges import GetOp
from tanghulu.store.client.model import KeyInfo, MasterView, NodeView, PutItem, PutOptions, Status, TenantView
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.messages import ChunkInfo, Evicted, VerifiedPage
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, NewChunk, validate_key
from tanghulu.transfer_engine.core.buffers import Buffer, bytes_of

T = TypeVar("T")
#: Arguments of ``put_many``.
Items = Mapping[str, Any] | Iterable[PutItem | tuple[str, Any]]

#: Buffers that may form one value.
MAX_PIECES = 4096


class Operations:
    """The logic of every public method; closing a Chunk without a copy calls ``flush``."""

    def __init__(self, context: Context, flush: Callable[[], None]) -> None:
        self._context = context
        self._flush = flush

    def put(self, deadline: Deadline, item: PutItem, options: PutOptions) -> Logic[Status]:
        """Put one value; raises its error."""
        op = self._put_op(item, options)
        if self._context.reads.noted:
            yield from report_reads(self._context)
        yield from puts.put_one(self._context, deadline, op, options)
        status = op.status()
        if status.error is not None:
            raise status.error
        return status

    def put_many(
        self, deadline: Deadline, items: Items, options: PutOptions, raise_errors: bool = False
    ) -> Logic[list[Status]]:
        """Put many values, with a Status each; malformed items get theirs without disturbing the others."""
        statuses: list[Status | PutOp] = []
        for item in put_items(items):
            try:
                statuses.append(self._put_op(item, options))
            except InvalidRequest as error:
                statuses.append(Status(item.key, error=error))
        ops = [each for each in statuses if isinstance(each, PutOp)]
        if ops:
            yield from report_reads(self._context)
            yield from puts.put_all(self._context, deadline, ops, options)
        ended = [each.status() if isinstance(each, PutOp) else each for each in statuses]
        if raise_errors:
            raise_first([each.error for each in ended])
        return ended

    def put_tensor(self, deadline: Deadline, key: str, tensor: Any, options: PutOptions) -> Logic[Status]:
        """Put one tensor with its description; raises its error."""
        return (yield from self.put(deadline, PutItem(key, tensors.with_header(tensor)), options))

    def get_tensor(self, deadline: Deadline, key: str, shared: bool) -> Logic[Any]:
        """Return the tensor; raises its error."""
        with (yield from self.get(deadline, key)) as chunk:
            return tensors.from_value(key, chunk.numpy(), shared=shared)

    def _put_op(self, item: PutItem, options: PutOptions) -> PutOp:
        pieces = readable_pieces(item.value) if isinstance(item.value, list | tuple) else ()
        size = sum(map(len, pieces))
        if size > MAX_INLINE_BYTES:
            value = memoryview(b"")
        else:
            value = readable(b"".join(pieces) if pieces else item.value)
            pieces, size = (), value.nbytes
        given = item.checksums
        if not isinstance(given, Checksums):
            raise InvalidRequest(f"checksums are a Checksums, not {given!r:.80}")
        if given.parts:
            sums.validate(given, size)
        elif size <= MAX_INLINE_BYTES:
            given = sums.compute(value, options.part_bytes)
        else:
            sums.part_length(size, options.part_bytes)  # too many parts are refused before anything is sent
        new = NewChunk(
            validate_key(item.key),
            next(self._context.versions),
            size,
            given,
            options.pin,
            options.ttl_s,
            options.replicas,
        )
        return PutOp(new, value, pieces)

    def get(self, deadline: Deadline, key: str) -> Logic[Chunk]:
        """Return one chunk; raises its error."""
        chunk = yield from gets.fetch_one(self._context, deadline, GetOp(validate_key(key)), self._flush)
        assert isinstance(chunk, Chunk)
        return chunk

    def get_many(
        self, deadline: Deadline, keys: Sequence[str], raise_errors: bool = False
    ) -> Logic[list[Chunk | TanghuluError]]:
        """Return a chunk or an error for each key."""
        ops = [_get_op(key) for key in as_keys(keys)]
        yield from gets.fetch(self._context, deadline, ops, self._flush)
        chunks: list[Chunk | TanghuluError] = [op.result for op in ops]  # type: ignore[misc]  # no buffers: no sizes
        if raise_errors:
            try:
                raise_first(chunks)
            except TanghuluError:
                for chunk in chunks:
                    if isinstance(chunk, Chunk):
                        chunk.close()
                raise
        return chunks

    def get_range(self, deadline: Deadline, key: str, offset: int, length: int | None) -> Logic[Chunk]:
        """Return a part of one chunk; raises its error."""
        op = GetOp(validate_key(key), part=ranges.make_range(offset, length))
        chunk = yield from gets.fetch_one(self._context, deadline, op, self._flush)
        assert isinstance(chunk, Chunk)
        return chunk

    def get_into(
        self, deadline: Deadline, key: str, buffer: Any, offset: int = 0, length: int | None = None
    ) -> Logic[int]:
        """Read one value, or a part of it, into ``buffer``, or into several; return its size. Raises its error."""
        if isinstance(buffer, list | tuple):
            buffers = [writable(each) for each in buffer]
            chunk = yield from self.get_range(deadline, key, offset, length)
            with chunk:
                return ranges.scatter(chunk, buffers)
        op = GetOp(validate_key(key), writable(buffer), ranges.make_range(offset, length))
        num_bytes = yield from gets.fetch_one(self._context, deadline, op, self._flush)
        assert isinstance(num_bytes, int)
        return num_bytes

    def get_many_into(
        self,
        deadline: Deadline,
        keys: Sequence[str],
        buffers: Sequence[Any],
        raise_errors: bool = False,
        proofs: Sequence[ranges.Proof] = (),
    ) -> Logic[list[int | TanghuluError]]:
        """Return a size or an error for each key; ``proofs`` are of values that move, one for each key if given."""
        keys = as_keys(keys)
        if len(keys) != len(buffers):
            raise InvalidRequest(f"{len(keys)} keys and {len(buffers)} buffers do not belong together")
        ops = [_get_op(key, *_destination(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        for op, proof in zip(ops, proofs, strict=False):
            op.proof = proof
        yield from gets.fetch(self._context, deadline, ops, self._flush)
        for op in ops:
            ranges.scatter_result(op)
        if raise_errors:
            raise_first([op.result for op in ops])
        return [op.result for op in ops]  # type: ignore[misc]  # buffers: no chunks

    def exists(self, deadline: Deadline, key: str) -> Logic[bool]:
        """Return whether a live node holds the key."""
        (found,) = yield from directory.exists(self._context, deadline, [key])
        return found

    def exists_many(self, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
        """Return whether a live node holds each key."""
        return (yield from directory.exists(self._context, deadline, as_keys(keys)))

    def match_prefix(self, deadline: Deadline, keys: Sequence[str]) -> Logic[int]:
        """Return the number of leading keys that exist, up to the first missing one."""
        return (yield from directory.match_prefix(self._context, deadline, as_keys(keys)))

    def wait_for(self, deadline: Deadline, key: str) -> Logic[bool]:
        """Wait until the key is stored; return whether it is."""
        (found,) = yield from directory.wait_for(self._context, deadline, [key])
        return found

    def wait_for_many(self, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
        """Wait until all keys are stored; return for each whether it is."""
        return (yield from directory.wait_for(self._context, deadline, as_keys(keys)))

    def remove(self, deadline: Deadline, key: str) -> Logic[bool]:
        """Drop one chunk; return whether there was one. Raises the error of a holder that failed to."""
        yield from report_reads(self._context)
        (removed,) = yield from directory.remove(self._context, deadline, [key])
        if isinstance(removed, TanghuluError):
            raise removed
        return removed

    def remove_many(
        self, deadline: Deadline, keys: Sequence[str], raise_errors: bool = False
    ) -> Logic[list[bool | TanghuluError]]:
        """Drop many chunks, with an outcome for each."""
        yield from report_reads(self._context)
        outcomes = yield from directory.remove(self._context, deadline, as_keys(keys))
        if raise_errors:
            raise_first(outcomes)
        return outcomes

    def remove_matching(self, deadline: Deadline, pattern: str) -> Logic[int]:
        """Drop every chunk whose key matches the regular expression anywhere; return their number."""
        return (yield from directory.remove_matching(self._context, deadline, pattern))

    def stat(self, deadline: Deadline, key: str) -> Logic[ChunkInfo]:
        """Return the store's description of the chunk."""
        yield from report_reads(self._context)
        return (yield from directory.stat(self._context, deadline, key))

    def stat_at(self, key: str, node: str) -> Logic[ChunkInfo]:
        """Return one node's description of the chunk; raises ChunkNotFound."""
        return (yield from directory.stat_at(key, node))

    def drain(self, deadline: Deadline, node: str, draining: bool) -> Logic[None]:
        """Have the node refuse new chunks and its chunks moved elsewhere, or undo that."""
        yield from admin.drain(self._context, node, draining)

    def evict(self, deadline: Deadline, node: str, keys: Sequence[str], num_bytes: int) -> Logic[Evicted]:
        """Evict chunks of a node."""
        return (yield from admin.evict(self._context, node, as_keys(keys), num_bytes))

    def replicate(self, deadline: Deadline, keys: Sequence[str], holders: int, for_s: float) -> Logic[int]:
        """Have chunks copied in advance."""
        return (yield from admin.replicate(self._context, deadline, as_keys(keys), holders, for_s))

    def verify(
        self, deadline: Deadline, node: str, after: str, drop_corrupt: bool, report: bool
    ) -> Logic[VerifiedPage]:
        """Return a page of a node's chunks, compared with their checksums."""
        return (yield from admin.verify(self._context, node, after, drop_corrupt, report))

    def masters(self, deadline: Deadline) -> Logic[list[MasterView]]:
        """Return all masters that own keys."""
        return (yield from admin.masters(self._context))

    def tenants(self, deadline: Deadline) -> Logic[list[TenantView]]:
        """Return all tenants, over all nodes."""
        return (yield from admin.tenants(self._context))

    def eviction_policy(self, deadline: Deadline, node: str, name: str | None) -> Logic[str]:
        """Return the eviction policy of a node, after switching to ``name`` if given."""
        yield from report_reads(self._context)
        return (yield from directory.eviction_policy(self._context, node, name or ""))

    def nodes(self, deadline: Deadline) -> Logic[list[NodeView]]:
        """Return all store nodes."""
        return (yield from directory.nodes(self._context, deadline))

    def meet(self, deadline: Deadline) -> Logic[None]:
        """Request the nodes from the master, to check that it is up and answers this client."""
        yield from directory.leaders_nodes(self._context)

    def list_keys(self, deadline: Deadline, prefix: str, limit: int | None, after: str) -> Logic[list[KeyInfo]]:
        """Return keys in order."""
        return (yield from directory.list_keys(self._context, deadline, prefix, limit, after))


def _get_op(key: str, buffer: Buffer | None = None, pieces: Sequence[Buffer] = ()) -> GetOp:
    """Return the get of one of many keys; an invalid key is its own outcome."""
    try:
        return GetOp(validate_key(key), buffer, pieces=pieces)
    except InvalidRequest as error:
        return GetOp("", buffer, pieces=pieces, result=error)


def _destination(buffer: Any) -> tuple[Buffer | None, Sequence[Buffer]]:
    """Return the destination of a value: one buffer, or several."""
    if isinstance(buffer, list | tuple):
        return None, [writable(each) for each in buffer]
    return writable(buffer), ()


# --- callers' keys and items


def as_keys(keys: Sequence[str]) -> Sequence[str]:
    """Return ``keys`` as a list; raises InvalidRequest for a single key, whose characters would be taken for keys."""
    if isinstance(keys, list | tuple):
        return keys
    if isinstance(keys, str | bytes | bytearray | memoryview):
        raise InvalidRequest(f"a list of keys is wanted, not the {type(keys).__name__} {keys!r}; write [{keys!r}]")
    try:
        return list(keys)
    except TypeError:
        raise InvalidRequest(f"a list of keys is wanted, not {keys!r}") from None


def put_items(items: Items) -> list[PutItem]:
    """Return the items to put; raises InvalidRequest for anything but pairs of a key and a value."""
    pairs = items.items() if isinstance(items, Mapping) else items
    if isinstance(pairs, str | bytes | bytearray):
        raise InvalidRequest(
            f"put_many() takes (key, value) pairs, PutItems, or a dict, not the {type(pairs).__name__}"
        )
    found = []
    if not isinstance(pairs, Iterable):
        raise InvalidRequest(f"put_many() takes (key, value) pairs, PutItems, or a dict, not {pairs!r:.80}")
    for each in pairs:
        if isinstance(each, PutItem):
            found.append(each)
        elif isinstance(each, list | tuple) and 2 <= len(each) <= 3:
            found.append(PutItem(*each))
        else:
            raise InvalidRequest(f"put_many() takes (key, value) pairs, PutItems, or a dict; {each!r:.80} is neither")
    return found


def raise_first(outcomes: Sequence[object]) -> None:
    """Raise the first error among ``outcomes``, with a note of their number."""
    errors = [each for each in outcomes if isinstance(each, TanghuluError)]
    if errors:
        if len(outcomes) > 1:
            errors[0].add_note(f"{len(errors)} of {len(outcomes)} failed, the first with this")
        raise errors[0]


# --- callers' values and buffers as memory of format ``B``


def readable(value: Any) -> memoryview:
    """Return the bytes of ``value`` (bytes-like, numpy array, torch tensor, Buffer, Chunk), without a copy.

    Raises InvalidRequest for anything else, see ``bytes_of``.
    """
    if isinstance(value, Buffer):
        return value.view(0, value.size_bytes)
    if isinstance(value, Chunk):
        return value.view
    if type(value) is bytes and value:
        return memoryview(value)
    return bytes_of(value).data


def readable_pieces(values: Sequence[Any]) -> tuple[memoryview, ...]:
    """Return the bytes of each of ``values``, together one value; raises InvalidRequest as ``readable``."""
    if not 0 < len(values) <= MAX_PIECES:
        raise InvalidRequest(f"a value in {len(values)} pieces; 1 to {MAX_PIECES} are allowed")
    pieces: list[memoryview] = []
    for number, value in enumerate(values):
        try:
            pieces.append(readable(value))
        except InvalidRequest as error:
            raise InvalidRequest(f"piece {number} of the value: {error.message}") from None
    return tuple(pieces)


def writable(buffer: Any) -> Buffer:
    """Return ``buffer`` as a transfer's destination. Raises InvalidRequest if it is read-only or not contiguous."""
    named = buffer if isinstance(buffer, Buffer) else Buffer(buffer)
    if named.read_only:
        raise InvalidRequest("the buffer to read into is read-only")
    return named
