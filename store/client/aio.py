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
from tanghulu.store.client.logic.operations import Operations
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
    """A client that is being opened: await it, or enter it."""

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
    """The store as one event loop sees it. Every method takes ``deadline_s``; None means the client's own."""

    def __init__(self, settings: Settings) -> None:
        self._driver = AsyncioDriver(settings)
        self._do = Operations(self._driver.context, self._driver.flush)
        self._run = self._driver.run
        self._deadline = self._driver.deadline
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
        """Store ``value`` (bytes-like, numpy array, torch tensor) under ``key``; a key that is there is a hit.

        A list of values is stored as one, each behind the other, without joining them first.

        When this returns, a get from anywhere finds the key; ``visible=False`` does not wait for that. The value is
        written to ``replicas`` nodes as far as there are so many (see Status). ``prefer_node``, by its id, comes first
        while it can take the value. ``part_bytes`` asks for one checksum per
        run of so many bytes (a layer), ``checksums`` brings them along. Raises StoreFull, NodeUnavailable,
        MasterUnavailable, InvalidRequest, DeadlineExceeded.
        """
        options = put_options(replicas, pin, ttl_s, prefer_node, visible, part_bytes)
        return await self._perform(deadline_s, self._do.put, PutItem(key, value, checksums), options)

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
        """Store many values: a dict, or (key, value) pairs or PutItems; a Status each, in order.

        What went wrong with a value is in its status, which is false then; ``raise_errors`` raises the first error,
        when all have ended. Bad options raise InvalidRequest.
        """
        options = put_options(replicas, pin, ttl_s, prefer_node, visible, part_bytes)
        return await self._perform(deadline_s, self._do.put_many, items, options, raise_errors)

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

        The tensor is dense and in host memory; one that is not contiguous is copied first. What is stored is a short
        header and the elements, see ``tanghulu.store.client.tensors``.
        """
        options = put_options(replicas, pin, ttl_s, prefer_node, visible, 0)
        return await self._perform(deadline_s, self._do.put_tensor, key, tensor, options)

    # --- gets

    async def get(self, key: str, *, deadline_s: float | None = None) -> Chunk:
        """The value; over shm without a copy. Close the chunk, or use it in a ``with``, to give its memory back.

        Raises ChunkNotFound, NodeUnavailable, ChecksumMismatch, DirectoryIncomplete, MasterUnavailable,
        DeadlineExceeded.
        """
        return await self._perform(deadline_s, self._do.get, key)

    async def get_range(
        self, key: str, offset: int, length: int | None = None, *, deadline_s: float | None = None
    ) -> Chunk:
        """``length`` bytes of the value from ``offset`` on, or all behind it; over shm without a copy.

        Only the parts around the range are moved and verified where the chunk has several checksums (see
        ``part_bytes``); else all of it. Raises as ``get``, and InvalidRequest for a range that is not within the value.
        """
        return await self._perform(deadline_s, self._do.get_range, key, offset, length)

    async def get_into(
        self, key: str, buffer: Any, *, offset: int = 0, length: int | None = None, deadline_s: float | None = None
    ) -> int:
        """The value into ``buffer`` (writable bytes-like, array, tensor, or a registered Buffer); returns its size.

        A list of buffers is filled one behind the other. With ``offset`` and ``length`` only that part, see
        ``get_range``. Raises as ``get``, and InvalidRequest if the buffers are too small. After an error their contents
        are undefined.
        """
        return await self._perform(deadline_s, self._do.get_into, key, buffer, offset, length)

    async def get_many(
        self, keys: Sequence[str], *, raise_errors: bool = False, deadline_s: float | None = None
    ) -> list[Chunk | TanghuluError]:
        """A chunk or an error for each key, bad keys included.

        Give the keys of one prompt in their order: eviction then spares prefixes.

        ``raise_errors`` raises the first error instead, and closes the chunks that were found.
        """
        return await self._perform(deadline_s, self._do.get_many, keys, raise_errors)

    async def get_many_into(
        self,
        keys: Sequence[str],
        buffers: Sequence[Any],
        *,
        raise_errors: bool = False,
        deadline_s: float | None = None,
    ) -> list[int | TanghuluError]:
        """Each value into its buffer; a size or an error for each key. The buffers must not overlap.

        A key's buffer may be a list of buffers, which are filled one behind the other, as with ``get_into``.
        ``raise_errors`` raises the first error instead.
        """
        return await self._perform(deadline_s, self._do.get_many_into, keys, buffers, raise_errors)

    async def get_tensor(self, key: str, *, shared: bool = False, deadline_s: float | None = None) -> torch.Tensor:
        """The tensor that ``put_tensor`` stored: a copy, the caller's own. ``shared=True`` as with ``Chunk.torch``.

        Raises as ``get``, and InvalidRequest for a value that was put otherwise.
        """
        tensor: torch.Tensor = await self._perform(deadline_s, self._do.get_tensor, key, shared)
        return tensor

    # --- questions

    async def exists(self, key: str, *, deadline_s: float | None = None) -> bool:
        """Return whether a live node holds the key; neither pins nor renews anything."""
        return await self._perform(deadline_s, self._do.exists, key)

    async def exists_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]:
        """The same for many keys in one call."""
        return await self._perform(deadline_s, self._do.exists_many, keys)

    async def match_prefix(self, keys: Sequence[str], *, deadline_s: float | None = None) -> int:
        """How many of ``keys`` exist, counted from the first up to the first that does not."""
        return await self._perform(deadline_s, self._do.match_prefix, keys)

    async def wait_for(self, key: str, *, deadline_s: float | None = None) -> bool:
        """Wait until somebody has put the key, at most ``deadline_s``; whether it is there.

        The master tells as soon as the put is announced. A master that restarts meanwhile, or another that leads, is
        asked again. Raises MasterUnavailable if none answered to the end, Overloaded if too many wait there.
        """
        return await self._perform(deadline_s, self._do.wait_for, key)

    async def wait_for_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]:
        """The same until all of ``keys`` are there, or the time is up; for each whether it is."""
        return await self._perform(deadline_s, self._do.wait_for_many, keys)

    async def stat(self, key: str, *, deadline_s: float | None = None) -> ChunkInfo:
        """What the store knows of a chunk; raises ChunkNotFound."""
        return await self._perform(deadline_s, self._do.stat, key)

    async def list_keys(
        self, prefix: str = "", *, after: str = "", limit: int | None = None, deadline_s: float | None = None
    ) -> list[KeyInfo]:
        """The first ``limit`` keys (None: all) that begin with ``prefix`` and come behind ``after``, in order.

        To read them page by page, give the last key of a page as ``after`` of the next: keys that come or go meanwhile
        shift nothing. Raises MasterUnavailable.
        """
        return await self._perform(deadline_s, self._do.list_keys, prefix, limit, after)

    async def _meet(self) -> None:
        """Hear whether the master is there, and which nodes it knows."""
        await self._perform(None, self._do.meet)

    async def nodes(self, *, deadline_s: float | None = None) -> list[NodeView]:
        """All store nodes as the master lists them."""
        return await self._perform(deadline_s, self._do.nodes)

    async def masters(self, *, deadline_s: float | None = None) -> list[MasterView]:
        """The masters that own ranges of keys, and how much each knows; one that does not answer is among them."""
        return await self._perform(deadline_s, self._do.masters)

    async def tenants(self, *, deadline_s: float | None = None) -> list[TenantView]:
        """What each tenant holds and does, over all nodes; a tenant's token tells of that tenant only.

        Raises InvalidRequest where the nodes know no tenants.
        """
        return await self._perform(deadline_s, self._do.tenants)

    # --- removal

    async def eviction_policy(self, node: str, name: str | None = None, *, deadline_s: float | None = None) -> str:
        """The eviction policy of the node called ``node``, after switching it to ``name`` if one is given.

        A switch keeps all chunks; it lasts until the node restarts. Raises InvalidRequest for an unknown name or node.
        """
        return await self._perform(deadline_s, self._do.eviction_policy, node, name)

    async def drain(self, node: str, draining: bool = True, *, deadline_s: float | None = None) -> None:
        """Have the node called ``node`` take no new chunks and its chunks copied to others, or undo that.

        ``nodes()`` tells how far it is: ``num_unsafe`` chunks are left, ``drained`` means that it may be stopped.
        """
        await self._perform(deadline_s, self._do.drain, node, draining)

    async def replicate(
        self, keys: Sequence[str], *, holders: int = 2, for_s: float = 60.0, deadline_s: float | None = None
    ) -> int:
        """Have each of ``keys`` held by ``holders`` nodes for ``for_s`` seconds, so that many can read it at once.

        The master has it copied in the background, within its bounds (four holders, a rate); copies that nobody reads
        go again afterwards. Returns how many of the keys were taken: those that are there and not too many.
        """
        return await self._perform(deadline_s, self._do.replicate, keys, holders, for_s)

    async def evict(
        self, node: str, keys: Sequence[str] = (), *, num_bytes: int = 0, deadline_s: float | None = None
    ) -> Evicted:
        """Evict ``keys`` on one node, and ``num_bytes`` more by its policy; what is being read or pinned hard stays."""
        return await self._perform(deadline_s, self._do.evict, node, keys, num_bytes)

    async def verify(
        self,
        node: str,
        after: str = "",
        *,
        drop_corrupt: bool = False,
        report: bool = False,
        deadline_s: float | None = None,
    ) -> VerifiedPage:
        """Some chunks of one node, in order behind the key ``after``, each compared with its checksums.

        ``drop_corrupt`` drops those that do not match; ``report`` has the node tell the master again all that it holds.
        """
        return await self._perform(deadline_s, self._do.verify, node, after, drop_corrupt, report)

    async def remove(self, key: str, *, deadline_s: float | None = None) -> bool:
        """Drop the chunk everywhere, copies under way included; whether there was one.

        ``exists`` says False once this has returned, until somebody puts the key again.
        """
        return await self._perform(deadline_s, self._do.remove, key)

    async def remove_many(
        self, keys: Sequence[str], *, raise_errors: bool = False, deadline_s: float | None = None
    ) -> list[bool | TanghuluError]:
        """Drop many chunks; an outcome each. ``raise_errors`` raises the first error instead."""
        return await self._perform(deadline_s, self._do.remove_many, keys, raise_errors)

    async def remove_matching(self, pattern: str, *, deadline_s: float | None = None) -> int:
        """Drop every chunk whose key the regular expression is found in; how many there were.

        Waits while a master that is rebuilding cannot list all keys; raises DirectoryIncomplete if that takes too long,
        and InvalidRequest for an empty pattern: ``"^"`` is every key.
        """
        return await self._perform(deadline_s, self._do.remove_matching, pattern)

    # --- memory

    def register(self, buffer: Any) -> Buffer:
        """Name local memory once, for many ``get_into`` and ``put`` calls; cheaper than naming it each time."""
        return self._driver.register(buffer)

    # --- life

    async def close(self) -> None:
        """Close every connection. Chunks and arrays in use keep their memory until they go, too."""
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
