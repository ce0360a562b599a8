"""Chained block hashes: the names by which equal prefixes find each other.

A prompt's tokens are cut into blocks of ``block_tokens``. Each full block is named by

    h[-1] = BLAKE2b(fingerprint, salt)      the root: what model, which tenant; keyed by the cluster secret
    h[i]  = H(h[i-1], tokens of block i)    tokens as little-endian uint32

so equal names mean an equal model, tenant and *whole prefix*, and KV of that block can be shared. With
blocks of 4 tokens, ``[1..10]`` has two names, h[0] over 1-4 and h[1] over h[0] and 5-8; tokens 9 and 10
wait for their block to fill. This is the scheme of vLLM's automatic prefix caching and of the Mooncake
paper (FAST'25, section 4); the 128-bit default H is xxh3, which is fast (a 128k-token prompt in about a
millisecond). It does not resist an attacker who picks tokens and knows the preceding hash. The cluster secret hides
that hash: choose ``sha256`` without a secret if tenants do not trust each other, and with one if users of the same
tenant do not. ``vllm_sha256_cbor`` gives the names that vLLM itself gives its blocks (at the end of this file).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from tanghulu.errors import InvalidRequest
from tanghulu.types import BlockHash, Fingerprint

DEFAULT_BLOCK_TOKENS = 64
TOKEN_BYTES = 4

Tokens = npt.NDArray[np.uint32]
HashFunction = Callable[[bytes | memoryview], BlockHash]


def _sha256_128(data: bytes | memoryview) -> BlockHash:
    return BlockHash(hashlib.sha256(data).digest()[:16])


def _sha256(data: bytes | memoryview) -> BlockHash:
    return BlockHash(hashlib.sha256(data).digest())


#: Blocks are named as vLLM names them with ``--prefix-caching-hash-algo sha256_cbor``: 32 bytes.
VLLM_SHA256_CBOR = "vllm_sha256_cbor"
#: The first does not call ``BlockHash``: it would double the cost of a block's hash.
HASH_FUNCTIONS: dict[str, HashFunction] = {
    "xxh3_128": cast(HashFunction, xxhash.xxh3_128_digest),
    "sha256": _sha256_128,
    VLLM_SHA256_CBOR: _sha256,
}


def hash_function(name: str) -> HashFunction:
    """Return the hash called ``name``; raises InvalidRequest listing the known ones."""
    try:
        return HASH_FUNCTIONS[name]
    except KeyError:
        raise InvalidRequest(f"block hash {name!r} is unknown; known: {', '.join(HASH_FUNCTIONS)}") from None


def joined(*fields: bytes) -> bytes:
    """Join ``fields`` so that different lists of fields give different bytes. ``(b"a", b"")`` gives ``b"1:a,0:,"``."""
    return b"".join(b"%d:%b," % (len(field), field) for field in fields)


def root_hash(fingerprint: Fingerprint, salt: bytes = b"", algorithm: str = "xxh3_128", key: bytes = b"") -> BlockHash:
    """Return the hash preceding a prompt's first block: model and tenant. The only way to make it.

    ``key`` is ``ClusterSecret.naming_key``. The root resists attackers whatever ``algorithm`` names the blocks:
    16 bytes of keyed BLAKE2b. vLLM's names do not cover the model: there the root is vLLM's own, followed by the digest
    of ``vllm_salt``.
    """
    if algorithm == VLLM_SHA256_CBOR:
        return vllm_root_hash(salt=vllm_salt(salt, key).encode())
    hash_function(algorithm)
    return BlockHash(_digest(b"root", key, fingerprint, salt))


def vllm_salt(salt: bytes, key: bytes = b"") -> str:
    """Return the ``cache_salt`` of a request to vLLM whose own salt is ``salt``; "" only without salt and key."""
    return _digest(b"vllm salt", key, salt).hex() if salt or key else ""


def _digest(purpose: bytes, key: bytes, *fields: bytes) -> bytes:
    return hashlib.blake2b(joined(*fields), digest_size=16, key=key, person=purpose).digest()


def as_tokens(tokens: Iterable[int] | bytes | Tokens) -> Tokens:
    """Return ``tokens`` as a uint32 array; bytes are read as little-endian uint32. Raises InvalidRequest."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.uint32, copy=False)
    if isinstance(tokens, bytes | bytearray | memoryview):
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"token buffer of {len(tokens)} bytes is not a multiple of {TOKEN_BYTES}")
        return np.frombuffer(tokens, dtype="<u4")
    return np.fromiter(tokens, dtype=np.uint32)


def chain_hashes(parent: BlockHash, tokens: Tokens, block_tokens: int, algorithm: str = "xxh3_128") -> list[BlockHash]:
    """Return the hashes of the full blocks of ``tokens`` after ``parent``; a partial last block has none."""
    if algorithm == VLLM_SHA256_CBOR:
        return vllm_chain_hashes(parent, tokens, block_tokens)
    digest = hash_function(algorithm)
    num_blocks = len(tokens) // block_tokens
    data = np.ascontiguousarray(tokens[: num_blocks * block_tokens], dtype="<u4")
    # One call cuts all blocks into bytes, and the loop is a comprehension: 0.3 ms for 2,000 blocks, half of slicing.
    blocks: list[bytes] = data.view(f"V{block_tokens * TOKEN_BYTES}").tolist()
    return [parent := digest(parent + block) for block in blocks]


#: (parent, tokens, block_tokens, algorithm) -> the hashes returned by ``chain_hashes``.
ChainFunction = Callable[[BlockHash, Tokens, int, str], list[BlockHash]]


class TokenSequence:
    """A growing list of tokens together with the hashes of its full blocks.

    Conductor, worker and migration use this one class, so that all three give a block the same name.
    Appending costs time proportional to the new tokens only. The first array is used without copying: it must not
    be changed afterwards. ``chain`` may be another way to compute the same hashes, such as one
    that remembers those of earlier prompts.
    """

    def __init__(
        self,
        root: BlockHash,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        tokens: Iterable[int] | bytes | Tokens = (),
        algorithm: str = "xxh3_128",
        chain: ChainFunction = chain_hashes,
    ) -> None:
        if block_tokens < 1:
            raise InvalidRequest(f"block_tokens is {block_tokens}; a block has at least one token")
        self.root = root
        self.block_tokens = block_tokens
        self.algorithm = algorithm
        self._chain = chain
        self.block_hashes: list[BlockHash] = []
        self._buffer: Tokens = np.empty(block_tokens, dtype=np.uint32)
        self._length = 0
        self.append(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        """All tokens, shape ``[len(self)]``; a read-only view that the next append may leave stale."""
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view

    def append(self, tokens: Iterable[int] | bytes | Tokens) -> list[BlockHash]:
        """Append ``tokens``; returns the hashes of the blocks that became full, in order."""
        new = as_tokens(tokens)
        if not len(new):
            return []
        if not self._length and len(new) > len(self._buffer):
            self._buffer = new  # it is full, so the next append copies it into one of its own
        else:
            self._reserve(self._length + len(new))
            self._buffer[self._length : self._length + len(new)] = new
        self._length += len(new)
        return self._hash_new_blocks()

    def append_one(self, token: int) -> None:
        """Append one token, as a step of decode does for each of its requests."""
        length = self._length + 1
        self._reserve(length)
        self._buffer[self._length] = token
        self._length = length
        if length % self.block_tokens == 0:
            self._hash_new_blocks()

    @property
    def last(self) -> int:
        """The last token."""
        return int(self._buffer[self._length - 1])

    def _reserve(self, length: int) -> None:
        if length > len(self._buffer):
            grown = np.empty(max(length, 2 * len(self._buffer)), dtype=np.uint32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown

    def _hash_new_blocks(self) -> list[BlockHash]:
        start = len(self.block_hashes) * self.block_tokens
        end = self._length - self._length % self.block_tokens
        if end == start:
            return []
        parent = self.block_hashes[-1] if self.block_hashes else self.root
        fresh = self._chain(parent, self._buffer[start:end], self.block_tokens, self.algorithm)
        self.block_hashes.extend(fresh)
        return fresh

    def check(self) -> None:
        assert self.block_hashes == chain_hashes(
            self.root, self._buffer[: self._length], self.block_tokens, self.algorithm
        )

    def __repr__(self) -> str:
        return f"TokenSequence({self._length} tokens, {len(self.block_hashes)} full blocks of {self.block_tokens})"


# --- the block hashes of vLLM (its scheme ``sha256_cbor``): events, store keys and routing then share one name

#: Seed of vLLM's first blocks by default (``PYTHONHASHSEED`` there, as text).
DEFAULT_VLLM_SEED = "vllm-none-hash"
VLLM_HASH_BYTES = 32
CborValue = int | str | bytes | None | tuple["CborValue", ...]


def cbor(value: CborValue) -> bytes:
    """Encode ``value`` in canonical CBOR (RFC 8949, 4.2.1): shortest heads, definite lengths. Ints: up to 64 bits."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    return _cbor_head(4, len(value)) + b"".join(map(cbor, value))


def _cbor_head(major: int, number: int) -> bytes:
    assert 0 <= number < 1 << 64
    if number < 24:
        return bytes((major << 5 | number,))
    power = 0 if number < 1 << 8 else 1 if number < 1 << 16 else 2 if number < 1 << 32 else 3
    return bytes((major << 5 | 24 + power,)) + number.to_bytes(1 << power, "big")


def vllm_root_hash(seed: str = DEFAULT_VLLM_SEED, salt: bytes = b"") -> BlockHash:
    """Return the parent hash of vLLM's first block; with ``salt`` (UTF-8), followed by that salt as CBOR.

    vLLM puts the text of ``cache_salt`` into the first block's extra keys; ``vllm_chain_hashes`` takes it from here.
    Raises InvalidRequest for a salt that is not text.
    """
    root = hashlib.sha256(cbor(seed)).digest()
    if not salt:
        return BlockHash(root)
    try:
        return BlockHash(root + cbor((("cache_salt", salt.decode()),)))
    except UnicodeDecodeError:
        raise InvalidRequest(f"the cache salt {salt!r} is not UTF-8; vLLM requires text") from None


def vllm_chain_hashes(
    parent: BlockHash, tokens: Tokens, block_tokens: int, extra_keys: Sequence[CborValue] = ()
) -> list[BlockHash]:
    """Return vLLM's hashes (32 bytes) of the full blocks of ``tokens`` after ``parent``: SHA-256 of the CBOR of

        (parent's hash, the block's tokens, extra keys or null)

    ``extra_keys`` lists those of each block (``BlockExtras``); None or a missing entry is a block without any.
    ``parent`` may be a root followed by a salt (``vllm_root_hash``).
    """
    num_blocks = len(tokens) // block_tokens
    if not num_blocks:
        return []
    bodies, ends = _cbor_blocks(as_tokens(tokens)[: num_blocks * block_tokens], block_tokens)
    front = _cbor_head(4, 3) + _cbor_head(2, VLLM_HASH_BYTES)
    last, salted = bytes(parent[:VLLM_HASH_BYTES]), parent[VLLM_HASH_BYTES:]
    hashes, begin, null, sha256 = [], 0, cbor(None), hashlib.sha256
    for number, end in enumerate(ends):
        extra = salted if salted and not number else null
        if number < len(extra_keys):
            extra = cbor(extra_keys[number])
        last = sha256(front + last + bodies[begin:end] + extra).digest()
        hashes.append(BlockHash(last))
        begin = end
    return hashes


def _cbor_blocks(tokens: Tokens, block_tokens: int) -> tuple[bytes, list[int]]:
    """Return the concatenated CBOR of each block's list of tokens, and the end of each.

    A token below 24 is one byte; others are a head (0x18, 0x19, 0x1a) and 1, 2 or 4 bytes, big-endian. So each gets
    five columns, and only the columns it needs are kept: 500 is ``19 .. .. 01 f4`` without the dots.
    """
    small, byte, short = tokens < 24, tokens < 1 << 8, tokens < 1 << 16
    columns = np.empty((len(tokens), 5), np.uint8)
    columns[:, 0] = np.where(small, tokens, 0x1A - byte.view(np.uint8) - short.view(np.uint8))
    columns[:, 1:] = tokens.astype(">u4").view(np.uint8).reshape(-1, 4)
    needed = np.empty(columns.shape, bool)
    needed[:, 0] = True
    needed[:, 1] = needed[:, 2] = ~short
    needed[:, 3], needed[:, 4] = ~byte, ~small
    head = np.frombuffer(_cbor_head(4, block_tokens), np.uint8)
    num_blocks = len(tokens) // block_tokens
    rows = (num_blocks, 5 * block_tokens)
    whole = np.concatenate((np.tile(head, (num_blocks, 1)), columns.reshape(rows)), axis=1)
    kept = np.concatenate((np.ones((num_blocks, len(head)), bool), needed.reshape(rows)), axis=1)
    return whole[kept].tobytes(), np.cumsum(kept.sum(axis=1)).tolist()


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a video or a sound in a prompt: vLLM's identifier, and the tokens that stand for it."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class BlockExtras:
    """The parts of block names besides tokens: the request's ``cache_salt``, its LoRA and where that is, its media."""

    salt: str = ""
    lora: str = ""
    lora_path: str = ""
    media: tuple[Media, ...] = ()

    def hashes(
        self, root: BlockHash, tokens: Tokens, block_tokens: int, algorithm: str, chain: ChainFunction = chain_hashes
    ) -> list[BlockHash]:
        """Return the names of the full blocks of ``tokens``: those of vLLM (seen with 0.32) by its algorithm.

        By others, salt and LoRA change the root, and a medium's identifier replaces the tokens that stand for it.
        """
        if not (self.salt or self.lora or self.media):
            return chain(root, tokens, block_tokens, algorithm)
        if algorithm == VLLM_SHA256_CBOR:
            num_blocks = len(tokens) // block_tokens
            keys = [self._vllm_keys(number * block_tokens, block_tokens) for number in range(num_blocks)]
            return vllm_chain_hashes(root, tokens, block_tokens, keys)
        if self.media:
            tokens = tokens.copy()
        for each in self.media:
            place = tokens[each.offset : each.offset + each.length]
            place[:] = np.resize(np.frombuffer(_digest(b"medium", b"", each.identifier.encode()), "<u4"), len(place))
        fields = root, self.salt.encode(), self.lora.encode(), self.lora_path.encode()
        return chain(BlockHash(_digest(b"extras", b"", *fields)), tokens, block_tokens, algorithm)

    def _vllm_keys(self, start: int, block_tokens: int) -> CborValue:
        keys: list[CborValue] = [("lora", self.lora, self.lora_path)] if self.lora else []
        end = start + block_tokens
        inside = [each for each in self.media if each.offset < end and each.offset + each.length > start]
        keys += [("mm", each.identifier, each.offset - start) for each in inside]
        if self.salt and not start:
            keys.append(("cache_salt", self.salt))
        return tuple(keys) or None


NO_EXTRAS = BlockExtras()


def vllm_event_hash(block_hash: BlockHash) -> int:
    """Return the 64-bit number that names a block in vLLM's KV events, unless configured to carry all bytes."""
    return int.from_bytes(block_hash[-8:], "big")
