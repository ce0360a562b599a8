"""Conversions that both APIs of the routing service, HTTP and gRPC, share: hashes, tokens, roles, places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tanghulu.conductor.index.hash_cache import HashCache
from tanghulu.conductor.routing.overrides import WEIGHTS, RoutingOverrides
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES
from tanghulu.conductor.routing_service.service import RoutingClient, RoutingQuery
from tanghulu.errors import InvalidRequest
from tanghulu.hashing import Tokens
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


def checked_hashes(values: Iterable[bytes]) -> list[BlockHash]:
    """The block hashes of a message; raises InvalidRequest for an empty or an overlong one."""
    hashes = [BlockHash(value) for value in values]
    if any(not 0 < len(h) <= MAX_HASH_BYTES for h in hashes):
        raise InvalidRequest(f"a block hash has 1 to {MAX_HASH_BYTES} bytes")
    return hashes


def query_of(
    hasher: Hasher,
    hashes: Sequence[BlockHash],
    tokens: Tokens | None,
    num_tokens: int,
    overrides: RoutingOverrides,
    session: str,
    caller: RoutingClient,
) -> RoutingQuery:
    """A query of ``caller`` with either hashes or tokens. Raises InvalidRequest for both."""
    if tokens is None or not len(tokens):
        return RoutingQuery(caller.blocks(hashes), num_tokens, overrides, session)
    if hashes:
        raise InvalidRequest("give either block hashes or tokens")
    return RoutingQuery(caller.blocks(hasher.hashes(tokens)), len(tokens), overrides, session)


def overrides_of(policy: str, weights: Mapping[str, float], prefill: str, decode: str) -> RoutingOverrides:
    """The overrides of a request. Raises InvalidRequest for an unknown policy or weight."""
    if policy and policy not in POLICY_NAMES:
        raise InvalidRequest(f"policy {policy!r} is unknown; there is {', '.join(POLICY_NAMES)}")
    for name, value in weights.items():
        if name not in WEIGHTS:
            raise InvalidRequest(f"weight {name!r} is unknown; there is {', '.join(WEIGHTS)}")
        if not 0 <= value < float("inf"):
            raise InvalidRequest(f"weight {name!r} is {value}; it must be at least 0")
    return RoutingOverrides(policy, InstanceId(prefill), InstanceId(decode), tuple(sorted(weights.items())))


def role_of(name: str) -> Role:
    """The role of that name. Raises InvalidRequest."""
    try:
        return Role(name or Role.BOTH.value)
    except ValueError:
        raise InvalidRequest(f"role {name!r} is none of prefill, decode, worker") from None


def place_of(text: str) -> Place:
    """``zone/rack/host``, or the default place for "". Raises InvalidRequest."""
    return Place.parse(text) if text else Place()
