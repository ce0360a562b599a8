"""A vLLM server played by as little as possible: its steps take no time, and each gives every request there a token.

Its KV events announce the blocks of a prompt, as far as they are new.

    python -m benchmarks.conductor.played_vllm FOLDER PORT EVENTS_PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys

import msgspec
import zmq

BLOCK = 16
HEAD = b"HTTP/1.1 %d X\r\n%b\r\n\r\n"
TOKEN = (
    '{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1795869402,"model":"mock","choices":[{"index":0,'
    '"text":"s","logprobs":null,"finish_reason":%s,"stop_reason":null,"token_ids":[82],"prompt_token_ids":null}]}'
)


def chunks(*events: str) -> bytes:
    """Return events as they are sent."""
    made = [b"data: %b\n\n" % event.encode() for event in events]
    return b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in made)


NEXT, LAST = chunks(TOKEN % "null"), chunks(TOKEN % '"length"', '{"choices":[]}', "[DONE]") + b"0\r\n\r\n"


class Played:
    """The server: ``rest`` are the tokens still to come, by connection."""

    def __init__(self, folder: str, events_port: str) -> None:
        self.rest, self.more, self.kept = dict[asyncio.StreamWriter, int](), asyncio.Event(), set[int]()
        self.publisher, self.numbers = zmq.Context.instance().socket(zmq.PUB), itertools.count()
        self.publisher.bind(endpoint := f"tcp://127.0.0.1:{events_port}")
        model = {"id": "mock", "root": folder, "max_model_len": 16384}
        pages = {"/v1/models": {"data": [model]}, "/kv_event_sources": {"0": {"endpoint": endpoint}}, "/health": {}}
        self.pages = {path.encode(): json.dumps(page).encode() for path, page in pages.items()}

    async def steps(self) -> None:
        """Run steps while there are requests."""
        while await self.more.wait():
            for writer, rest in list(self.rest.items()):
                writer.write(NEXT if rest > 1 else LAST)
                self.rest[writer] = rest - 1
            self.rest = {writer: rest for writer, rest in self.rest.items() if rest}
            if not self.rest:
                self.more.clear()
            await asyncio.sleep(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it ends."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r")[0]
                data = await reader.readexactly(int(length or 0))
                if (path := head.split(b" ")[1]) == b"/v1/completions":
                    body = json.loads(data)
                    self.keep(body["prompt"])
                    writer.write(HEAD % (200, b"transfer-encoding: chunked"))
                    self.rest[writer] = body["max_tokens"]
                    self.more.set()
                    continue
                page = self.pages.get(path, b"")
                writer.write(HEAD % (200 if path in self.pages else 404, b"content-length: %d" % len(page)) + page)
        writer.close()

    def keep(self, prompt: list[int]) -> None:
        """Announce the prompt's new blocks."""
        names = [hash(tuple(prompt[:end])) for end in range(0, len(prompt) + 1, BLOCK)]
        known = max(1, sum(name in self.kept for name in names))
        self.kept.update(names)
        if new := names[known:]:
            event = {"type": "BlockStored", "block_hashes": new, "block_size": BLOCK, "medium": "GPU"}
            event["parent_block_hash"] = names[known - 1] if known > 1 else None
            event["token_ids"] = prompt[(known - 1) * BLOCK : (len(names) - 1) * BLOCK]
            payload = msgspec.msgpack.encode([0.0, [event], 0])
            self.publisher.send_multipart([b"", next(self.numbers).to_bytes(8, "big"), payload])


async def main(folder: str, port: str, events_port: str) -> None:
    """Serve until killed."""
    played = Played(folder, events_port)
    async with await asyncio.start_server(played.serve, "127.0.0.1", int(port)):
        await played.steps()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
