"""The structured log and the Prometheus metrics of a process.

The log has one line per lifecycle event, JSON in files and pipes, coloured text on a terminal. The metrics are one
registry per process (served by ``metrics_server``); each component keeps its metric names in one file of its own
(``<component>/metrics.py``).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TextIO, cast

import structlog
from prometheus_client import CollectorRegistry, Info, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from tanghulu.errors import TanghuluError
from tanghulu.version import __version__

#: Seconds between two lines of the same event in a ``RareLog``.
RARE_S: Final = 30.0
#: Kinds of library lines that are limited separately.
MAX_KINDS: Final = 256
LOG_LEVELS = ("debug", "info", "warning", "error")
#: Otherwise each counter and histogram has a second line with its creation time, which nobody uses.
disable_created_metrics()  # type: ignore[no-untyped-call]


class LossyStream:
    """A stream for output that may be lost if it cannot be written, as with a full disk or a closed terminal."""

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write ``text`` if possible."""
        with contextlib.suppress(OSError, TanghuluError):
            self._stream().write(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        with contextlib.suppress(OSError, TanghuluError):
            self._stream().flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream().isatty()

    @property
    def encoding(self) -> str:
        """The encoding of the stream."""
        return self._stream().encoding


def configure_log(component: str, level: str = "info") -> None:
    """Send all logs of this process to stderr, each line with ``component``."""
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
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyStream(lambda: sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(component=component)
    logging.basicConfig(handlers=[_LibraryLog()], level=logging.WARNING)
    logging.captureWarnings(capture=True)


class RareLog:
    """Logs warnings that a peer can trigger at any rate: each event once in ``every_s``.

    A line after suppressed ones has their number as ``omitted``.
    """

    def __init__(self, log: Any, every_s: float = RARE_S, **values: Any) -> None:
        self._log, self._every_s, self._values = log, every_s, values
        self._last_s: dict[str, float] = {}
        self._omitted: dict[str, int] = {}

    def warning(self, event: str, **values: Any) -> None:
        """Log ``event`` unless it was logged less than ``every_s`` ago."""
        now_s = time.monotonic()
        if now_s - self._last_s.get(event, -self._every_s) < self._every_s:
            self._omitted[event] = self._omitted.get(event, 0) + 1
            return
        self._last_s[event] = now_s
        omitted = self._omitted.pop(event, 0)
        self._log.warning(event, **self._values, **values, **({"omitted": omitted} if omitted else {}))


class _LibraryLog(logging.Handler):
    """Lines of libraries as lines of the log, each kind at a limited rate, as strangers trigger some (HTTP's parser).

    A trace of bytes that are not a message, which gRPC logs as an error for each, is uninformative and left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], RareLog] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Log ``record``."""
        fields = {"logger": record.name, "text": record.getMessage(), "exc_info": record.exc_info}
        log = structlog.get_logger("library")
        is_undecodable = record.exc_info is not None and getattr(record.exc_info[0], "__name__", "") == "DecodeError"
        if is_undecodable:
            del fields["exc_info"]
        if (record.levelno > logging.WARNING and not is_undecodable) or len(self._kinds) >= MAX_KINDS:
            log.log(record.levelno, "library.logged", **fields)
            return
        kind = self._kinds.setdefault((record.name, str(record.msg)), RareLog(log))
        kind.warning("library.logged", **fields)


def new_registry() -> CollectorRegistry:
    """Return a registry that already holds the process's version, memory, CPU and file-descriptor figures."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    Info("tanghulu_build", "This program", registry=registry).info({"version": __version__})
    return registry
