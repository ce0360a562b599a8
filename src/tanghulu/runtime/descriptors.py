"""The number of files and connections that this process may have open."""

from __future__ import annotations

import resource

import structlog

_log = structlog.get_logger(__name__)
#: What a process has open besides its peers' connections.
_OTHERS = 256


def allow_descriptors(num_connections: int) -> None:
    """Raise the process's soft limit to the hard one; log if that is not enough for so many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wanted = num_connections + _OTHERS
    if hard not in (resource.RLIM_INFINITY, -1) and hard < wanted:
        _log.warning("process.few_descriptors", most=hard, wanted=wanted, hint="raise the hard limit of open files")
