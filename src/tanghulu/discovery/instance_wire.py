"""An Instance as sent between processes and stored in etcd: texts, checked when they are read."""

from __future__ import annotations

import msgspec

from tanghulu.discovery.base import Instance, validate
from tanghulu.errors import InvalidRequest
from tanghulu.rpc.wire import U64, FastMessage, encode, parser_of
from tanghulu.types import Address, InstanceId, Place, Role

_ROLES = {role.value: role for role in Role}


def role_of(component: str) -> Role:
    """Return the role that registers as ``component``; raises InvalidRequest."""
    role = _ROLES.get(component)
    if role is None:
        raise InvalidRequest(f"component {component!r} is unknown; known: {', '.join(sorted(_ROLES))}")
    return role


class InstanceEntry(FastMessage, frozen=True):
    """An instance in messages. ``component`` is a role's value; a peer of a newer version may send another."""

    id: str
    component: str
    address: str
    namespace: str = "default"
    metrics_address: str = ""
    place: str = ""
    generation: U64 = 0
    unix_path: str = ""
    attributes: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, instance: Instance) -> InstanceEntry:
        """Convert ``instance`` to an entry."""
        return cls(
            instance.id,
            instance.role.value,
            str(instance.address),
            instance.namespace,
            instance.metrics_address,
            str(instance.place),
            instance.generation,
            instance.unix_path,
            instance.attributes,
        )

    def instance(self) -> Instance:
        """Return the instance; raises InvalidRequest naming a malformed or too long field."""
        return validate(
            Instance(
                id=InstanceId(self.id),
                role=role_of(self.component),
                address=Address.parse(self.address),
                namespace=self.namespace or "default",
                metrics_address=self.metrics_address,
                place=Place.parse(self.place) if self.place else Place(),
                generation=self.generation,
                unix_path=self.unix_path,
                attributes=self.attributes,
            )
        )


def instance_to_bytes(instance: Instance) -> bytes:
    """Encode ``instance`` for etcd."""
    return encode(InstanceEntry.of(instance))


def instance_from_bytes(value: bytes) -> Instance:
    """Decode the instance in a value of etcd; raises InvalidRequest."""
    return parser_of(InstanceEntry)(value).instance()
