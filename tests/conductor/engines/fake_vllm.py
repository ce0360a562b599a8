"""A plain vLLM server as seen from outside: HTTP/1.1 over real sockets, KV events over ZeroMQ where pyzmq is there.

The token after n tokens is the (n mod length)-th of its script, so that a request continued from prompt + answer gives
the text of an undisturbed one. ``hold()`` makes it wait before each token; ``step()`` then lets one come.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2

from tests.conductor.fake_worker import EOS, TEMPLATE, TOKENIZER
from tests.open_connections import OpenConnections

BLOCK = 4
CONTEXT = 512


def write_model(folder: Path, template: str = TEMPLATE) -> Path:
    """The folder of the model that fakes serve."""
    folder.mkdir(parents=True, exist_ok=True)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    config = {"model_type": "tiny", "vocab_size": TOKENIZER.get_vocab_size(), "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    named = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


class FakeVllm:
    """One server; ``requests`` are the bodies of its completions, ``open_streams`` those not ended yet."""

    engine, generate_path = "vllm", "/v1/completions"

    def __init__(self, folder: Path, script: str = "Hello, world! ", name: str = "tiny") -> None:
        self.folder, self.name = folder, name
        self.script = TOKENIZER.encode(script).ids
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open_streams = 0
        self.adapters: list[str] = []
        self.context_length = CONTEXT
        self.metrics_on = True
        self.has_details = True
        self.kv_transfer: dict[str, Any] | None = None
        #: Status of /health and of completions; ids added to those of /tokenize.
        self.health = self.status = 200
        self.more_ids: list[int] = []
        #: Tokens after which a stream breaks, sends an error, or nonsense.
        self.cut_at = self.error_at = self.nonsense_at = self.abort_at = -1
        #: Nothing is answered, as by a stopped process.
        self.silent = False
        self.cached: dict[bytes, bytes] = {}
        self.others_running = 0
        self._permits: asyncio.Semaphore | None = None
        self._num_steps = 0
        self._connections = OpenConnections()
        self._server: asyncio.Server | None = None
        self.events: FakeEvents | None = None
        self.changed = asyncio.Condition()

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> FakeVllm:
        self._server = await asyncio.start_server(self._connections.served_by(self._connected), host, port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def flag(self) -> str:
        return f"{self.engine}={self.url}"

    def hold(self) -> None:
        self._permits = asyncio.Semaphore(0)

    def step(self, num_tokens: int = 1) -> None:
        for _ in range(num_tokens):
            self._permits.release()

    def go(self) -> None:
        permits, self._permits = self._permits, None
        for _ in range(10_000):
            permits.release()

    def refuse(self) -> None:
        """As after SIGTERM: nothing listens, and open streams stay open without another byte."""
        self._server.close()
        self.hold()

    async def die(self) -> None:
        """As after SIGKILL."""
        self._server.close()
        self._connections.abort()

    async def stop(self) -> None:
        self._server.close()
        await self._connections.close()
        if self.events is not None:
            self.events.close()

    # --- HTTP

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                pass

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        line, *rest = head.decode("latin-1").split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (each.partition(":") for each in rest if each)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if self.silent:
            await asyncio.Event().wait()
        _, path, _ = line.split(" ")
        if path == self.generate_path:
            self.headers.append(headers)
            watch = asyncio.ensure_future(reader.read(1))
            work = asyncio.ensure_future(self._complete(json.loads(body), writer))
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
            gone = watch.done()
            for each in (watch, work):
                each.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)
            return not gone and self.cut_at < 0
        status, answer = self._answer(path, json.loads(body) if body else {})
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self._head(writer, status, f"content-length: {len(data)}")
        writer.write(data)
        await writer.drain()
        return headers.get("connection") != "close"

    def _head(self, writer: asyncio.StreamWriter, status: int, more: str) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}\r\n\r\n".encode())

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/health":
                return self.health, ""
            case "/v1/models":
                base = {"id": self.name, "root": str(self.folder), "parent": None, "max_model_len": self.context_length}
                more = [{"id": each, "root": "/a", "parent": self.name} for each in self.adapters]
                return 200, {"data": [base, *more]}
            case "/metrics":
                return (200, self._metrics()) if self.metrics_on else (404, {"detail": "Not Found"})
            case "/tokenize":
                return 200, {"tokens": [*self._tokenize(body), *self.more_ids]}
            case "/kv_event_sources" if self.events is not None:
                return 200, {"0": {"endpoint": self.events.endpoint, "replay_endpoint": self.events.replay_endpoint}}
            case "/reset_prefix_cache":
                self.cached.clear()
                return 200, ""
        return 404, {"detail": "Not Found"}

    def _tokenize(self, body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return TOKENIZER.encode(body["prompt"]).ids
        template = (self.folder / "tokenizer_config.json").read_text()
        made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
            json.loads(template)["chat_template"]
        )
        return TOKENIZER.encode(made.render(messages=body["messages"], add_generation_prompt=True)).ids

    def _metrics(self) -> str:
        labels = '{engine="0",model_name="tiny"}'
        return (
            f"vllm:num_requests_running{labels} {self.open_streams + self.others_running}\n"
            f"vllm:num_requests_waiting{labels} 0\nvllm:kv_cache_usage_perc{labels} 0.25\n"
            f"vllm:iteration_tokens_total_count{labels} {self._num_steps}\n"
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="1000",enable_prefix_caching="True"}} 1\n'
        )

    # --- completions

    def _as_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.requests.append(body)
        body = self._as_completion(body)
        async with self.changed:
            self.changed.notify_all()
        if self.status != 200:
            data = json.dumps({"error": {"message": "no", "type": "x", "code": self.status}}).encode()
            self._head(writer, self.status, f"content-length: {len(data)}")
            writer.write(data)
            return
        self.open_streams += 1
        try:
            await (self._stream if body["stream"] else self._whole)(body, writer)
        finally:
            self.open_streams -= 1

    async def _whole(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        ids = list(body["prompt"])
        self._keep(ids, body)
        choice = {"token_ids": [self.script[len(ids) % len(self.script)]], "finish_reason": "length"}
        answer: dict[str, Any] = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        if body.get("kv_transfer_params"):
            answer["kv_transfer_params"] = self.kv_transfer
        data = json.dumps(answer).encode()
        self._head(writer, 200, f"content-length: {len(data)}")
        writer.write(data)
        await writer.drain()

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self._head(writer, 200, "transfer-encoding: chunked")
        ids, num = list(body["prompt"]), 0
        cached = self._keep(ids, body)
        while True:
            if self._permits is not None:
                await self._permits.acquire()
            if num == self.cut_at:
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                return
            if num == self.error_at:
                self._event(writer, {"error": {"message": "it broke", "type": "x", "code": 500}})
                break
            if num == self.nonsense_at:
                self._event(writer, {"choices": [{"token_ids": ["zwölf"]}]})
                break
            token = self.script[len(ids) % len(self.script)]
            ids.append(token)
            num += 1
            self._num_steps += 1
            reason = "length" if num == body["max_tokens"] else None
            if (token == EOS and not body["ignore_eos"]) or token in body["stop_token_ids"]:
                reason = "stop"
            if num == self.abort_at:
                reason = "abort"
            self._event(writer, self._token_event(body, ids, num, reason, cached))
            await writer.drain()
            await asyncio.sleep(0)
            if reason:
                self._keep(ids[:-1], body)
                if self.engine == "vllm":
                    details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.has_details else {}
                    self._event(writer, {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), **details}})
                break
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _token_event(
        self, body: dict[str, Any], ids: list[int], num: int, reason: str | None, cached: int
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids[-1:], "finish_reason": reason}
        if body.get("logprobs") is not None:
            top = {f"token_id:{ids[-1]}": -0.5, "token_id:3": -1.5}
            choice["logprobs"] = {"tokens": [f"token_id:{ids[-1]}"], "token_logprobs": [-0.5], "top_logprobs": [top]}
        return {"choices": [choice]}

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _keep(self, ids: list[int], body: dict[str, Any]) -> int:
        """Put the prompt's blocks into the cache, with their events; return how many of its tokens were there."""
        parent: bytes | None = None
        salt, hits, new = body.get("cache_salt"), 0, []
        for at in range(0, len(ids) - len(ids) % BLOCK, BLOCK):
            tokens = ids[at : at + BLOCK]
            one = hashlib.sha256(repr((parent, tokens, salt if not at else None)).encode()).digest()
            if one in self.cached:
                hits += BLOCK
            else:
                keys = [(salt,)] if salt and not at else [None]
                fields = {"block_hashes": [int.from_bytes(one[-8:], "big")], "token_ids": tokens, "block_size": BLOCK}
                before = int.from_bytes(parent[-8:], "big") if parent else None
                new.append(
                    {"type": "BlockStored", "medium": "GPU", "parent_block_hash": before, "extra_keys": keys, **fields}
                )
            self.cached[one] = parent = one
        if new and self.events is not None:
            self.events.publish(new)
        return min(hits, len(ids) - 1)


class FakeEvents:
    """The publisher of a server's KV events, with replay."""

    def __init__(self) -> None:
        import zmq
        import zmq.asyncio
        from msgspec.msgpack import encode

        self._encode, self._context = encode, zmq.asyncio.Context()
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://*:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_endpoint = f"tcp://*:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self.sent: list[bytes] = []
        self._replaying = asyncio.ensure_future(self._replay())
        #: Done once somebody subscribes: what is published before is lost.
        self.subscribed = asyncio.ensure_future(self._pub.recv())

    def publish(self, events: list[dict[str, Any]]) -> None:
        payload = self._encode([0.0, events, 0])
        number, _ = len(self.sent), self.sent.append(payload)
        self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def _replay(self) -> None:
        while True:
            peer, _, first = await self._router.recv_multipart()
            for number in range(int.from_bytes(first, "big"), len(self.sent)):
                frames = [peer, b"", b"", number.to_bytes(8, "big"), self.sent[number]]
                await self._router.send_multipart(frames)
            await self._router.send_multipart([peer, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._replaying.cancel()
        self.subscribed.cancel()
        self._context.destroy(0)
