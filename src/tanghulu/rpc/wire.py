"""Bodies of fast-lane frames: messages to bytes and back, in MessagePack.

Faults in bytes from a peer always raise InvalidRequest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Annotated, Any, SupportsIndex, TypeAlias, TypeVar

import msgspec

from tanghulu.errors import InvalidRequest, TanghuluError, error_from_code

U32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
#: MessagePack has no larger integers.
U64: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class FastMessage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message of the fast lane: its fields in order, as a MessagePack array.

    A peer with more fields sends a longer array, and what follows the known fields is ignored; one with fewer sends a
    shorter array, and missing fields have their defaults. So a field is added at the end with a default, and never
    removed or given another meaning; everything else needs a new version of the protocol
    (see ``methods``). Messages hold no reference cycles (``gc=False``).
    """

    def validate(self) -> None:
        """Raise InvalidRequest for faults that the fields' types cannot express. Called on received messages."""


_MAX_TEXT = (1 << 16) - 1


class Failure(FastMessage, frozen=True, tag=1):
    """A typed error: of a call, or of one item of a call whose other items may have succeeded."""

    code: str
    message: str

    @classmethod
    def of(cls, error: TanghuluError) -> Failure:
        """Convert ``error`` to a message."""
        return cls(error.code, error.message[:_MAX_TEXT])

    @property
    def error(self) -> TanghuluError:
        """Return the typed error."""
        return error_from_code(self.code, self.message)


Body: TypeAlias = FastMessage | bytes
B = TypeVar("B", bound=Body)


def _as_plain(value: Any) -> Any:
    """Convert a caller's numpy scalar, subclass or view of a dictionary to a plain number, text or list."""
    if isinstance(value, SupportsIndex):
        return operator.index(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Collection):
        return list(value)
    raise TypeError(f"{value!r} cannot be part of a message")


_to_bytes = msgspec.msgpack.Encoder(enc_hook=_as_plain).encode


def encode(message: Body) -> bytes:
    """Encode ``message``."""
    return message if isinstance(message, bytes) else _to_bytes(message)


def _as_it_is(body: bytes) -> bytes:
    return body


_parsers: dict[type[Any], Callable[[bytes], Any]] = {bytes: _as_it_is}


def parser_of(kind: type[B]) -> Callable[[bytes], B]:
    """Return a parser of messages of ``kind``; it raises InvalidRequest for invalid bytes."""
    parser = _parsers.get(kind)
    if parser is None:
        parser = _parsers[kind] = _new_parser(kind)
    return parser


def _new_parser(kind: type[Any]) -> Callable[[bytes], Any]:
    from_bytes = msgspec.msgpack.Decoder(kind).decode
    must_validate = kind.validate is not FastMessage.validate
    shorter = kind.__bases__[0]

    def parse(body: bytes) -> Any:
        try:
            message = from_bytes(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if shorter is not FastMessage:
                parser_of(shorter)(body)  # its beginning identifies another version of the protocol
            raise InvalidRequest(f"received bytes are not a valid {kind.__name__}: {error}") from None
        if must_validate:
            message.validate()
        return message

    return parse
