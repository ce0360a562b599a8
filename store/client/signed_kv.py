"""A client that loads only KV stored by this cluster's own processes.

The first put of a key is final, and the store cannot decide which writers to trust for a prompt's KV. So each value
written by this client ends with a signature, and a value read without the right one counts as unusable, like a value of
another size. The signature is

    BLAKE2b(key of the chunk, xxh3_128(bytes, secret seed), key = the cluster secret's signing key), 16 bytes

A fast hash with a secret seed finds changed bytes, and the keyed hash around it hides its result, so that nobody learns
enough about the seed to choose bytes by it (Carter and Wegman, 1981: hash, then encrypt). It covers the bytes
themselves and not the store's checksums, which writers choose. Example: a block of 1,000 bytes is a value of 1,016.

Without a cluster secret the signing key is empty: then a signature shows only that a value was stored as KV, and stops
nobody who knows this file.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import structlog
import xxhash

from tanghulu.auth.cluster_secret import NO_SECRET, ClusterSecret
from tanghulu.errors import ChunkNotFound, InvalidRequest, TanghuluError
from tanghulu.runtime.telemetry import RareLog
from tanghulu.store.client.client import Client
from tanghulu.store.client.logic import operations
from tanghulu.store.client.logic.operations import readable
from tanghulu.store.client.logic.query import raise_first
from tanghulu.store.client.model import PutItem, Status
from tanghulu.store.client.settings import Settings

SIGNATURE_BYTES: Final = 16
_REASON: Final = "put by others, with another --cluster-secret or in another size; removed, to be computed and put anew"
_log = structlog.get_logger(__name__)


class KvSigner:
    """Makes and compares signatures."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._key = secret.signing_key
        seed = hashlib.blake2b(key=self._key, digest_size=8, person=b"seed").digest()
        self._seed = int.from_bytes(seed, "little")

    def sign(self, key: str, pieces: Iterable[Any]) -> bytes:
        """Return the signature of a value in ``pieces``, under ``key``."""
        content = self.content()
        for piece in pieces:
            content.update(piece)
        return self.seal(key, content)

    def content(self) -> Any:
        """Return the running digest of a value, see ``seal``."""
        return xxhash.xxh3_128(seed=self._seed)

    def seal(self, key: str, content: Any) -> bytes:
        """Return the signature of the value fed to ``content``."""
        return hashlib.blake2b(
            content.digest() + key.encode(), key=self._key, digest_size=SIGNATURE_BYTES, person=b"kv"
        ).digest()


class _Arrival:
    """A signed value on its way into ``pieces`` and ``signature``; a ``ValueCheck`` for the client's logic."""

    def __init__(self, signer: KvSigner, key: str, pieces: Sequence[memoryview]) -> None:
        self._signer, self._key, self.pieces = signer, key, pieces
        self.size = sum(map(len, pieces))
        self.signature = bytearray(SIGNATURE_BYTES)
        self._content, self._missing = signer.content(), self.size

    def begin(self) -> None:
        self._content, self._missing = self._signer.content(), self.size

    def add(self, piece: memoryview) -> None:
        piece = piece[: max(self._missing, 0)]
        self._content.update(piece)
        self._missing -= len(piece)

    def void(self) -> None:
        self._missing = self.size + 1

    def holds(self) -> bool:
        """Return whether the signature is right; bytes not hashed on arrival are hashed now."""
        if self._missing:
            self.begin()
            for piece in self.pieces:
                self.add(piece)
        return hmac.compare_digest(self._signer.seal(self._key, self._content), self.signature)


class KvClient(Client):
    """A client of signed values: buffers and sizes exclude the signatures.

    ``on_refused`` is called with the number of values found by a call that were not the cluster's.
    """

    def __init__(
        self,
        settings: Settings,
        secret: ClusterSecret = NO_SECRET,
        on_refused: Callable[[int], None] = lambda num: None,
    ) -> None:
        super().__init__(settings)
        self._signer, self._on_refused, self._rare_log = KvSigner(secret), on_refused, RareLog(_log)

    def put_many(self, items: Any, **options: Any) -> list[Status]:
        """As ``Client.put_many``, of (key, value) pairs."""
        signed = []
        for key, value in items:
            pieces = list(map(readable, _pieces(value)))
            signed.append(PutItem(key, [*pieces, self._signer.sign(key, pieces)]))
        return super().put_many(signed, **options)

    def get_many_into(
        self,
        keys: Sequence[str],
        buffers: Sequence[Any],
        *,
        raise_errors: bool = False,
        deadline_s: float | None = None,
        from_ssd: set[str] | None = None,
    ) -> list[int | TanghuluError]:
        """As ``Client.get_many_into``, but a value that is not the cluster's, or of another size, is ChunkNotFound.

        It is removed, so that the next put can store the right one, and its buffers are zeroed.
        """
        arrivals = [
            _Arrival(self._signer, key, list(map(readable, _pieces(each))))
            for key, each in zip(keys, buffers, strict=True)
        ]
        whole = [[*_pieces(each), arrival.signature] for each, arrival in zip(buffers, arrivals, strict=True)]
        outcomes = self._perform(
            deadline_s, operations.get_many_into, keys, whole, value_checks=arrivals, from_ssd=from_ssd
        )
        refused = []
        for at, (arrival, outcome) in enumerate(zip(arrivals, outcomes, strict=True)):
            if outcome == arrival.size + SIGNATURE_BYTES and arrival.holds():
                outcomes[at] = arrival.size
            elif isinstance(outcome, int | InvalidRequest):
                refused.append(at)
                outcomes[at] = ChunkNotFound(
                    f"the value stored as {keys[at]!r} was not signed by this cluster and has been removed"
                )
        if refused:
            self._refuse(
                [keys[at] for at in refused], [each for at in refused for each in arrivals[at].pieces], deadline_s
            )
        if raise_errors:
            raise_first(outcomes)
        return outcomes

    def _refuse(self, keys: Sequence[str], pieces: Iterable[memoryview], deadline_s: float | None) -> None:
        self._on_refused(len(keys))
        self._rare_log.warning("store.kv_refused", first=keys[0], num=len(keys), reason=_REASON)
        for piece in pieces:
            piece[:] = bytes(len(piece))
        try:
            self.remove_many(keys, deadline_s=deadline_s)
        except TanghuluError as error:
            self._rare_log.warning("store.kv_not_removed", first=keys[0], num=len(keys), error=error.message)


def _pieces(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
