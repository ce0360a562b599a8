"""The version of the fast lane's protocol. HELLO carries the caller's, the answer the server's; both must be equal.

Within a version messages only grow, at their end (see ``wire.FastMessage``). docs/design/0019 says how ranges of
versions return with the second release.
"""

from __future__ import annotations

from tanghulu.errors import VersionMismatch

#: Of the fast lane, of a worker's sessions, and of conductors among each other.
PROTOCOL_VERSION = 1


def require_version(version: int, peer: str) -> None:
    """Raise VersionMismatch unless ``peer``, which named ``version`` in its HELLO or its answer, speaks this one."""
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"{peer} speaks version {version} of the protocol, this process version {PROTOCOL_VERSION}; "
            "upgrade the older one"
        )
