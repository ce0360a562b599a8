"""The version of the fast lane's protocol. HELLO carries the caller's, the answer the server's; both must be equal.

Within a version messages only grow, at their end (see ``wire.FastMessage``). docs/design/0019 explains how ranges of
versions return with the second release.
"""

from __future__ import annotations

from tanghulu.errors import VersionMismatch

#: Version of the fast lane, of a worker's sessions, and of messages between conductors.
PROTOCOL_VERSION = 1


def require_version(version: int, peer: str) -> None:
    """Raise VersionMismatch unless ``peer``, which sent ``version`` in its HELLO or its answer, has this one."""
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"{peer} speaks version {version} of the protocol, this process version {PROTOCOL_VERSION}; "
            "upgrade the older one"
        )
