"""A method of the fast lane: one row of a table (``store.protocol.methods``) read by everything else.

The row registers the method's handler, names it in metrics, and states the right that a token needs for it and the
location of keys in its messages; the same rules guard gRPC methods. To add a method, add a row.

HELLO carries the caller's version of the protocol, its answer the server's; both must be equal. Within a version
messages only grow, at their end (see ``wire.FastMessage``). docs/design/0019 explains how ranges of versions return
with the second release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from tanghulu.auth.tenants import Identity, Right, is_kv
from tanghulu.errors import VersionMismatch
from tanghulu.rpc.fast_client import Call
from tanghulu.rpc.wire import U32, Body, FastMessage

#: Version of the fast lane, of a worker's sessions, and of messages between conductors.
PROTOCOL_VERSION = 1


def require_version(version: int, peer: str) -> None:
    """Raise VersionMismatch unless ``peer``, which sent ``version`` in its HELLO or its answer, has this one."""
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"{peer} speaks version {version} of the protocol, this process version {PROTOCOL_VERSION}; "
            "upgrade the older one"
        )


Q = TypeVar("Q", bound=Body)
A = TypeVar("A", bound=Body)
Scoping: TypeAlias = Callable[[Identity, Any], Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """The authorization of a method. ``right`` None admits any authenticated caller; it may depend on the request.

    ``written`` names the keys of a request that it stores or removes: KV among them needs the right ``kv``, too.
    ``scope`` returns the request in the store's names, ``unscope`` the answer (of a stream: each message) in the
    tenant's. ``unscope`` is for handlers that answer at once.
    """

    name: str
    right: Right | Callable[[Any], Right | None] | None
    scope: Scoping | None = None
    unscope: Scoping | None = None
    written: Callable[[Any], Iterable[str]] | None = None

    def admit(self, identity: Identity, request: Any) -> Any:
        """Return the request, scoped; raises Forbidden."""
        right = self.right(request) if callable(self.right) else self.right
        if right is not None:
            identity.require(right, self.name)
        if self.written is not None and not identity.may(Right.KV) and any(map(is_kv, self.written(request))):
            identity.require(Right.KV, f"{self.name} of KV")
        return request if self.scope is None or not identity.tenant else self.scope(identity, request)

    def answer(self, identity: Identity, answer: Any) -> Any:
        """Return the answer in the tenant's names."""
        return answer if self.unscope is None or not identity.tenant else self.unscope(identity, answer)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, A]):
    """One method. ``name`` is its label in metrics; ``reply`` bytes: the answer is not parsed, or there is none.

    ``rule`` None closes it if tokens are required, except HELLO, which presents them.
    """

    number: int
    name: str
    request: type[Q]
    reply: type[A]
    rule: Rule | None = None

    def call(self, request: Q, attachment: Sequence[bytes | bytearray | memoryview] = ()) -> Call[A]:
        """Return a call of this method."""
        return Call(self.number, request, self.reply, attachment)


class HelloRequest(FastMessage, frozen=True):
    """The caller's version of the protocol and its credentials: the beginning of every HELLO, in every version."""

    protocol_version: U32
    tenant: str = ""
    token: str = ""

    def validate(self) -> None:
        """Raise VersionMismatch for a caller of another version."""
        require_version(self.protocol_version, "the caller")


class HelloReply(FastMessage, frozen=True):
    """The server's version: the beginning of every answer to HELLO, in every version."""

    protocol_version: U32


#: The first call of a connection. Services that open a session use longer messages that begin with these fields (see
#: ``transfer_engine.core.segment``).
HELLO = Method(1, "hello", HelloRequest, HelloReply)


class EndRequest(FastMessage, frozen=True):
    """Request that a process end in order, as by SIGTERM."""


class EndReply(FastMessage, frozen=True):
    """``num_requests`` are in progress; those unfinished after ``grace_s`` are moved, or fail if they cannot be."""

    num_requests: U32 = 0
    grace_s: float = 0.0


#: Answered by conductors and workers, at once.
END = Method(55, "end", EndRequest, EndReply, Rule("drain", Right.ADMIN))


def writing(name: str, *fields: str) -> Rule:
    """Return the rule of a method that stores or removes the keys in these fields of its request."""
    paths = [field.split(".") for field in fields]

    def written(request: Any) -> Iterator[str]:
        for path in paths:
            yield from _texts(request, path)

    return Rule(name, Right.WRITE, scope_keys(*fields), written=written)


def _texts(value: Any, path: Sequence[str]) -> Iterator[str]:
    """Yield the strings at ``path``."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, FastMessage):
        yield from _texts(getattr(value, path[0]), path[1:])
    else:
        for each in value:
            yield from _texts(each, path)


def scope_keys(*fields: str) -> Scoping:
    """Return a function that adds the tenant's scope to the keys in these fields of a request.

    A field is named by its path: ``keys`` is a list of keys, ``item.key`` a key inside the message ``item``, and
    ``items.key`` one in each message of the list ``items``.
    """
    paths = [field.split(".") for field in fields]

    def scope(identity: Identity, request: Any) -> Any:
        for path in paths:
            request = _changed(request, path, identity.scoped)
        return request

    return scope


def _changed(value: Any, path: Sequence[str], change: Callable[[str], str]) -> Any:
    """Return ``value`` with ``change`` applied to what is at ``path``."""
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, FastMessage):
        return [_changed(each, path, change) for each in value]
    name, *rest = path
    return msgspec.structs.replace(value, **{name: _changed(getattr(value, name), rest, change)})
