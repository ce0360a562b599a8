"""The limit of files and connections that this process may open, and its behaviour at the limit."""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Final

import structlog

from tanghulu.errors import ConfigError, Overloaded
from tanghulu.runtime.telemetry import RareLog

_log = structlog.get_logger(__name__)
_rare_log = RareLog(_log)
#: Descriptors that a process has open besides its peers' connections.
_OTHERS: Final = 256
#: With fewer no process gets far enough to report what is wrong.
LEAST: Final = 64
#: Reserved for refusals and for a process's own files: a 16th of all, within these bounds.
_LEAST_KEPT, _MOST_KEPT = 8, 64
_LOOK_S: Final = 1.0
_HINT: Final = "raise the limit of open files (ulimit -n, LimitNOFILE)"


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft in (resource.RLIM_INFINITY, -1) else soft


def require_descriptors() -> None:
    """Raise the soft limit to ``LEAST`` if allowed; else raise ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = (resource.RLIM_INFINITY, -1)
    if soft not in unlimited and soft < LEAST:
        if hard not in unlimited and hard < LEAST:
            raise ConfigError(f"only {hard} files may be open, and {LEAST} are needed at least: {_HINT}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST, hard))


def allow_descriptors(num_connections: int) -> None:
    """Raise the process's soft limit to the hard one; log if that is not enough for ``num_connections``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = num_connections + _OTHERS
    if hard not in (resource.RLIM_INFINITY, -1) and hard < wanted:
        _log.warning("process.few_descriptors", most=hard, wanted=wanted, hint=_HINT)


def refuse_last_descriptors(descriptor: int) -> None:
    """Raise Overloaded if a peer's connection, accepted as ``descriptor``, is one of the last possible ones.

    The kernel assigns the lowest free number, so it indicates how many are in use.
    """
    most = _most()
    if descriptor >= most - min(_MOST_KEPT, max(_LEAST_KEPT, most // 16)):
        _rare_log.warning("process.out_of_descriptors", most=most, hint=_HINT)
        raise Overloaded(f"this process may have {most} files open and has none left for a connection: {_HINT}")


async def watch_descriptors() -> None:
    """Log while none can be opened; runs until cancelled. Event loops then close connections without an error."""
    while True:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            _rare_log.warning("process.out_of_descriptors", most=_most(), hint=_HINT)
        await asyncio.sleep(_LOOK_S)
