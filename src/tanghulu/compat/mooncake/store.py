"""``MooncakeDistributedStore`` over tanghulu's client: Mooncake's methods, codes and conventions.

Methods for data raise nothing but TypeError for arguments of a wrong type: they return codes, of which 0 and above are
successes, and ``b""`` or None for a missing value. Batches return an outcome for each key. Before ``setup``, after
``close`` and in a forked child every call returns as for bad arguments. Threads may share a store; calls release the
GIL while bytes move. All calls end within the deadlines of ``BlockStore``, and none is made for a while after the
store did not answer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from typing import Any, TypeVar

from tanghulu.compat.mooncake import options
from tanghulu.compat.mooncake.memory import BufferHandle, RegisteredMemory, buffer_at, buffers_at
from tanghulu.compat.mooncake.open_store import OpenStore
from tanghulu.compat.mooncake.options import ReplicateConfig, SetupOptions, code_of
from tanghulu.compat.mooncake.replicas import ReplicaDescriptor
from tanghulu.errors import ChunkNotFound, InvalidRequest, NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.core.buffers import Buffer

_log = logging.getLogger(__name__)
T = TypeVar("T")
Config = ReplicateConfig
Keys = Sequence[str]
Ints = Sequence[int]
Rows = Sequence[Ints]
_PLAIN = ReplicateConfig()
_NOT_SET_UP = "the store is not open; call setup() first"
#: The arguments of ``setup`` in Mooncake's order.
_SETUP_ARGUMENTS = (
    *("local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "rdma_devices"),
    *("master_server_addr", "engine", "enable_ssd_offload", "ssd_offload_path", "tenant_id"),
    *("enable_client_http_server", "client_http_port"),
)


class MooncakeDistributedStore:
    """See Mooncake's documentation of its Python API, and docs/engines/mooncake.md for the differences."""

    def __init__(self) -> None:
        self._opened: OpenStore | None = None
        self._memory = RegisteredMemory()
        self._logged: set[int] = set()

    # --- life

    def setup(self, *args: Any, **named: Any) -> int:
        """Open the store; return 0, or -1 with the reason in the log.

        Takes Mooncake's arguments by position or name, or one dict of them. A second call closes the store opened
        before. Raises TypeError for an unknown keyword.
        """
        self.close()
        try:
            self._opened = OpenStore(SetupOptions.of(_setup_values(args, named)))
        except TanghuluError as error:
            _log.error("tanghulu: setup failed: %s: %s", error.code, error.message)
            return options.INTERNAL_ERROR
        return options.OK

    def setup_dummy(self, *args: Any, **named: Any) -> int:
        """Return -1: there is no client process of Mooncake's to share memory with; use ``setup``."""
        _log.error("tanghulu: setup_dummy needs Mooncake's own client process; use setup, which connects to nodes")
        return options.INTERNAL_ERROR

    def close(self) -> int:
        """Close the store, and end the node that ``setup`` started, if any. May be called again."""
        opened, self._opened = self._opened, None
        self._memory, self._logged = RegisteredMemory(), set()
        if opened is not None:
            opened.close()
        return options.OK

    def health_check(self) -> int:
        """Return 0 if the master answers, 1 before ``setup``, 2 if it does not answer."""
        if self._opened is None:
            return 1
        return 2 if self._number(OpenStore.ping) else 0

    def get_hostname(self) -> str:
        """Return the name of this store's segment, for ``preferred_segment``; "" before ``setup``."""
        return "" if self._opened is None else self._opened.hostname

    # --- memory

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory for transfers. Those of other memory work, too."""
        return self._number(lambda opened: self._memory.add(buffer_ptr, size))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Undo ``register_buffer``."""
        return self._number(lambda opened: self._memory.remove(buffer_ptr))

    # --- puts; ``_replace`` is for the upserts

    def put(self, key: str, value: Any, config: Config = _PLAIN, _replace: bool = False) -> int:
        """Store a bytes-like value; an existing key keeps its value, which is a success."""
        return self._write([key], [_bytes_like(value)], config, _replace)[0]

    def put_parts(self, key: str, *parts: Any, config: Config = _PLAIN, _replace: bool = False) -> int:
        """Store the concatenation of ``parts``."""
        return self._write([key], [[part for part in map(_bytes_like, parts) if part.nbytes]], config, _replace)[0]

    def put_batch(self, keys: Keys, values: Sequence[Any], config: Config = _PLAIN, _replace: bool = False) -> int:
        """Store several values; return 0, or the first error."""
        return min(self._write(keys, list(map(_bytes_like, values)), config, _replace), default=options.OK)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Config = _PLAIN, _replace: bool = False) -> int:
        """Store ``size`` bytes at an address."""
        return self.batch_put_from([key], [buffer_ptr], [size], config, _replace)[0]

    def batch_put_from(
        self, keys: Keys, buffer_ptrs: Ints, sizes: Ints, config: Config = _PLAIN, _replace: bool = False
    ) -> list[int]:
        """Store a range of memory for each key."""
        return self._write(keys, _each(buffer_at, buffer_ptrs, sizes), config, _replace)

    def batch_put_from_multi_buffers(
        self, keys: Keys, all_buffer_ptrs: Rows, all_sizes: Rows, config: Config = _PLAIN
    ) -> list[int]:
        """Store the concatenation of several ranges of memory for each key."""
        return self._write(keys, _each(buffers_at, all_buffer_ptrs, all_sizes), config)

    # As the puts, in place of the values before. Those are removed first: readers may miss a key meanwhile.
    upsert = partialmethod(put, _replace=True)
    upsert_parts = partialmethod(put_parts, _replace=True)
    upsert_batch = partialmethod(put_batch, _replace=True)
    upsert_from = partialmethod(put_from, _replace=True)
    batch_upsert_from = partialmethod(batch_put_from, _replace=True)

    # --- gets

    def get(self, key: str) -> bytes:
        """Return a value; ``b""`` for a missing one."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Keys) -> list[bytes]:
        """Return the value of each key; ``b""`` for a missing one."""
        return [b"" if each is None else each for each in self._fetch(keys, bytes)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """Return a value in memory of its own; None for a missing one."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Keys) -> list[BufferHandle | None]:
        """Return each value in memory of its own; None for a missing one."""
        return self._fetch(keys, BufferHandle.of)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read a value into memory; return its size."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys: Keys, buffer_ptrs: Ints, sizes: Ints) -> list[int]:
        """Read the value of each key into its range of memory; return each size."""
        return self._read(keys, _each(buffer_at, buffer_ptrs, sizes))

    def batch_get_into_multi_buffers(
        self, keys: Keys, all_buffer_ptrs: Rows, all_sizes: Rows, prefer_alloc_in_same_node: bool = False
    ) -> list[int]:
        """Read each value into several ranges, which it must fill exactly; return each size."""
        return self._read(keys, _each(buffers_at, all_buffer_ptrs, all_sizes), is_exact=True)

    # --- questions and removal

    def is_exist(self, key: str, /) -> int:
        """Return 1 if the key exists, else 0, even if that cannot be found out: callers take -1 for a yes."""
        return max(0, self.batch_is_exist([key])[0])

    def batch_is_exist(self, keys: Keys) -> list[int]:
        """Return 1 or 0 for each key, -1 where that cannot be found out."""
        found = self._each_key(keys, keys, lambda opened, names, _: opened.blocks.look_up(names))
        return [options.INTERNAL_ERROR if isinstance(each, TanghuluError) else int(each) for each in found]

    def get_size(self, key: str) -> int:
        """Return the size of a value."""
        return self._number(lambda opened: opened.stat(key).size_bytes)

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Return the copies of a value; [] for a missing one."""
        info = self._outcome(lambda opened: opened.stat(key))
        return [] if isinstance(info, TanghuluError) else ReplicaDescriptor.all_of(info)

    def batch_get_replica_desc(self, keys: Keys) -> dict[str, list[ReplicaDescriptor]]:
        """Return the copies of each value found."""
        return {key: found for key in keys if (found := self.get_replica_desc(key))}

    def remove(self, key: str, force: bool = False) -> int:
        """Remove a value. Values read lately are removed, too, with and without ``force``."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Keys, force: bool = False) -> list[int]:
        """Remove several values."""
        removed = self._each_key(keys, keys, lambda opened, names, _: opened.blocks.discard(names))
        return [options.NOT_FOUND if each is False else 0 if each is True else self._code(each) for each in removed]

    def remove_by_regex(self, regex: str, force: bool = False) -> int:
        """Remove the tenant's values whose keys match anywhere; return their number."""
        try:
            wanted = re.compile(regex)
        except re.error as error:
            return self._code(InvalidRequest(f"{regex!r} is not a regular expression: {error}"))
        return self._number(lambda opened: opened.remove_matching(wanted))

    def remove_all(self, force: bool = False) -> int:
        """Remove all values of the tenant; return their number."""
        return self.remove_by_regex("")

    # --- reads in parts

    def batch_get_session_start(self, keys: Keys) -> list[int]:
        """Return 0 for each key whose parts can be read. Nothing is held: a later read may miss an evicted value."""
        return [options.OK if found == 1 else options.NOT_FOUND for found in self.batch_is_exist(keys)]

    def batch_get_session_end(self, keys: Keys) -> int:
        """Return 0: sessions hold nothing."""
        return options.OK

    def batch_get_into_multi_buffer_ranges(
        self, keys: Keys, all_buffer_ptrs: Rows, all_sizes: Rows, all_src_offsets: Rows
    ) -> list[int]:
        """Read parts of each value, from the given offsets, into ranges of memory; return the bytes for each key."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return [options.INVALID_PARAMS] * len(keys)
        wanted = zip(keys, all_buffer_ptrs, all_sizes, all_src_offsets, strict=True)
        return [self._number(partial(OpenStore.read_parts, row=row)) for row in wanted]

    # --- the common part

    def _write(self, keys: Keys, values: Sequence[Any], config: Config, replace: bool = False) -> list[int]:
        def write(opened: OpenStore, names: list[str], values: list[Any]) -> Sequence[TanghuluError | None]:
            prefer = opened.node_called(config.segment)
            removed = opened.blocks.discard(names) if replace else names
            chosen = {"replicas": config.replicas, "pin": config.pin, "prefer_node": prefer}
            written = opened.blocks.write(names, values, **chosen)
            failed = [was if isinstance(was, TanghuluError) else put for was, put in zip(removed, written, strict=True)]
            # ``BlockStore`` skips a store that is away as a miss; for a put that is no outcome.
            return [NodeUnavailable(each.message) if isinstance(each, ChunkNotFound) else each for each in failed]

        return [self._code(each) for each in self._each_key(keys, values, write)]

    def _read(self, keys: Keys, buffers: Sequence[Any], *, is_exact: bool = False) -> list[int]:
        def read(opened: OpenStore, names: list[str], into: list[Any]) -> Sequence[int | TanghuluError]:
            got = opened.blocks.read(names, into)
            return [_filled(size, room) for size, room in zip(got, into, strict=True)] if is_exact else got

        return [self._code(each) for each in self._each_key(keys, buffers, read)]

    def _fetch(self, keys: Keys, copy: Callable[[memoryview], T]) -> list[T | None]:
        fetched = self._each_key(keys, keys, lambda opened, names, _: opened.blocks.fetch(names))
        values: list[T | None] = []
        for each in fetched:
            if isinstance(each, TanghuluError):
                self._code(each)
                values.append(None)
            else:
                with each:
                    values.append(copy(each.view))
        return values

    def _each_key(
        self,
        keys: Keys,
        values: Sequence[Any],
        call: Callable[[OpenStore, list[str], list[Any]], Sequence[Any]],
    ) -> list[Any]:
        """Return the outcome of ``call`` for each key; an error where a key or its value is one."""
        opened = self._opened
        if opened is None or len(keys) != len(values):
            reason = _NOT_SET_UP if opened is None else f"{len(keys)} keys do not match the other arguments in number"
            return [InvalidRequest(reason)] * len(keys)
        outcomes: list[Any] = [_attempt(opened.key, key) for key in keys]
        outcomes = [v if isinstance(v, TanghuluError) else name for name, v in zip(outcomes, values, strict=True)]
        good = [at for at, each in enumerate(outcomes) if isinstance(each, str)]
        if good:
            names, rest = [outcomes[at] for at in good], [values[at] for at in good]
            made = _attempt(call, opened, names, rest)
            made = [made] * len(good) if isinstance(made, TanghuluError) else made
            for at, outcome in zip(good, made, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _number(self, call: Callable[[OpenStore], int | None]) -> int:
        """Return the number that ``call`` returns, 0 for None, or the code of its error."""
        return self._code(self._outcome(call))

    def _outcome(self, call: Callable[[OpenStore], T]) -> T | TanghuluError:
        opened = self._opened
        return InvalidRequest(_NOT_SET_UP) if opened is None else _attempt(call, opened)

    def _code(self, outcome: Any) -> int:
        """Return the code of an outcome; the first error of each code since ``setup`` is logged."""
        if not isinstance(outcome, TanghuluError):
            return int(outcome or options.OK)
        code = code_of(outcome)
        if code not in self._logged:
            self._logged.add(code)
            level = logging.DEBUG if code == options.NOT_FOUND else logging.WARNING
            _log.log(level, "tanghulu: code %d: %s: %s; logged once", code, outcome.code, outcome.message)
        return code


def _setup_values(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``setup`` by name; raises TypeError as a function with these arguments would."""
    if len(args) == 1 and isinstance(args[0], dict) and not named:
        return args[0]
    if len(args) > len(_SETUP_ARGUMENTS):
        raise TypeError(f"setup() takes at most {len(_SETUP_ARGUMENTS)} arguments, not {len(args)}")
    values = dict(zip(_SETUP_ARGUMENTS, args, strict=False))
    for name, value in named.items():
        if name not in _SETUP_ARGUMENTS or name in values:
            fault = "got multiple values for" if name in values else "got an unexpected keyword"
            raise TypeError(f"setup() {fault} argument '{name}'")
        values[name] = value
    return values


def _attempt(call: Callable[..., T], *args: Any) -> T | TanghuluError:
    """Return the outcome of ``call``, its error included."""
    try:
        return call(*args)
    except TanghuluError as error:
        return error


def _each(make: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """Return for each row what ``make`` makes of it, or its error; nothing for columns of unequal length."""
    if len({len(column) for column in columns}) > 1:
        return []
    return [_attempt(make, *row) for row in zip(*columns, strict=True)]


def _bytes_like(value: Any) -> memoryview:
    """Return ``value`` as memory; raises TypeError for what has none, such as text."""
    return memoryview(value)


def _filled(size: int | TanghuluError, room: Sequence[Buffer]) -> int | TanghuluError:
    """Return ``size`` if the value filled all of its buffers, or the error."""
    wanted = sum(each.size_bytes for each in room)
    if isinstance(size, TanghuluError) or size == wanted:
        return size
    return TransferFailed(f"the value has {size} bytes and its buffers {wanted}; give buffers of the value's size")
