"""Conversions shared by both APIs of the routing service, HTTP and gRPC: hashes, tokens, roles, places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tanghulu.conductor.index.hash_cache import HashCache
from tanghulu.conductor.routing.overrides import WEIGHTS, RoutingOverrides
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES
from tanghulu.conductor.routing_service.service import RoutingClient, RoutingQuery
from tanghulu.errors import InvalidRequest
from tanghulu.hashing import Tokens, as_tokens
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash, InstanceId, Place, Role

MAX_HASH_BYTES = 32


@dataclass(eq=False)
class Hasher:
    """Hashes tokens to block hashes. ``root`` is the root of the engine's hash chain."""

    root: BlockHash
    block_tokens: int
    algorithm: str

    def __post_init__(self) -> None:
        self._cache = HashCache()

    def hashes(self, tokens: Tokens) -> list[BlockHash]:
        return self._cache.chain(self.root, tokens, self.block_tokens, self.algorithm)


def checked_hashes(values: Iterable[bytes | str | int]) -> list[BlockHash]:
    """Return the block hashes of a message: bytes, hex, or 64-bit numbers. Raises InvalidRequest for any other."""
    try:
        hashes = [BlockHash(value if type(value) is bytes else _bytes_of(value)) for value in values]
    except ValueError as error:
        raise InvalidRequest(f"a block hash is not hex: {error}") from None
    if any(not 0 < len(h) <= MAX_HASH_BYTES for h in hashes):
        raise InvalidRequest(f"a block hash has 1 to {MAX_HASH_BYTES} bytes")
    return hashes


def _bytes_of(value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return value.to_bytes(8, "big")
    return bytes.fromhex(value) if isinstance(value, str) else value


def change_of(events: Any) -> KvChange:
    """Return a worker's cache changes from the message ``events`` of either API. Raises InvalidRequest."""
    stored, removed = checked_hashes(events.stored), checked_hashes(events.removed)
    return KvChange(tuple(stored), tuple(removed), events.cleared)


def query_of(hasher: Hasher, question: Any, caller: RoutingClient) -> RoutingQuery:
    """Return the query of ``question``, a message of either API with hashes or tokens. InvalidRequest for both."""
    overrides = overrides_of(question.policy, question.weights, question.prefill_worker, question.decode_worker)
    hashes = checked_hashes(question.block_hashes)
    if not question.tokens:
        return RoutingQuery(caller.blocks(hashes), question.num_tokens, overrides, question.session)
    if hashes:
        raise InvalidRequest("give either block hashes or tokens")
    return query_of_tokens(hasher, as_tokens(question.tokens), overrides, question.session, caller)


def query_of_tokens(
    hasher: Hasher, tokens: Tokens, overrides: RoutingOverrides, session: str, caller: RoutingClient
) -> RoutingQuery:
    """Return the query of ``caller`` for a prompt of ``tokens``."""
    return RoutingQuery(caller.blocks(hasher.hashes(tokens)), len(tokens), overrides, session)


def overrides_of(policy: str, weights: Mapping[str, float], prefill: str, decode: str) -> RoutingOverrides:
    """Return the overrides of a request. Raises InvalidRequest for an unknown policy or weight."""
    if policy and policy not in POLICY_NAMES:
        raise InvalidRequest(f"policy {policy!r} is unknown; there is {', '.join(POLICY_NAMES)}")
    for name, value in weights.items():
        if name not in WEIGHTS:
            raise InvalidRequest(f"weight {name!r} is unknown; there is {', '.join(WEIGHTS)}")
        if not 0 <= value < float("inf"):
            raise InvalidRequest(f"weight {name!r} is {value}; it must be at least 0")
    return RoutingOverrides(policy, InstanceId(prefill), InstanceId(decode), tuple(sorted(weights.items())))


def role_of(name: str) -> Role:
    """Return the role of that name. Raises InvalidRequest."""
    try:
        return Role(name or Role.BOTH.value)
    except ValueError:
        raise InvalidRequest(f"role {name!r} is none of prefill, decode, worker") from None


def place_of(text: str) -> Place:
    """Parse ``zone/rack/host``; "" gives the default place. Raises InvalidRequest."""
    return Place.parse(text) if text else Place()
