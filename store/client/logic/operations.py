"""Puts and gets as the clients call them: check arguments, fill in defaults, unpack results.

Each takes the client's context and the deadline first, as the other operations in ``query`` and ``admin`` do; a driver
performs them. The two clients (blocking, asyncio) are these with a driver around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.store.client import tensors
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic import get as gets
from tanghulu.store.client.logic import put as puts
from tanghulu.store.client.logic import ranges
from tanghulu.store.client.logic.commit import PutOp
from tanghulu.store.client.logic.context import Context, report_reads
from tanghulu.store.client.logic.effects import Deadline, Logic
from tanghulu.store.client.logic.query import as_keys, raise_first
from tanghulu.store.client.logic.ranges import GetOp
from tanghulu.store.client.model import PutItem, PutOptions, Status
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, NewChunk, validate_key
from tanghulu.transfer_engine.core.buffers import Buffer, bytes_of

#: Arguments of ``put_many``.
Items = Mapping[str, Any] | Iterable[PutItem | tuple[str, Any]]

#: Buffers that may form one value.
MAX_PIECES = 4096


def put(context: Context, deadline: Deadline, item: PutItem, options: PutOptions) -> Logic[Status]:
    """Put one value; raises its error."""
    op = _put_op(context, item, options)
    if context.reads.noted:
        yield from report_reads(context)
    yield from puts.put_one(context, deadline, op, options)
    status = op.status()
    if status.error is not None:
        raise status.error
    return status


def put_many(
    context: Context, deadline: Deadline, items: Items, options: PutOptions, raise_errors: bool = False
) -> Logic[list[Status]]:
    """Put many values, with a Status each; malformed items get theirs without disturbing the others."""
    statuses: list[Status | PutOp] = []
    for item in put_items(items):
        try:
            statuses.append(_put_op(context, item, options))
        except InvalidRequest as error:
            statuses.append(Status(item.key, error=error))
    ops = [each for each in statuses if isinstance(each, PutOp)]
    if ops:
        yield from report_reads(context)
        yield from puts.put_all(context, deadline, ops, options)
    ended = [each.status() if isinstance(each, PutOp) else each for each in statuses]
    if raise_errors:
        raise_first([each.error for each in ended])
    return ended


def put_tensor(context: Context, deadline: Deadline, key: str, tensor: Any, options: PutOptions) -> Logic[Status]:
    """Put one tensor with its description; raises its error."""
    return (yield from put(context, deadline, PutItem(key, tensors.with_header(tensor)), options))


def get_tensor(context: Context, deadline: Deadline, key: str, shared: bool) -> Logic[Any]:
    """Return the tensor; raises its error."""
    with (yield from get(context, deadline, key)) as chunk:
        return tensors.from_value(key, chunk.numpy(), shared=shared)


def _put_op(context: Context, item: PutItem, options: PutOptions) -> PutOp:
    pieces = readable_pieces(item.value) if isinstance(item.value, list | tuple) else ()
    size = sum(map(len, pieces))
    if size > MAX_INLINE_BYTES:
        value = memoryview(b"")
    else:
        value = readable(b"".join(pieces) if pieces else item.value)
        pieces, size = (), value.nbytes
    given = item.checksums
    if not isinstance(given, Checksums):
        raise InvalidRequest(f"checksums must be a Checksums, not {given!r:.80}")
    if given.parts:
        sums.validate(given, size)
    elif size <= MAX_INLINE_BYTES:
        given = sums.compute(value, options.part_bytes)
    else:
        sums.part_length(size, options.part_bytes)  # too many parts are refused before anything is sent
    key, version = validate_key(item.key), next(context.versions)
    new = NewChunk(key, version, size, given, options.pin, options.ttl_s, options.replicas)
    return PutOp(new, value, pieces)


def get(context: Context, deadline: Deadline, key: str, offset: int = 0, length: int | None = None) -> Logic[Chunk]:
    """Return one chunk, or a part of it; raises its error."""
    op = GetOp(validate_key(key), part=ranges.make_range(offset, length))
    chunk = yield from gets.fetch_one(context, deadline, op)
    assert isinstance(chunk, Chunk)
    return chunk


def get_many(
    context: Context, deadline: Deadline, keys: Sequence[str], raise_errors: bool = False
) -> Logic[list[Chunk | TanghuluError]]:
    """Return a chunk or an error for each key."""
    ops = [_get_op(key) for key in as_keys(keys)]
    yield from gets.fetch(context, deadline, ops)
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


def get_into(
    context: Context, deadline: Deadline, key: str, buffer: Any, offset: int = 0, length: int | None = None
) -> Logic[int]:
    """Read one value, or a part of it, into ``buffer``, or into several; return its size. Raises its error."""
    if isinstance(buffer, list | tuple):
        buffers = [writable(each) for each in buffer]
        with (yield from get(context, deadline, key, offset, length)) as chunk:
            return ranges.scatter(chunk, buffers)
    op = GetOp(validate_key(key), writable(buffer), ranges.make_range(offset, length))
    num_bytes = yield from gets.fetch_one(context, deadline, op)
    assert isinstance(num_bytes, int)
    return num_bytes


def get_many_into(
    context: Context,
    deadline: Deadline,
    keys: Sequence[str],
    buffers: Sequence[Any],
    raise_errors: bool = False,
    value_checks: Sequence[ranges.ValueCheck] = (),
    from_ssd: set[str] | None = None,
) -> Logic[list[int | TanghuluError]]:
    """Return a size or an error for each key; ``value_checks`` are of values that move, one for each key if given.

    ``from_ssd`` receives the keys that nodes had to read from their SSDs.
    """
    keys = as_keys(keys)
    if len(keys) != len(buffers):
        raise InvalidRequest(f"{len(keys)} keys and {len(buffers)} buffers; give one buffer for each key")
    ops = [_get_op(key, *_destination(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
    for op, value_check in zip(ops, value_checks, strict=False):
        op.value_check = value_check
    yield from gets.fetch(context, deadline, ops)
    for op in ops:
        ranges.scatter_result(op)
    if from_ssd is not None:
        from_ssd.update(op.key for op in ops if op.from_ssd)
    if raise_errors:
        raise_first([op.result for op in ops])
    return [op.result for op in ops]  # type: ignore[misc]  # buffers: no chunks


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


# --- callers' items


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
            raise InvalidRequest(
                f"put_many() takes (key, value) pairs, PutItems, or a dict; {each!r:.80} is none of them"
            )
    return found


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
        raise InvalidRequest("the buffer to read into is read-only; give a writable one")
    return named
