"""Stories as OpenTelemetry spans, sent to a collector by OTLP over HTTP (extra ``otel``, imported only here).

Spans are made from closed stories, so requests in progress pay nothing for them; a thread of the SDK sends them in
batches, and drops spans beyond its bound. A sequence is a span with the ids of its `Trace`, under the client's span;
below it is one for each phase here and each worker, and below each worker's span its phases. A trace that the client
has not sampled is not sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tanghulu.conductor.stories.origin import new_span_id
from tanghulu.conductor.stories.story import RequestStatus, Story
from tanghulu.errors import ConfigError
from tanghulu.runtime.extras import require
from tanghulu.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind

#: Most spans waiting to be sent; a request produces about fifteen.
MAX_WAITING: Final = 16384
#: Seconds for one batch, retries included, and for the remaining spans at the end of the process.
SEND_S: Final = 5.0
_PATH: Final = "/v1/traces"


class SpanExport:
    """Exports spans to the collector at ``endpoint`` as ``instance``. Raises ConfigError without the extra."""

    def __init__(self, endpoint: str, instance: str) -> None:
        address = urlsplit(endpoint)
        if address.scheme not in ("http", "https") or not address.netloc:
            raise ConfigError(f"--otlp-endpoint {endpoint} is not a URL such as http://collector:4318")
        require("otel", "--otlp-endpoint")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        where = endpoint if address.path.strip("/") else endpoint.rstrip("/") + _PATH
        self._exporter = OTLPSpanExporter(where, timeout=SEND_S)
        self._sending = BatchSpanProcessor(self._exporter, max_queue_size=MAX_WAITING)
        self._resource = Resource.create({"service.name": "tanghulu-conductor", "service.instance.id": instance})
        self._scope = InstrumentationScope("tanghulu", __version__)
        self._span, self._context = ReadableSpan, SpanContext
        self._server, self._internal = SpanKind.SERVER, SpanKind.INTERNAL
        self._flags = TraceFlags(TraceFlags.SAMPLED)
        self._failed, self._fine = Status(StatusCode.ERROR), Status(StatusCode.UNSET)

    def export(self, story: Story) -> None:
        """Send a closed story, if its request's trace is sampled."""
        origin = story.origin
        if origin is None or not origin.trace.is_sampled:
            return
        trace = origin.trace
        context = self._context_of(trace.trace_id, trace.span_id)
        parent = self._context_of(trace.trace_id, trace.parent_id, is_remote=True) if trace.parent_id else None
        offset_s = time.time() - time.monotonic()
        end_s = story.began_s + story.seconds()
        self._end(
            "request", self._server, context, parent, (story.began_s + offset_s, end_s + offset_s), _attributes(story)
        )
        visits = []
        for visit in story.visits:
            inner = self._context_of(trace.trace_id, new_span_id())
            visits.append(inner)
            times = visit.sent_s + offset_s, (end_s if visit.end_s is None else visit.end_s) + offset_s
            attributes = {"tanghulu.worker": visit.worker, "tanghulu.left": visit.how.name.lower() if visit.how else ""}
            self._end("worker", self._internal, inner, context, times, attributes)
        for part in story.parts:
            inner = self._context_of(trace.trace_id, new_span_id())
            above = visits[part.visit] if part.visit >= 0 else context
            times = part.start_s + offset_s, part.end_s + offset_s
            self._end(part.phase.name.lower(), self._internal, inner, above, times, {})

    def close(self) -> None:
        """Send the remaining spans, for about `SEND_S` at most; blocks meanwhile."""
        sending = threading.Thread(target=self._sending.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(SEND_S)
        if sending.is_alive():  # the exporter would retry, for up to half a minute
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK has no types there
        sending.join(SEND_S)

    def _context_of(self, trace_id: str, span_id: str, *, is_remote: bool = False) -> SpanContext:
        return self._context(int(trace_id, 16), int(span_id, 16), is_remote, self._flags)

    def _end(
        self,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        times_s: tuple[float, float],
        attributes: Mapping[str, Any],
    ) -> None:
        span: ReadableSpan = self._span(
            name,
            context,
            parent,
            self._resource,
            attributes,
            kind=kind,
            status=self._failed
            if attributes.get("tanghulu.status") == RequestStatus.FAILED.name.lower()
            else self._fine,
            start_time=int(times_s[0] * 1e9),
            end_time=int(times_s[1] * 1e9),
            instrumentation_scope=self._scope,
        )
        self._sending.on_end(span)


def _attributes(story: Story) -> dict[str, Any]:
    assert story.origin is not None
    assert story.status is not None
    return {
        "gen_ai.request.model": story.model,
        "gen_ai.usage.input_tokens": story.prompt_tokens,
        "gen_ai.usage.output_tokens": story.generated_tokens,
        "tanghulu.cached_tokens": story.cached_tokens,
        "tanghulu.status": story.status.name.lower(),
        "tanghulu.error": story.code,
        "tanghulu.request": story.id,
        "tanghulu.name": story.name,
        "tanghulu.x_request_id": story.origin.x_request_id,
    }
