"""The tree of typed errors: failures caused by the outside world. Programming errors assert instead.

Every error has a stable ``code``; it travels by that code in both carriers and is mapped to gRPC statuses, HTTP
statuses and exit codes by the outermost layers alone (``rpc``, the conductor's HTTP app, ``cli``). A message states
what was requested, what exists, and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class TanghuluError(Exception):
    """Root of all typed errors. ``retryable``: the same call may succeed later unchanged."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    @property
    def message(self) -> str:
        """The text without the class name."""
        return str(self.args[0]) if self.args else self.code


class ChunkNotFound(TanghuluError):
    """No live node holds the key."""

    code = "CHUNK_NOT_FOUND"


class NodeUnavailable(TanghuluError):
    """A store node or a worker cannot be reached, or disconnected during the call."""

    code = "NODE_UNAVAILABLE"
    retryable = True


class PeerSilent(NodeUnavailable):
    """The host of a store node or a worker does not answer at all: it is down, or the network drops what is sent.

    Raised to the direct caller only; others receive NodeUnavailable.
    """


class VersionMismatch(NodeUnavailable):
    """The peer speaks another version of a protocol; the message names both versions."""

    code = "VERSION_MISMATCH"
    retryable = False


class MasterUnavailable(TanghuluError):
    """No master answered before the deadline."""

    code = "MASTER_UNAVAILABLE"
    retryable = True


class NotLeader(MasterUnavailable):
    """The request reached a master that does not lead; ``leader`` is the one to use instead, "" if it knows none."""

    code = "NOT_LEADER"

    @classmethod
    def naming(cls, leader: str) -> NotLeader:
        """Return the error that redirects a caller to ``leader``."""
        return cls(f"this master does not lead; the leader is {leader}" if leader else _NO_LEADER)

    @property
    def leader(self) -> str:
        """``host:port`` of the leader as far as the answering master knows."""
        _, found, leader = self.message.rpartition("the leader is ")
        return leader if found else ""


_NO_LEADER = "this master does not lead, and no leader is elected yet; try again in a moment"


class KeysMoved(MasterUnavailable):
    """The request named keys that this master does not all own; no part of the call was executed."""

    code = "MOVED"

    @classmethod
    def known_in(cls, version: int) -> KeysMoved:
        """Return the error of a master that has the map of the masters up to ``version``."""
        return cls(f"this master does not own all keys of the call; ask for the map of the masters, version {version}")

    @property
    def version(self) -> int:
        """The version up to which the answering master has the map; 0 if it did not report one."""
        _, found, version = self.message.rpartition("version ")
        return int(version) if found and version.isdecimal() else 0


class DirectoryIncomplete(TanghuluError):
    """The master cannot decide yet whether the key exists: it is rebuilding, or a returned node has yet to report."""

    code = "DIRECTORY_INCOMPLETE"
    retryable = True


class StoreFull(TanghuluError):
    """No eviction could make room for the value before the deadline."""

    code = "STORE_FULL"
    retryable = True


class QuotaExceeded(StoreFull):
    """The tenant's quota is used up by chunks being written, read or hard-pinned."""

    code = "QUOTA_EXCEEDED"
    retryable = True


class ChecksumMismatch(TanghuluError):
    """The received bytes differ from those that were put."""

    code = "CHECKSUM_MISMATCH"


class LeaseExpired(TanghuluError):
    """The reservation or pin that a transfer relied on has expired; reserve or pin again."""

    code = "LEASE_EXPIRED"
    retryable = True


class TransferFailed(TanghuluError):
    """A transfer request failed on every path that it could try."""

    code = "TRANSFER_FAILED"
    retryable = True


class InvalidRequest(TanghuluError):
    """The request is malformed or out of bounds and will fail again. ``param`` names the field at fault, if known."""

    code = "INVALID_REQUEST"
    param: str | None = None


class NodeNotFound(InvalidRequest):
    """No store node has the given id."""

    code = "NODE_NOT_FOUND"


class Conflict(InvalidRequest):
    """The current state forbids the request; the message states what has to change first."""

    code = "CONFLICT"


class Unauthorized(TanghuluError):
    """The caller is not authenticated: no token, an unknown one, or one of another tenant."""

    code = "UNAUTHORIZED"


class Forbidden(Unauthorized):
    """The caller is authenticated, but its token does not grant this right."""

    code = "FORBIDDEN"


class DeadlineExceeded(TanghuluError):
    """The call did not end before its deadline."""

    code = "DEADLINE_EXCEEDED"
    retryable = True


class Overloaded(TanghuluError):
    """A bounded queue is full, or no worker can take the request now."""

    code = "OVERLOADED"
    retryable = True


class RequestKillsWorkers(TanghuluError):
    """Successive workers died while running the request; sending it again would cost another one."""

    code = "REQUEST_KILLS_WORKERS"


class ModelNotFound(TanghuluError):
    """No worker serves the requested model."""

    code = "MODEL_NOT_FOUND"


class ModelUnsupported(TanghuluError):
    """The model's files name an architecture, a tensor or a format that the worker cannot run."""

    code = "MODEL_UNSUPPORTED"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit into the model's context."""

    code = "CONTEXT_LENGTH_EXCEEDED"


class ConfigError(TanghuluError):
    """A flag, variable or TOML key is unknown or has a bad value; the process refuses to start."""

    code = "CONFIG_ERROR"


def _tree(root: type[TanghuluError]) -> list[type[TanghuluError]]:
    return [root] + [leaf for child in root.__subclasses__() for leaf in _tree(child)]


_BY_CODE = {cls.code: cls for cls in reversed(_tree(TanghuluError))}


def error_from_code(code: str, message: str) -> TanghuluError:
    """Return the typed error that a peer reported by ``code``; unknown codes of newer peers become TanghuluError."""
    return _BY_CODE.get(code, TanghuluError)(message)
