"""The methods of the routing service, as both of its APIs have them: HTTP's bodies and gRPC's messages name their
fields alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from tanghulu.conductor.engines.events import hashes_of
from tanghulu.conductor.index.hash_cache import HashCache
from tanghulu.conductor.inference.schema import RoutingFields
from tanghulu.conductor.routing.overrides import RoutingOverrides
from tanghulu.conductor.routing_service.service import Best, PotentialLoad, RoutingClient, RoutingQuery, RoutingService
from tanghulu.errors import InvalidRequest
from tanghulu.hashing import NO_EXTRAS, BlockExtras, Media, Tokens, as_tokens
from tanghulu.runtime.clock import Clock
from tanghulu.session.load import WorkerLoad
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash, InstanceId, Place, Role
from tanghulu.web.errors import from_validation

MAX_HASH_BYTES: Final = 32
#: Images and other media in one prompt.
MAX_MEDIA: Final = 256
#: The figures of a worker's load that the service takes.
LOADS: Final = (
    *("num_running", "num_waiting", "blocks_total", "blocks_free", "prefill_tokens_waiting"),
    *("prefill_tokens_per_s", "decode_step_s", "store_bytes_per_s"),
)


@dataclass(eq=False)
class Hasher:
    """Hashes tokens to block hashes. ``root`` is the root of the engine's hash chain."""

    root: BlockHash
    block_tokens: int
    algorithm: str

    def __post_init__(self) -> None:
        self._cache = HashCache()

    def hashes(self, tokens: Tokens, extras: BlockExtras = NO_EXTRAS) -> list[BlockHash]:
        return extras.hashes(self.root, tokens, self.block_tokens, self.algorithm, self._cache.chain)


class RouterApi:
    """The methods on ``service``. All raise InvalidRequest for wrong fields and unknown workers."""

    def __init__(self, service: RoutingService, hasher: Hasher, clock: Clock) -> None:
        self.service, self._hasher, self._clock = service, hasher, clock

    def put_worker(self, message: Any, _: RoutingClient) -> None:
        """Register a worker."""
        try:
            role = Role(message.role or Role.BOTH.value)
        except ValueError:
            raise InvalidRequest(f"role {message.role!r} is unknown; use prefill, decode or worker") from None
        place = Place.parse(message.place) if message.place else Place()
        self.service.put_worker(InstanceId(message.worker), role, place, message.url)

    def remove_worker(self, message: Any, _: RoutingClient) -> None:
        """Remove a worker."""
        self.service.remove_worker(InstanceId(message.worker))

    def report_load(self, message: Any, _: RoutingClient) -> None:
        """Record a worker's own load figures."""
        self.service.report(InstanceId(message.worker), WorkerLoad(**{name: getattr(message, name) for name in LOADS}))

    def publish_events(self, message: Any, _: RoutingClient) -> None:
        """Apply changes of a worker's cache."""
        change = KvChange(_hashes(message.stored), _hashes(message.removed), message.cleared)
        self.service.kv_event(InstanceId(message.worker), change)

    def best_worker(self, message: Any, caller: RoutingClient) -> Best:
        """Return the best workers for a request; request_id adds it there, explain returns all candidates."""
        query = self._query(message, caller)
        return self.service.best(query, self._clock.now_s(), message.request_id, message.explain)

    def add_request(self, message: Any, caller: RoutingClient) -> None:
        """Add a request already routed by the gateway: prefill_worker and possibly decode_worker are named."""
        if not message.request_id:
            raise InvalidRequest("request_id is missing: an added request needs one")
        prefill = InstanceId(message.prefill_worker)
        decode = InstanceId(message.decode_worker or prefill)
        query, now_s = self._query(message, caller), self._clock.now_s()
        self.service.add_request(message.request_id, query, prefill, decode, now_s)

    def prefill_completed(self, message: Any, caller: RoutingClient) -> None:
        """Record the first token of a request."""
        name = message.request_id
        if not self.service.prefill_completed(name, self._clock.now_s(), caller):
            raise InvalidRequest(f"request {name!r} is not in progress; it has ended, or was never added")

    def free(self, message: Any, caller: RoutingClient) -> dict[str, bool]:
        """Record the end of a request."""
        return {"freed": self.service.free(message.request_id, caller)}

    def overlaps(self, message: Any, caller: RoutingClient) -> dict[InstanceId, int]:
        """Return the number of leading blocks each worker has or is computing."""
        return self.service.overlaps(self._query(message, caller).hashes, self._clock.now_s())

    def potential_loads(self, message: Any, caller: RoutingClient) -> list[PotentialLoad]:
        """Return the load each worker would have with the request."""
        return self.service.potential_loads(self._query(message, caller), self._clock.now_s())

    def query(
        self,
        tokens: Tokens,
        overrides: RoutingOverrides,
        session: str,
        caller: RoutingClient,
        extras: BlockExtras = NO_EXTRAS,
    ) -> RoutingQuery:
        """Return the query of ``caller`` for a prompt of ``tokens``."""
        names = caller.blocks(self._hasher.hashes(tokens, extras))
        return RoutingQuery(names, len(tokens), overrides, session, caller)

    def _query(self, message: Any, caller: RoutingClient) -> RoutingQuery:
        """Return the query of a message with either hashes or tokens."""
        overrides = overrides_of(
            {
                "policy": message.policy or None,
                "weights": dict(message.weights),
                "prefill_worker": message.prefill_worker,
                "decode_worker": message.decode_worker,
            }
        )
        hashes = _hashes(message.block_hashes)
        if not message.tokens:
            return RoutingQuery(caller.blocks(hashes), message.num_tokens, overrides, message.session, caller)
        if hashes:
            raise InvalidRequest("give either block_hashes or tokens, not both")
        if len(message.media) > MAX_MEDIA:
            raise InvalidRequest(f"the prompt has {len(message.media)} items of media; the limit is {MAX_MEDIA}")
        media = tuple(Media(each.identifier, each.offset, each.length) for each in message.media)
        extras = BlockExtras(message.cache_salt, message.lora, message.lora_path, media)
        return self.query(as_tokens(message.tokens), overrides, message.session, caller, extras)


def overrides_of(fields: Any, where: str = "") -> RoutingOverrides:
    """Return the overrides in ``fields``, named as in ``routing`` of a conductor's bodies; ``where`` is for errors."""
    try:
        return RoutingFields.model_validate(fields).overrides()
    except ValidationError as error:
        raise InvalidRequest(where + from_validation(error).message) from None


def _hashes(values: Iterable[bytes | str | int]) -> tuple[BlockHash, ...]:
    """Return the block hashes of a message: bytes, hex, or 64-bit numbers, signed or not."""
    try:
        hashes = hashes_of(bytes.fromhex(value) if isinstance(value, str) else value for value in values)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"a block hash is neither hex nor a number of 64 bits: {error}") from None
    if any(not 0 < len(h) <= MAX_HASH_BYTES for h in hashes):
        raise InvalidRequest(f"a block hash must have 1 to {MAX_HASH_BYTES} bytes")
    return hashes
