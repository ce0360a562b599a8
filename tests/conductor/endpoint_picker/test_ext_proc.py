"""The endpoint picker over gRPC, driven as a gateway drives it; the engines are real servers on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from tanghulu.conductor.endpoint_picker.ext_proc import SERVICE, TEST_PICK, TEST_SERVED
from tanghulu.protos import endpoint_picker_pb2 as pb
from tanghulu.web.bodies import Bodies
from tests.conductor.endpoint_picker.rig import Engine, Stream, chat, endpoints_in, engine, picker, refusal, until

LONG = "You are a careful assistant. " * 8


class Scene:
    def __init__(self, server, channel, engines: list[Engine]) -> None:
        self.server, self.channel, self.engines = server, channel, engines
        self.names = [each.address for each in engines]

    def stream(self) -> Stream:
        return Stream(self.server, self.channel)

    @property
    def num_requests(self) -> int:
        return self.server.service.num_requests

    def counted(self, name: str) -> float:
        (family,) = [each for each in self.server.registry.collect() if each.name == f"tanghulu_epp_{name}"]
        return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


@contextlib.asynccontextmanager
async def scene_of(num_engines: int = 2, **options) -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine()) for _ in range(num_engines)]
        server = await stack.enter_async_context(picker(*engines, **options))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(str(server.address)))
        yield Scene(server, channel, engines)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with scene_of() as made:
        yield made


async def test_a_prefix_goes_where_it_was_served(scene: Scene):
    first = await scene.stream().whole(chat(LONG))
    assert sorted(first) == sorted(scene.names), "the best first, then the other for retries"
    for _ in range(5):
        assert (await scene.stream().whole(chat(LONG, "answer", "next")))[0] == first[0]
    assert scene.num_requests == 0


@pytest.mark.parametrize("report", ["endpoint", "attribute"])
async def test_the_load_and_the_blocks_move_to_who_served(scene: Scene, report: str):
    stream = scene.stream()
    first, second = await stream.picked(chat(LONG))
    await stream.served(**{report: second})
    blocks = {worker.id: worker.num_blocks for worker in scene.server.service.workers}
    assert blocks[first] == 0
    assert blocks[second] > 0
    await stream.response_body(b"token", ends=False)
    assert scene.server.service.index.num_blocks_of(second) > 0
    await stream.response_body(b"", ends=True)
    assert scene.num_requests == 0
    assert await scene.stream().picked(chat(LONG, "and", "more")) == [second], "the first was not reached"


async def test_an_endpoint_that_was_not_reached_rests(scene: Scene):
    stream = scene.stream()
    first, second = await stream.picked(chat(LONG))
    details = "upstream_reset_before_response_started{remote_connection_failure}"
    await stream.served(attribute=first, details=details)
    assert scene.num_requests == 0
    assert await scene.stream().picked(chat(LONG)) == [second]
    await (stream := scene.stream()).picked(chat(LONG))
    await stream.served("10.9.9.9:1")
    await stream.response_body(b"x")
    assert await scene.stream().picked(chat(LONG)) == [second], "a stranger says nothing about it"


async def test_a_gateway_that_reports_nothing_is_believed_to_follow(scene: Scene):
    stream = scene.stream()
    first, _ = await stream.picked(chat(LONG))
    await stream.served()
    await stream.response_body(b"x")
    assert scene.num_requests == 0
    assert (await scene.stream().picked(chat(LONG)))[0] == first


async def test_a_cancelled_stream_frees_its_load(scene: Scene):
    for at in ("picked", "answering"):
        stream = scene.stream()
        endpoints = await stream.picked(chat(LONG))
        if at == "answering":
            await stream.served(endpoints[0])
            await stream.response_body(b"token", ends=False)
        assert scene.num_requests == 1
        stream.call.cancel()
        await until(lambda: scene.num_requests == 0)


async def test_a_stream_that_ends_early_frees_its_load(scene: Scene):
    stream = scene.stream()
    await stream.picked(chat(LONG))
    await stream.end()
    await until(lambda: scene.num_requests == 0)
    stream = scene.stream()
    await stream.begin()
    await stream.body(b'{"mess', ends=False)
    await stream.end()


async def test_the_body_comes_back_in_small_pieces_and_is_bounded():
    async with scene_of(max_body_size=200_000) as scene:
        data = chat("word " * 30_000)
        stream = scene.stream()
        await stream.begin()
        for start in range(0, len(data), 50_000):
            await stream.body(data[start : start + 50_000], ends=False)
        await stream.body(b"", ends=True)
        endpoints_in(await stream.read(), "request_headers")
        pieces = []
        while not pieces or not pieces[-1].end_of_stream:
            pieces.append((await stream.read()).request_body.response.body_mutation.streamed_response)
        assert b"".join(piece.body for piece in pieces) == data
        assert max(len(piece.body) for piece in pieces) < 1 << 16
        # Envoy may send a second end behind a long body (its issue 46237): it gets no answer.
        await stream.body(b"", ends=True)
        assert (await stream.served(scene.names[0])).WhichOneof("response") == "response_headers"
        stream = scene.stream()
        await stream.begin()
        await stream.body(b"x" * 200_001, ends=False)
        status, text = refusal(await stream.read())
        assert (status, "200000" in text) == (413, True)
        stream = scene.stream()
        await stream.begin(content_length="200001")
        assert refusal(await stream.read())[0] == 413


async def test_a_body_that_stalls_is_refused(scene: Scene):
    scene.server._ext_proc.bodies = Bodies(1 << 20, 1 << 20, stall_s=0.05)
    stream = scene.stream()
    await stream.begin()
    await stream.body(b'{"mess', ends=False)
    assert refusal(await stream.read())[0] == 408
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_bodies_have_a_bound_together(scene: Scene):
    scene.server._ext_proc.bodies = Bodies(1000, 1500)
    first = scene.stream()
    await first.begin()
    await first.body(b"x" * 1000, ends=False)
    await until(lambda: scene.server._ext_proc.bodies.room.num_bytes == 1000)
    for mode in (pb.FULL_DUPLEX_STREAMED, pb.BUFFERED):
        stream = scene.stream()
        await stream.begin(modes=pb.ProtocolConfiguration(request_body_mode=mode))
        if mode == pb.BUFFERED:
            await stream.read()
        await stream.body(b"x" * 1000)
        assert refusal(await stream.read())[0] == 503
    first.call.cancel()
    await until(lambda: scene.server._ext_proc.bodies.room.num_bytes == 0)


async def test_a_stream_that_begins_in_the_middle_ends(scene: Scene):
    stream = scene.stream()
    await stream.send(response_headers=pb.HttpHeaders())
    assert await stream.call.code() is grpc.StatusCode.OK
    for mode in (pb.FULL_DUPLEX_STREAMED, pb.BUFFERED):  # the gateway answers by itself before the body has come
        stream = scene.stream()
        await stream.begin(modes=pb.ProtocolConfiguration(request_body_mode=mode))
        if mode == pb.BUFFERED:
            await stream.read()
        await stream.send(response_headers=pb.HttpHeaders())
        assert await stream.call.read() is grpc.aio.EOF


async def test_trailers_end_a_body(scene: Scene):
    stream = scene.stream()
    await stream.begin()
    await stream.body(chat("hello"), ends=False)
    await stream.send(request_trailers=pb.HttpTrailers())
    endpoints_in(await stream.read(), "request_headers")
    piece = (await stream.read()).request_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (chat("hello"), False)
    assert (await stream.read()).WhichOneof("response") == "request_trailers"
    await stream.served(scene.names[0])
    await stream.response_body(b"x", ends=False)
    answer = await stream.exchange(response_trailers=pb.HttpTrailers())
    assert answer.WhichOneof("response") == "response_trailers"
    assert scene.num_requests == 0


@pytest.mark.parametrize(("mode", "is_whole"), [("BUFFERED", True), ("BUFFERED_PARTIAL", False)])
async def test_of_a_buffered_request_the_pick_is_in_the_bodys_answer(scene: Scene, mode: str, is_whole: bool):
    modes = pb.ProtocolConfiguration(request_body_mode=mode, response_body_mode=pb.STREAMED)
    first = await scene.stream().whole(chat(LONG))
    stream = scene.stream()
    await stream.begin(modes=modes)
    assert (await stream.read()).WhichOneof("response") == "request_headers"
    await stream.body(chat(LONG, "next"), ends=is_whole)
    endpoints = endpoints_in(await stream.read(), "request_body")
    assert scene.counted("unread") == (not is_whole)
    assert endpoints[0] == first[0] or not is_whole
    await stream.served(endpoints[0])
    answer = await stream.response_body(b"x")
    assert not answer.response_body.HasField("response"), "nothing is changed"
    await stream.end()


async def test_of_a_streamed_request_the_pick_does_not_wait_for_the_body(scene: Scene):
    stream = scene.stream()
    await stream.begin(modes=pb.ProtocolConfiguration(request_body_mode=pb.STREAMED))
    assert len(endpoints_in(await stream.read(), "request_headers")) == 2
    for piece in (b"one", b"two"):
        answer = await stream.exchange(request_body=pb.HttpBody(body=piece, end_of_stream=piece == b"two"))
        assert answer.WhichOneof("response") == "request_body"
    assert (await stream.exchange(request_trailers=pb.HttpTrailers())).WhichOneof("response") == "request_trailers"
    assert scene.counted("unread") == 1


@pytest.mark.parametrize("modes", [pb.ProtocolConfiguration(), None])
async def test_without_a_body_the_load_decides(scene: Scene, modes):
    stream = scene.stream()
    await stream.begin(path="/v1/models", modes=modes, ends=True)
    assert sorted(endpoints_in(await stream.read(), "request_headers")) == sorted(scene.names)
    stream = scene.stream()
    await stream.begin(modes=pb.ProtocolConfiguration())
    assert len(endpoints_in(await stream.read(), "request_headers")) == 2
    assert scene.counted("unread") == 2


async def test_unknown_bodies_are_routed_by_load_and_counted(scene: Scene):
    bodies = {
        "/v1/embeddings": b'{"input": "a"}',
        "/v1/completions": b'{"text": "a"}',
        "/v1/messages": b'{"messages": []}',
        "/v1/chat/completions": b'{"input": "a"}',
    }
    for number, (path, body) in enumerate(bodies.items(), 1):
        assert len(await scene.stream().whole(body, path=path)) == 2
        assert scene.counted("unread") == number
    await scene.stream().whole(chat("hello"))
    assert scene.counted("unread") == len(bodies)


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff"])
async def test_a_bad_body_is_refused(scene: Scene, body: bytes):
    stream = scene.stream()
    await stream.begin()
    await stream.body(body)
    status, text = refusal(await stream.read())
    assert (status, "JSON" in text) == (400, True)
    assert await stream.call.code() is grpc.StatusCode.OK
    assert scene.counted("refused") == 1


async def test_the_gateways_subset_limits_the_pick(scene: Scene):
    other = scene.names[1]
    for subset in (other, [other], f"10.9.9.9:1, {other}"):
        assert await scene.stream().picked(chat("hello"), subset=subset) == [other]
    assert len(await scene.stream().picked(chat("hello"), subset="127.0.0.1")) == 2
    for subset in ("", [], "10.9.9.9:1"):
        stream = scene.stream()
        await stream.begin(subset=subset)
        await stream.body(chat("hello"))
        assert refusal(await stream.read())[0] == 503


async def test_nobody_healthy_is_503_and_health_follows():
    async with scene_of() as scene:
        check = scene.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            pb.HealthCheckRequest.SerializeToString,
            pb.HealthCheckResponse.FromString,
        )

        async def status(service: str) -> int:
            return (await check(pb.HealthCheckRequest(service=service))).status

        watch = scene.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            pb.HealthCheckRequest.SerializeToString,
            pb.HealthCheckResponse.FromString,
        )(pb.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == pb.HealthCheckResponse.SERVING
        scene.engines[0].is_healthy = False
        await until(lambda: len(scene.server.picker.ready) == 1)
        assert await scene.stream().whole(chat("hello")) == [scene.names[1]]
        scene.engines[1].is_healthy = False
        assert (await watch.read()).status == pb.HealthCheckResponse.NOT_SERVING
        assert [await status(name) for name in ("readiness", "", SERVICE, "liveness")] == [2, 2, 2, 1]
        with pytest.raises(grpc.aio.AioRpcError, match="use readiness"):
            await status("other")
        stream = scene.stream()
        await stream.begin()
        await stream.body(chat("hello"))
        code, text = refusal(await stream.read())
        assert (code, "2 known, 0 healthy" in text) == (503, True)
        scene.engines[0].is_healthy = True
        assert (await watch.read()).status == pb.HealthCheckResponse.SERVING
        watch.cancel()


async def test_full_endpoints_shed():
    async with scene_of(max_requests_per_worker=1) as scene:
        streams = [scene.stream(), scene.stream()]
        picked = [(await stream.picked(chat("hello")))[0] for stream in streams]
        assert sorted(picked) == sorted(scene.names)
        shed = scene.stream()
        await shed.begin()
        await shed.body(chat("hello"))
        answer = await shed.read()
        assert refusal(answer)[0] == 429
        headers = {each.header.key: each.header.raw_value for each in answer.immediate_response.headers.set_headers}
        assert headers["retry-after"] == b"1"
        assert headers["x-tanghulu-request-dropped-reason"] == b"overloaded"
        streams[1].call.cancel()
        await until(lambda: scene.num_requests == 1)
        assert (await scene.stream().picked(chat("hello")))[0] == picked[1]


async def test_adapters_are_known_by_their_servers():
    async with scene_of() as scene:
        scene.engines[1].adapters = {"sql": "/adapters/sql"}
        scene.engines[1].is_healthy = False
        await until(lambda: len(scene.server.picker.ready) == 1)
        scene.engines[1].is_healthy = True
        await until(lambda: scene.server.picker.adapter_path("sql") == "/adapters/sql")
        for _ in range(3):
            assert await scene.stream().whole(chat(LONG, model="sql")) == [scene.names[1]]
        stream = scene.stream()
        await stream.picked(chat(LONG))
        assert scene.server.service.index.num_blocks_of(scene.names[1]) > 0


async def test_conformance_headers_are_an_option(scene: Scene):
    assert len(await scene.stream().picked(chat("hello"), **{TEST_PICK: scene.names[1]})) == 2
    async with scene_of(conformance_headers=True) as tested:
        stream = tested.stream()
        assert await stream.picked(chat("hello"), **{TEST_PICK: tested.names[1]}) == [tested.names[1]]
        answer = await stream.served(attribute=tested.names[1])
        (option,) = answer.response_headers.response.header_mutation.set_headers
        assert (option.header.key, option.header.raw_value.decode()) == (TEST_SERVED, tested.names[1])
        assert len(await tested.stream().picked(chat("hello"), **{TEST_PICK: "10.9.9.9"})) == 2


async def test_a_client_header_does_not_choose(scene: Scene):
    picked = await scene.stream().picked(chat("hello"), x_gateway_destination_endpoint="10.0.0.1:22")
    assert sorted(picked) == sorted(scene.names)
