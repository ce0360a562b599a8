"""The structured log and the Prometheus metrics of a process.

The log has one line a lifecycle event, JSON in files and pipes, coloured text on a terminal. The metrics are one
registry a process (``metrics_server`` serves it); each component holds its metric names in one file of its own
(``<component>/metrics.py``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog
from prometheus_client import CollectorRegistry, Info, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from tanghulu.version import __version__

LOG_LEVELS = ("debug", "info", "warning", "error")
#: Else each counter and histogram comes with a second line that says when it began, and nobody asks for it.
disable_created_metrics()  # type: ignore[no-untyped-call]


class _LossyStderr:
    """Standard error for the log: what it cannot take, as a file on a full disk, is lost, and nothing else."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure_log(component: str, level: str = "info") -> None:
    """Send all logs of this process to stderr, each with ``component`` in it."""
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _LossyStderr())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(component=component)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")


def new_registry() -> CollectorRegistry:
    """A registry that already holds the process's version, memory, CPU and file-descriptor figures."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    Info("tanghulu_build", "This program", registry=registry).info({"version": __version__})
    return registry
