"""The Discovery interface: processes register instances under leases; others watch them appear and disappear.

One contract suite (tests/discovery/test_contract.py) runs against every implementation: the master (the default), etcd,
a file. An implementation only stores and reports; it does not decide the use of an instance.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import Protocol, Self

from tanghulu.errors import Conflict, InvalidRequest
from tanghulu.types import Address, InstanceId, Place, Role

DEFAULT_TTL_S = 3.0
MAX_FIELD_BYTES = 256
MAX_ATTRIBUTES_BYTES = 4096
WAIT_FOR_LEASE = "choose another id, or wait until its lease has ended"
_BARE_BYTES = 512
#: Attribute of a store node that registers for the first time with nothing to report. Later it may have chunks.
HOLDS_NOTHING = "holds_nothing"
#: Attribute of a worker that neither exports nor imports KV: prefill and answer happen in the same worker.
WHOLE_REQUESTS = "whole_requests"


@dataclass(frozen=True, slots=True)
class Instance:
    """One process as others see it. ``generation`` differs between a process and its restarted successor.

    ``metrics_address`` is host:port, or "" if there are no metrics.
    """

    id: InstanceId
    role: Role
    address: Address
    namespace: str = "default"
    metrics_address: str = ""
    place: Place = field(default_factory=Place)
    generation: int = 0
    unix_path: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Approximate memory used by the instance."""
        texts = (self.id, self.namespace, self.metrics_address, self.unix_path, *chain(*self.attributes.items()))
        return _BARE_BYTES + sum(map(len, texts))

    @property
    def holds_nothing(self) -> bool:
        """Whether this is the first registration of a node that has nothing to report."""
        return HOLDS_NOTHING in self.attributes

    def again(self) -> Instance:
        """Return the instance for a repeated registration, perhaps because the first reply was lost."""
        if not self.holds_nothing:
            return self
        return replace(self, attributes={name: each for name, each in self.attributes.items() if name != HOLDS_NOTHING})


def validate(instance: Instance) -> Instance:
    """Return ``instance`` if it is within bounds; else raise InvalidRequest naming the field."""
    for name in ("id", "namespace", "metrics_address", "unix_path"):
        _require_bytes(name, getattr(instance, name), MAX_FIELD_BYTES)
    _require_bytes("address", str(instance.address), MAX_FIELD_BYTES)
    _require_bytes("place", str(instance.place), MAX_FIELD_BYTES)
    _require_bytes("attributes", "".join(chain(*instance.attributes.items())), MAX_ATTRIBUTES_BYTES)
    if instance.metrics_address:
        try:
            Address.parse(instance.metrics_address)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"metrics_address of {instance.id!r}: {error.message}; give host:port, without scheme or path"
            ) from None
    return instance


def _require_bytes(name: str, value: str, most: int) -> None:
    num_bytes = len(value.encode())
    if num_bytes > most:
        raise InvalidRequest(f"{name} of an instance has {num_bytes} bytes; at most {most} are allowed")


def require_same_role(known: Instance, instance: Instance) -> None:
    """Raise Conflict if ``instance`` has another role than ``known``, which has the same id and is alive."""
    if known.role is not instance.role:
        raise Conflict(
            f"instance {instance.id!r} is a {known.role.value} and cannot register as a {instance.role.value}; "
            f"{WAIT_FOR_LEASE}"
        )


class EventKind(Enum):
    """The kinds of changes of an instance."""

    PUT = "put"  # it is new or has other contents
    DELETE = "delete"  # it unregistered, or its lease expired
    SYNCED = "synced"  # all instances present at the start of the watch were sent


@dataclass(frozen=True, slots=True)
class InstanceEvent:
    """One change; ``instance`` is None with SYNCED."""

    kind: EventKind
    instance: Instance | None = None


class Registration(Protocol):
    """An instance kept registered by renewing its lease, until it is closed or this process dies."""

    async def update(self, instance: Instance) -> None:
        """Replace the registered contents (same id)."""
        ...

    async def close(self) -> None:
        """Unregister now; watchers see DELETE at once instead of at the lease's end."""
        ...


class Discovery(Protocol):
    """The registry in which instances are registered and watched. An async context manager."""

    async def look(self) -> None:
        """Return if registration is possible now. Raises MasterUnavailable; NotLeader if only the leader is missing.

        One attempt of a few seconds at most; callers that can wait retry.
        """
        ...

    async def register(self, instance: Instance, ttl_s: float = DEFAULT_TTL_S) -> Registration:
        """Register ``instance``; it vanishes ``ttl_s`` after this process stops renewing. Raises MasterUnavailable.

        Processes call ``entering.enter``, which first calls ``require_role``.
        """
        ...

    async def require_role(self, instance: Instance) -> None:
        """Raise Conflict if a live instance with this id has another role, unless ``register`` does so itself."""
        ...

    def watch(self, *roles: Role, namespace: str = "default") -> AsyncIterator[InstanceEvent]:
        """Yield every live instance (PUT), then SYNCED, then changes. Without roles: all roles.

        An implementation that loses its source reconnects by itself and yields only the differences.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...
