"""The other sides of an endpoint picker: engines that answer over HTTP, and a gateway that streams requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, Response, StreamingResponse
from tokenizers import Tokenizer, models, pre_tokenizers

from tanghulu.conductor.endpoint_picker import endpoints
from tanghulu.conductor.endpoint_picker.ext_proc import PICKED, SERVED, SERVICE
from tanghulu.conductor.endpoint_picker.main import EndpointPickerConfig, EndpointPickerServer
from tanghulu.protos import endpoint_picker_pb2 as pb
from tanghulu.web.server import HttpServer, address_of, listen

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
endpoints.DEADLINE_S = 30.0  # type: ignore[misc]  # on a loaded machine, engines answer late
DUPLEX = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED)


class Engine:
    """An engine's HTTP API. It answers with its own address, the picker's header and the body, in three pieces."""

    def __init__(self) -> None:
        self.is_healthy = True
        self.adapters: dict[str, str] = {}
        self.sources: dict[str, Any] = {}
        self.address = ""
        self.num_served = 0
        self.go = asyncio.Event()
        self.go.set()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.is_healthy else 503)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            own = [{"id": "base", "root": "/models/base", "parent": None}]
            return {"data": [*own, *({"id": n, "root": r, "parent": "base"} for n, r in self.adapters.items())]}

        @app.get("/kv_event_sources")
        async def sources() -> dict[str, Any]:
            return self.sources

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def answer(request: Request) -> Response:
            body = await request.body()
            self.num_served += 1
            headers = {"x-endpoint": self.address, "x-picked": request.headers.get(PICKED, "")}
            if request.query_params.get("status"):
                return JSONResponse({}, int(request.query_params["status"]), headers)
            return StreamingResponse(self._pieces(body), headers=headers)

        return app

    async def _pieces(self, body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), len(body) // 3 + 1):
            yield body[start : start + len(body) // 3 + 1]
            await self.go.wait()


@contextlib.asynccontextmanager
async def engine(port: int = 0) -> AsyncIterator[Engine]:
    made, listener = Engine(), listen("127.0.0.1", port)
    made.address = str(address_of(listener))
    server = HttpServer(made.app(), 0.0)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield made
    finally:
        server.force_exit = True
        server.stop()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


@contextlib.asynccontextmanager
async def picker(
    *engines: Engine, num_ready: int | None = None, within_s: float = 60, **options: Any
) -> AsyncIterator[EndpointPickerServer]:
    """A picker for ``engines``, of which all healthy ones are known to be so."""
    num_ready = sum(each.is_healthy for each in engines) if num_ready is None else num_ready
    addresses = options.pop("endpoints", ",".join(each.address for each in engines))
    settings = {"port": 0, "health_port": 0, "grace_s": 0.0, "health_interval_s": 0.03, "block_tokens": 4} | options
    config = EndpointPickerConfig(endpoints=addresses, **settings)
    registry = CollectorRegistry()
    async with EndpointPickerServer(config, registry).running() as server:
        server.registry = registry  # type: ignore[attr-defined]
        await until(lambda: len(server.picker.ready) == num_ready, within_s)
        yield server
        server.picker.check()


async def until(condition, within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what it looks at has no hook for tests
            await asyncio.sleep(0.001)


def model_folder(where: Path) -> Path:
    """A model's folder whose tokens are bytes."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(where / "tokenizer.json"))
    (where / "config.json").write_text('{"vocab_size": 256}')
    (where / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return where


def chat(*texts: str, **fields: Any) -> bytes:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps({"model": "base", "messages": messages, **fields}).encode()


class Stream:
    """One request of a gateway. ``exchange`` sends a message and returns its answer."""

    def __init__(self, server: EndpointPickerServer, channel: grpc.aio.Channel, metadata: Any = None) -> None:
        call = channel.stream_stream(
            f"/{SERVICE}/Process", pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
        )
        self.server, self.call = server, call(metadata=metadata)

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.ProcessingRequest(**message))

    async def read(self) -> pb.ProcessingResponse:
        answer = await asyncio.wait_for(self.call.read(), 60)
        assert answer is not grpc.aio.EOF, "the picker ended the stream"
        return answer

    async def exchange(self, **message: Any) -> pb.ProcessingResponse:
        await self.send(**message)
        return await self.read()

    async def begin(
        self,
        path: str = "/v1/chat/completions",
        modes: pb.ProtocolConfiguration | None = DUPLEX,
        ends: bool = False,
        subset: Any = None,
        **headers: str,
    ) -> None:
        given = {":method": "POST", ":path": path, **{name.replace("_", "-"): value for name, value in headers.items()}}
        values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in given.items()]
        message = pb.ProcessingRequest(
            request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=ends),
            protocol_config=modes,
        )
        if subset is not None:
            metadata = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            metadata.update({"x-gateway-destination-endpoint-subset": subset})
        await self.call.write(message)

    async def body(self, data: bytes, ends: bool = True) -> None:
        await self.send(request_body=pb.HttpBody(body=data, end_of_stream=ends))

    async def picked(self, data: bytes, **begin: Any) -> list[str]:
        """Send a whole request in full duplex; returns the endpoints picked, after all of the body came back."""
        await self.begin(**begin)
        await self.body(data)
        endpoints = endpoints_in(await self.read(), "request_headers")
        returned, is_last = b"", False
        while not is_last:
            piece = (await self.read()).request_body.response.body_mutation.streamed_response
            returned, is_last = returned + piece.body, piece.end_of_stream
        assert returned == data
        return endpoints

    async def served(self, endpoint: str = "", attribute: str = "", details: str = "") -> pb.ProcessingResponse:
        headers = pb.HeaderMap(headers=[pb.HeaderValue(key=":status", raw_value=b"200")])
        message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=headers))
        if endpoint:
            message.metadata_context.filter_metadata["envoy.lb"].update({SERVED: endpoint})
        attributes = {"upstream.address": attribute, "response.code_details": details}
        if any(attributes.values()):
            message.attributes["envoy.filters.http.ext_proc"].update({k: v for k, v in attributes.items() if v})
        await self.call.write(message)
        return await self.read()

    async def response_body(self, data: bytes, ends: bool = True) -> pb.ProcessingResponse:
        return await self.exchange(response_body=pb.HttpBody(body=data, end_of_stream=ends))

    async def end(self) -> None:
        await self.call.done_writing()
        assert await self.call.code() is grpc.StatusCode.OK

    async def whole(self, data: bytes, served: int = 0, **begin: Any) -> list[str]:
        """A request from its beginning to its end, served by one of the endpoints picked."""
        endpoints = await self.picked(data, **begin)
        await self.served(endpoints[served])
        await self.response_body(b"answer")
        await self.end()
        return endpoints


def endpoints_in(answer: pb.ProcessingResponse, kind: str) -> list[str]:
    """The endpoints in an answer of ``kind``, which header and metadata name alike."""
    assert answer.WhichOneof("response") == kind, answer
    response = getattr(answer, kind).response
    assert response.clear_route_cache
    (option,) = response.header_mutation.set_headers
    assert (option.header.key, option.append_action) == (PICKED, pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
    text = option.header.raw_value.decode()
    assert answer.dynamic_metadata["envoy.lb"][PICKED] == text
    return text.split(",")


def refusal(answer: pb.ProcessingResponse) -> tuple[int, str]:
    """Status and message of an answer in the engine's place."""
    assert answer.WhichOneof("response") == "immediate_response", answer
    given = answer.immediate_response
    return given.status.code, json.loads(given.body)["error"]["message"]
