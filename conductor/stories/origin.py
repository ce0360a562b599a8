"""Origin of a request: its ids in other systems, and its time of arrival.

A trace is W3C's (https://www.w3.org/TR/trace-context/): the client's, where its ``traceparent`` is well formed, else a
new one. Example: ``00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01`` comes in; requests to workers carry the
same trace id and flags, and an id of our own in place of ``b7ad6b7169203331``, which is now the parent.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct, structs

SAMPLED: Final = 1
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


class Trace(Struct, frozen=True):
    """A request's place in a trace. ``span_id`` is its own; ``parent_id`` the caller's, "" if the trace is ours."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    flags: int = SAMPLED

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def header(self) -> str:
        """The ``traceparent`` for outgoing calls, also used as the ``traceresponse`` of the answer."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


class Origin(Struct, frozen=True):
    """The client's id of the request, its trace, and the process's monotonic times of its header and its body."""

    x_request_id: str
    trace: Trace
    began_s: float
    received_s: float

    def beside(self) -> Origin:
        """Return the origin of another sequence of the same request, with its own span id."""
        return structs.replace(self, trace=structs.replace(self.trace, span_id=new_span_id()))


def sender_of(authorization: str, host: str) -> str:
    """Return the sender of a request: its credential in hashed form, or its address if it has none. No key is kept."""
    if authorization:
        return "key " + hashlib.blake2b(authorization.encode(), digest_size=8).hexdigest()
    return f"address {host}" if host else ""


def trace_of(given: Sequence[str]) -> Trace:
    """Continue the trace of a request's ``traceparent`` headers; begin one unless there is exactly one valid header."""
    found = _FORM.fullmatch(given[0]) if len(given) == 1 else None
    if found is not None:
        version, trace_id, parent_id, flags, more = found.groups()
        is_known = version != "ff" and (version != "00" or more is None)
        if is_known and trace_id != _NO_TRACE and parent_id != _NO_SPAN:
            return Trace(trace_id, new_span_id(), parent_id, int(flags, 16) & SAMPLED)
    return Trace(f"{random.getrandbits(128) or 1:032x}", new_span_id())


def new_span_id() -> str:
    """Create the id of a span."""
    return f"{random.getrandbits(64) or 1:016x}"
