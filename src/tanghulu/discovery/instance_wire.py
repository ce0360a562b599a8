"""An Instance as it travels between processes and as etcd keeps it: texts, checked when they are read."""

from __future__ import annotations

import msgspec

from tanghulu.discovery.base import Instance, validate
from tanghulu.errors import InvalidRequest
from tanghulu.protos import common_pb2
from tanghulu.rpc.wire import U64, FastMessage, encode, parser_of
from tanghulu.types import Address, InstanceId, Place, Role

_ROLES = {role.value: role for role in Role}


def role_of(component: str) -> Role:
    """The role that registers as ``component``; raises InvalidRequest."""
    role = _ROLES.get(component)
    if role is None:
        raise InvalidRequest(f"component {component!r} is none of {', '.join(sorted(_ROLES))}")
    return role


class InstanceEntry(FastMessage, frozen=True):
    """An instance in messages. ``component`` is a role's value; a peer of a newer version may have another."""

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
        """``instance`` as it travels."""
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
        """The instance; raises InvalidRequest that names a field that is malformed or too long."""
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
    """``instance`` as etcd keeps it."""
    return encode(InstanceEntry.of(instance))


def instance_from_bytes(value: bytes) -> Instance:
    """The instance in a value of etcd; raises InvalidRequest."""
    return parser_of(InstanceEntry)(value).instance()


def instance_to_proto(instance: Instance) -> common_pb2.Instance:
    """The message that carries ``instance``."""
    return common_pb2.Instance(
        id=instance.id,
        namespace=instance.namespace,
        component=instance.role.value,
        address=str(instance.address),
        metrics_address=instance.metrics_address,
        place=str(instance.place),
        generation=instance.generation,
        unix_path=instance.unix_path,
        attributes=instance.attributes,
    )
