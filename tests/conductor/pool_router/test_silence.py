"""Servers behind a router that stand still: whoever answers nothing at all is given up, who computes is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tanghulu.conductor.pool_router.grid import parse_pools
from tanghulu.conductor.pool_router.main import GlobalRouter, GlobalRouterConfig
from tanghulu.conductor.pool_router.relaying import RelayClient
from tanghulu.conductor.routing_service.main import RouterConfig, RouterServer
from tanghulu.rpc.sockets import SILENT_HOST_S
from tests.open_connections import OpenConnections

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
SILENCE_S = 0.4


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server:
    """An HTTP server that answers a request with ``begin``, /health while it ``lives``, and ``rest`` when it may."""

    def __init__(self, begin: bytes = b"", rest: bytes = b"") -> None:
        self.begin, self.rest = begin, rest
        self.lives = True
        self.go = asyncio.Event()
        if begin.endswith(END):
            self.go.set()
        self.num_looks = self.num_requests = 0
        self.looked = asyncio.Event()
        self.url = ""
        self.connections = OpenConnections()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"GET /health"):
                self.num_looks += 1
                self.looked.set()
                if self.lives:
                    writer.write(OK)
                continue
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            self.num_requests += 1
            writer.write(self.begin)
            await self.go.wait()
            writer.write(self.rest)


@contextlib.asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[None]:
    listening = [
        await asyncio.start_server(server.connections.served_by(server.handle), "127.0.0.1", 0) for server in servers
    ]
    for server, listener in zip(servers, listening, strict=True):
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield
    finally:
        for server, listener in zip(servers, listening, strict=True):
            listener.close()
            await server.connections.close()


@contextlib.asynccontextmanager
async def pool_of(*servers: Server) -> AsyncIterator[tuple[GlobalRouter, httpx.AsyncClient]]:
    pools = parse_pools(
        {
            "pool": [{"name": "only", "urls": [server.url for server in servers]}],
            "prefill": {"ttft_s": [1.0], "prompt_tokens": [99], "pools": [["only"]]},
            "decode": {"tbt_s": [1.0], "context_tokens": [99], "pools": [["only"]]},
        }
    )
    config = GlobalRouterConfig(port=0, grace_s=0.0, silence_timeout_s=SILENCE_S)
    router = GlobalRouter(config, pools, CollectorRegistry())
    async with router.running(None):
        async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60, trust_env=False) as http:
            yield router, http


WHOLE = HEAD + chunk(b"data: [DONE]\n\n") + END
BODY = {"prompt": "What is a tanghulu?", "max_tokens": 8, "stream": True}


async def test_one_that_has_not_begun_is_asked_no_more_and_another_serves() -> None:
    still, good = Server(), Server(begin=WHOLE)
    still.lives = False
    async with serving(still, good), pool_of(still, good) as (router, http):
        answer = await http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.text) == (200, "data: [DONE]\n\n")
        assert (still.num_requests, good.num_requests) == (1, 1)
        first, second = router.forwarder.members["only"].in_order(float("inf"))
        assert {first.url: first.num_failures, second.url: second.num_failures} == {still.url: 1, good.url: 0}
        good_member = first if first.url == good.url else second
        good_member.open_requests += 5  # so that the other one's turn comes as soon as its rest is over
        next(m for m in (first, second) if m is not good_member).rests_until_s = 0.0
        answer = await http.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        assert still.num_requests == 1, "it was asked for a sign of life, and not for an answer"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_one_that_falls_silent_in_its_answer_ends_it_with_an_error(path: str) -> None:
    server = Server(begin=HEAD + chunk(b'data: {"text": "a"}\n\n'))
    async with serving(server), pool_of(server) as (_, http):
        async with http.stream("POST", path, json=BODY) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == 'data: {"text": "a"}'
            server.lives = False
            rest = [line async for line in lines if line]
        of_anthropic = path == "/v1/messages"
        assert json.loads(rest[of_anthropic].removeprefix("data: "))["error"]["type"]
        assert [rest[0], *rest[2:]] == ["event: error"] if of_anthropic else rest[1:] == ["data: [DONE]"]


async def test_one_that_computes_is_waited_for_and_looked_at_once_for_all() -> None:
    server = Server(begin=HEAD, rest=chunk(b"data: [DONE]\n\n") + END)
    async with serving(server), pool_of(server) as (_, http):
        asking = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(3)]
        for _ in range(3):
            server.looked.clear()
            await server.looked.wait()
        server.go.set()
        answers = await asyncio.gather(*asking)
        assert [answer.text for answer in answers] == ["data: [DONE]\n\n"] * 3


async def test_the_kernel_looks_whether_the_host_of_a_silent_server_is_there() -> None:
    server = Server(begin=WHOLE)
    async with serving(server):
        client = RelayClient(SILENCE_S)
        try:
            response = await client.send(client.request("POST", f"{server.url}/generate", b"{}", {}))
            sock = response.extensions["network_stream"].get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENT_HOST_S * 1000
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert [piece async for piece in client.pieces(response, "the server")] == [b"data: [DONE]\n\n"]
        finally:
            await client.close()


async def test_who_is_asked_by_several_at_once_hears_one_question() -> None:
    server = Server()
    async with serving(server):
        client = RelayClient(SILENCE_S)
        try:
            assert await asyncio.gather(*(client.is_alive(server.url, 30) for _ in range(5))) == [True] * 5
            assert server.num_looks == 1
            server.lives = False
            assert not await client.is_alive(server.url, 0.1)
        finally:
            await client.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_service_gives_up_a_silent_worker(begun: bool) -> None:
    still, good = Server(begin=HEAD + chunk(b"one ") if begun else b""), Server(begin=WHOLE)
    config = RouterConfig(port=0, grpc_port=0, block_tokens=4, grace_s=0.0, silence_timeout_s=SILENCE_S)
    async with serving(still, good), RouterServer(config, CollectorRegistry()).running() as server:
        async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=60, trust_env=False) as http:
            for name, each in (("a", still), ("b", good)):
                put = await http.put("/workers", json={"worker": name, "role": "worker", "url": each.url})
                assert put.status_code == 200
            still.lives = False
            body = {"input_ids": [1, 2, 3], "routing": {"worker": "a"}}
            if begun:
                answer = await http.post("/generate", json=body)
                assert answer.text.startswith("one ")
                assert answer.text.endswith("data: [DONE]\n\n")
                assert "broke off" in answer.text
            else:
                answer = await http.post("/generate", json=body)
                assert (answer.status_code, answer.headers["x-tanghulu-worker"]) == (200, "b")
            assert still.num_requests == 1
        async with asyncio.timeout(30):
            while server.service.num_requests:  # noqa: ASYNC110 - what it looks at has no hook for tests
                await asyncio.sleep(0.001)
        server.service.check()
