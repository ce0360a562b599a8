"""The tree of typed errors: failures that the world causes. A programmer's error asserts instead.

Every error has a stable ``code``; it travels by that code in both carriers and is mapped to gRPC
statuses, HTTP statuses and exit codes by the outermost layers alone (``rpc``, the conductor's HTTP app, ``cli``).
A message says what was asked, what is there, and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class TanghuluError(Exception):
    """Root of all typed errors. ``retryable`` says whether the same call may succeed later unchanged."""

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
    """A store node or a worker cannot be reached, or went away in the middle."""

    code = "NODE_UNAVAILABLE"
    retryable = True


class PeerSilent(NodeUnavailable):
    """The host of a store node or a worker answers nothing at all: it is down, or the way there swallows what is sent.

    For who asked alone; others are told NodeUnavailable.
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
    """A master was asked that does not lead; ``leader`` is the one to ask instead, "" if it knows none."""

    code = "NOT_LEADER"

    @classmethod
    def naming(cls, leader: str) -> NotLeader:
        """The error that sends a caller to ``leader``."""
        return cls(f"this master does not lead; the leader is {leader}" if leader else _NO_LEADER)

    @property
    def leader(self) -> str:
        """``host:port`` of the leader as far as the master that was asked knows."""
        _, found, leader = self.message.rpartition("the leader is ")
        return leader if found else ""


_NO_LEADER = "this master does not lead, and no leader is elected yet; try again in a moment"


class KeysMoved(MasterUnavailable):
    """A master was asked for keys of which it does not own all; nothing of the call was done."""

    code = "MOVED"

    @classmethod
    def known_in(cls, version: int) -> KeysMoved:
        """The error of a master that knows the map of the masters up to ``version``."""
        return cls(f"this master does not own all keys of the call; ask for the map of the masters, version {version}")

    @property
    def version(self) -> int:
        """Up to which version the master that was asked knows the map; 0 if it did not tell."""
        _, found, version = self.message.rpartition("version ")
        return int(version) if found and version.isdecimal() else 0


class DirectoryIncomplete(TanghuluError):
    """The master cannot tell yet whether the key exists: it is rebuilding, or a node that is back has yet to report."""

    code = "DIRECTORY_INCOMPLETE"
    retryable = True


class StoreFull(TanghuluError):
    """No eviction could make room for the value before the deadline."""

    code = "STORE_FULL"
    retryable = True


class QuotaExceeded(StoreFull):
    """The tenant's quota is used up by what is being written, read or pinned hard."""

    code = "QUOTA_EXCEEDED"
    retryable = True


class ChecksumMismatch(TanghuluError):
    """The bytes that arrived are not the bytes that were put."""

    code = "CHECKSUM_MISMATCH"


class LeaseExpired(TanghuluError):
    """The reservation or pin that a transfer stood on is gone; reserve or pin again."""

    code = "LEASE_EXPIRED"
    retryable = True


class TransferFailed(TanghuluError):
    """A transfer request failed on every path that it was allowed to try."""

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
    """The current state forbids the request; the message says what has to change first."""

    code = "CONFLICT"


class Unauthorized(TanghuluError):
    """The caller is not known: no token, an unknown one, or one of another tenant."""

    code = "UNAUTHORIZED"


class Forbidden(Unauthorized):
    """The caller is known, and its token does not give this right."""

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
    """Worker after worker died under the request; sending it again would cost another one."""

    code = "REQUEST_KILLS_WORKERS"


class ModelNotFound(TanghuluError):
    """No worker serves the model that was asked for."""

    code = "MODEL_NOT_FOUND"


class ModelUnsupported(TanghuluError):
    """The model's files name an architecture, a tensor or a format that the worker cannot run."""

    code = "MODEL_UNSUPPORTED"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and wanted output do not fit into the model's context."""

    code = "CONTEXT_LENGTH_EXCEEDED"


class ConfigError(TanghuluError):
    """A flag, variable or TOML key is unknown or has a bad value; the process refuses to start."""

    code = "CONFIG_ERROR"


def _tree(root: type[TanghuluError]) -> list[type[TanghuluError]]:
    return [root] + [leaf for child in root.__subclasses__() for leaf in _tree(child)]


_BY_CODE = {cls.code: cls for cls in reversed(_tree(TanghuluError))}


def error_from_code(code: str, message: str) -> TanghuluError:
    """The typed error that a peer reported by ``code``; unknown codes of newer peers become TanghuluError."""
    return _BY_CODE.get(code, TanghuluError)(message)
