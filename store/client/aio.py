"""The asyncio client, ``tanghulu.aio.connect``: the store's methods as coroutines of one event loop.

The blocking client's methods are generated from these, see ``tools/generate_client.py``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials, TlsFiles
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.masters import Masters
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.drivers.asynchronous import AsyncioDriver
from tanghulu.store.client.logic import admin, operations, query
from tanghulu.store.client.model import KeyInfo, MasterView, NodeView, PutItem, Status, TenantView, put_options
from tanghulu.store.client.settings import DEFAULT_DEADLINE_S, Settings, not_a_master
from tanghulu.store.protocol.checksums import NO_CHECKSUMS, Checksums
from tanghulu.store.protocol.messages import ChunkInfo, Evicted, VerifiedPage
from tanghulu.transfer_engine.core.buffers import Buffer

if TYPE_CHECKING:
    import torch


def connect(
    master: str | Masters,
    *,
    tenant: str = "",
    token: str = "",
    tls_ca: str = "",
    tls_cert: str = "",
    tls_key: str = "",
    transport: str | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
    place: str = "",
) -> Connecting:
    """As ``tanghulu.connect``: ``async with connect(...) as client``, or ``client = await connect(...)``."""
    masters = Masters.of(master)
    shown = Credentials(tenant, token, TlsFiles(tls_cert, tls_key, tls_ca))
    settings = Settings(
        master=masters.showing(shown) if shown != NOTHING_TO_SHOW else masters,
        transport=transport,
        deadline_s=deadline_s,
        place=place,
    )
    return Connecting(settings)


class Connecting:
    """A client being opened: await it, or enter it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: AsyncClient | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(AsyncClient, name):
            raise InvalidRequest(f"{name}: this client is not open yet; write client = await tanghulu.aio.connect(...)")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def _open(self) -> AsyncClient:
        client = AsyncClient(self._settings)
        try:
            await client._meet()
        except TanghuluError as error:
            await client.close()
            raise not_a_master(self._settings.master, error) from None
        return client


class AsyncClient:
    """The store, as used from one event loop. Every method takes ``deadline_s``; None means the client's default."""

    def __init__(self, settings: Settings) -> None:
        self._driver = AsyncioDriver(settings)
        self._perform = self._driver.perform

    # --- puts

    async def put(
        self,
        key: str,
        value: Any,
        *,
        replicas: int = 1,
        pin: str = "none",
        ttl_s: float | None = None,
        prefer_node: str | None = None,
        visible: bool = True,
        part_bytes: int = 0,
        checksums: Checksums = NO_CHECKSUMS,
        deadline_s: float | None = None,
    ) -> Status:
        """Store ``value`` (bytes-like, numpy array, torch tensor) under ``key``; an existing key is a hit.

        A list of values is stored as one value, concatenated, without joining them first.

        When this returns, a get from anywhere finds the key; ``visible=False`` does not wait for that. The value is
        written to ``replicas`` nodes, or to all if there are fewer (see Status). The node with the id ``prefer_node``
        comes first while it has room for the value. ``part_bytes`` requests one checksum per run of that many bytes (a
        layer), ``checksums`` supplies them. Raises StoreFull, NodeUnavailable, MasterUnavailable, InvalidRequest,
        DeadlineExceeded.
        """
        options = put_options(replicas, pin, ttl_s, prefer_node, visible, part_bytes)
        return await self._perform(deadline_s, operations.put, PutItem(key, value, checksums), options)

    async def put_many(
        self,
        items: Mapping[str, Any] | Iterable[PutItem | tuple[str, Any]],
        *,
        replicas: int = 1,
        pin: str = "none",
        ttl_s: float | None = None,
        prefer_node: str | None = None,
        visible: bool = True,
        part_bytes: int = 0,
        raise_errors: bool = False,
        deadline_s: float | None = None,
    ) -> list[Status]:
        """Store many values: a dict, or (key, value) pairs or PutItems; return a Status each, in order.

        A value's error is in its status, which is then false; ``raise_errors`` raises the first error after all have
        ended. Bad options raise InvalidRequest.
        """
        options = put_options(replicas, pin, ttl_s, prefer_node, visible, part_bytes)
        return await self._perform(deadline_s, operations.put_many, items, options, raise_errors)

    async def put_tensor(
        self,
        key: str,
        tensor: torch.Tensor,
        *,
        replicas: int = 1,
        pin: str = "none",
        ttl_s: float | None = None,
        prefer_node: str | None = None,
        visible: bool = True,
        deadline_s: float | None = None,
    ) -> Status:
        """Store a torch tensor with its dtype and shape, for ``get_tensor``; options and errors as with ``put``.

        The tensor must be dense and in host memory; one that is not contiguous is copied first. The stored value is a
        short header and the elements, see ``tanghulu.store.client.tensors``.
        """
        options = put_options(replicas, pin, ttl_s, prefer_node, visible, 0)
        return await self._perform(deadline_s, operations.put_tensor, key, tensor, options)

    # --- gets

    async def get(self, key: str, *, deadline_s: float | None = None) -> Chunk:
        """Return the value; over shm without a copy. Close the chunk, or use it in a ``with``, to return its memory.

        Raises ChunkNotFound, NodeUnavailable, ChecksumMismatch, DirectoryIncomplete, MasterUnavailable,
        DeadlineExceeded.
        """
        return await self._perform(deadline_s, operations.get, key)

    async def get_range(
        self, key: str, offset: int, length: int | None = None, *, deadline_s: float | None = None
    ) -> Chunk:
        """Return ``length`` bytes of the value from ``offset`` on (default: the rest); over shm without a copy.

        If the chunk has several checksums (see ``part_bytes``), only the parts around the range are moved and verified;
        otherwise all of it. Raises as ``get``, and InvalidRequest for a range outside the value.
        """
        return await self._perform(deadline_s, operations.get, key, offset, length)

    async def get_into(
        self, key: str, buffer: Any, *, offset: int = 0, length: int | None = None, deadline_s: float | None = None
    ) -> int:
        """Read the value into ``buffer`` (writable bytes-like, array, tensor or registered Buffer); return its size.

        A list of buffers is filled in order. ``offset`` and ``length`` select a part, see ``get_range``. Raises as
        ``get``, and InvalidRequest if the buffers are too small. After an error their contents are undefined.
        """
        return await self._perform(deadline_s, operations.get_into, key, buffer, offset, length)

    async def get_many(
        self, keys: Sequence[str], *, raise_errors: bool = False, deadline_s: float | None = None
    ) -> list[Chunk | TanghuluError]:
        """Return a chunk or an error for each key, bad keys included.

        Give the keys of one prompt in their order, so that eviction spares prefixes.

        ``raise_errors`` raises the first error instead, and closes the chunks that were found.
        """
        return await self._perform(deadline_s, operations.get_many, keys, raise_errors)

    async def get_many_into(
        self,
        keys: Sequence[str],
        buffers: Sequence[Any],
        *,
        raise_errors: bool = False,
        deadline_s: float | None = None,
        from_ssd: set[str] | None = None,
    ) -> list[int | TanghuluError]:
        """Read each value into its buffer; return a size or an error for each key. The buffers must not overlap.

        A key's buffer may be a list of buffers, which are filled in order, as with ``get_into``. ``raise_errors``
        raises the first error instead. ``from_ssd`` receives the keys that nodes had to read from their SSDs.
        """
        return await self._perform(deadline_s, operations.get_many_into, keys, buffers, raise_errors, (), from_ssd)

    async def get_tensor(self, key: str, *, shared: bool = False, deadline_s: float | None = None) -> torch.Tensor:
        """Return a tensor stored by ``put_tensor``, as the caller's own copy. ``shared=True`` as with ``Chunk.torch``.

        Raises as ``get``, and InvalidRequest for a value stored by another method.
        """
        tensor: torch.Tensor = await self._perform(deadline_s, operations.get_tensor, key, shared)
        return tensor

    # --- questions

    async def exists(self, key: str, *, deadline_s: float | None = None) -> bool:
        """Return whether a live node holds the key; neither pins nor renews anything."""
        (found,) = await self._perform(deadline_s, query.exists, [key])
        return found

    async def exists_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]:
        """Return the same for many keys in one call."""
        return await self._perform(deadline_s, query.exists, keys)

    async def match_prefix(self, keys: Sequence[str], *, deadline_s: float | None = None) -> int:
        """Return the number of leading ``keys`` that exist, up to the first missing one."""
        return await self._perform(deadline_s, query.match_prefix, keys)

    async def wait_for(self, key: str, *, deadline_s: float | None = None) -> bool:
        """Wait until the key is stored, at most ``deadline_s``; return whether it is.

        The master answers as soon as the put is announced. If it restarts meanwhile, or another one takes over, the
        request is repeated. Raises MasterUnavailable if none answered until the deadline, Overloaded if too many
        callers wait there.
        """
        (found,) = await self._perform(deadline_s, query.wait_for, [key])
        return found

    async def wait_for_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]:
        """Wait until all of ``keys`` are stored, or the time is up; return for each whether it is."""
        return await self._perform(deadline_s, query.wait_for, keys)

    async def stat(self, key: str, *, deadline_s: float | None = None) -> ChunkInfo:
        """Return the store's description of a chunk; raises ChunkNotFound."""
        return await self._perform(deadline_s, query.stat, key)

    async def list_keys(
        self, prefix: str = "", *, after: str = "", limit: int | None = None, deadline_s: float | None = None
    ) -> list[KeyInfo]:
        """Return the first ``limit`` keys (None: all) with ``prefix`` that sort behind ``after``, in order.

        To page through them, give the last key of a page as ``after`` of the next: keys added or removed meanwhile
        shift nothing. Raises MasterUnavailable.
        """
        return await self._perform(deadline_s, query.list_keys, prefix, limit, after)

    async def _meet(self) -> None:
        """Check that the master answers, and take its list of nodes."""
        await self._perform(None, query.leaders_nodes)

    async def nodes(self, *, deadline_s: float | None = None) -> list[NodeView]:
        """Return all store nodes as listed by the master."""
        return await self._perform(deadline_s, query.nodes)

    async def masters(self, *, deadline_s: float | None = None) -> list[MasterView]:
        """Return the masters that own ranges of keys, with the keys known to each, unresponsive ones included."""
        return await self._perform(deadline_s, admin.masters)

    async def tenants(self, *, deadline_s: float | None = None) -> list[TenantView]:
        """Return the usage and activity of each tenant over all nodes; a tenant's token shows that tenant only.

        Raises InvalidRequest if the nodes have no tenants.
        """
        return await self._perform(deadline_s, admin.tenants)

    # --- removal

    async def eviction_policy(self, node: str, name: str | None = None, *, deadline_s: float | None = None) -> str:
        """Return the eviction policy of the node called ``node``, after switching it to ``name`` if given.

        A switch keeps all chunks; it lasts until the node restarts. Raises InvalidRequest for an unknown name or node.
        """
        return await self._perform(deadline_s, query.eviction_policy, node, name)

    async def drain(self, node: str, draining: bool = True, *, deadline_s: float | None = None) -> None:
        """Have the node called ``node`` refuse new chunks and its chunks copied to others, or undo that.

        ``nodes()`` reports the progress: ``num_unsafe`` chunks are left, ``drained`` means that it may be stopped.
        """
        await self._perform(deadline_s, admin.drain, node, draining)

    async def replicate(
        self, keys: Sequence[str], *, holders: int = 2, for_s: float = 60.0, deadline_s: float | None = None
    ) -> int:
        """Have each of ``keys`` held by ``holders`` nodes for ``for_s`` seconds, to serve many readers at once.

        The master has them copied in the background, within its bounds (four holders, a rate); unread copies are
        dropped afterwards. Returns the number of keys accepted: those that exist, up to the bound.
        """
        return await self._perform(deadline_s, admin.replicate, keys, holders, for_s)

    async def evict(
        self, node: str, keys: Sequence[str] = (), *, num_bytes: int = 0, deadline_s: float | None = None
    ) -> Evicted:
        """Evict ``keys`` on one node, and ``num_bytes`` more by its policy; chunks being read or pinned hard stay."""
        return await self._perform(deadline_s, admin.evict, node, keys, num_bytes)

    async def verify(
        self,
        node: str,
        after: str = "",
        *,
        drop_corrupt: bool = False,
        report: bool = False,
        deadline_s: float | None = None,
    ) -> VerifiedPage:
        """Compare a page of one node's chunks, in order behind the key ``after``, with their checksums.

        ``drop_corrupt`` drops those that do not match; ``report`` has the node report all its chunks to the master
        again.
        """
        return await self._perform(deadline_s, admin.verify, node, after, drop_corrupt, report)

    async def remove(self, key: str, *, deadline_s: float | None = None) -> bool:
        """Drop the chunk everywhere, including copies in progress; return whether there was one.

        ``exists`` returns False once this has returned, until somebody puts the key again.
        """
        return await self._perform(deadline_s, query.remove, [key], True) == [True]

    async def remove_many(
        self, keys: Sequence[str], *, raise_errors: bool = False, deadline_s: float | None = None
    ) -> list[bool | TanghuluError]:
        """Drop many chunks; return an outcome each. ``raise_errors`` raises the first error instead."""
        return await self._perform(deadline_s, query.remove, keys, raise_errors)

    async def remove_matching(self, pattern: str, *, deadline_s: float | None = None) -> int:
        """Drop every chunk whose key matches the regular expression anywhere; return their number.

        Waits while a rebuilding master cannot list all keys; raises DirectoryIncomplete if that takes too long, and
        InvalidRequest for an empty pattern: ``"^"`` matches every key.
        """
        return await self._perform(deadline_s, query.remove_matching, pattern)

    # --- memory

    def register(self, buffer: Any) -> Buffer:
        """Register local memory once, for many ``get_into`` and ``put`` calls; cheaper than doing so in each call."""
        return self._driver.register(buffer)

    # --- life

    async def close(self) -> None:
        """Close every connection. Chunks and arrays in use keep their memory until they are dropped, too."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be copied or pickled; call tanghulu.aio.connect() where another is wanted")

    def __del__(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None:
            driver.dropped(self)

    def __repr__(self) -> str:
        return f"AsyncClient({self._driver.settings.master})"
