"""Stories at a collector: OpenTelemetry's own SDK sends them to an HTTP server that reads OTLP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tanghulu.conductor.main import ConductorConfig
from tanghulu.conductor.stories.otel import SpanExport
from tanghulu.errors import ConfigError
from tanghulu.runtime import extras
from tanghulu.session.outputs import PhaseTimes
from tanghulu.types import Role
from tests.conductor.cluster import running_cluster

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK = {"model": "tiny", "prompt": "a secret prompt", "max_tokens": 6, "ignore_eos": True}


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Its address, and the bodies that came to /v1/traces."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                bodies.append(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            serving.join()


def spans_of(bodies: list[bytes]) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    return [s for r in requests for rs in r.resource_spans for scope in rs.scope_spans for s in scope.spans]


async def test_a_handed_over_request_becomes_spans(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="extra: otel is not installed")
    with collector() as (endpoint, bodies):
        async with running_cluster(tmp_path, otlp_endpoint=endpoint) as cluster:
            prefill, decode = await cluster.add(Role.PREFILL), await cluster.add(Role.DECODE)
            prefill.phases = decode.phases = PhaseTimes(queue_s=1e-6, prefill_s=1e-6, decode_s=1e-6)
            for flags, name in (("01", "mine"), ("00", "not sampled")):
                headers = {"traceparent": f"00-{TRACE}-{CALLER}-{flags}", "x-request-id": name.replace(" ", "-")}
                assert (await cluster.http.post("/v1/completions", json=ASK, headers=headers)).status_code == 200
            stories = cluster.dispatcher.stories
            await cluster.until(lambda: all(story.is_over for story in stories.stories()))
            (story,) = stories.find("mine")
    spans = spans_of(bodies)
    (root,) = [span for span in spans if span.name == "request"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, CALLER)
    assert story.origin is not None
    assert root.span_id.hex() == story.origin.trace.span_id
    said = {each.key: each.value for each in root.attributes}
    assert said["tanghulu.x_request_id"].string_value == "mine"
    assert said["tanghulu.status"].string_value == "served"
    assert said["gen_ai.usage.output_tokens"].int_value == 6
    workers = [span for span in spans if span.name == "worker"]
    assert [span.attributes[0].value.string_value for span in workers] == [prefill.id, decode.id]
    below = [span for span in spans if span.parent_span_id == root.span_id]
    assert {"receive", "tokenise", "queue", "route", "worker", "hand_over", "send"} <= {span.name for span in below}
    assert {"prefill", "decode"} <= {s.name for s in spans if s.parent_span_id in [w.span_id for w in workers]}
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano <= root.end_time_unix_nano for span in spans)
    assert b"secret" not in b"".join(bodies)
    assert all(span.trace_id == root.trace_id for span in spans)


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "otel", ("no_such_package.part",))
    with pytest.raises(ConfigError, match=r"^--otlp-endpoint needs the package no_such_package.part: pip"):
        SpanExport("http://127.0.0.1:1", "here")


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector", "http://"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    assert ConductorConfig().otlp_endpoint == ""
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        SpanExport(endpoint, "here")
