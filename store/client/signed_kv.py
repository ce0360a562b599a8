"""A client that loads only KV that this cluster's own processes have stored.

The first put of a key stands, and the store does not know who may say what a prompt's KV is. So each value that goes
out through this client ends with a signature, and what comes in without the right one counts as unusable: as a value
of another size does. The signature is

    BLAKE2b(key of the chunk, xxh3_128(bytes, secret seed), key = the cluster secret's signing key), 16 bytes

A fast hash with a secret seed finds changed bytes, and the keyed hash around it hides what it found, so that nobody
learns enough about the seed to choose bytes by it (Carter and Wegman, 1981: hash, then encrypt). It covers the bytes
themselves and not the store's checksums, which writers choose. Example: a block of 1,000 bytes is a value of 1,016.

Without a cluster secret the signing key is empty: then a signature shows only that a value was stored as KV, and keeps
out nobody who knows this file.
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
from tanghulu.store.client.logic.operations import readable
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
        """The signature of a value that lies in ``pieces``, under ``key``."""
        content = xxhash.xxh3_128(seed=self._seed)
        for piece in pieces:
            content.update(piece)
        return hashlib.blake2b(
            content.digest() + key.encode(), key=self._key, digest_size=SIGNATURE_BYTES, person=b"kv"
        ).digest()

    def signed(self, key: str, pieces: Iterable[Any], signature: bytes | bytearray) -> bool:
        """Whether ``signature`` is that of the value, by somebody with this secret."""
        return hmac.compare_digest(self.sign(key, pieces), signature)


class KvClient(Client):
    """A client of signed values: buffers and sizes are those of the values without their signatures.

    ``on_refused`` is called with the number of values that a call found and that were not the cluster's.
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

    def get_many_into(self, keys: Sequence[str], buffers: Sequence[Any], **options: Any) -> list[int | TanghuluError]:
        """As ``Client.get_many_into``, but a value that is not the cluster's, or of another size, is ChunkNotFound.

        It is removed, so that the next put can store the right one, and its buffers are zeroed.
        """
        pieces = [list(map(readable, _pieces(each))) for each in buffers]
        tags = [bytearray(SIGNATURE_BYTES) for _ in keys]
        whole = [[*_pieces(each), tag] for each, tag in zip(buffers, tags, strict=True)]
        outcomes = super().get_many_into(keys, whole, **options)
        refused = []
        for at, outcome in enumerate(outcomes):
            size = sum(map(len, pieces[at]))
            if outcome == size + SIGNATURE_BYTES and self._signer.signed(keys[at], pieces[at], tags[at]):
                outcomes[at] = size
            elif isinstance(outcome, int | InvalidRequest):
                refused.append(at)
                outcomes[at] = ChunkNotFound(f"what was stored as {keys[at]!r} is not this cluster's KV")
        if refused:
            self._refuse([keys[at] for at in refused], [piece for at in refused for piece in pieces[at]], **options)
        return outcomes

    def _refuse(self, keys: Sequence[str], pieces: Iterable[memoryview], **options: Any) -> None:
        self._on_refused(len(keys))
        self._rare_log.warning("store.kv_refused", first=keys[0], num=len(keys), reason=_REASON)
        for piece in pieces:
            piece[:] = bytes(len(piece))
        try:
            self.remove_many(keys, **options)
        except TanghuluError as error:
            self._rare_log.warning("store.kv_not_removed", first=keys[0], num=len(keys), error=error.message)


def _pieces(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
