"""Protobuf at the edge: which messages belong to a fast-lane method, and errors to Status and back."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from tanghulu.errors import InvalidRequest, TanghuluError, error_from_code
from tanghulu.protos import common_pb2

M = TypeVar("M", bound=Message)


def decode(message_type: type[M], body: bytes) -> M:
    """Parse ``body``; raises InvalidRequest instead of protobuf's own error."""
    try:
        return message_type.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"bytes are not a {message_type.__name__}: {error}") from None


def status_of(error: TanghuluError) -> common_pb2.Status:
    """The Status that carries ``error`` to a peer."""
    return common_pb2.Status(code=error.code, message=error.message)


def error_of(status: common_pb2.Status) -> TanghuluError | None:
    """The typed error in ``status``; None if it says success."""
    return error_from_code(status.code, status.message) if status.code else None


def raise_for(status: common_pb2.Status) -> None:
    """Raise the typed error in ``status``, if there is one."""
    if status.code:
        raise error_from_code(status.code, status.message)
